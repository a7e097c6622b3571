/// Futures of calls: torch futures whose `wait` takes the reply off the link itself.
#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/fork.h"
#include "python/csrc/agent.h"
#include "python/csrc/inbox.h"

namespace tensorferry::python {

using TorchFuture = torch::jit::PythonFutureWrapper;

/// A second base of type enable_shared_from_this, which makes that base ambiguous. pybind11 then leaves out its
/// dynamic_cast to TorchFuture, which that class does not allow (it has no virtual function). std::make_shared then
/// leaves TorchFuture's weak pointer unset; PythonFuture::make sets it.
struct SecondSharedBase : std::enable_shared_from_this<SecondSharedBase> {};

/// tensorferry.Future: the future of the reply to one Call. It is a torch._C.Future, so the functions of torch.futures
/// take it.
///
/// Completion: exactly one thread takes the reply and completes the future; Call::claim decides which.
/// - A thread that waits for the future takes the reply off the link and decodes it.
/// - If no thread waits, a pool thread of the agent completes it, as torch's functions (then, collect_all) need.
/// - If an asyncio task awaits the future, the pool thread posts the raw reply to the task's event loop, which decodes
///   it. A thread that waits at the same time may take the posted reply before the loop does. So does a thread of an
///   agent that is finishing, because the loop may not run any more.
///
/// Lazy completion: until a callback is added or a task awaits it, a future whose reply has come may complete some
/// milliseconds later.
///
/// All functions need the GIL, and release it while they wait. The call keeps the future alive until it has completed.
///
/// Logging: if a call fails, or a callback of then() raises, and the program has neither waited for that future, asked
/// for its value nor added a callback to it, the error is logged when the future is dropped.
class PythonFuture final : public TorchFuture, private SecondSharedBase {
 public:
  /// Makes the future of a call's reply.
  static std::shared_ptr<PythonFuture> of(std::shared_ptr<PythonAgent> agent, PendingCall pending);
  /// Makes a future that other code completes through `future`, such as then()'s.
  static std::shared_ptr<PythonFuture> make(c10::intrusive_ptr<c10::ivalue::Future> future);
  ~PythonFuture();

  /// Waits for the reply. Returns the value, or raises the exception of the call. DeadlineExceeded if `timeout`
  /// (seconds) passes first; the call then goes on.
  py::object wait(std::optional<double> timeout);
  /// Waits like wait(), but returns the exception instead of raising it; None if the call succeeded. Raises
  /// DeadlineExceeded if `timeout` passes.
  py::object exception(std::optional<double> timeout);
  /// Returns the value of a completed future, or raises its exception. The current streams then wait for the value's
  /// tensors on GPUs. InvalidArgument if the future has not completed.
  py::object value();
  /// Whether wait() would return at once.
  bool done() const { return fut->completed() || (pending_.call && pending_.call.done()); }
  /// Cancels the call: it fails with Cancelled here, and the peer is told. A future of then() cancels the call that it
  /// depends on. Does nothing if the future has completed.
  void cancel();

  /// Has the reply posted to `inbox`, so that its event loop's thread completes the future, unless another thread does
  /// before.
  void arrive_at(const std::shared_ptr<LoopInbox>& inbox);
  /// Completes the future with the posted reply, unless another thread has taken it. Called by the inbox.
  void complete_arrived();
  /// Returns whether it is the future of a call of `agent`.
  [[nodiscard]] bool is_of(const PythonAgent& agent) const noexcept { return agent_.get() == &agent; }

  /// Returns a future of None that completes when the caller may overwrite the arguments' memory; the same object each
  /// time. InvalidArgument if this future belongs to no call.
  std::shared_ptr<PythonFuture> sent();

  /// Returns the future of `callback(self)`, which runs when this one has completed. `self` is the Python object of
  /// this future.
  std::shared_ptr<PythonFuture> then(const py::object& self, py::function callback);
  /// Runs `callback(self)` when this future has completed. An exception that it raises goes to sys.unraisablehook.
  void add_done_callback(const py::object& self, py::function callback);

  /// Claims the call, so that this thread may wait for it and take its reply. True: complete() or let_go() must follow.
  [[nodiscard]] bool claim() {
    looked_at_ = true;
    return !fut->completed() && pending_.call && pending_.call.claim();
  }
  [[nodiscard]] Call& call() { return pending_.call; }
  /// Describes the call for messages.
  [[nodiscard]] std::string text() const { return pending_.text(); }
  /// Decodes the reply and completes the future; its callbacks run on this thread.
  void complete(Result<Received> reply);
  /// Returns a claimed call to completion on arrival.
  void let_go();

 private:
  explicit PythonFuture(c10::intrusive_ptr<c10::ivalue::Future> future) : TorchFuture(std::move(future)) {}
  std::shared_ptr<PythonFuture> shared();
  void complete_on_arrival();
  void escalate();
  /// Waits until the future has completed. Throws DeadlineExceeded, or what a signal's handler raised.
  void await(std::optional<double> timeout);
  bool wait_completed(std::optional<Clock::time_point> until);
  std::optional<Result<Received>> take_arrived();

  std::shared_ptr<PythonAgent> agent_;
  PendingCall pending_;
  std::shared_ptr<PythonFuture> sent_;
  std::weak_ptr<PythonFuture> before_;  // the future whose then() made this one
  bool of_callback_ = false;            // made by then(): holds its callback's result or exception
  bool looked_at_ = false;
  bool escalated_ = false;

  std::mutex arrival_mutex_;
  std::optional<Result<Received>> arrived_;   // posted to a loop, and not taken yet
  std::vector<std::shared_ptr<Gate>> gates_;  // of waiting threads; opened when the reply is posted
  const std::uint32_t forks_ = forks();       // the copy in a forked child never completes
};

/// Posts `callable` to `inbox`, so that the loop's thread calls it, when `future` (a torch future, perhaps one of ours)
/// has completed. Returns true, and posts nothing, if the future is done already.
bool await_at(const py::object& future, const std::shared_ptr<LoopInbox>& inbox, py::object callable);

/// Waits for all `futures` (ours or torch's) and returns their values in order. Waits for the last one first, because
/// its reply usually comes last. Then raises the first exception in order.
py::list wait_all(const py::iterable& futures, std::optional<double> timeout);

void bind_future(py::module_& module);

/// Returns the time point `seconds` from now; nullopt: never (none given, or more than 1e9). ValueError: negative or
/// not a number.
std::optional<Clock::time_point> deadline_after(std::optional<double> seconds);

}  // namespace tensorferry::python
