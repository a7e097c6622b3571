/// A process among its peers: names and rendezvous, calls of bytes and buffers, deadlines, liveness, metrics.
/// Knows no torch and no Python. The folder rpc/ builds its interface on this one.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/rendezvous/store.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "channels/registry.h"

namespace tensorferry {

using Milliseconds = std::chrono::milliseconds;

/// Identifies one incarnation of one agent. A restarted agent of the same name has another incarnation number.
struct PeerInfo {
  std::string name;
  int rank = -1;                  // -1: joined without one
  std::uint64_t incarnation = 0;  // random, never 0
  bool operator==(const PeerInfo&) const = default;
};

/// The peer's device on which a buffer lands.
struct Destination {
  Device device;
  /// True for a tensor's buffer: the call's Placement and the peer's devices decide on which device it lands.
  /// False: the buffer lands on `device`, or the message cannot be sent.
  bool anywhere = false;
  bool operator==(const Destination&) const = default;
};

/// Maps the sender's devices to the receiver's devices on which tensors land. A call fails with InvalidArgument if the
/// receiver has no such device. A tensor that neither `all` nor `map` names lands on the receiver's device of the same
/// type and index if there is one, else on the first device of that type, else on the CPU.
struct Placement {
  std::optional<Device> all;                   // for every source device; takes precedence over `map`
  std::vector<std::pair<Device, Device>> map;  // from, to; at most 64
  [[nodiscard]] bool empty() const noexcept { return !all && map.empty(); }
  [[nodiscard]] std::optional<Device> find(Device from) const;
  bool operator==(const Placement&) const = default;
};

/// The payload and the buffers of a call or a reply. The payload is opaque to the agent; a payload that does not fit a
/// frame travels as a buffer.
struct Message {
  Bytes payload;
  std::vector<Buffer> buffers;            // must not change until the call's on_sent() completion runs
  std::vector<Destination> destinations;  // per buffer; buffers without one land on the peer's CPU
  std::vector<Sharing> sharing;           // per buffer; missing ones go by value

  [[nodiscard]] Destination destination_of(std::size_t buffer) const {
    return buffer < destinations.size() ? destinations[buffer] : Destination{};
  }
  [[nodiscard]] Sharing sharing_of(std::size_t buffer) const {
    return buffer < sharing.size() ? sharing[buffer] : Sharing::by_value;
  }
  /// Returns the bytes of the buffers that go by value. Shared and frozen buffers count nothing.
  [[nodiscard]] std::size_t bytes() const;
};

/// A message as the receiver gets it. The receiver owns every buffer, except those that the sender shares.
struct Received {
  Bytes payload;
  std::vector<Buffer> buffers;
};

struct RawCallOptions {
  Milliseconds timeout{60000};  // 0: none
  std::string require;          // the only channel that may carry the buffers; the call waits for its probe; "": any
  std::vector<Buffer> into;     // receives the reply's buffers; pool memory if missing or of another size or device
  Placement arguments;          // the peer's devices for tensors among the arguments
  Placement results;            // this agent's devices for the reply's tensors; travels with the request
  bool wait_for_ready = false;  // waits up to the deadline for a peer that has not joined yet, or restarts
  std::uint32_t order = 0;      // calls to one peer with the same non-zero key run in the order in which they were made
  /// True: if the call's connection is lost, sends the call again over the session's next link, within its deadline. So
  /// the function may run more than once. Such a call fails with ConnectionLost if the callee's incarnation has ended.
  /// The message is kept until the call has ended, and its buffers must not change until then. Not with `order`, nor
  /// with buffers that are shared.
  bool idempotent = false;
  std::string label;  // the function's name in errors; "": shown_name() of its name
};

/// Returns the function's name for errors and logs: the last part of a name that may have scopes ("py:module:f").
std::string_view shown_name(std::string_view function);

/// A handle of a call in flight. Any thread may wait on it, query it and cancel it; one thread takes the result.
/// Dropping the last handle abandons the reply, not the call. In a forked child, a call of the parent counts as ended
/// with AgentClosed; it goes on in the parent.
class Call {
 public:
  /// Blocks until the call has completed or `until` has passed. The calling thread reads the replies itself if no other
  /// thread reads them. Calls `interrupted` whenever a signal has arrived (Python's Ctrl-C); its true ends the wait.
  /// False: the wait ended before the call completed.
  bool wait(std::optional<Clock::time_point> until = std::nullopt, const std::function<bool()>& interrupted = {});
  /// Spins for the reply in shared memory, and takes it when it has come. The spin lasts some microseconds, adapted to
  /// its recent success, and ends early when a request waits for this agent. It is for a caller that holds a lock which
  /// it would release around wait(). Such a caller sets `at_least`, the shortest spin, if releasing the lock is
  /// expensive. True: the call has completed.
  bool spin_wait(std::chrono::nanoseconds at_least = {});
  /// Returns whether the call has completed. Also polls for the reply in shared memory, and takes it if it has come.
  [[nodiscard]] bool done() const noexcept;
  /// Returns the name of the called function.
  [[nodiscard]] std::string_view function() const noexcept;
  /// Returns the reply or the error; once, after done().
  Result<Received> take();
  /// How soon the completion of on_done() runs.
  ///  - `prompt`: as soon as the reply has come; the reply wakes a thread of the pool.
  ///  - `lazy` (lazy completion): for calls that are likely to be claimed. The link treats one such call,
  ///    the sentinel call, as prompt. The others become prompt when the sentinel call's completion has run, and a few
  ///    milliseconds after they were made at the latest (by the reactor's tick).
  enum class Notice : std::uint8_t { prompt, lazy };
  /// Runs `completion` once when the call completes, on a thread of the agent's pool (inside the executor if
  /// `with_executor`). If the call has completed already, runs it at once on the calling thread. May follow a
  /// wait() that returned false. Otherwise must not be mixed with wait() and take(), except after claim().
  void on_done(UniqueFunction<void(Result<Received>)> completion, bool with_executor = false,
               Notice notice = Notice::prompt);
  /// Makes a lazy completion prompt.
  void escalate();
  /// Withdraws the completion of on_done(). True: it has not begun and will not run; the caller then uses wait() and
  /// take(). False: it has begun, or there is none.
  bool claim();
  /// Fails the call with Cancelled here, and tells the peer. Does nothing if the call has ended, or if its reply is
  /// landing in `RawCallOptions::into`.
  void cancel();
  /// Runs `sent` when the caller may overwrite the arguments' memory: when every buffer's source has been read, or the
  /// call's link has ended. That may be before the call completes, or after it (after a time-out). Runs at once on the
  /// calling thread if the memory is free already; else on the thread that finds out, or, if `with_executor`, on a pool
  /// thread inside the executor.
  void on_sent(Completion sent, bool with_executor = false);

  class State;
  explicit Call(std::shared_ptr<State> state) : state_(std::move(state)) {}
  Call() = default;
  explicit operator bool() const noexcept { return state_ != nullptr; }

 private:
  std::shared_ptr<State> state_;
};

/// The handler's means to answer a request: once, from any thread. If it is dropped unanswered, the call fails with
/// Internal.
class Reply {
 public:
  Reply(Reply&&) noexcept;
  Reply& operator=(Reply&&) noexcept;
  ~Reply();
  /// Answers with `message`. If the request is cancelled or expired, the caller gets an error instead.
  void send(Message message);
  /// Answers with an error.
  void fail(Status status);
  /// True: the answer will be discarded, because the caller cancelled, the deadline passed, or the link has ended.
  [[nodiscard]] bool cancelled() const;
  /// Returns the caller's deadline on this process's clock; nullopt: none.
  [[nodiscard]] std::optional<Clock::time_point> deadline() const;
  /// Runs `told` once if the caller cancels, or the link ends, before the answer. `told` runs on a thread of the agent
  /// and under none of its locks; it must not block. If the request is cancelled already, `told` runs at once on the
  /// calling thread. The passing of the deadline does not run it: the handler compares deadline() with the clock. If
  /// several are given, they run in that order.
  void on_cancelled(UniqueFunction<void()> told);

  /// For the agent's own use: the handler begins now. False: cancelled(), so it must not.
  bool begin();
  /// For the agent's own use: sends the function's number to the caller with the answer.
  void tell(std::uint32_t number);

  class State;
  explicit Reply(std::unique_ptr<State> state);

 private:
  std::unique_ptr<State> state_;
};

/// A request as its handler gets it. `peer` and `function` are valid while the handler runs.
struct Request {
  const PeerInfo& peer;
  std::string_view function;
  Received arguments;
};

/// Serves one request, on a thread of the agent's pool, after all arguments have landed. May block, and may call other
/// agents.
using Handler = std::function<void(Request request, Reply reply)>;

struct HandlerOptions {
  bool executor = false;  // runs the handler inside RawAgentOptions::executor (Python: with the GIL)
};

/// If entering the executor took longer than this, other threads of its runtime compute, and a thread that leaves the
/// executor waits as long again to re-enter it.
inline constexpr std::chrono::microseconds executor_is_dear_from{500};
/// A thread then keeps the executor for up to this long in case more work comes.
inline constexpr std::chrono::microseconds executor_patience{100};

/// The hooks by which a language runtime prepares the threads that run its handlers. Every function runs on a pool
/// thread. `thread` is the result of attach() on that thread.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void* attach() = 0;            // once per thread, before the first enter()
  virtual void enter(void* thread) = 0;  // before handlers; many handlers may run before leave()
  virtual void leave(void* thread) = 0;
  virtual void detach(void* thread) = 0;  // once per attached thread, before it ends
};

/// A wait of the calling thread for something that another call or a peer brings. If the thread runs a handler, the
/// handler holds no place (`RawAgentOptions::max_threads`) while this object lives, so the calls for which it waits can
/// run. Call::wait() does this by itself. Other waits inside handlers need it, for example those on a condition
/// variable. Does nothing on threads that belong to no agent.
class WaitInHandler {
 public:
  WaitInHandler();
  ~WaitInHandler();
  WaitInHandler(const WaitInHandler&) = delete;
  WaitInHandler& operator=(const WaitInHandler&) = delete;
};

class Network;
class OneSided;

/// What an agent takes from its process: time, connections, threads. Tests give others.
struct Surroundings {
  Clock clock{};
  std::shared_ptr<Network> network{};  // null: the sockets of this host
  bool threads = true;                 // false: the agent works only inside RawAgent::step()
  std::uint64_t incarnation = 0;       // 0: random
};

struct RawAgentOptions {
  std::string name;
  int rank = -1;
  std::shared_ptr<Store> store;        // the key-value store in which agents find one another
  std::string prefix = "tensorferry";  // of the keys in the store
  std::string key;  // the cluster key; "": TENSORFERRY_KEY_FILE, TENSORFERRY_KEY, or none (one user on one host)
  Registry registry = Registry::built_in();
  std::string channels;                                  // see Registry::drivers; "": TENSORFERRY_CHANNELS
  std::vector<Device> devices{Device{}};                 // this agent's devices; always includes the CPU
  std::map<DeviceType, std::shared_ptr<Memory>> memory;  // receive memory; the agent makes the CPU's if it is missing
  std::shared_ptr<Executor> executor;
  int max_threads = 1024;  // handlers that run at once, without those that wait for a call of their own
  // Per peer: requests taken in whose handlers have not started, and the bytes of their payloads and buffers. They wait
  // up to their deadlines. Beyond a bound, requests fail with ResourceExhausted.
  int max_queued_calls = 65536;
  std::size_t max_queued_bytes = std::size_t{16} << 30;
  // Per peer, and in each direction: bytes of buffers that the peer has not taken. Beyond it a caller blocks, and no
  // further handler of the peer's requests starts.
  std::size_t max_bytes_in_flight = std::size_t{1} << 30;
  Milliseconds heartbeat{5000};      // between hosts; the link to a peer that is silent for three heartbeats ends
  Milliseconds peer_timeout{60000};  // a peer that cannot be reached for this long is dead
  std::string interface;             // "": TENSORFERRY_SOCKET_IFNAME, else the one that reaches the rendezvous
  std::string ports;                 // "": any; "7000" or "7000-7099"
  std::string reaches;               // the rendezvous's host, from which the interface is chosen; "": loopback
  Surroundings surroundings;
  bool unix_sockets = true;   // false: TCP also between processes of one host
  bool shared_memory = true;  // false: the agent shares no memory with peers: sockets carry every frame, and channels
                              // such as shm are left out unless `channels` names them
  std::string socket_dir;     // "": TENSORFERRY_SOCKET_DIR, else abstract sockets
  std::string tls;            // of TCP connections, see agent/transport/tls.h; "": TENSORFERRY_TLS, else off
  std::string trace;          // a file: leave() writes a trace of all calls beside it; "": TENSORFERRY_TRACE, else none
};

struct Counters {
  std::uint64_t calls_sent = 0, calls_served = 0, calls_failed = 0;
  std::uint64_t late_answers = 0;  // calls that this agent answered after their callers had given up
  std::uint64_t late_replies = 0;  // replies to this agent that came after their calls had ended
  std::map<std::string, std::uint64_t> bytes_sent, bytes_received;  // by channel; "inline" inside frames
  std::uint64_t pinned_bytes = 0;  // page-locked host memory of the whole process, for GPUs and network cards
};

/// The channels between one local device and one device of a peer, and the transport of calls to that peer.
struct Route {
  Device remote;          // the device on which the buffer would land
  std::string channel;    // the one that would carry the buffer; "" if none can
  std::string transport;  // of calls to the peer: "ring", "unix", "tcp"
  std::string no_ring;    // why `transport` is not "ring"; "" if it is
  struct Candidate {
    std::string channel;
    bool usable;
    std::string reason;  // why not, or why not yet; for a usable channel, its Channel::describe()
  };
  std::vector<Candidate> candidates;  // in order of priority
};

struct AgentMetrics;                      // agent/agent_metrics.h
struct FlightEvent;                       // agent/flight_recorder.h
enum class FlightSubject : std::uint8_t;  // agent/flight_recorder.h

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
  /// Finds the handler for a name that is not served; the agent serves it under that name from then on. nullopt: the
  /// call fails with NotFound. A Status fails the call with that status, and PermissionDenied is logged too; the next
  /// call of that name asks again. Runs on a pool thread, inside the executor if there is one.
  using Resolver = std::function<Result<std::optional<std::pair<Handler, HandlerOptions>>>(std::string_view name)>;
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
  /// Returns the events of the flight recorder (agent/flight_recorder.h), in the order of time.
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
