#include "rpc/collectives/torch/window_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <charconv>
#include <cstring>
#include <optional>
#include <utility>

#include "base/text.h"
#include "rpc/collectives/torch/tensor_group.h"

namespace tensorferry::collectives {
namespace {

/// Sizes travel with a region as text: "2,3".
std::string text_of_sizes(at::IntArrayRef sizes) {
  std::string out;
  for (const auto size : sizes) out += (out.empty() ? "" : ",") + std::to_string(size);
  return out;
}

/// Returns the sizes if they make that number of elements; nullopt: a peer has told nonsense.
std::optional<std::vector<std::int64_t>> sizes_of(const std::string& text, std::int64_t elements) {
  constexpr std::size_t most_dimensions = 64;
  std::vector<std::int64_t> out;
  std::int64_t left = elements;
  for (const auto* at = text.data(); at != text.data() + text.size();) {
    std::int64_t size = 0;
    const auto [end, error] = std::from_chars(at, text.data() + text.size(), size);
    if (error != std::errc() || size < 1 || left % size != 0 || out.size() == most_dimensions) return std::nullopt;
    left /= size;
    out.push_back(size);
    at = end;
    if (at != text.data() + text.size() && *at++ != ',') return std::nullopt;
  }
  if (left != 1) return std::nullopt;
  return out;
}

}  // namespace

Buffer bytes_of_cpu(const at::Tensor& tensor) {
  std::shared_ptr<at::Tensor> kept(new at::Tensor(tensor), [](at::Tensor* last) {
    TorchAccess::release({std::move(*last)});
    delete last;
  });
  return {{}, static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes(), nullptr, std::move(kept)};
}

Result<std::shared_ptr<WindowMemory>> WindowMemory::of(std::shared_ptr<regions::RegionService> service,
                                                       const at::Tensor& tensor) {
  const auto refused = [](std::string why) { return Status(Code::invalid_argument, std::move(why)); };
  if (!tensor.defined()) return refused("a window takes no undefined tensor");
  if (!tensor.is_cpu()) {
    return refused(
        formatted("a window of the backend tensorferry takes tensors of the CPU, not of {}: tensorferry's "
                  "regions (Agent.region) take tensors of GPUs",
                  tensor.device().str()));
  }
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || !tensor.is_contiguous() || tensor.is_conj() ||
      tensor.is_neg()) {
    return refused("a window takes a dense, contiguous tensor: peers write to its memory");
  }
  std::uint64_t region = 0;
  if (tensor.numel() != 0) {
    auto added = service->owned->add(bytes_of_cpu(tensor), {true, true, {}}, {}, text_of_sizes(tensor.sizes()));
    if (!added.ok()) return added.status();
    region = *added;
  }
  return std::shared_ptr<WindowMemory>(new WindowMemory(std::move(service), tensor.detach(), region));
}

RegisteredTensor WindowMemory::record() const {
  return {RegisteredTensor::registered, 0, static_cast<std::int64_t>(region_), own_.numel(),
          static_cast<std::int64_t>(own_.scalar_type())};
}

void WindowMemory::set_ranks(std::size_t own_rank, std::vector<RegisteredTensor> told, std::vector<std::string> names) {
  own_rank_ = own_rank;
  told_ = std::move(told);
  names_ = std::move(names);
  open_.resize(names_.size());
}

Result<std::shared_ptr<regions::RemoteRegion>> WindowMemory::open(std::size_t rank,
                                                                  const regions::TransferLimits& limits) {
  {
    const std::lock_guard lock(mutex_);
    if (open_[rank] && open_[rank]->alive().ok()) return open_[rank];
  }
  const auto& there = told_[rank];
  auto opened = service_->remote->open(
      {names_[rank], static_cast<std::uint64_t>(there.incarnation), static_cast<std::uint64_t>(there.region)}, limits);
  if (!opened.ok()) return opened.status();
  if ((*opened)->bytes() !=
      static_cast<std::uint64_t>(there.elements) * c10::elementSize(static_cast<at::ScalarType>(there.dtype))) {
    return Status(Code::protocol_error,
                  formatted("\"{}\" granted a region of another size than it told", names_[rank]));
  }
  const std::lock_guard lock(mutex_);
  open_[rank] = *opened;
  return opened;
}

Status WindowMemory::write(std::size_t rank, std::int64_t element, const Buffer& from,
                           const regions::TransferLimits& limits) {
  if (from.bytes == 0) return {};
  const auto offset =
      static_cast<std::uint64_t>(element) * c10::elementSize(static_cast<at::ScalarType>(told_[rank].dtype));
  if (rank == own_rank_) {
    std::memmove(static_cast<std::byte*>(own_.data_ptr()) + offset, from.data, from.bytes);
    return {};
  }
  const auto region = open(rank, limits);
  if (!region.ok()) return region.status();
  return (*region)->write(regions::Runs::one(offset, from.bytes), from, std::nullopt, limits);
}

Result<at::Tensor> WindowMemory::map(std::size_t rank, const regions::TransferLimits& limits) {
  if (rank == own_rank_) return own_.detach();
  const auto& there = told_[rank];
  const auto dtype = static_cast<at::ScalarType>(there.dtype);
  if (there.region == 0) return at::empty({0}, at::TensorOptions(dtype));
  const auto region = open(rank, limits);
  if (!region.ok()) return region.status();
  auto bytes = (*region)->mapped_bytes();
  if (!bytes.ok()) return bytes.status();
  const auto sizes = sizes_of((*region)->shape(), there.elements);
  if (!sizes) return Status(Code::protocol_error, formatted("\"{}\" told no shape of its window", names_[rank]));
  return at::from_blob(
      bytes->data, *sizes, [kept = std::move(bytes->owner)](void*) mutable { kept = {}; }, at::TensorOptions(dtype));
}

void WindowMemory::drop() {
  if (region_ != 0) (void)service_->owned->drop(region_);  // NotFound: the second time, or the agent has left
}

}  // namespace tensorferry::collectives
