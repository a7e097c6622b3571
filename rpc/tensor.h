/// Conversion between torch tensors and records of the codec.
///
/// A view sends exactly its elements:
///
/// - A view without gaps (contiguous, channels-last, transposed, expanded, a slice of rows) is sent from its own memory
///   and keeps its strides.
/// - A view with gaps (a column of a matrix) is first copied into dense memory, in the order of its strides.
///
/// Conjugate and negative bits are kept, not resolved.
///
/// Tensors of one message that overlap in a storage share memory at the receiver too. Overlapping views without gaps
/// are merged into one buffer. A view with gaps shares such a buffer if the buffer covers all of it. So a view that is
/// sent together with its whole storage shares it. Only bytes that a tensor covers are sent, with up to 15 bytes in
/// front for alignment. Views that do not overlap are sent as separate buffers and share nothing at the receiver.
///
/// Autograd's history is not sent: a tensor that requires grad arrives as a leaf that requires grad.
///
/// A tensor of a device type that programs have registered (include/tensorferry/converter.h) is copied to host memory
/// and sent from there. Its record names its device, and a receiver that has the converter copies it back.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "converters/registry.h"
#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"

namespace tensorferry {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// Writes the tensors of one message. Used by one thread at a time.
///
/// The caller calls note() for each tensor in any order, then prepare(), then write() for each. A tensor that was not
/// noted may be written too; other tensors do not share its memory then.
class TensorWriter {
 public:
  TensorWriter(const Converters& converters, Encoder& out) : converters_(&converters), out_(&out) {}

  /// Registers a tensor that will be written. Its storage must live until then, because only a pointer to it is kept.
  void note(const at::Tensor& tensor);
  /// Returns the most bytes that prepare() will copy: those of the noted views with gaps.
  [[nodiscard]] std::size_t copying() const noexcept { return copying_; }
  /// Merges overlapping views, and copies views with gaps into dense memory. This is the only step that may take long.
  /// It calls back into no other code, so the caller may let the GIL go.
  void prepare();

  /// Writes a tensor. `identity` is the Encoder's. InvalidArgument says why the tensor cannot be sent and what to send
  /// instead; the message cannot be used then. Such tensors are:
  ///
  /// - undefined, quantised, nested, mkldnn and named tensors, and tensors of more than 64 dimensions;
  /// - tensors without a storage (inside torch.func), or whose storage was freed;
  /// - tensors on a device without a converter, or of a dtype that the codec lacks;
  /// - tensors on a GPU while a CUDA graph is being captured.
  Status write(const at::Tensor& tensor, bool parameter, const void* identity = nullptr);
  /// Writes a tensor that is handed over (rpc/sharing.h). Nothing is copied, not even a view with gaps. At the receiver
  /// it shares memory only with other tensors that are handed over. Needs no note().
  Status write_shared(const at::Tensor& tensor, bool parameter, const void* identity = nullptr);

 private:
  /// A range of bytes of a storage that is sent as one buffer.
  struct Range {
    c10::StorageImpl* storage;
    std::size_t begin;
    std::size_t end;
    std::size_t item_bytes;  // the largest element size of its tensors
    std::optional<std::uint32_t> buffer;
  };

  /// `source`: the device that the record names, if `tensor` is a copy in host memory.
  Status write_strided(const at::Tensor& tensor, std::uint8_t flags, const void* identity,
                       std::optional<Device> source = std::nullopt);
  Status write_converted(const DeviceConverter& converter, const at::Tensor& tensor, bool parameter,
                         const void* identity);
  Status write_sparse(const at::Tensor& tensor, bool parameter, const void* identity);
  void note_strided(const at::Tensor& tensor);
  Range* range_around(c10::StorageImpl* storage, std::size_t begin, std::size_t end);
  const at::Tensor& copy_of(const at::Tensor& view);
  Result<std::uint32_t> add(Converter& converter, const c10::Storage& storage, std::size_t begin, std::size_t end,
                            Device device);

  const Converters* converters_;
  Encoder* out_;
  std::vector<Range> ranges_;      // after prepare(): merged, sorted by storage and begin
  std::vector<at::Tensor> gappy_;  // the noted views with gaps
  std::vector<std::pair<c10::TensorImpl*, at::Tensor>> copies_;
  std::size_t copying_ = 0;
  std::size_t noted_ = 0;
};

/// Makes the tensors of one received message. Tensors in one buffer share one storage. Used by one thread at a time;
/// `buffers` must outlive it.
class TensorReader {
 public:
  TensorReader(const Converters& converters, std::span<const Buffer> buffers)
      : converters_(&converters), buffers_(buffers) {}

  /// Makes the tensor that `in` stands at, after next() has returned `tag`: Tag::tensor or Tag::sparse. For a sparse
  /// tensor, reads all its parts and calls leave(). The tensor requires grad if the record says so. Errors:
  ///
  /// - InvalidArgument: this version of torch lacks the dtype, the agent has no converter for the device, the converter
  ///   cannot receive the buffer now, or a registered converter fails.
  /// - ProtocolError: the parts of a sparse tensor do not fit together.
  Result<at::Tensor> read(Decoder& in, Tag tag);

  /// Returns the storages made so far that are not on the CPU, and forgets them.
  [[nodiscard]] std::vector<WeakStorage> take_device_storages() { return std::move(device_storages_); }

 private:
  Result<at::Tensor> read_sparse(Decoder& in);
  Result<at::Tensor> strided(const TensorLayout& layout, std::uint32_t buffer);

  const Converters* converters_;
  std::span<const Buffer> buffers_;
  std::vector<c10::Storage> storages_;  // one for each buffer, made on first use
  std::vector<WeakStorage> device_storages_;
};

/// Returns the codec's dtype; nullopt if the dtype cannot be sent (a quantised one).
std::optional<DType> dtype_of(at::ScalarType type);
/// Returns torch's dtype; nullopt if this version of torch lacks it.
std::optional<at::ScalarType> scalar_type_of(DType dtype);

/// Returns all of `storage` as a tensor of bytes in the same memory. Calls no operator of torch's.
at::Tensor bytes_of(const c10::Storage& storage);

}  // namespace tensorferry
