/// The regions that an agent owns: memory that peers read and write without a call of the program.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "channels/copy.h"
#include "channels/one_sided.h"
#include "rpc/regions/messages.h"
#include "rpc/regions/visits.h"

namespace tensorferry::regions {

/// What peers may do with a region.
struct RegionRights {
  bool read = true;
  bool write = false;
  std::vector<std::string> peers{};  // the names of the agents that may; empty: all agents of the job
};

/// What a write told its owner with `notify`.
struct Notification {
  std::string peer;
  std::uint64_t number = 0;
};

/// The owner's table of regions, and what it has granted.
///
/// The model. A region has an id that this agent never uses again: its generation. A grant is a peer's right to one
/// region for the time of one visit; the owner keeps a word for it on a control page of the visit's own, which holds
/// the id while the region lives. `drop` stores 0 in all words of the region before it lets go of the memory. A reader
/// copies bytes between two looks at the word. Invariant: if the second look finds the id, then the region had not been
/// dropped when the last byte was copied, so all bytes are the region's. If it finds anything else, the reader fails by
/// name and the copied bytes count for nothing. The end of a visit clears its words too: no drop can do so later.
///
/// The owner only writes the pages and never reads them, and a page belongs to one visit: a peer that changes its page
/// deceives itself alone. Mapped memory is a memfd that is never used for anything else (channels/region.h), so even a
/// late write of a peer can only change bytes of that region. A region in other memory of the host is never written by
/// a peer; its owner writes it, by a call.
///
/// A network card of a peer reads and writes a region by a key that is the region's alone, and then reads the word by
/// another key. `drop` clears the word, and takes back the key before it returns. So the peer's card reaches no other
/// memory, also if the peer breaks the protocol.
///
/// A region on a GPU is mapped by the driver's handle of its allocation, which other tensors of the owner may share: a
/// peer of the same user reads and writes it by copies and kernels of its own, and the library alone keeps those within
/// the region. A peer's card reaches the region's bytes alone. Nothing orders either behind the streams of the owner.
/// What a card has written there is visible to the owner's GPU when the owner gets the notification; nothing else says
/// when.
///
/// Bounds: at most `most_grants` grants and `most_notifications` unread notifications for each visit and region.
/// Grants end with the visit. Notifications tell of bytes that are there, so they stay until they are read or the
/// region is dropped.
///
/// Thread-safe. No function throws.
class OwnedRegions final : public std::enable_shared_from_this<OwnedRegions> {
 public:
  static constexpr std::uint32_t most_grants = 8192;
  static constexpr std::size_t most_notifications = 65536;

  /// Serves `tf:region` at `agent`, and keeps the agent as long as it lives.
  static std::shared_ptr<OwnedRegions> serve(std::shared_ptr<RawAgent> agent, Visitors& visitors);

  /// Makes `memory` a region, and returns its id. Its owner (Buffer::owner) is kept until drop(). Memory that has none,
  /// such as cudaMalloc's, is freed after drop(): peers reach it until then. `name`: peers may
  /// find the region by it; a region that had the name before keeps its id and loses the name. `shape`: told to peers.
  /// The memory is the host's, or a GPU's. InvalidArgument: the name is longer than 256 bytes, or the memory is of
  /// another device.
  Result<std::uint64_t> add(Buffer memory, RegionRights rights, const std::string& name = {}, std::string shape = {});
  /// Ends the region: reads and writes of peers fail from now on, also those under way. A write that a peer has under
  /// way in mapped memory may land until it notices. NotFound: there is no such region.
  Status drop(std::uint64_t id);
  /// Waits until a peer has written and notified, and returns the oldest notification; `number`: the oldest with that
  /// number. DeadlineExceeded; NotFound: the region is dropped, perhaps meanwhile; Cancelled: `interrupted` was true.
  Result<Notification> await_notification(std::uint64_t id, std::optional<std::uint64_t> number,
                                          std::optional<Clock::time_point> until,
                                          const std::function<bool()>& interrupted = {});
  /// Drops all regions.
  void close();
  [[nodiscard]] std::size_t size() const;
  /// Returns the number of grants that visits hold now.
  [[nodiscard]] std::size_t grants() const;

 private:
  struct Owned {
    std::string name;
    std::shared_ptr<const Buffer> memory;
    RegionRights rights;
    std::string shape;
    std::deque<Notification> notifications;
    std::shared_ptr<ExposedMemory> exposed{};  // to network cards; ends before `memory`
  };
  /// The grants of one visit. The page is written here alone.
  struct Visited {
    std::string peer;
    Buffer page;                             // a region of most_grants words
    std::shared_ptr<ExposedMemory> exposed;  // the page, to network cards
    std::unique_ptr<std::uint64_t> proof;
    struct Slot {
      std::uint32_t place = 0;   // in the page
      std::uint32_t grants = 0;  // a visitor may open a region again before it has closed it
    };
    std::map<std::uint64_t, Slot> slots;  // by region
    std::vector<std::uint32_t> free;
    std::uint32_t used = 0;
    [[nodiscard]] std::atomic<std::uint64_t>& word(std::uint32_t slot) const;
  };

  OwnedRegions(std::shared_ptr<RawAgent> agent, std::shared_ptr<Visitors> visitors);
  void handle(Request request, Reply reply);
  void open(const PeerInfo& peer, const OpenRegion& asked, Reply reply);
  /// Grants what `asked` names, under the lock, and adds the shared buffers to `message`.
  Result<RegionGrant> grant(const PeerInfo& peer, const OpenRegion& asked, Message& message);
  /// Returns whether the peer can read this process's memory: by what it says, and by the kernel's word.
  [[nodiscard]] bool may_read_in_place(const PeerInfo& peer, const ProcessPlace& place) const;
  Result<std::uint64_t> named(const OpenRegion& asked) const;
  Result<Visited*> visited(const PeerInfo& peer, const OpenRegion& asked);
  void close_grant(VisitId visit, std::uint64_t id);
  void read(const PeerInfo& peer, const ReadRuns& asked, Reply reply);
  /// Lets network cards of the peer reach a region that it has a grant of.
  Result<RegionKeys> keys(const PeerInfo& peer, const AskKeys& asked);
  Status write(const PeerInfo& peer, const WriteRuns& asked, const std::vector<Buffer>& from);
  /// Notes the notification when what the peer has written is visible.
  void notify(const PeerInfo& peer, const NotifyOwner& told, Reply reply);
  Status note(const PeerInfo& peer, const NotifyOwner& told);
  /// Copies runs of a region to `host`, or back.
  Status copy(const Buffer& region, std::uint64_t run_bytes, const std::vector<std::uint64_t>& offsets, std::byte* host,
              bool to_region);
  void end(VisitId visit);
  /// Returns the region, if `peer` may use it so; under the lock.
  Result<Owned*> allowed(const PeerInfo& peer, std::uint64_t id, bool to_write);
  Result<std::uint32_t> slot_of(Visited& visited, std::uint64_t id) const;
  [[nodiscard]] Status gone(std::uint64_t id) const;

  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<Visitors> visitors_;
  const ProcessPlace place_;
  Copier copier_;
  std::mutex exposing_;  // one thread at a time makes keys, or takes them back; locked before mutex_
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t last_id_ = 0;
  std::map<std::uint64_t, Owned> regions_;
  std::map<std::string, std::uint64_t, std::less<>> names_;
  std::map<VisitId, Visited> visits_;
  bool closed_ = false;
};

/// Returns where this process is, and an empty place if others must not read its memory.
ProcessPlace own_place();
/// Returns Ok if each run of `run_bytes` at `offsets` lies within `bytes`; else InvalidArgument.
Status check_runs(std::uint64_t bytes, std::uint64_t run_bytes, const std::vector<std::uint64_t>& offsets);

}  // namespace tensorferry::regions
