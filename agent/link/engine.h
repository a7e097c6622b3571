/// The state that the links of one agent share. It joins the parts of an agent, and does little itself: it dials,
/// greets and runs handlers. Every link holds a reference to the engine, so the engine outlives its links.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "agent/agent_drivers.h"
#include "agent/buffers/receive_memory.h"
#include "agent/calls/functions.h"
#include "agent/handles.h"
#include "agent/link/peers.h"
#include "agent/message.h"
#include "agent/observing/agent_counters.h"
#include "agent/observing/call_trace.h"
#include "agent/options.h"
#include "agent/pool/active_links.h"
#include "agent/pool/pool.h"
#include "agent/pool/reactor.h"
#include "agent/rendezvous/directory.h"
#include "agent/transport/cluster_key.h"
#include "agent/transport/tls.h"
#include "agent/wire/frame.h"
#include "base/fork.h"

namespace tensorferry {

class DialLink;

/// Who this agent is to its peers.
struct AgentIdentity {
  PeerInfo self;
  Key key;                   // empty: only this user's processes of this host are peers
  std::shared_ptr<Tls> tls;  // of TCP connections; null: none
  Record record;             // in the store
};

struct Engine final : std::enable_shared_from_this<Engine> {
  explicit Engine(RawAgentOptions agent_options);
  ~Engine();

  /// Opens a connection of `purpose` to the link's peer and gives it to the link (Peers::admit). Tries again, with
  /// backoff:
  /// - while no incarnation of the peer is known: as long as calls wait for it (`wait_for_ready`); else an error closes
  ///   the link;
  /// - with a session: until the peer is dead, or the link does not need the connection any more.
  void dial(std::shared_ptr<DialLink> link, wire::Hello::Purpose purpose);
  /// Runs the handler of a request on the calling thread, or fails the reply if the request is cancelled or expired.
  /// If `function` is null, looks `name` up and asks the resolver first.
  void run_handler(std::shared_ptr<const RawFunction> function, const std::string& name, const PeerInfo& peer,
                   Received arguments, Reply reply);

  /// Returns whether this engine is the copy in a forked child. The child has none of the engine's threads, its locks
  /// may be held for ever, and its connections belong to the parent. The child must leave such an engine untouched.
  [[nodiscard]] bool inherited() const noexcept { return forks_ != forks(); }
  /// Returns the error for a forked child that uses the parent's agent.
  [[nodiscard]] Status used_after_fork() const;

  /// Returns this agent's hello. `connection` and `expected`: see wire::Hello.
  wire::Hello hello(wire::Hello::Purpose purpose, std::uint64_t connection, std::uint64_t expected) const;
  /// Makes tick() tick this link, from now until it has nothing under way.
  void activate(std::weak_ptr<TickedLink> link);
  /// Runs on the reactor thread while something is under way. Ticks the active links alone.
  Pace tick();
  /// Runs on the reactor thread every half heartbeat, but at least once a second, also when the agent is idle.
  /// Sends heartbeats, ends links to silent peers, and trims host memory.
  void look_after();

  RawAgentOptions options;
  const Clock clock;  // the agent's; see RawAgentOptions::surroundings
  AgentIdentity identity;
  std::unique_ptr<Directory> directory;
  AgentDrivers drivers;
  ReceiveMemory memory;
  Functions functions;
  std::unique_ptr<Reactor> reactor;
  std::shared_ptr<Pool> pool;
  AgentCounters counters;
  CallTrace trace;
  std::atomic<bool> leaving{false};
  Peers peers;
  ActiveLinks active_links;

 private:
  const std::uint32_t forks_ = forks();
};

}  // namespace tensorferry
