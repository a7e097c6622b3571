#include "channels/cuda_gdr/gpu_reach.h"

#include <cstdint>
#include <mutex>
#include <variant>

#include "channels/cuda/device.h"

namespace tensorferry::cuda_gdr {

using rdma::LocalCards;
using rdma::Registration;

namespace {

/// Returns what `use` returns, while the end's channel and the GPU are there.
template <class T, class Use>
Result<T> with_gpu(GdrEnd& end, const Use& use) {
  Result<T> out = Status(Code::channel_unavailable, "the link has ended");
  end.wire.with([&](Wire&) {
    const cuda::DeviceGuard here(end.device);
    out = here.status().ok() ? use() : here.status();
  });
  return out;
}

}  // namespace

Device GpuReach::device() const noexcept { return {DeviceType::cuda, static_cast<std::uint8_t>(end_->device)}; }

std::vector<std::size_t> GpuReach::nearest(const LocalCards& local, const std::vector<std::size_t>& ports) {
  std::vector<std::size_t> out;
  end_->wire.with([&](Wire&) { out = end_->cards.near(end_->device, local, ports); });
  return out;
}

Result<std::shared_ptr<Registration>> GpuReach::reach(LocalCards& local, const Buffer& memory,
                                                      const std::vector<std::size_t>& cards) {
  using Reached = std::shared_ptr<Registration>;
  return with_gpu<Reached>(*end_, [&]() -> Result<Reached> {
    auto found = end_->cards.registration(local, memory, cards, GpuCards::Unregistered::register_now);
    if (const auto* refusal = std::get_if<Refusal>(&found)) return Status(Code::channel_unavailable, refusal->reason);
    return std::get<Reached>(std::move(found));
  });
}

Result<std::shared_ptr<Registration>> GpuReach::expose(LocalCards& local, const Buffer& memory, rdma::Access access,
                                                       const std::vector<std::size_t>& cards,
                                                       std::shared_ptr<Registration> earlier) {
  if (cards.empty()) return Status(Code::channel_unavailable, "the link has ended");
  return with_gpu<std::shared_ptr<Registration>>(
      *end_, [&] { return end_->cards.expose(local, memory, access, cards, std::move(earlier)); });
}

Result<ExposedMemory::Flush> GpuReach::flush(const std::shared_ptr<LocalCards>& local,
                                             const std::vector<std::size_t>& ports) {
  return with_gpu<ExposedMemory::Flush>(*end_, [&]() -> Result<ExposedMemory::Flush> {
    std::shared_ptr<ProbePage> page;
    {
      const std::lock_guard lock(end_->mutex);
      page = end_->probing.page;
    }
    if (page == nullptr) return Status(Code::channel_unavailable, "its probe is under way");
    auto registered = page->registration(local->cards_of(ports));
    if (!registered.ok()) return registered.status();
    std::vector<ibv::CardFetch::Way> ways;
    for (const auto port : ports) ways.push_back({nullptr, local->ports[port].card, 0, port});
    const Buffer read{device(), reinterpret_cast<std::byte*>(page->address()), 1, nullptr, page};
    return ExposedMemory::Flush([local, read, ways = std::move(ways), registration = *std::move(registered),
                                 flush = end_->cards.flush(*local, end_->device)](Completion done) {
      flush->after(read, ways, *registration, std::move(done));
    });
  });
}

}  // namespace tensorferry::cuda_gdr
