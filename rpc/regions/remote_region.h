/// The regions of peers, as this agent reads and writes them.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "base/spin.h"
#include "channels/channel.h"
#include "channels/cma/process.h"
#include "channels/copy.h"
#include "channels/one_sided.h"
#include "rpc/regions/messages.h"
#include "rpc/regions/visits.h"

namespace tensorferry::regions {

/// Names a region of a peer. Travels in calls.
struct RegionKey {
  std::string owner;
  std::uint64_t incarnation = 0;  // of the owner; 0: any
  std::uint64_t id = 0;           // 0: by `name`
  std::string name{};
};

/// Equal runs of bytes in a region: `run_bytes` at each of `offsets`, in that order.
struct Runs {
  std::uint64_t run_bytes = 0;
  std::vector<std::uint64_t> offsets;
  [[nodiscard]] std::uint64_t bytes() const noexcept { return run_bytes * offsets.size(); }
  [[nodiscard]] static Runs one(std::uint64_t offset, std::uint64_t bytes) { return {bytes, {offset}}; }
};

/// How long a transfer may take, and what ends it early.
struct TransferLimits {
  Milliseconds timeout{60000};          // of each of the owner's answers; a copy on this host is not timed. 0: none
  std::function<bool()> interrupted{};  // true ends the wait for an answer
};

class RemoteRegions;

/// By what cards reach a region of a peer: the link's transfers, from and to memory of the host and perhaps of a GPU,
/// and the keys.
struct CardKeys {
  std::shared_ptr<OneSided> cards;
  RegionKeys keys;
};

/// One grant. Reads and writes go, whichever the grant allows first:
///
/// - mapped: this process copies from or to memory that it has mapped; on a GPU, the caller does (map_on());
/// - in_place: the kernel copies from the owner's memory (reads alone);
/// - by_card: a network card copies, by keys that the owner gives (RDMA). To a region on a GPU it does if cards connect
///   the GPU to one that this process uses. If that fails, the owner serves;
/// - served: the owner's agent sends or takes the bytes, over any link.
///
/// The memory to copy from or to is the host's or a GPU's. No work of a stream may use that of a GPU meanwhile. If no
/// card carries its bytes, they go by way of the host's memory.
///
/// The library checks the bounds against the grant that it has copied, and the region's generation word before and
/// after each copy. Errors:
///  - InvalidArgument: out of bounds, or memory of another size. Nothing was copied.
///  - PermissionDenied: the owner does not allow it.
///  - NotFound: the owner has dropped or replaced the region, perhaps while the bytes were copied.
///  - ConnectionLost: the owner has died, or the link was lost; a later call opens the region again.
///  - DeadlineExceeded: the owner did not answer in time. `into` may be written until its owner is dropped here.
/// After an error the bytes of `into` are undefined; of a write, any part may have landed.
///
/// Thread-safe. No function throws.
class RemoteRegion final {
 public:
  ~RemoteRegion();
  /// Copies runs of the region into `into`, one after another.
  Status read(const Runs& runs, const Buffer& into, const TransferLimits& limits = {});
  /// Copies `from` into runs of the region; then, with `notify`, gives that number to the owner. The owner sees all the
  /// bytes before the number.
  Status write(const Runs& runs, const Buffer& from, std::optional<std::uint64_t> notify = {},
               const TransferLimits& limits = {});

  [[nodiscard]] const std::string& owner() const noexcept { return visit_->owner(); }
  /// Returns the visit that the grant is of.
  [[nodiscard]] const std::shared_ptr<Visit>& visit() const noexcept { return visit_; }
  [[nodiscard]] std::uint64_t id() const noexcept { return grant_.id; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return grant_.bytes; }
  [[nodiscard]] bool readable() const noexcept { return grant_.read; }
  [[nodiscard]] bool writable() const noexcept { return grant_.write; }
  /// Returns what the owner told of the region.
  [[nodiscard]] const std::string& shape() const noexcept { return grant_.shape; }
  /// Returns whether the region is in memory of a GPU.
  [[nodiscard]] bool on_gpu() const noexcept { return grant_.on_gpu; }
  /// Maps a region on a GPU for kernels and copies of this process's GPU `device`, once. The caller copies, and calls
  /// alive() after the last byte is there: if that is not Ok, the bytes count for nothing. The memory stays mapped
  /// while a copy of the buffer lives. Takes milliseconds the first time. PermissionDenied; ChannelUnavailable: it
  /// cannot be mapped, and read() and write() go by the owner's agent.
  Result<Buffer> map_on(int device, bool to_write);
  /// Returns the region's bytes, in memory of the host that this process has mapped; to write there needs writable().
  /// The memory stays mapped while a copy of the buffer lives, also after the region was dropped. PermissionDenied;
  /// ChannelUnavailable: it is not mapped.
  [[nodiscard]] Result<Buffer> mapped_bytes() const;
  /// Returns the word that holds id() while the region lives, where kernels of the GPU `device` can read it: so a
  /// stream finds out itself whether the region lived until the bytes that it has copied were there.
  /// ChannelUnavailable: the owner shares no such word, or the driver does not page-lock it.
  Result<Buffer> word_on(int device);
  /// Returns how reads go now.
  [[nodiscard]] Reach reach() const noexcept { return reach_.load(std::memory_order_relaxed); }
  /// Returns Ok while the grant is good: NotFound if the region is dropped, ConnectionLost if the owner has gone.
  [[nodiscard]] Status alive() const;

 private:
  friend class RemoteRegions;
  RemoteRegion(std::shared_ptr<RemoteRegions> regions, std::shared_ptr<Visit> visit, RegionGrant grant);
  [[nodiscard]] Status check_right(bool to_write) const;
  [[nodiscard]] Status check(const Runs& runs, const Buffer& memory, bool to_write) const;
  Status copy_mapped(const Runs& runs, std::byte* memory, bool to_region);
  Status read_in_place(const Runs& runs, std::byte* into);
  /// Copies by a network card. nullopt: no card can now, or it has failed; any part may have landed.
  std::optional<Status> by_card(const Runs& runs, const Buffer& memory, bool to_region, const TransferLimits& limits);
  /// Returns by what cards reach the owner's memory, with the keys; null if they do not now.
  std::shared_ptr<const CardKeys> card_keys(DevicePair pair, const TransferLimits& limits);
  /// Returns the devices whose cards carry between the region and memory on `here`; nullopt: there are none.
  std::optional<DevicePair> pair_for(Device here);
  /// Of memory of a GPU: by a card, or by way of the host.
  Status read_by_gpu(const Runs& runs, const Buffer& into, const TransferLimits& limits);
  Status write_by_gpu(const Runs& runs, const Buffer& from, const TransferLimits& limits);
  Status read_served(const Runs& runs, const Buffer& into, const TransferLimits& limits);
  Status write_served(const Runs& runs, const Buffer& from, const TransferLimits& limits);
  [[nodiscard]] Status dropped() const;
  Status noting_a_drop(Status status);
  void tell(const RegionMessage& message);

  const std::shared_ptr<RemoteRegions> regions_;
  const std::shared_ptr<Visit> visit_;
  const RegionGrant grant_;
  Buffer page_, memory_;                 // set before the first use
  std::optional<cma::Process> process_;  // the same
  std::atomic<Reach> reach_{Reach::served};
  std::atomic<bool> dropped_{false};  // a transfer has found it so
  std::mutex mapping_;
  std::map<int, Buffer> mapped_;        // of a region on a GPU, by device; empty: that one cannot. Guarded by mapping_
  std::shared_ptr<LockedWords> words_;  // guarded by mapping_
  struct KnownKeys {
    std::shared_ptr<const CardKeys> keys;
    Clock::time_point ask_at{};  // not before that
  };
  std::map<DevicePair, KnownKeys> keys_;  // guarded by mapping_
};

/// The grants that this agent holds. Thread-safe.
class RemoteRegions final : public std::enable_shared_from_this<RemoteRegions> {
 public:
  RemoteRegions(std::shared_ptr<RawAgent> agent, std::shared_ptr<Visits> visits);

  /// Returns the grant for `key`, and asks the owner for it if there is none that is good. Errors: those of
  /// RemoteRegion, and NotFound for a name that the owner does not have.
  Result<std::shared_ptr<RemoteRegion>> open(const RegionKey& key, const TransferLimits& limits = {});
  /// Uses no faster way than `most`, for tests and measures. `by_card`: network cards, else served.
  void reach_at_most(Reach most) { most_ = most; }
  [[nodiscard]] RawAgent& agent() const noexcept { return *agent_; }

 private:
  friend class RemoteRegion;
  Result<Received> ask(const std::string& owner, const RegionMessage& message, Message bytes, const Buffer& into,
                       const TransferLimits& limits) const;
  Result<std::shared_ptr<RemoteRegion>> grant(const RegionKey& key, const std::shared_ptr<Visit>& visit, bool map,
                                              const TransferLimits& limits);
  void attach(RemoteRegion& region, std::vector<Buffer> buffers) const;
  /// Page-locks a page of words, which several grants of one visit share; by way of the GPU `device`, if it is not yet.
  Result<std::shared_ptr<LockedWords>> locked(const Buffer& page, int device);

  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<Visits> visits_;
  const ProcessPlace place_;
  const std::uint64_t proof_;
  Copier copier_;
  Spin spin_;  // of waits for network cards
  std::atomic<Reach> most_{Reach::mapped};
  std::mutex mutex_;
  std::map<std::pair<std::string, std::uint64_t>, std::weak_ptr<RemoteRegion>> open_;  // by owner and id
  std::map<std::byte*, std::weak_ptr<LockedWords>> locked_;
};

}  // namespace tensorferry::regions
