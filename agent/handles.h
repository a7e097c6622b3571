/// A call as its caller holds it, and a request as its handler gets it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/message.h"
#include "base/clock.h"
#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry {

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

  /// The loss of the connection cancels the request no more: the caller may ask again. The end of the caller still
  /// does, if that ends the link.
  void outlive_link();

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

/// Finds the handler for a name that is not served; the agent serves it under that name from then on. nullopt: the call
/// fails with NotFound. A Status fails the call with that status, and PermissionDenied is logged too; the next call of
/// that name asks again. Runs on a pool thread, inside the executor if there is one.
using Resolver = std::function<Result<std::optional<std::pair<Handler, HandlerOptions>>>(std::string_view name)>;

}  // namespace tensorferry
