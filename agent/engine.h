/// The state that the links of one agent share: options, drivers, functions, pool, reactor, counters, and the
/// links themselves by peer name. Every link holds a reference to the engine, so the engine outlives its links.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "agent/agent.h"
#include "agent/auth.h"
#include "agent/call_trace.h"
#include "agent/functions.h"
#include "agent/idempotent_call.h"
#include "agent/late_answers.h"
#include "agent/pool.h"
#include "agent/reactor.h"
#include "agent/rendezvous/directory.h"
#include "agent/session.h"
#include "agent/wire/frame.h"
#include "base/fork.h"
#include "channels/channel.h"
#include "channels/host_memory.h"

namespace tensorferry {

class Link;

struct Engine final : std::enable_shared_from_this<Engine> {
  static constexpr std::size_t most_drivers = 64;

  explicit Engine(RawAgentOptions agent_options);
  ~Engine();

  /// Returns the link to `name`. Makes one, without dialling, if there is none or if the known one has ended. After
  /// leave() the returned link is closed.
  std::shared_ptr<Link> link_to(std::string_view name);
  /// Returns the link to which an authenticated connection with this hello belongs; makes it if there is none. Ends a
  /// link to an earlier incarnation of the peer, and a link that the peer has replaced by another one. Null: the
  /// connection is of a link or an incarnation that the peer has given up.
  /// `gone`: the connection has ended already, so it is no reason to end another link.
  std::shared_ptr<Link> link_of(const wire::Hello& hello, bool gone);
  /// Removes a link that has ended. If its session goes on (`loss`), makes the session's next link, which dials. Else
  /// buries the session.
  void lost(const std::shared_ptr<Link>& link, const Status& why, Loss loss);
  /// Returns the session with this incarnation of a peer; makes it if there is none. Buries the session with another
  /// incarnation.
  std::shared_ptr<Session> session_of(const PeerInfo& peer);
  /// Watches the process of a session's peer on this host, unless it is watched already. `process`: its pidfd.
  void watch_process(const std::shared_ptr<Session>& session, FileDescriptor process);
  /// Ends the session whose peer's process has ended, and its link. Calls that wait for a connection go on waiting, for
  /// the peer's next incarnation.
  void process_ended(const std::shared_ptr<Session>& session);
  /// Ends the session of a dead peer, and submits the on_peer_lost callback to the pool. Idempotent. Does nothing while
  /// this agent leaves.
  void bury(const std::shared_ptr<Session>& session, const Status& why);
  std::vector<std::shared_ptr<Link>> all_links();

  /// Opens a connection of `purpose` to the link's peer and attaches it, on a pool thread. Tries again, with backoff:
  /// - while no incarnation of the peer is known: as long as calls wait for it (`wait_for_ready`); else an error closes
  ///   the link;
  /// - with a session: until the peer is dead, or the link does not need the connection any more.
  /// If the link has another connection, also asks the peer to dial.
  void dial(std::shared_ptr<Link> link, wire::Hello::Purpose purpose);
  /// Answers a `dial` frame: dials the peer once, for a connection on which the peer sends.
  void dial_back(std::shared_ptr<Link> link, wire::Hello::Purpose purpose);
  /// Runs the handler of a request on the calling thread, or fails the reply if the request is cancelled or expired.
  /// If `function` is null, looks `name` up and asks the resolver first.
  void run_handler(std::shared_ptr<const RawFunction> function, const std::string& name,
                   const std::shared_ptr<Link>& link, Received arguments, Reply reply);

  /// Returns whether this engine is the copy in a forked child. The child has none of the engine's threads, its locks
  /// may be held for ever, and its connections belong to the parent. The child must leave such an engine untouched.
  [[nodiscard]] bool inherited() const noexcept { return forks_ != forks(); }
  /// Returns the error for a forked child that uses the parent's agent.
  [[nodiscard]] Status used_after_fork() const;

  Memory& memory_of(DeviceType type);
  /// Returns this agent's hello; as the dialler of `link`, or as an acceptor (null).
  wire::Hello hello(wire::Hello::Purpose purpose, const Link* link, std::uint64_t expected) const;
  /// Makes tick() tick this link, from now until it has nothing under way.
  void activate(std::weak_ptr<Link> link);
  /// Runs on the reactor thread while something is under way. Ticks the active links alone.
  Pace tick();
  /// Runs on the reactor thread every half heartbeat, but at least once a second, also when the agent is idle.
  /// Sends heartbeats, ends links to silent peers, and trims host memory.
  void look_after();

  RawAgentOptions options;
  PeerInfo self;
  Key key;
  bool own_key = false;  // the user gave `key`; false: the agents generated it at rendezvous
  Record record;
  std::unique_ptr<Directory> directory;
  std::vector<std::unique_ptr<Driver>> drivers;  // in order of priority
  std::vector<wire::Hello::Driver> descriptors;  // one for each driver
  HostMemory host_memory;
  Functions functions;
  IdempotencyKeys idempotency_keys;
  std::mutex resolver_mutex;
  RawAgent::Resolver resolver;
  std::function<void(const PeerInfo&, Status)> peer_lost;  // under resolver_mutex

  std::unique_ptr<Reactor> reactor;
  std::shared_ptr<Pool> pool;

  std::atomic<std::uint64_t> calls_sent{0}, calls_served{0}, calls_failed{0};
  std::atomic<std::uint64_t> late_replies{0};  // came after their calls had ended here
  LateAnswers late_answers;
  CallTrace trace;
  std::atomic<std::size_t> pending{0}, serving{0};
  std::atomic<std::uint64_t> links_made{0};                                                 // the links' numbers
  std::array<std::atomic<std::uint64_t>, most_drivers + 1> bytes_sent{}, bytes_received{};  // by driver; last: inline
  std::atomic<bool> leaving{false};

  std::mutex links_mutex;
  std::map<std::string, std::shared_ptr<Link>, std::less<>> links;
  std::map<std::string, std::shared_ptr<Session>, std::less<>> sessions;  // with peers that are not dead; links_mutex

 private:
  const std::uint32_t forks_ = forks();
  std::mutex active_mutex_;  // guards the next one
  std::vector<std::weak_ptr<Link>> active_links_;
};

}  // namespace tensorferry
