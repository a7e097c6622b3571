#include "rpc/collectives/cuda/lent_memory.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <variant>

#include "channels/cuda/allocation.h"
#include "channels/cuda/device.h"
#include "channels/cuda/invalidate.h"
#include "rpc/collectives/cuda/symmetric_memory.h"
#include "rpc/collectives/cuda/watch.h"
#include "rpc/collectives/messages.h"
#include "rpc/collectives/tuned_inputs.h"

namespace tensorferry::collectives::cuda {
namespace {

namespace driver = tensorferry::cuda;
using driver::address_of;
using driver::api;

constexpr std::uint64_t alignment = 16;  // what kernels read at once

using Allocation = Allocations::Allocation;

/// Returns the allocation of an address, if IPC handles can export it. Call inside DeviceGuard, with no lock.
std::optional<Allocation> exportable_at(CUdeviceptr address) {
  const auto found = driver::allocation_at(address);
  const auto* const allocation = std::get_if<driver::GpuAllocation>(&found);
  if (allocation == nullptr || !allocation->handle || allocation->chunk) return std::nullopt;
  auto* const base = reinterpret_cast<std::byte*>(allocation->base);  // NOLINT(performance-no-int-to-ptr)
  return Allocations::of_this_process().find_on_device(base, allocation->bytes, std::span(&allocation->memory, 1));
}

/// The marked memory of this process, by the generation of the allocation that it lies in.
class Marks final : public AllocationUser {
 public:
  static Marks& of_this_process() {
    static const auto& all = *new std::shared_ptr<Marks>([] {
      auto made = std::make_shared<Marks>();
      Allocations::of_this_process().tell(made);
      return made;
    }());
    return *all;
  }
  void add(std::uint64_t generation, CUdeviceptr begin, CUdeviceptr end) {
    const std::lock_guard lock(mutex_);
    auto& ranges = marked_[generation];
    auto it = ranges.upper_bound(begin);
    if (it != ranges.begin() && std::prev(it)->second >= begin) --it;
    while (it != ranges.end() && it->first <= end) {
      begin = std::min(begin, it->first);
      end = std::max(end, it->second);
      it = ranges.erase(it);
    }
    ranges.emplace(begin, end);
  }
  [[nodiscard]] bool contains(std::uint64_t generation, CUdeviceptr begin, CUdeviceptr end) {
    const std::lock_guard lock(mutex_);
    const auto found = marked_.find(generation);
    if (found == marked_.end()) return false;
    const auto it = found->second.upper_bound(begin);
    return it != found->second.begin() && std::prev(it)->second >= end;
  }
  void gone(std::uint64_t generation) noexcept override {
    const std::lock_guard lock(mutex_);
    marked_.erase(generation);
  }

 private:
  using Ranges = std::map<CUdeviceptr, CUdeviceptr>;  // from begin to end; they do not overlap
  std::mutex mutex_;
  std::map<std::uint64_t, Ranges> marked_;
};

/// Tells the other ranks in a step of the group, under the call that they have agreed on.
template <class Report>
Result<std::vector<Report>> tell(RawGroup& group, const Fingerprint& called, const Report& own,
                                 const WaitLimits& limits) {
  std::vector<Report> all(group.size());
  auto status =
      group.tell_each_other(called, std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)), limits);
  if (!status.ok()) return status;
  return all;
}

/// Maps what a rank offers, unless it is this rank's `own`. False: nothing is offered, or it cannot be mapped.
bool open(const driver::BufferOffer& offer, int device, bool own, std::shared_ptr<driver::PeerMemory>& opened) {
  if (offer.nonce == 0) return false;
  if (own) return true;
  auto memory = driver::PeerMemory::open(offer, device, offer.nonce);
  if (memory.ok()) opened = *std::move(memory);
  return opened != nullptr;
}

}  // namespace

void mark_symmetric(int device, const std::byte* data, std::size_t bytes) {
  const driver::DeviceGuard here(device);
  if (bytes == 0 || !here.status().ok()) return;
  const auto begin = address_of(data);
  if (const auto found = exportable_at(begin)) {
    Marks::of_this_process().add(found->generation, begin, begin + bytes);
  }
}

LentMemory::LentMemory(std::shared_ptr<RawGroup> group)
    : group_(std::move(group)), from_(never_mapped), borrowed_(group_->size()) {}

std::shared_ptr<LentMemory> LentMemory::make(std::shared_ptr<RawGroup> group) {
  std::shared_ptr<LentMemory> made(new LentMemory(std::move(group)));
  Allocations::of_this_process().tell(made);
  return made;
}

LentMemory::Place LentMemory::place_of(int device, std::span<const std::byte> own) {
  const auto begin = address_of(own.data());
  if (own.empty() || begin % alignment != 0 || cuda_memory_is_untracked()) return {};
  const driver::DeviceGuard here(device);
  const auto found = here.status().ok() ? exportable_at(begin) : std::nullopt;
  if (!found) return {};
  const auto base = address_of(found->base);
  if (begin + own.size() > base + found->bytes) return {};
  if (own.size() < from_ && !Marks::of_this_process().contains(found->generation, begin, begin + own.size())) return {};
  const std::lock_guard lock(mutex_);
  auto& known = own_[found->generation];
  if (known.number == 0) known = {++last_, base, found->bytes};
  return {known.number, 0, begin - base};
}

Result<LentInputs> LentMemory::agree(const Fingerprint& called, int device, std::span<const std::byte> own,
                                     bool in_place, std::size_t bytes, bool captured, const WaitLimits& limits) {
  LentInputs out;
  auto place = place_of(device, own);
  place.in_place = in_place ? 1 : 0;
  const auto places = tell(*group_, called, place, limits);
  if (!places.ok()) return places.status();
  if (auto status = introduce(called, device, *places, limits); !status.ok()) return status;
  out.at.resize(group_->size());
  out.all_in_place = true;
  Borrowed none;
  for (std::size_t rank = 0; rank < out.at.size(); ++rank) {
    const auto& there = (*places)[rank];
    auto& borrowed = there.number == 0 ? none : borrowed_[rank].at(there.number);
    if (borrowed.bytes == 0) {  // not lent, or a rank could not map it
      out.all_in_place = false;
      continue;
    }
    out.all_in_place = out.all_in_place && there.in_place == 1;
    if (there.offset > borrowed.bytes || bytes > borrowed.bytes - there.offset) {
      return Status(Code::protocol_error, group_->named(rank) + " lends memory outside of its allocation");
    }
    if (rank == group_->rank()) {
      out.at[rank] = const_cast<std::byte*>(own.data());
      continue;
    }
    auto memory = borrowed.memory.lock();
    if (!memory) {
      return Status(Code::protocol_error, group_->named(rank) + " lends memory again that it has withdrawn");
    }
    out.at[rank] = reinterpret_cast<std::byte*>(memory->address() + there.offset);  // NOLINT(performance-no-int-to-ptr)
    if (captured) captured_.push_back(memory);
    out.keep.push_back(std::move(memory));
  }
  return out;
}

/// If an input lies in an allocation that the ranks have not met before, all of them map it.
Status LentMemory::introduce(const Fingerprint& called, int device, const std::vector<Place>& places,
                             const WaitLimits& limits) {
  const auto is_new = [&](std::size_t rank) {
    return places[rank].number != 0 && !borrowed_[rank].contains(places[rank].number);
  };
  bool any = false;
  for (std::size_t rank = 0; rank < places.size(); ++rank) any = any || is_new(rank);
  if (!any) return {};

  const auto self = group_->rank();
  driver::BufferOffer own;
  const driver::DeviceGuard here(device);
  if (is_new(self) && here.status().ok()) {
    const std::lock_guard lock(mutex_);
    const auto it = std::find_if(own_.begin(), own_.end(),
                                 [&](const auto& each) { return each.second.number == places[self].number; });
    if (it != own_.end()) {
      if (const auto offered = driver::offer_of(it->second.base, device); offered.ok()) {
        own = *offered;
        own.nonce = it->second.bytes;
      }
    }
  }
  const auto offers = tell(*group_, called, own, limits);
  if (!offers.ok()) return offers.status();

  std::vector<std::shared_ptr<driver::PeerMemory>> opened(places.size());
  std::uint64_t failed = 0;  // a bit for each rank whose memory this one could not map
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    if (!is_new(rank)) continue;
    const bool good = here.status().ok() && open((*offers)[rank], device, rank == self, opened[rank]);
    if (!good) failed |= std::uint64_t{1} << rank;
  }
  const auto all_failed = tell(*group_, called, failed, limits);
  if (!all_failed.ok()) return all_failed.status();
  for (const auto each : *all_failed) failed |= each;
  for (std::size_t rank = 0; rank < places.size(); ++rank) {
    if (!is_new(rank)) continue;
    const auto number = places[rank].number;
    const auto size = (*offers)[rank].nonce;
    const bool good = (failed & (std::uint64_t{1} << rank)) == 0;
    borrowed_[rank].emplace(number, Borrowed{{}, good ? size : 0});
    if (!good || rank == self) continue;
    // The owner's message that the memory goes drops this owner.
    auto* const data = reinterpret_cast<std::byte*>(opened[rank]->address());  // NOLINT(performance-no-int-to-ptr)
    const std::shared_ptr<driver::PeerMemory> counted(
        opened[rank].get(), [memory = opened[rank], mapped = mapped_](driver::PeerMemory*) { --*mapped; });
    ++*mapped_;
    borrowed_[rank].at(number).memory = counted;
    Owner owner(data, [memory = counted](void*) {
      watcher().submit([memory] {}, std::chrono::steady_clock::now() + kept_for);
    });
    auto kept = group_->exchange().map_region(
        rank, region_bit | number,
        {{DeviceType::cuda, static_cast<std::uint8_t>(device)}, data, size, nullptr, std::move(owner)});
    if (!kept.ok()) return kept;
  }
  return {};
}

void LentMemory::gone(std::uint64_t generation) noexcept {
  std::uint32_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    const auto it = own_.find(generation);
    if (it == own_.end()) return;
    number = it->second.number;
    own_.erase(it);
  }
  for (std::size_t to = 0; to < group_->size(); ++to) {
    if (to == group_->rank()) continue;
    Message message;
    message.payload = encode(
        GroupMessage(UnmapRegion{group_->id(), static_cast<std::uint32_t>(group_->rank()), region_bit | number}));
    RawCallOptions options;
    options.timeout = Milliseconds(10000);
    group_->agent()->call(group_->names()[to], group_function, std::move(message), std::move(options));
  }
}

}  // namespace tensorferry::collectives::cuda
