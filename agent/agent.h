/// A process among its peers: names and rendezvous, calls of bytes and buffers, deadlines, liveness, metrics.
/// Knows no torch and no Python. The folder rpc/ builds its interface on this one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/executor.h"
#include "agent/handles.h"
#include "agent/message.h"
#include "agent/options.h"
#include "agent/reports.h"
#include "agent/store.h"
#include "base/clock.h"
#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry {

class OneSided;
struct AgentMetrics;                      // agent/observing/agent_metrics.h
struct FlightEvent;                       // agent/observing/flight_recorder.h
enum class FlightSubject : std::uint8_t;  // agent/observing/flight_recorder.h

/// An agent: serves functions to its peers and calls theirs. Any thread may use it.
///
/// A forked child must not use its parent's agent. In the child, calls and look-ups end with AgentClosed, and leave()
/// and the destructor do nothing; the parent's agent goes on. A child may join as an agent of its own. A handler that
/// forks must not return in the child: the pool then ends the child process.
class RawAgent {
 public:
  /// Makes an agent that listens and can call, but that peers cannot find before announce(). Call serve() in between.
  /// Errors: InvalidArgument, Unauthenticated (no key beyond loopback), the store's.
  static Result<std::shared_ptr<RawAgent>> create(RawAgentOptions options);
  /// Registers the agent's name, once; from then on peers find and call it. InvalidArgument: the name or rank belongs
  /// to an agent that is alive. Else the store's errors. If it fails, drop the agent.
  Status announce();
  /// create(), then announce().
  static Result<std::shared_ptr<RawAgent>> join(RawAgentOptions options);
  ~RawAgent();  // leave()

  /// Makes `name` callable; replaces an earlier handler of that name.
  void serve(std::string name, Handler handler, HandlerOptions options = {});
  /// Sets who finds the handler for a name that is not served.
  void resolve_with(Resolver resolver);

  /// Calls `function` of `peer`. Never throws. Blocks on the peer only if the bytes in flight would exceed
  /// `max_bytes_in_flight`. Errors come through the Call.
  Call call(std::string_view peer, std::string_view function, Message message, RawCallOptions options = {});

  [[nodiscard]] const PeerInfo& self() const;
  /// Returns the clock of RawAgentOptions::surroundings.
  [[nodiscard]] const Clock& clock() const noexcept;
  /// Returns Ok, or AgentClosed if this process is a forked child of the one that joined.
  [[nodiscard]] Status usable_here() const;
  /// Looks the agent of that name up in the store; waits up to `timeout` for it to join.
  Result<PeerInfo> find(std::string_view name, Milliseconds timeout);
  Result<PeerInfo> find(int rank, Milliseconds timeout);
  /// Returns the agent of that name if there is a session with it. Does not ask the store.
  [[nodiscard]] std::optional<PeerInfo> linked(std::string_view name) const;
  /// Returns the agent of that rank if a connected link to it exists now. Does not ask the store.
  [[nodiscard]] std::optional<PeerInfo> linked(int rank) const;
  /// Returns Ok if the kernel says that a process of this process's user on this host is at the other end of the link
  /// to `peer`, and that its pid is `pid`, unless that is 0 or the kernel does not say it (TCP). Ask before this
  /// process reads or maps memory that the peer names, or tells the peer where its own memory is. All connections of a
  /// link are of one user. PermissionDenied: another user or process, with the reason. ConnectionLost: there is no link
  /// now.
  [[nodiscard]] Status check_process(std::string_view peer, std::int32_t pid = 0) const;
  /// Returns whether no process listens any more at the addresses of this incarnation of an agent. No link tells of a
  /// death before there was one. Asks the store, and dials: blocks for up to 1 s for each address. False for agents of
  /// other hosts and network namespaces, because a firewall may refuse for them.
  [[nodiscard]] bool has_ended(const PeerInfo& peer) const;
  /// Returns whether the agent of that name has left, or no agent answers for it at its addresses any more. Asks the
  /// store, and dials for up to 2 s unless there is a link. On another host a firewall may refuse, so an agent there
  /// has gone only if it has left; under torchrun (TORCHELASTIC_RUN_ID) also if it refuses.
  [[nodiscard]] bool has_gone(std::string_view peer) const;
  /// Waits until agents of ranks 0..size-1 have joined, and returns them in that order. Agents that were killed do not
  /// count, although their records are still in the store. DeadlineExceeded names the missing ranks. An error of
  /// `check`, which is called about twice a second, ends the wait.
  Result<std::vector<PeerInfo>> wait_for_world(int size, Milliseconds timeout,
                                               const std::function<Status()>& check = {});
  /// Waits until every member of that world has called barrier() with `tag` as often. DeadlineExceeded names the
  /// missing ones.
  Status barrier(const std::string& tag, Milliseconds timeout);

  /// Says how a tensor of `bytes` bytes on `local` travels to the device of `peer` that `placement` gives. Opens the
  /// link if there is none, for up to 10 s. InvalidArgument: the peer has no such device. Else the link's error.
  Result<Route> explain(std::string_view peer, Device local = {}, const Placement& placement = {},
                        std::size_t bytes = 1 << 20);
  /// Returns by what this agent reads and writes memory of a peer without the peer's threads, from `local` to `remote`
  /// (channels/one_sided.h). Null: no link is up, or no usable channel of these devices can; perhaps later. Opens the
  /// channels, and no link. Never waits for the peer.
  [[nodiscard]] std::shared_ptr<OneSided> one_sided(std::string_view peer, Device local = {}, Device remote = {});
  /// Describes the link to `peer` for people: its connections, its ring, and the state of each call in flight. For
  /// reports of calls that do not end. Opens no link.
  [[nodiscard]] std::string link_state(std::string_view peer) const;
  /// Returns memory of the CPU from the pool for what the agent receives: warm pages, if it has been used before. The
  /// pool gets it back when the last owner drops it. `data` is null if the system has no memory left.
  [[nodiscard]] Buffer allocate(std::size_t bytes);
  [[nodiscard]] Counters counters() const;
  /// Returns all that is counted, and the state of the links. Takes locks of the links one after another.
  [[nodiscard]] AgentMetrics metrics() const;
  /// Whether the times of calls are counted, for AgentMetrics; true at first.
  void time_calls(bool timed);
  /// Adds an event to the flight recorder.
  void note(FlightSubject subject, std::string_view name, std::string_view text);
  /// Returns the events of the flight recorder (agent/observing/flight_recorder.h), in the order of time.
  [[nodiscard]] std::vector<FlightEvent> flight_events() const;
  /// Records the calls that begin from now on, made and served here, until stop_trace(). Returns the recording's
  /// number.
  [[nodiscard]] std::size_t start_trace();
  /// Ends a recording. Returns the calls that have ended meanwhile as a Chrome trace (JSON); docs/tracing.md describes
  /// it.
  std::string stop_trace(std::size_t recording);
  /// Returns the number of calls made here that have not completed, and of requests here that have not been answered.
  [[nodiscard]] std::pair<std::size_t, std::size_t> in_flight() const;

  /// One kind of work of an agent without threads (Surroundings::threads).
  enum class Work : std::uint8_t {
    reactor,  // one handler of the reactor: a timer, a dial, a connection in its handshake
    pool,     // one job or handler, or else the connections that have something to read
    tick,     // the reactor's tick: flushes, acknowledgements, deadlines
  };
  /// Does one piece of such work on the calling thread. False: there was none. A simulation decides by it what an agent
  /// does next. Not thread-safe.
  bool step(Work work);

  /// Sets the callback that runs on a pool thread when the session with an incarnation of a peer has ended; replaces an
  /// earlier one. Does not run while this agent leaves.
  void on_peer_lost(std::function<void(const PeerInfo&, Status)> callback);

  /// Leaves the job:
  ///  - frees the name in the store, and says goodbye to every peer, which writes all queued frames that the sockets
  ///    take at once; waits for no peer;
  ///  - fails pending calls with AgentClosed;
  ///  - ends all threads (waits up to a second for the pool's), and closes all descriptors.
  /// Handlers that still run keep their threads, and the pool's descriptors, until they return. Idempotent. Must not be
  /// called from a handler.
  void leave();

  class Impl;

 private:
  explicit RawAgent(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorferry
