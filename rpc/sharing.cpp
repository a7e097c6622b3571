#include "rpc/sharing.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include <string>
#include <utility>

#include "channels/region.h"
#include "converters/cpu.h"
#include "converters/extent.h"

namespace tensorferry {
namespace {

constexpr std::size_t alignment = 16;  // of a buffer that a receiver uses without a copy: see CpuConverter::to_storage

Status cannot_share(std::string why) { return {Code::invalid_argument, "cannot share " + std::move(why)}; }

}  // namespace

Result<at::Tensor> empty_to_share(std::span<const std::int64_t> sizes, at::ScalarType type) {
  std::int64_t bytes = static_cast<std::int64_t>(c10::elementSize(type));
  for (const auto size : sizes) {
    if (size < 0) return Status(Code::invalid_argument, "a tensor cannot have a negative size");
  }
  for (const auto size : sizes) {
    if (__builtin_mul_overflow(bytes, size, &bytes))
      return Status(Code::invalid_argument, "a tensor of more than 2^63 bytes");
  }
  const at::IntArrayRef shape(sizes.data(), sizes.size());
  if (bytes == 0) return at::Tensor(at::detail::empty_cpu(shape, type));
  auto memory = Regions::of_this_process().make(static_cast<std::size_t>(bytes));
  if (!memory.ok()) {
    return Status(memory.status().code(),
                  std::string(memory.status().what()) +
                      " (each tensor of tensorferry.empty() is a memfd, with a file descriptor: ulimit -n)");
  }
  auto tensor = at::detail::make_tensor<at::TensorImpl>(
      storage_over(*std::move(memory)), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(type));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return tensor;
}

Result<SharedBytes> shared_bytes(const at::Tensor& tensor) {
  if (!tensor.defined()) return cannot_share("an undefined tensor");
  if (tensor.layout() != at::kStrided || !tensor.has_storage()) {
    return cannot_share(
        "a tensor without one memory of its own (sparse, nested, or inside torch.func): share its parts");
  }
  if (!tensor.is_cpu()) {
    return cannot_share("a tensor on " + tensor.device().str() +
                        ": only memory of tensorferry.empty(), on the CPU, can be");
  }
  const auto extent = extent_of(tensor.sizes(), tensor.strides());
  if (extent.span == 0) return SharedBytes{};
  const auto item = tensor.itemsize();
  const auto begin = static_cast<std::size_t>(tensor.storage_offset()) * item;
  const auto offset = begin % alignment;
  const auto& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  auto* const data = const_cast<std::byte*>(static_cast<const std::byte*>(storage.data())) + (begin - offset);
  const auto bytes = offset + static_cast<std::size_t>(extent.span) * item;
  auto found = storage.data() == nullptr ? std::nullopt : Regions::of_this_process().find(data, bytes);
  if (!found || (found->offset % alignment) != 0) {
    return cannot_share("a tensor whose memory was not made by tensorferry.empty() in this process");
  }
  return SharedBytes{{Device{}, data, bytes, nullptr, std::move(found->region)}, offset};
}

}  // namespace tensorferry
