/// The peers of one agent: its links and sessions by name, and what happens when a link or a peer is lost.
///
/// A peer has one link at a time, and one session from the first connection of an incarnation until that incarnation is
/// dead.
///
/// Threads: any. Callbacks run under no lock.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "agent/connections/session.h"
#include "agent/message.h"
#include "agent/wire/frame.h"
#include "base/file_descriptor.h"

namespace tensorferry {

struct Connected;
struct Engine;
class Link;

class Peers final {
 public:
  /// Belongs to `engine`.
  explicit Peers(Engine& engine) : engine_(engine) {}

  // --- links ---------------------------------------------------------------------------------------------------------
  /// Returns the link to `name`. Makes one, without dialling, if there is none or if the known one has ended. After
  /// leave() the returned link is closed.
  std::shared_ptr<Link> link_to(std::string_view name);
  /// Gives a connection that has completed the handshake to its link, which sends what waited for it; makes the link if
  /// there is none. On a pool thread.
  ///
  /// Which connection carries the calls of two agents, the one with the lower incarnation decides: it takes the first
  /// one that is made, whoever has dialled it, and says `go` on it. The other one uses only such a connection
  /// (tests/models/duplex.pml). A link whose peer has given its connection up, or was restarted, is ended.
  ///
  /// Otherwise drops the connection. Cancelled: another one carries the calls. ConnectionLost: it has ended, its link
  /// has ended, or the peer has given it up. PermissionDenied: it is of another user than the peer's link.
  Status admit(Connected connection);
  /// Removes a link that has ended. If its session goes on (`loss`), makes the session's next link, which dials. Else
  /// buries the session.
  void lost(const std::shared_ptr<Link>& link, const Status& why, Loss loss);
  /// Returns the number of a connection for calls that this agent takes; see wire::Hello::connection.
  std::uint64_t next_connection() noexcept { return ++connections_taken_; }
  /// Returns the known link to `name`, which may have ended; else null.
  [[nodiscard]] std::shared_ptr<Link> known_link(std::string_view name) const;
  [[nodiscard]] std::vector<std::shared_ptr<Link>> all_links() const;

  // --- sessions ------------------------------------------------------------------------------------------------------
  /// Returns the session with this incarnation of a peer; makes it if there is none. Buries the session with another
  /// incarnation.
  std::shared_ptr<Session> session_of(const PeerInfo& peer);
  /// Watches the process of a session's peer on this host, unless it is watched already. `process`: its pidfd;
  /// `pid`: in this pid namespace, 0: not known.
  void watch_process(const std::shared_ptr<Session>& session, FileDescriptor process, std::int32_t pid);
  /// Ends the session whose peer's process has ended, and its link. Calls that wait for a connection go on waiting, for
  /// the peer's next incarnation.
  void process_ended(const std::shared_ptr<Session>& session);
  /// Ends the session of a dead peer, and submits the callback of on_lost() to the pool. Idempotent. Does nothing while
  /// this agent leaves.
  void mark_dead(const std::shared_ptr<Session>& session, const Status& why);
  /// See RawAgent::on_peer_lost.
  void on_lost(std::function<void(const PeerInfo&, Status)> callback);
  /// Drops all sessions: the agent leaves.
  void forget_sessions();

  /// Returns the peer of this name whose session goes on; see RawAgent::linked.
  [[nodiscard]] std::optional<PeerInfo> linked(std::string_view name) const;
  /// Returns the peer of this rank that has a connected link.
  [[nodiscard]] std::optional<PeerInfo> linked(int rank) const;

 private:
  Result<std::shared_ptr<Link>> link_of(const Connected& connection, bool gone, std::optional<uid_t> user);
  [[nodiscard]] Status judge(const Link& known, const Connected& connection, std::optional<uid_t> user) const;

  Engine& engine_;
  std::atomic<std::uint64_t> connections_taken_{0};
  mutable std::mutex mutex_;  // guards the others
  std::map<std::string, std::shared_ptr<Link>, std::less<>> links_;
  std::map<std::string, std::shared_ptr<Session>, std::less<>> sessions_;  // with peers that are not dead
  std::function<void(const PeerInfo&, Status)> lost_;
};

}  // namespace tensorferry
