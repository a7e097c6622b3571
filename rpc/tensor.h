/// Torch tensors as records of the codec, and back.
///
/// A view sends exactly its elements. One without gaps (contiguous, channels-last, transposed, expanded, a slice of
/// rows, ...) is sent from where it lies and keeps its strides; one with gaps (a column of a matrix) is copied together
/// first, in the order of its strides. Conjugate and negative bits are kept, not resolved.
///
/// Tensors of one message that overlap in a storage go on sharing memory at the receiver: overlapping views without
/// gaps are merged into one buffer, and a view with gaps goes along where such a buffer holds all of it. So whatever is
/// sent together with the whole of its storage shares it, and no byte travels that no tensor covers (but for up to 15
/// in front that align the rest). Views that do not overlap are sent, and live, apart.
///
/// Autograd's history is not sent: what requires grad arrives as a leaf that does.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "channels/status.h"
#include "converters/registry.h"
#include "rpc/core/codec.h"

namespace tensorferry {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Writes the tensors of one message. First note() for each, in any order; then prepare(); then write() for each.
/// A tensor that was not noted may be written, and shares nothing.
class TensorWriter {
 public:
  TensorWriter(const Converters& converters, Encoder& out) : converters_(&converters), out_(&out) {}

  void note(const at::Tensor& tensor);
  /// Bytes that prepare() will copy; what is noted must live until then.
  [[nodiscard]] std::size_t copying() const noexcept { return copying_; }
  /// Copies the views with gaps together. The only part that may take long, and calls back to nobody.
  void prepare();

  /// InvalidArgument says what cannot be sent and what can instead: quantised, nested, mkldnn and named tensors, those
  /// without a storage (inside torch.func), on devices without a converter, of dtypes that are not the codec's, on a
  /// GPU while a CUDA graph is being captured. The message is of no more use then. `identity` as Encoder has it.
  Status write(const at::Tensor& tensor, bool parameter, const void* identity = nullptr);
  /// The same for a tensor that is handed over (rpc/sharing.h): nothing is copied, gaps neither, and it shares memory
  /// with nothing else in the message but what is handed over too. Needs no note().
  Status write_shared(const at::Tensor& tensor, bool parameter, const void* identity = nullptr);

 private:
  /// Bytes of a storage that go as one buffer.
  struct Range {
    c10::StorageImpl* storage;
    std::size_t begin;
    std::size_t end;
    std::size_t item_bytes;  // the largest among the tensors
    std::optional<std::uint32_t> buffer;
  };

  Status write_strided(const at::Tensor& tensor, std::uint8_t flags, const void* identity);
  Status write_sparse(const at::Tensor& tensor, bool parameter, const void* identity);
  void note_strided(const at::Tensor& tensor);
  Range* range_around(c10::StorageImpl* storage, std::size_t begin, std::size_t end);
  const at::Tensor& copy_of(const at::Tensor& view);
  Result<std::uint32_t> add(Converter& converter, const c10::Storage& storage, std::size_t begin, std::size_t end,
                            Device device);

  const Converters* converters_;
  Encoder* out_;
  std::vector<Range> ranges_;      // after prepare(): merged, sorted by storage and begin
  std::vector<at::Tensor> gappy_;  // noted views with gaps
  std::vector<std::pair<c10::TensorImpl*, at::Tensor>> copies_;
  std::size_t copying_ = 0;
  std::size_t noted_ = 0;
};

/// Makes the tensors of one message. Those that lie in one buffer share one storage.
class TensorReader {
 public:
  TensorReader(const Converters& converters, std::span<const Buffer> buffers)
      : converters_(&converters), buffers_(buffers) {}

  /// The tensor that `in`, after next() gave Tag::tensor or Tag::sparse, stands at (for sparse: up to and with
  /// leave()). Requires grad where the record says so. Errors: ProtocolError, where a sparse tensor's parts do not fit
  /// together.
  Result<at::Tensor> read(Decoder& in, Tag tag);

  /// The storages made so far that are not on the CPU.
  [[nodiscard]] std::vector<WeakStorage> take_device_storages() { return std::move(device_storages_); }

 private:
  Result<at::Tensor> read_sparse(Decoder& in);
  Result<at::Tensor> strided(const TensorLayout& layout, std::uint32_t buffer);

  const Converters* converters_;
  std::span<const Buffer> buffers_;
  std::vector<c10::Storage> storages_;  // by buffer; made on first use
  std::vector<WeakStorage> device_storages_;
};

/// nullopt: not a dtype that travels (a quantised one).
std::optional<DType> dtype_of(at::ScalarType type);
/// nullopt: not a dtype of this version of torch.
std::optional<at::ScalarType> scalar_type_of(DType dtype);

/// All of `storage` as a tensor of bytes; no operator of torch's is called.
at::Tensor bytes_of(const c10::Storage& storage);

}  // namespace tensorferry
