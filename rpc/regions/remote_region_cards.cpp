// Reads and writes of a peer's region by network cards.
#include <algorithm>
#include <condition_variable>
#include <utility>

#include "base/text.h"
#include "rpc/regions/parts_of_runs.h"
#include "rpc/regions/remote_region.h"

namespace tensorferry::regions {
namespace {

constexpr Milliseconds look_every{100};
constexpr Milliseconds ask_again_after{100};  // the owner's end of the connection may come up a little later

/// Waits until the transfer has ended, because the card may touch the caller's memory until then. The card's own
/// time-outs end it if the peer has gone.
Status await(OneSided& cards, OneSided::Transfer transfer, Spin& spin, const TransferLimits& limits) {
  struct Ended {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Status> status;
    bool known() {
      const std::lock_guard lock(mutex);
      return status.has_value();
    }
  };
  const auto ended = std::make_shared<Ended>();
  cards.transfer(std::move(transfer), [ended](Status status) {
    {
      const std::lock_guard lock(ended->mutex);
      ended->status = std::move(status);
    }
    ended->changed.notify_all();
  });
  const auto poll = [&] {
    cards.progress();
    return ended->known();
  };
  (void)(Spin::cpus_to_spare ? spin.until(poll) : poll());
  const WaitInHandler waiting;
  bool interrupted = false;
  std::unique_lock lock(ended->mutex);
  while (!ended->changed.wait_for(lock, look_every, [&] { return ended->status.has_value(); })) {
    if (interrupted || !limits.interrupted) continue;
    lock.unlock();
    interrupted = limits.interrupted();
    lock.lock();
  }
  if (interrupted) return {Code::cancelled, "the transfer was interrupted"};
  return *ended->status;
}

}  // namespace

std::optional<DevicePair> RemoteRegion::pair_for(Device here) {
  if (!grant_.on_gpu) return here == Device() ? std::optional(DevicePair{}) : std::nullopt;
  if (grant_.place.index < 0 || grant_.place.index > 255) return std::nullopt;
  const Device there{DeviceType::cuda, static_cast<std::uint8_t>(grant_.place.index)};
  if (here != Device()) return DevicePair{here, there};
  {
    const std::lock_guard lock(mapping_);
    // The cards of any pair reach the host's memory too.
    const auto known = std::ranges::find_if(keys_, [](const auto& each) { return each.second.keys != nullptr; });
    if (known != keys_.end()) return known->first;
  }
  const auto gpu = gpu_in_use();
  return gpu ? std::optional(DevicePair{{DeviceType::cuda, *gpu}, there}) : std::nullopt;
}

std::shared_ptr<const CardKeys> RemoteRegion::card_keys(DevicePair pair, const TransferLimits& limits) {
  const auto now = regions_->agent_->clock().now();
  {
    const std::lock_guard lock(mapping_);
    auto& known = keys_[pair];
    if (known.keys || now < known.ask_at) return known.keys;
    known.ask_at = now + ask_again_after;
  }
  auto cards = regions_->agent_->one_sided(owner(), pair.local, pair.remote);
  if (cards == nullptr) return nullptr;
  const auto reply = regions_->ask(owner(), AskKeys{visit_->number(), id(), pair.local.index}, {}, {}, limits);
  auto told = reply.ok() ? decode<RegionKeys>(reply->payload) : std::nullopt;
  if (!told || told->region.empty()) return nullptr;
  auto keys = std::make_shared<const CardKeys>(CardKeys{std::move(cards), *std::move(told)});
  const std::lock_guard lock(mapping_);
  return keys_[pair].keys = std::move(keys);
}

std::optional<Status> RemoteRegion::by_card(const Runs& runs, const Buffer& memory, bool to_region,
                                            const TransferLimits& limits) {
  const auto most = regions_->most_.load();
  if (runs.offsets.empty() || (most != Reach::mapped && most != Reach::by_card)) return std::nullopt;
  if (grant_.on_gpu && reach() == Reach::mapped) return std::nullopt;
  const auto pair = pair_for(memory.device);
  const auto keys = pair ? card_keys(*pair, limits) : nullptr;
  if (keys == nullptr) return std::nullopt;
  const auto done = in_messages(runs, [&](const Runs& few, std::uint64_t at) {
    OneSided::Transfer transfer;
    transfer.there = keys->keys.region;
    transfer.run_bytes = few.run_bytes;
    transfer.offsets = few.offsets;
    transfer.here = {memory.device, memory.data + at, few.bytes(), nullptr, memory.owner};
    transfer.writes = to_region;
    transfer.word = keys->keys.page;
    transfer.word_offset = grant_.slot * sizeof(std::uint64_t);
    transfer.expected = grant_.id;
    return await(*keys->cards, std::move(transfer), regions_->spin_, limits);
  });
  if (done.code() == Code::cancelled) return done;
  if (done.code() == Code::not_found) return dropped();
  if (done.ok()) {
    reach_.store(Reach::by_card, std::memory_order_relaxed);
    return done;
  }
  reach_.store(Reach::served, std::memory_order_relaxed);
  const std::lock_guard lock(mapping_);
  auto& known = keys_[*pair];
  if (known.keys == keys) known.keys = nullptr;
  known.ask_at = regions_->agent_->clock().now() + ask_again_after;
  return std::nullopt;
}

}  // namespace tensorferry::regions
