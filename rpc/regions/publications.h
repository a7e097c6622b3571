/// The publications of an agent: it serves their versions to subscribers, and counts what these hold.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "channels/copy.h"
#include "rpc/regions/messages.h"
#include "rpc/regions/owned_regions.h"
#include "rpc/regions/versions.h"
#include "rpc/regions/visits.h"

namespace tensorferry::regions {

/// One publication that this agent serves: its own, or its copy of another agent's. Thread-safe.
///
/// A subscriber holds leases, each of one version. They are counted for its visit: at most `most_leases` of them, and
/// `most_waiting` requests that wait for a new version. They end with the visit. A lease that ends so abandons its
/// image (VersionStore), because the subscriber may still read it.
///
/// What stays on a GPU is a region of this agent for each image. A subscriber that maps it reads the region under its
/// lease, and looks at the region's word behind the last byte (OwnedRegions). The region is dropped when the last lease
/// of its image has ended, before the memory goes back to the program's allocator. A lease ends without its subscriber
/// only with the visit, and that clears the subscriber's word first. So a reader that finds its word has read bytes of
/// one version; one that the publisher gave up fails.
class Publication final : public std::enable_shared_from_this<Publication> {
 public:
  static constexpr std::size_t most_leases = 64, most_waiting = 64;
  /// Brings the versions of a copy up to date, at a subscriber that relays: waits for one above `newer_than` if `wait`.
  using Refresh = std::function<Status(std::uint64_t newer_than, bool wait, const std::function<bool()>& cancelled,
                                       std::optional<Clock::time_point> until)>;

  Publication(std::shared_ptr<RawAgent> agent, std::shared_ptr<Visitors> visitors, std::shared_ptr<OwnedRegions> owned,
              std::string name, std::shared_ptr<VersionStore> store, std::uint64_t epoch, Refresh refresh);

  /// Makes the next version, and tells the subscribers that wait. See VersionStore::update. One thread at a time makes
  /// it; others wait. The memory that `gpu` makes becomes a region.
  Result<std::uint64_t> update(const NewBytes& bytes, std::optional<Clock::time_point> until,
                               const std::function<bool()>& interrupted = {}, const GpuWriter* gpu = nullptr);
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] VersionStore& store() const noexcept { return *store_; }
  /// Returns the number of leases that subscribers hold.
  [[nodiscard]] std::size_t leases() const;
  /// Returns the number of subscribers that wait for a version.
  [[nodiscard]] std::size_t waiting() const;
  /// Answers the subscribers that wait: with the current version if it is newer than theirs.
  void tell_waiting();
  /// Fails those that wait. If this agent makes the versions, lets go of their memory: subscribers keep what they have
  /// mapped, and unmap it when they use it no more. A version on a GPU ends for them at once.
  void close(const Status& why);

  void acquire(const PeerInfo& peer, const AcquireVersion& asked, Reply reply);
  void release(VisitId visit, std::uint64_t lease);
  void changes(const PeerInfo& peer, const AskChanges& asked, Reply reply);
  void fetch(const PeerInfo& peer, const FetchRanges& asked, Reply reply);
  void subscribe(const PeerInfo& peer, const SubscribeTo& asked, const std::string& host, Reply reply);
  void end(VisitId visit);

 private:
  struct Held {
    std::string peer;
    std::map<std::uint64_t, VersionLease> leases;  // by number
  };
  struct Waiting {
    PeerInfo peer;
    AcquireVersion asked;
    std::shared_ptr<Reply> reply;
  };
  void answer(const PeerInfo& peer, const AcquireVersion& asked, const VersionLease& version, Reply& reply);
  [[nodiscard]] VersionLease lease_of(VisitId visit, std::uint64_t lease) const;
  [[nodiscard]] std::string holders() const;

  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<Visitors> visitors_;
  const std::shared_ptr<OwnedRegions> owned_;
  const std::string name_;
  const std::shared_ptr<VersionStore> store_;
  const std::uint64_t epoch_;
  const Refresh refresh_;
  std::mutex updating_;
  mutable std::mutex mutex_;
  std::uint64_t last_lease_;  // begins at random: no lease of an earlier publication has the number of a later one
  std::map<VisitId, Held> held_;
  std::vector<Waiting> waiting_;
  std::map<std::string, std::pair<VisitId, std::string>> relays_;  // by host: the subscriber that relays
  Status closed_;
};

/// Serves `tf:version`. Thread-safe.
class Publications final : public std::enable_shared_from_this<Publications> {
 public:
  /// `owned`: the agent's regions, served before this; null: what is on a GPU goes by the host alone.
  static std::shared_ptr<Publications> serve(std::shared_ptr<RawAgent> agent, Visitors& visitors,
                                             std::shared_ptr<OwnedRegions> owned = nullptr);

  /// Begins a publication without a version. The last `on_gpu` pieces stay on a GPU. InvalidArgument: the agent has one
  /// of that name, the name is too long, fewer than 2 images, or checksums of what is on a GPU.
  Result<std::shared_ptr<Publication>> publish(const std::string& name, ImageLayout layout,
                                               VersionStore::Options options, std::size_t on_gpu = 0);
  /// Serves a copy of another agent's publication.
  Result<std::shared_ptr<Publication>> relay(const std::string& name, std::shared_ptr<VersionStore> store,
                                             std::uint64_t epoch, Publication::Refresh refresh);
  /// Ends it: subscribers keep the versions that they have mapped, and waiting ones fail with NotFound.
  void withdraw(const std::string& name);
  void close();
  /// Counts this agent as one of the host `host`, for tests of several hosts on one.
  void pretend_host(std::string host) { host_ = std::move(host); }

 private:
  Publications(std::shared_ptr<RawAgent> agent, std::shared_ptr<OwnedRegions> owned);
  void handle(Request request, Reply reply);
  Result<std::shared_ptr<Publication>> add(const std::string& name, std::shared_ptr<VersionStore> store,
                                           std::uint64_t epoch, Publication::Refresh refresh);

  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<OwnedRegions> owned_;
  std::string host_;
  std::shared_ptr<Visitors> visitors_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Publication>, std::less<>> publications_;
  bool closed_ = false;
};

}  // namespace tensorferry::regions
