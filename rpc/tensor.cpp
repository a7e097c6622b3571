#include "rpc/tensor.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "converters/extent.h"
#include "include/tensorferry/converter.h"
#include "rpc/sharing.h"

namespace tensorferry {
namespace {

/// While it lives, torch's operators on this thread only move bytes: autograd and the caller's modes (FakeTensorMode,
/// torch.func) do not see them.
class PlainOperators {
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard no_modes_{c10::python_ks |
                                               c10::DispatchKeySet(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) |
                                               c10::DispatchKeySet(c10::DispatchKey::FuncTorchDynamicLayerBackMode)};
};

Status cannot_send(std::string what) { return {Code::invalid_argument, "cannot send " + std::move(what)}; }

std::string quoted(at::ScalarType type) { return "torch." + std::string(c10::getDtypeNames(type).first); }

/// Returns the codec's device; nullopt if there is no converter for it.
std::optional<Device> device_of(const at::Device& device, const Converters& converters) {
  Device found;
  if (device.is_cuda()) {
    found = {DeviceType::cuda, static_cast<std::uint8_t>(device.index())};
  } else if (!device.is_cpu()) {
    return std::nullopt;
  }
  if (converters.find(found.type) == nullptr) return std::nullopt;
  return found;
}

/// Returns the codec's device for a registered converter.
Device converted_device_of(const at::Device& device) {
  return {static_cast<DeviceType>(device.type()), static_cast<std::uint8_t>(device.has_index() ? device.index() : 0)};
}

/// Returns the registered converter of a strided tensor's device type; null if there is none.
const DeviceConverter* registered_for(const at::Tensor& tensor, const Converters& converters) {
  if (!tensor.defined() || tensor.is_cpu() || tensor.is_cuda() || tensor.layout() != at::kStrided) return nullptr;
  return converters.find_registered(converted_device_of(tensor.device()).type);
}

/// Runs a function of a registered converter, and checks that it has copied `from` to a device of `type`.
template <class Convert>
Result<at::Tensor> converted(const at::Tensor& from, at::DeviceType type, const Convert& convert) {
  const auto failed = [&](std::string_view why) {
    return Status(Code::invalid_argument, "the converter between " + from.device().str() + " and " +
                                              at::DeviceTypeName(type, true) + " failed: " + std::string(why));
  };
  try {
    const c10::NoGradGuard no_history;
    auto to = convert();
    if (!to.defined() || to.device().type() != type || to.layout() != at::kStrided || to.sizes() != from.sizes() ||
        to.scalar_type() != from.scalar_type()) {
      return failed("it returned no strided tensor there with the same sizes and dtype");
    }
    return to;
  } catch (const c10::Error& error) {
    return failed(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return failed(error.what());
  }
}

/// Returns whether the tensor is named. Newer versions of torch have no named tensors.
template <class Tensor>
bool has_names(const Tensor& tensor) {
  if constexpr (requires { tensor.has_names(); }) return tensor.has_names();
  return false;
}

/// Returns why a tensor of this kind cannot be sent; ok if it is strided or sparse, with a dtype and device that can be
/// sent.
Status check_kind(const at::Tensor& tensor, const Converters& converters) {
  if (!tensor.defined()) return cannot_send("an undefined tensor");
  if (tensor.is_quantized()) {
    return cannot_send("a quantized tensor (" + quoted(tensor.scalar_type()) +
                       "): send tensor.dequantize(), or tensor.int_repr() with its scale and zero point");
  }
  if (tensor.is_nested()) {
    return cannot_send("a nested tensor (torch.nested, layout torch.strided): send its parts, tensor.unbind()");
  }
  if (tensor.is_mkldnn()) return cannot_send("a tensor of layout torch._mkldnn: send tensor.to_dense()");
  if (has_names(tensor)) return cannot_send("a named tensor: send tensor.rename(None), and its names beside it");
  if (!dtype_of(tensor.scalar_type())) return cannot_send("a tensor of dtype " + quoted(tensor.scalar_type()));
  if (!device_of(tensor.device(), converters)) return cannot_send("a tensor on device " + tensor.device().str());
  return {};
}

/// Returns why a strided tensor's memory cannot be sent, or ok.
Status check_storage(const at::Tensor& tensor) {
  if (!tensor.has_storage()) {
    return cannot_send("a tensor without memory of its own (inside torch.func or vmap): call outside of the transform");
  }
  if (tensor.dim() > static_cast<std::int64_t>(Dims::max)) return cannot_send("a tensor of more than 64 dimensions");
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (tensor.numel() != 0 && storage.data() == nullptr) {
    return cannot_send("a tensor whose storage has been freed or was never allocated");
  }
  return {};
}

/// The range of a storage that holds a strided tensor's elements, in bytes.
struct StorageRange {
  std::size_t begin = 0;
  std::size_t end = 0;
  bool gapless = true;
};

StorageRange storage_range_of(const at::Tensor& tensor) {
  const auto extent = extent_of(tensor.sizes(), tensor.strides());
  const auto item = tensor.itemsize();
  const auto begin = static_cast<std::size_t>(tensor.storage_offset()) * item;
  if (extent.span == 0) return {begin, begin, true};
  return {begin, begin + static_cast<std::size_t>(extent.span) * item, extent.gapless};
}

at::Tensor strided_over(const c10::Storage& storage, at::ScalarType type, std::span<const std::int64_t> sizes,
                        std::span<const std::int64_t> strides, std::int64_t offset) {
  const auto key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto tensor = at::detail::make_tensor<at::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                        c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(sizes.data(), sizes.size()),
                                                      at::IntArrayRef(strides.data(), strides.size()), offset);
  return tensor;
}

/// Returns a type of the same size that has a copy kernel, because some dtypes have none and only bits are copied.
at::ScalarType bits_of(std::size_t item_bytes) {
  switch (item_bytes) {
    case 1:
      return at::kByte;
    case 2:
      return at::kShort;
    case 4:
      return at::kInt;
    case 8:
      return at::kLong;
    default:
      return at::kComplexDouble;
  }
}

/// Returns strides without gaps in the same order as `strides`. Strides of 0 stay 0, because their elements are one
/// element.
Dims packed_strides(std::span<const std::int64_t> sizes, std::span<const std::int64_t> strides) {
  std::array<std::size_t, Dims::max> order;
  for (std::size_t i = 0; i < sizes.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.begin() + sizes.size(),
                   [&](std::size_t a, std::size_t b) { return strides[a] > strides[b]; });
  Dims packed(strides);
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    const auto at = order[i];
    if (strides[at] == 0 && sizes[at] != 1) continue;
    packed[at] = stride;
    stride *= sizes[at];
  }
  return packed;
}

/// Returns a copy of a view with gaps, in dense memory of its own.
at::Tensor pack(const at::Tensor& view) {
  const PlainOperators plain;
  const auto bits = bits_of(view.itemsize());
  const auto strides = packed_strides(view.sizes(), view.strides());
  Dims sizes(view.sizes());  // an expanded dimension is copied once
  std::int64_t elements = 1;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (view.strides()[i] == 0) sizes[i] = 1;
    elements *= sizes[i];
  }
  auto memory = at::empty({elements}, at::TensorOptions(bits).device(view.device()));
  const auto from =
      strided_over(view.unsafeGetTensorImpl()->unsafe_storage(), bits, sizes, view.strides(), view.storage_offset());
  strided_over(memory.storage(), bits, sizes, strides, 0).copy_(from);
  return strided_over(memory.storage(), view.scalar_type(), view.sizes(), strides, 0);
}

/// Returns whether elements of the tensor share memory, so that it has more of them than its bytes can hold.
bool repeats_elements(const at::Tensor& tensor) {
  const auto range = storage_range_of(tensor);
  return static_cast<std::size_t>(tensor.numel()) > (range.end - range.begin) / tensor.itemsize();
}

/// Returns the tensor in memory of its own, which no sender can write. torch trusts the indices of a sparse tensor once
/// they have been validated.
at::Tensor own_copy(const at::Tensor& tensor) {
  const auto range = storage_range_of(tensor);
  const Dims bytes{static_cast<std::int64_t>(range.end - range.begin)};
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const auto copy = strided_over(storage, at::kByte, bytes, Dims{1}, static_cast<std::int64_t>(range.begin)).clone();
  return strided_over(copy.storage(), tensor.scalar_type(), tensor.sizes(), tensor.strides(), 0);
}

SparseLayout::Kind kind_of(at::Layout layout) {
  switch (layout) {
    case at::kSparseCsr:
      return SparseLayout::Kind::csr;
    case at::kSparseCsc:
      return SparseLayout::Kind::csc;
    case at::kSparseBsr:
      return SparseLayout::Kind::bsr;
    case at::kSparseBsc:
      return SparseLayout::Kind::bsc;
    default:
      return SparseLayout::Kind::coo;
  }
}

at::Layout layout_of(SparseLayout::Kind kind) {
  switch (kind) {
    case SparseLayout::Kind::csr:
      return at::kSparseCsr;
    case SparseLayout::Kind::csc:
      return at::kSparseCsc;
    case SparseLayout::Kind::bsr:
      return at::kSparseBsr;
    case SparseLayout::Kind::bsc:
      return at::kSparseBsc;
    case SparseLayout::Kind::coo:
      break;
  }
  return at::kSparse;
}

std::vector<at::Tensor> parts_of(const at::Tensor& sparse) {
  const PlainOperators plain;
  switch (sparse.layout()) {
    case at::kSparse:
      return {sparse._indices(), sparse._values()};
    case at::kSparseCsr:
    case at::kSparseBsr:
      return {sparse.crow_indices(), sparse.col_indices(), sparse.values()};
    default:
      return {sparse.ccol_indices(), sparse.row_indices(), sparse.values()};
  }
}

std::uint8_t flags_of(const at::Tensor& tensor, bool parameter) {
  return static_cast<std::uint8_t>(
      (tensor.requires_grad() ? TensorLayout::requires_grad : 0) | (parameter ? TensorLayout::parameter : 0) |
      (tensor.is_conj() ? TensorLayout::conjugate : 0) | (tensor.is_neg() ? TensorLayout::negative : 0));
}

bool is_sparse(const at::Tensor& tensor) { return tensor.layout() != at::kStrided; }

/// Returns a tensor with memory for a ZeroTensor of torch's, which is known to be all zeros and has none.
at::Tensor materialised(const at::Tensor& zeros) {
  const PlainOperators plain;
  return at::zeros(zeros.sizes(), at::TensorOptions(zeros.scalar_type()).device(zeros.device()));
}

}  // namespace

void TensorWriter::note(const at::Tensor& tensor) {
  if (!check_kind(tensor, *converters_).ok()) return;  // write() returns the reason
  if (!is_sparse(tensor)) return note_strided(tensor);
  for (const auto& part : parts_of(tensor)) note_strided(part);
}

void TensorWriter::note_strided(const at::Tensor& tensor) {
  ++noted_;
  if (!check_storage(tensor).ok()) return;
  const auto place = storage_range_of(tensor);
  if (place.begin == place.end) return;
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (!place.gapless) {
    gappy_.push_back(tensor);
    copying_ += static_cast<std::size_t>(tensor.numel()) * tensor.itemsize();
  } else if (storage.use_count() > 1) {
    ranges_.push_back({storage.unsafeGetStorageImpl(), place.begin, place.end, tensor.itemsize(), std::nullopt});
  }
}

void TensorWriter::prepare() {
  out_->expect_buffers(noted_);
  if (ranges_.size() > 1) {
    std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) {
      return a.storage != b.storage ? std::less<>()(a.storage, b.storage) : a.begin < b.begin;
    });
    std::size_t last = 0;
    for (std::size_t i = 1; i < ranges_.size(); ++i) {
      auto& range = ranges_[last];
      const auto& next = ranges_[i];
      if (next.storage == range.storage && next.begin < range.end) {
        range.end = std::max(range.end, next.end);
        range.item_bytes = std::max(range.item_bytes, next.item_bytes);
      } else {
        ranges_[++last] = next;
      }
    }
    ranges_.resize(last + 1);
  }
  // A tensor's offset in the buffer is in elements of its own size. So each buffer begins at a multiple of the largest
  // element size, as every tensor does at a multiple of its own.
  for (auto& range : ranges_) range.begin -= range.begin % range.item_bytes;
  for (const auto& view : gappy_) {
    const auto place = storage_range_of(view);
    if (range_around(view.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), place.begin, place.end))
      continue;
    copies_.emplace_back(view.unsafeGetTensorImpl(), pack(view));
  }
  std::sort(copies_.begin(), copies_.end(),
            [](const auto& a, const auto& b) { return std::less<>()(a.first, b.first); });
}

TensorWriter::Range* TensorWriter::range_around(c10::StorageImpl* storage, std::size_t begin, std::size_t end) {
  // Find the last range that begins at or before `begin`.
  auto after = std::upper_bound(
      ranges_.begin(), ranges_.end(), std::pair(storage, begin), [](const auto& key, const Range& range) {
        return key.first != range.storage ? std::less<>()(key.first, range.storage) : key.second < range.begin;
      });
  if (after == ranges_.begin()) return nullptr;
  auto& range = *std::prev(after);
  return range.storage == storage && range.begin <= begin && end <= range.end ? &range : nullptr;
}

const at::Tensor& TensorWriter::copy_of(const at::Tensor& view) {
  auto* const impl = view.unsafeGetTensorImpl();
  const auto found = std::lower_bound(copies_.begin(), copies_.end(), impl,
                                      [](const auto& copy, auto* key) { return std::less<>()(copy.first, key); });
  if (found != copies_.end() && found->first == impl) return found->second;
  return copies_.emplace(found, impl, pack(view))->second;
}

Result<std::uint32_t> TensorWriter::add(Converter& converter, const c10::Storage& storage, std::size_t begin,
                                        std::size_t end, Device device) {
  auto buffer = converter.to_buffer(storage, begin, end - begin);
  if (!buffer.ok()) return buffer.status();
  return out_->add_buffer(*std::move(buffer), {device, true});
}

Status TensorWriter::write(const at::Tensor& tensor, bool parameter, const void* identity) {
  if (const auto* const converter = registered_for(tensor, *converters_); converter != nullptr) [[unlikely]] {
    return write_converted(*converter, tensor, parameter, identity);
  }
  if (auto status = check_kind(tensor, *converters_); !status.ok()) return status;
  if (is_sparse(tensor)) return write_sparse(tensor, parameter, identity);
  if (tensor._is_zerotensor()) [[unlikely]] {
    return write_strided(materialised(tensor), 0, identity);
  }
  return write_strided(tensor, flags_of(tensor, parameter), identity);
}

Status TensorWriter::write_converted(const DeviceConverter& converter, const at::Tensor& tensor, bool parameter,
                                     const void* identity) {
  if (!dtype_of(tensor.scalar_type())) return cannot_send("a tensor of dtype " + quoted(tensor.scalar_type()));
  auto host =
      converted(tensor, at::kCPU, [&] { return converter.to_host(tensor.detach()).resolve_conj().resolve_neg(); });
  if (!host.ok()) return host.status();
  const auto flags = static_cast<std::uint8_t>((tensor.requires_grad() ? TensorLayout::requires_grad : 0) |
                                               (parameter ? TensorLayout::parameter : 0));
  return write_strided(host->contiguous(), flags, identity, converted_device_of(tensor.device()));
}

Status TensorWriter::write_shared(const at::Tensor& tensor, bool parameter, const void* identity) {
  if (auto status = check_kind(tensor, *converters_); !status.ok()) return status;
  auto bytes = shared_bytes(tensor);
  if (!bytes.ok()) return bytes.status();
  if (bytes->buffer.bytes == 0) return write(tensor, parameter, identity);
  TensorLayout layout;
  layout.dtype = *dtype_of(tensor.scalar_type());
  layout.flags = flags_of(tensor, parameter);
  layout.sizes = Dims(tensor.sizes());
  layout.strides = Dims(tensor.strides());
  layout.storage_offset = static_cast<std::int64_t>(bytes->offset / tensor.itemsize());
  out_->tensor(layout, out_->add_shared_buffer(std::move(bytes->buffer), layout.device), identity);
  return {};
}

Status TensorWriter::write_strided(const at::Tensor& tensor, std::uint8_t flags, const void* identity,
                                   std::optional<Device> source) {
  if (auto status = check_storage(tensor); !status.ok()) return status;
  TensorLayout layout;
  layout.dtype = *dtype_of(tensor.scalar_type());
  layout.flags = flags;
  layout.device = *device_of(tensor.device(), *converters_);
  layout.sizes = Dims(tensor.sizes());
  layout.strides = Dims(tensor.strides());

  auto& converter = *converters_->find(layout.device.type);
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  const auto place = storage_range_of(tensor);
  Result<std::uint32_t> buffer = 0U;
  if (place.begin == place.end) {
    buffer = add(converter, storage, 0, 0, layout.device);
  } else if (auto* range =
                 ranges_.empty() ? nullptr : range_around(storage.unsafeGetStorageImpl(), place.begin, place.end)) {
    if (!range->buffer) {
      buffer = add(converter, storage, range->begin, range->end, layout.device);
      if (buffer.ok()) range->buffer = *buffer;
    } else {
      buffer = *range->buffer;
    }
    layout.storage_offset = static_cast<std::int64_t>((place.begin - range->begin) / tensor.itemsize());
  } else if (place.gapless) {
    buffer = add(converter, storage, place.begin, place.end, layout.device);
  } else {
    const auto& packed = copy_of(tensor);
    layout.strides = Dims(packed.strides());
    const auto& memory = packed.unsafeGetTensorImpl()->unsafe_storage();
    buffer = add(converter, memory, 0, memory.nbytes(), layout.device);
  }
  if (!buffer.ok()) return buffer.status();
  if (source) layout.device = *source;
  out_->tensor(layout, *buffer, identity);
  return {};
}

Status TensorWriter::write_sparse(const at::Tensor& tensor, bool parameter, const void* identity) {
  SparseLayout layout;
  layout.kind = kind_of(tensor.layout());
  const auto coalesced = layout.kind == SparseLayout::Kind::coo && tensor.is_coalesced();
  layout.flags =
      static_cast<std::uint8_t>((tensor.requires_grad() ? SparseLayout::requires_grad : 0) |
                                (parameter ? SparseLayout::parameter : 0) | (coalesced ? SparseLayout::coalesced : 0));
  layout.sizes = Dims(tensor.sizes());
  auto parts = parts_of(tensor);
  for (const auto& part : parts) {
    if (auto status = check_kind(part, *converters_); !status.ok()) return status;
    if (auto status = check_storage(part); !status.ok()) return status;
  }
  for (auto part = parts.begin(); part != parts.end() - 1; ++part) {  // receivers refuse indices that share memory
    const PlainOperators plain;
    if (repeats_elements(*part)) *part = part->contiguous();
  }
  if (!out_->begin_sparse(layout, identity)) return out_->status();
  for (const auto& part : parts) {
    if (auto status = write_strided(part, 0, nullptr); !status.ok()) return status;
  }
  out_->end();
  return {};
}

Result<at::Tensor> TensorReader::read(Decoder& in, Tag tag) {
  if (tag == Tag::sparse) return read_sparse(in);
  return strided(in.tensor(), in.buffer());
}

Result<at::Tensor> TensorReader::strided(const TensorLayout& layout, std::uint32_t buffer) {
  const auto type = scalar_type_of(layout.dtype);
  if (!type) {
    return Status(Code::invalid_argument, "a tensor of dtype torch." + std::string(name_of(layout.dtype)) +
                                              " arrived, which this version of torch does not have");
  }
  storages_.resize(buffers_.size());
  auto& storage = storages_[buffer];
  if (!storage) {
    auto* const converter = converters_->find(buffers_[buffer].device.type);
    if (converter == nullptr) {
      return Status(Code::invalid_argument, "a tensor arrived on " + text_of(buffers_[buffer].device) +
                                                ", which this agent has no converter for");
    }
    auto made = converter->to_storage(buffers_[buffer]);
    if (!made.ok()) return made.status();
    storage = *std::move(made);
    if (!storage.device().is_cpu()) device_storages_.emplace_back(storage.getWeakStorageImpl());
  }
  auto tensor = strided_over(storage, *type, layout.sizes, layout.strides, layout.storage_offset);
  if ((layout.flags & TensorLayout::conjugate) != 0) tensor._set_conj(true);
  if ((layout.flags & TensorLayout::negative) != 0) tensor._set_neg(true);
  if (layout.device.type > DeviceType::cuda && tensor.is_cpu()) [[unlikely]] {
    if (const auto* const own = converters_->find_registered(layout.device.type); own != nullptr) {
      const at::Device device(static_cast<at::DeviceType>(layout.device.type),
                              static_cast<at::DeviceIndex>(layout.device.index));
      auto there = converted(tensor, device.type(), [&] { return own->from_host(tensor, device).detach(); });
      if (!there.ok()) return there.status();
      tensor = *std::move(there);
    }
  }
  if ((layout.flags & TensorLayout::requires_grad) != 0) tensor.set_requires_grad(true);
  return tensor;
}

Result<at::Tensor> TensorReader::read_sparse(Decoder& in) {
  const auto layout = in.sparse();
  std::vector<at::Tensor> parts;
  for (std::size_t i = 0; i < layout.parts(); ++i) {
    if (const auto tag = in.next(); tag != Tag::tensor) {
      if (tag != Tag::invalid) in.fail("has a sparse tensor whose parts are not all tensors");
      return in.status();
    }
    auto part = strided(in.tensor(), in.buffer());
    if (!part.ok()) return part;
    parts.push_back(*std::move(part));
  }
  in.leave();
  const PlainOperators plain;
  for (auto part = parts.begin(); part != parts.end() - 1; ++part) {
    if (repeats_elements(*part)) {
      return Status(Code::protocol_error, "a received sparse tensor has more indices than their buffer has bytes for");
    }
    try {
      *part = own_copy(*part);
    } catch (const c10::Error& error) {
      return Status(Code::resource_exhausted, std::string("no memory for the indices of a received sparse tensor: ") +
                                                  error.what_without_backtrace());
    }
  }
  const at::IntArrayRef sizes(layout.sizes.data(), layout.sizes.size());
  const auto& values = parts.back();
  const auto options = values.options().layout(layout_of(layout.kind));
  try {
    at::Tensor tensor;
    if (layout.kind == SparseLayout::Kind::coo) {
      const bool coalesced = (layout.flags & SparseLayout::coalesced) != 0;
      at::_validate_sparse_coo_tensor_args(parts[0], values, sizes, coalesced);
      tensor = at::_sparse_coo_tensor_unsafe(parts[0], values, sizes, options, coalesced);
    } else {
      at::_validate_sparse_compressed_tensor_args(parts[0], parts[1], values, sizes, options.layout());
      tensor = at::_sparse_compressed_tensor_unsafe(parts[0], parts[1], values, sizes, options);
    }
    if ((layout.flags & SparseLayout::requires_grad) != 0) tensor.set_requires_grad(true);
    return tensor;
  } catch (const c10::Error& error) {
    return Status(Code::protocol_error, std::string("the parts of a received sparse tensor do not fit together: ") +
                                            error.what_without_backtrace());
  }
}

std::optional<DType> dtype_of(at::ScalarType type) {
  // The numbers are torch's own (tensorferry/dtype.h).
  const auto dtype = static_cast<DType>(type);
  return size_of(dtype) != 0 ? std::optional(dtype) : std::nullopt;
}

std::optional<at::ScalarType> scalar_type_of(DType dtype) {
  // Undefined is torch's last number, and newer versions have a larger one.
  if (static_cast<int>(dtype) >= static_cast<int>(at::ScalarType::Undefined)) return std::nullopt;
  return static_cast<at::ScalarType>(dtype);
}

at::Tensor bytes_of(const c10::Storage& storage) {
  return strided_over(storage, at::kByte, Dims{static_cast<std::int64_t>(storage.nbytes())}, Dims{1}, 0);
}

static_assert(static_cast<int>(at::ScalarType::Float) == static_cast<int>(DType::float32) &&
              static_cast<int>(at::ScalarType::BFloat16) == static_cast<int>(DType::bfloat16) &&
              static_cast<int>(at::ScalarType::UInt64) == static_cast<int>(DType::uint64) &&
              static_cast<int>(at::ScalarType::Float8_e4m3fnuz) == static_cast<int>(DType::float8_e4m3fnuz) &&
              static_cast<int>(at::ScalarType::Float8_e8m0fnu) == static_cast<int>(DType::float8_e8m0fnu) &&
              static_cast<int>(at::ScalarType::Float4_e2m1fn_x2) == static_cast<int>(DType::float4_e2m1fn_x2));

}  // namespace tensorferry
