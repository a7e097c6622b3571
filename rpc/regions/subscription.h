/// A peer's publication, as a subscriber has it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "channels/copy.h"
#include "rpc/regions/publications.h"
#include "rpc/regions/remote_region.h"
#include "rpc/regions/visits.h"

namespace tensorferry::regions {

/// One version that this process may read: complete, and unchanged as long as the object lives.
struct VersionView {
  std::uint64_t version = 0;
  const std::byte* data = nullptr;  // of the whole image
  std::uint64_t checksum = 0;       // the publisher's; 0 without checksums
  std::uint64_t epoch = 0;          // of the publication: a restarted publisher counts versions anew
  bool leased = false;              // at the source: `owner` is the lease
  std::shared_ptr<const ImageLayout> layout{};
  Owner owner{};  // what keeps the memory and the lease
  // If set, the bytes from ImageLayout::gpu_from on are in this region alone. After the last copy of them, its alive()
  // must be Ok; else the copied bytes count for nothing.
  std::shared_ptr<RemoteRegion> region{};
};
using HeldVersion = std::shared_ptr<const VersionView>;

/// Where a reader wants bytes of an image.
struct ImageTarget {
  std::uint64_t offset = 0;  // in the image
  std::uint64_t bytes = 0;
  std::byte* to = nullptr;
};
/// Returns the copies that bring the bytes of `ranges` to the targets; nullopt: all of theirs. The ranges are in
/// ascending order and do not overlap. InvalidArgument: a target goes beyond the end of the image.
Result<std::vector<Copier::Piece>> copies_of(const VersionView& view, std::span<const ImageTarget> targets,
                                             const std::optional<std::vector<ByteRange>>& ranges);

class Subscriptions;

/// A subscription. On the publisher's host, versions are mapped: nothing is copied. On another host, the first
/// subscriber keeps a copy, to which only blocks that have changed travel; the others of that host map its copy.
///
/// Errors: NotFound (no version yet, or the publication has ended), DeadlineExceeded, ConnectionLost (the publisher has
/// died: versions that are held stay good; a later call subscribes again, at the publisher that then has the name),
/// ProtocolError (a checksum is wrong), ResourceExhausted.
///
/// Thread-safe. No function throws.
class Subscription final : public std::enable_shared_from_this<Subscription> {
 public:
  struct Limits {
    std::optional<Clock::time_point> until;
    std::function<bool()> interrupted{};
  };
  /// Returns the newest version. NotFound: there is none yet. If `on_gpu`, the caller maps what is on a GPU of this
  /// host (VersionView::region). If it cannot, it asks again without `on_gpu`, and gets all bytes in memory of the
  /// host.
  Result<HeldVersion> latest(const Limits& limits, bool on_gpu = false);
  /// Waits for a version above `newer_than`, and returns the newest. If the publisher has restarted since this object
  /// gave the last version, any version of the new one is newer.
  Result<HeldVersion> wait(std::uint64_t newer_than, const Limits& limits, bool on_gpu = false);
  /// Returns what differs between a version and an older one of that epoch; nullopt: everything may.
  std::optional<std::vector<ByteRange>> changes(const VersionView& version, std::uint64_t base, std::uint64_t epoch,
                                                const Limits& limits);

  ~Subscription();

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const std::string& publisher() const noexcept { return publisher_; }
  /// Returns the layout of the images, as the publisher has told it last.
  [[nodiscard]] ImageLayout layout() const;
  /// Says how versions come: "mapped", "mapped from NAME", or "copied".
  [[nodiscard]] std::string carried() const;
  /// Returns the bytes that were fetched so far over links.
  [[nodiscard]] std::uint64_t fetched() const noexcept { return fetched_.load(std::memory_order_relaxed); }

 private:
  friend class Subscriptions;
  struct Lease;
  /// Where versions come from now. The layout and the way never change; the mutex guards the rest.
  struct Source {
    std::string agent;
    std::shared_ptr<Visit> visit;
    bool maps = false;
    std::shared_ptr<VersionStore> copy;  // if versions are copied
    ImageLayout layout;
    std::uint64_t epoch = 0;
    std::set<std::uint64_t> leases;  // numbers
    std::uint64_t seen = 0;          // the highest number
    int asking = 0;                  // requests for leases under way
    // Of images on a GPU, because to map takes milliseconds; at most Publication::most_leases.
    std::map<std::uint64_t, std::shared_ptr<RemoteRegion>> regions;
  };
  struct Wanted {
    std::uint64_t newer_than = 0;
    bool wait = false;
    bool on_gpu = false;
  };
  Subscription(std::shared_ptr<Subscriptions> all, std::string publisher, std::string name)
      : all_(std::move(all)), publisher_(std::move(publisher)), name_(std::move(name)) {}
  Result<std::shared_ptr<Source>> connect(const Limits& limits);
  Result<std::shared_ptr<Source>> connect_to(const std::string& agent, std::string& relay, const Limits& limits);
  /// From now on, versions are copied.
  std::shared_ptr<Source> copy_instead(const Source& source, bool relays);
  void leave(const std::shared_ptr<Source>& source);
  /// Lets go of the source's images on a GPU, whose publication has ended. A view that is held keeps its own.
  void unmap(Source& source);
  Result<HeldVersion> newest(const Wanted& wanted, const Limits& limits);
  Result<HeldVersion> newest_of(const std::shared_ptr<Source>& source, const Wanted& wanted, const Limits& limits);
  Result<std::shared_ptr<Lease>> acquire(const std::shared_ptr<Source>& source, const Wanted& wanted,
                                         const Limits& limits);
  /// Opens the region of an image, under a lease of it.
  Result<std::shared_ptr<RemoteRegion>> region_of(Source& source, std::uint64_t id, const Limits& limits) const;
  Status copy(const Lease& lease, const Limits& limits);
  Status fetch(const Lease& lease, const std::vector<ByteRange>& ranges, const Buffer& image, const Limits& limits);
  Result<std::optional<std::vector<ByteRange>>> ask_changes(const Lease& lease, std::uint64_t base,
                                                            const Limits& limits) const;
  Result<Received> ask(const std::string& agent, const VersionMessage& message, const Buffer& into,
                       const Limits& limits) const;
  Status verify(const Lease& lease, std::uint64_t checksum) const;
  [[nodiscard]] Status malformed(const Source& source) const;

  const std::shared_ptr<Subscriptions> all_;
  const std::string publisher_, name_;
  std::mutex connecting_, copying_;  // one thread does so at a time
  mutable std::mutex mutex_;
  std::shared_ptr<Source> source_;
  bool relays_ = false;
  std::uint64_t given_epoch_ = 0;  // of the last view
  ImageLayout layout_;             // of the last source
  std::atomic<std::uint64_t> fetched_{0};
};

/// The subscriptions of one agent. Thread-safe.
class Subscriptions final : public std::enable_shared_from_this<Subscriptions> {
 public:
  /// `remote`: the regions of peers that this agent maps; null: what is on a GPU comes by the host.
  Subscriptions(std::shared_ptr<RawAgent> agent, std::shared_ptr<Visits> visits,
                std::shared_ptr<Publications> publications, std::shared_ptr<RemoteRegions> remote = nullptr);
  /// Returns the subscription to the publication `name` of `publisher`; there is one for each.
  Result<std::shared_ptr<Subscription>> subscribe(const std::string& publisher, const std::string& name,
                                                  const Subscription::Limits& limits);
  /// Counts this agent as one of the host `host`, for tests of several hosts on one.
  void pretend_host(std::string host) { host_ = std::move(host); }

 private:
  friend class Subscription;
  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<Visits> visits_;
  const std::shared_ptr<Publications> publications_;
  const std::shared_ptr<RemoteRegions> remote_;
  std::string host_;
  std::mutex mutex_;
  std::map<std::pair<std::string, std::string>, std::weak_ptr<Subscription>> subscriptions_;
};

}  // namespace tensorferry::regions
