/// A process among its peers: names and rendezvous, calls of bytes and buffers, deadlines, liveness, metrics.
/// Knows no torch and no Python. Everything that rpc/ offers is made of what stands here.
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
#include "channels/buffer.h"
#include "channels/bytes.h"
#include "channels/registry.h"
#include "channels/status.h"

namespace tensorferry {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

/// One life of one agent. A restarted agent of the same name has another id.
struct PeerInfo {
  std::string name;
  int rank = -1;                  // -1: joined without one
  std::uint64_t incarnation = 0;  // random, never 0
  bool operator==(const PeerInfo&) const = default;
};

/// Where a buffer lands at the peer.
struct Destination {
  Device device;
  /// A tensor's: it may land on another device, by the call's Placement and by what the peer has. Else on this one, or
  /// the message cannot be sent.
  bool anywhere = false;
  bool operator==(const Destination&) const = default;
};

/// On which of the receiver's devices tensors shall land, by the device that they leave from; InvalidArgument where it
/// has no such device. What is named by neither lands on the device of the same type and index where there is one,
/// else on the first of that type, else on the CPU.
struct Placement {
  std::optional<Device> all;                   // wherever they leave from; before the map
  std::vector<std::pair<Device, Device>> map;  // from, to; at most 64
  [[nodiscard]] bool empty() const noexcept { return !all && map.empty(); }
  [[nodiscard]] std::optional<Device> find(Device from) const;
  bool operator==(const Placement&) const = default;
};

/// What a call or a reply carries. The payload is opaque to the agent; up to a few KB ride inside the frame.
struct Message {
  Bytes payload;
  std::vector<Buffer> buffers;            // read until the message's `sent` has run
  std::vector<Destination> destinations;  // per buffer; missing ones land on the peer's cpu
  std::vector<Sharing> sharing;           // per buffer; missing ones go by value

  [[nodiscard]] Destination destination_of(std::size_t buffer) const {
    return buffer < destinations.size() ? destinations[buffer] : Destination{};
  }
  [[nodiscard]] Sharing sharing_of(std::size_t buffer) const {
    return buffer < sharing.size() ? sharing[buffer] : Sharing::by_value;
  }
  /// Bytes of buffers that travel: of those by value.
  [[nodiscard]] std::size_t bytes() const;
};

/// What arrived: every buffer is the receiver's own, but for those that were handed over to be shared.
struct Received {
  Bytes payload;
  std::vector<Buffer> buffers;
};

struct RawCallOptions {
  Milliseconds timeout{60000};  // 0: none
  std::string require;          // the only channel that may carry the buffers, its probe is waited for; "" any
  std::vector<Buffer> into;     // where the reply's buffers land; missing, of another size or device: pool memory
  Placement arguments;          // where tensors among the arguments land, at the peer
  Placement results;            // where those of the reply land, here; travels with the request
  bool wait_for_ready = false;  // a peer that is not there yet (or restarts) is waited for, up to the deadline
  std::uint32_t order = 0;      // calls to one peer with the same non-zero key run in the order in which they were made
  std::string label;            // what errors call the function; "": shown_name() of its name
};

/// What messages call a function: the last part of its name, which may have scopes ("py:module:f").
std::string_view shown_name(std::string_view function);

/// A call in flight. A handle may be waited on, asked, and cancelled from any thread; one of them takes the result.
/// Dropping the last handle abandons the reply, not the call. In a forked child a call of its parent's has ended with
/// AgentClosed, and goes on for the parent.
class Call {
 public:
  /// Blocks until the call completed or `until` passed; the calling thread reads the replies itself where nobody else
  /// does. False: not completed by `until`. `interrupted` is asked whenever a signal arrived (Python's Ctrl-C); true
  /// ends the wait.
  bool wait(std::optional<Clock::time_point> until = std::nullopt, const std::function<bool()>& interrupted = {});
  /// Looks for an answer in shared memory for some microseconds, as long as that pays, and takes it; gives way where
  /// requests wait for this agent. For callers that hold a lock which they would let go to wait(); for `at_least` in
  /// any case, where that costs them dearly. True: completed.
  bool look(std::chrono::nanoseconds at_least = {});
  [[nodiscard]] bool done() const noexcept;
  /// What it calls.
  [[nodiscard]] std::string_view function() const noexcept;
  /// The reply or the error; once, after done().
  Result<Received> take();
  /// When on_done runs. `prompt`: as soon as the reply has come, for which a thread of the pool is called. `relaxed`:
  /// for calls that are likely to be claimed; of those that a link has in flight one is looked after as promptly, and
  /// when its completion runs, so are the others, at the latest some milliseconds after their replies.
  enum class Notice : std::uint8_t { prompt, relaxed };
  /// Runs once when the call completes, on a thread of the agent's pool (with the executor entered when
  /// `with_executor`); at once, on this thread, where it has. Not to be mixed with wait() and take().
  void on_done(UniqueFunction<void(Result<Received>)> completion, bool with_executor = false,
               Notice notice = Notice::prompt);
  /// Makes a relaxed completion prompt.
  void hurry();
  /// Takes back on_done: true when its completion had not begun and will not; the caller waits and takes itself.
  bool claim();
  /// Fails the call with Cancelled here, and tells the peer.
  void cancel();
  /// Runs when the arguments' memory may be overwritten: when every buffer's source has been read, or the call's link
  /// has ended. May be before or (after a time-out) after the call completed. At once, on this thread, where that is so
  /// already; else on whichever thread learns of it, or, `with_executor`, like a completion of on_done's.
  void on_sent(Completion sent, bool with_executor = false);

  class State;
  explicit Call(std::shared_ptr<State> state) : state_(std::move(state)) {}
  Call() = default;
  explicit operator bool() const noexcept { return state_ != nullptr; }

 private:
  std::shared_ptr<State> state_;
};

/// The handler's duty to answer, once, from any thread. Dropped unanswered, it fails the call with Internal.
class Reply {
 public:
  Reply(Reply&&) noexcept;
  Reply& operator=(Reply&&) noexcept;
  ~Reply();
  void send(Message message);
  void fail(Status status);
  /// The caller cancelled, its deadline passed, or it is gone: the answer will be discarded.
  [[nodiscard]] bool cancelled() const;
  [[nodiscard]] std::optional<Clock::time_point> deadline() const;
  /// Runs `told` once when the caller cancels, or its link ends, before the answer: on a thread of the agent's, under
  /// none of its locks; must not block. At once, here, where that has happened. That the deadline passes tells nobody:
  /// who cares for that has a clock. Replaces an earlier one.
  void on_cancelled(UniqueFunction<void()> told);

  /// For the agent: the caller learns this number of the function with the answer.
  void tell(std::uint32_t number);

  class State;
  explicit Reply(std::unique_ptr<State> state);

 private:
  std::unique_ptr<State> state_;
};

struct Request {
  const PeerInfo& peer;
  std::string_view function;
  Received arguments;
};

/// Runs on a thread of the agent's pool when everything has landed. May block, and may call other agents.
using Handler = std::function<void(Request request, Reply reply)>;

struct HandlerOptions {
  bool executor = false;  // enter RawAgentOptions::executor around it (Python: take the GIL)
};

/// Where entering an executor took this long, other threads of its runtime compute: who leaves it pays as much again.
inline constexpr std::chrono::microseconds executor_is_dear_from{500};
/// For so long it is then kept while something may come.
inline constexpr std::chrono::microseconds executor_patience{100};

/// What a language runtime asks of the threads that run its handlers. Every function runs on a pool thread.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void* attach() = 0;            // once a thread; the result is passed to the others
  virtual void enter(void* thread) = 0;  // before handlers, many under one hold
  virtual void leave(void* thread) = 0;
  virtual void detach(void* thread) = 0;
};

struct RawAgentOptions {
  std::string name;
  int rank = -1;
  std::shared_ptr<Store> store;        // where agents find one another
  std::string prefix = "tensorferry";  // of the keys in the store
  std::string key;  // the cluster key; "": TENSORFERRY_KEY_FILE, TENSORFERRY_KEY, or one from the store (loopback)
  Registry registry = Registry::built_in();
  std::string channels;                                  // see Registry::drivers; "": TENSORFERRY_CHANNELS
  std::vector<Device> devices{Device{}};                 // what this agent has; cpu always
  std::map<DeviceType, std::shared_ptr<Memory>> memory;  // receive memory; the CPU's is made where missing
  std::shared_ptr<Executor> executor;
  int max_threads = 1024;                                  // handlers at once, then ResourceExhausted
  std::size_t max_bytes_in_flight = std::size_t{1} << 30;  // per peer; a sender waits beyond it
  Milliseconds heartbeat{5000};                            // between hosts; a peer silent for three of them is lost
  std::string interface;      // "": TENSORFERRY_SOCKET_IFNAME, else the one that reaches the rendezvous
  std::string ports;          // "": any; "7000" or "7000-7099"
  std::string reaches;        // host that the rendezvous is at, to choose the interface; "": loopback
  bool unix_sockets = true;   // false: TCP also on one host
  bool shared_memory = true;  // false: none is shared with peers: sockets carry every frame, and channels
                              // such as shm are left out unless `channels` names them
  std::string socket_dir;     // "": TENSORFERRY_SOCKET_DIR, else abstract sockets
};

struct Counters {
  std::uint64_t calls_sent = 0, calls_served = 0, calls_failed = 0;
  std::map<std::string, std::uint64_t> bytes_sent, bytes_received;  // by channel; "inline" inside frames
  std::uint64_t structure_bytes_spared = 0;  // of payloads of which only the differences were sent
};

/// How buffers travel between one of our devices and one of a peer's.
struct Route {
  Device remote;          // where the buffer would land
  std::string channel;    // "" when none carries
  std::string transport;  // of calls to the peer: "ring", "unix", "tcp"
  std::string no_ring;    // why it is not "ring"; "" where it is
  struct Candidate {
    std::string channel;
    bool usable;
    std::string reason;  // why not, or why not yet; of a usable one what joins the devices, where it says so
  };
  std::vector<Candidate> candidates;  // in order of priority
};

/// A forked child must not use its parent's agent: calls and look-ups there end with AgentClosed, leave() and the
/// destructor do nothing, and the parent's goes on. A child may join as an agent of its own. A handler that forks must
/// not return in the child: the process is ended then.
class RawAgent {
 public:
  /// Makes an agent that listens and can call, but that peers cannot find before announce(): serve their functions in
  /// between. Errors: InvalidArgument, Unauthenticated (no key beyond loopback), the store's.
  static Result<std::shared_ptr<RawAgent>> create(RawAgentOptions options);
  /// Registers the agent's name, once; from now on peers find and call it. InvalidArgument: the name or rank belongs to
  /// an agent that lives. Else the store's errors. If it fails, drop the agent.
  Status announce();
  /// create(), then announce().
  static Result<std::shared_ptr<RawAgent>> join(RawAgentOptions options);
  ~RawAgent();  // leave()

  /// Makes `name` callable; replaces an earlier one.
  void serve(std::string name, Handler handler, HandlerOptions options = {});
  /// Asked for names that are not served; what it returns is served under that name from then on. nullopt: NotFound. A
  /// Status fails the call, and with PermissionDenied leaves a line in the log; the name is asked for again next time.
  using Resolver = std::function<Result<std::optional<std::pair<Handler, HandlerOptions>>>(std::string_view name)>;
  void resolve_with(Resolver resolver);

  /// Never throws and never blocks on the peer, but for the bound on bytes in flight. Errors come through the Call.
  Call call(std::string_view peer, std::string_view function, Message message, RawCallOptions options = {});

  [[nodiscard]] const PeerInfo& self() const;
  /// Ok, or AgentClosed: this process is a forked child of the one that joined.
  [[nodiscard]] Status usable_here() const;
  /// Looks a name up in the store, waiting up to `timeout` for it to join.
  Result<PeerInfo> find(std::string_view name, Milliseconds timeout);
  Result<PeerInfo> find(int rank, Milliseconds timeout);
  /// The agent of that name to which there is a link now. Asks nobody.
  [[nodiscard]] std::optional<PeerInfo> linked(std::string_view name) const;
  /// Waits until agents of ranks 0..size-1 have joined; in that order. DeadlineExceeded names the missing ones.
  Result<std::vector<PeerInfo>> wait_for_world(int size, Milliseconds timeout);
  /// Waits until every member of that world has called barrier() with `tag` as often. DeadlineExceeded names the
  /// missing.
  Status barrier(const std::string& tag, Milliseconds timeout);

  /// A tensor of `bytes` bytes on `local`, which lands where `placement` says. Opens the link when there is none.
  /// InvalidArgument: the peer has no such device.
  Result<Route> explain(std::string_view peer, Device local = {}, const Placement& placement = {},
                        std::size_t bytes = 1 << 20);
  /// What is known of the link to `peer`, for people: its connections, its ring, the calls in flight and where each is
  /// waited for. For reports of calls that do not end; opens no link.
  [[nodiscard]] std::string link_state(std::string_view peer) const;
  [[nodiscard]] Counters counters() const;
  /// Calls made here that have not completed, and calls served here that have not been answered.
  [[nodiscard]] std::pair<std::size_t, std::size_t> in_flight() const;

  /// Runs when a peer's incarnation is known to have ended.
  void on_peer_lost(std::function<void(const PeerInfo&, Status)> callback);

  /// Writes everything corked, waits for nobody, fails pending calls with AgentClosed, ends all threads, closes
  /// all descriptors, frees the name. Handlers that still run keep the threads they run on (and the pool's descriptors)
  /// until they return. Idempotent. Not from a handler.
  void leave();

  class Impl;

 private:
  explicit RawAgent(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tensorferry
