/// Results that have not come yet: torch futures whose `wait` takes the reply itself.
#pragma once

#include <torch/csrc/jit/python/pybind_utils.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "channels/fork.h"
#include "python/csrc/agent.h"
#include "python/csrc/inbox.h"

namespace tensorferry::python {

using TorchFuture = torch::jit::PythonFutureWrapper;

/// A second base of the kind that TorchFuture has keeps pybind11 from a dynamic_cast, which that class does not allow
/// (it has no virtual function). Future::make does what std::make_shared then leaves out.
struct SecondSharedBase : std::enable_shared_from_this<SecondSharedBase> {};

/// tensorferry.Future. A torch._C.Future (so torch.futures' functions take it) of the reply to one Call.
///
/// Whoever waits here takes the reply off the wire and decodes it; one that nobody waits for is completed by a thread
/// of the agent's pool, as torch's own machinery (then, collect_all) needs. Exactly one of the two does it:
/// Call::claim. A reply that nobody has asked for by then() may be completed some milliseconds later. One that an
/// asyncio task awaits is handed to the task's event loop as it came, which completes it on its own thread; or whoever
/// waits in another one, if that is earlier. All functions need the GIL, and wait without it. Kept alive until
/// completed by the call itself.
///
/// If a call fails, or a callback of then() raises, and the program has neither waited for that future, asked for its
/// value nor added a callback to it, the error is logged when the future is dropped.
class Future final : public TorchFuture, private SecondSharedBase {
 public:
  /// The future of a call's reply.
  static std::shared_ptr<Future> of(std::shared_ptr<PythonAgent> agent, PendingCall pending);
  /// A future that is completed by others, such as then()'s.
  static std::shared_ptr<Future> make(c10::intrusive_ptr<c10::ivalue::Future> future);
  ~Future();

  /// The value, or the exception raised. DeadlineExceeded where `timeout` (seconds) passes first: the call goes on.
  py::object wait(std::optional<double> timeout);
  /// Like wait, but gives the exception instead of raising it; None where there is none.
  py::object exception(std::optional<double> timeout);
  /// The value or exception of a completed future, tensors on GPUs in the order of the current streams. InvalidArgument
  /// where it is not done.
  py::object value();
  bool done() const { return fut->completed() || (pending_.call && pending_.call.done()); }
  /// Fails the call with Cancelled, here and at the peer; of then()'s futures, the call that it waits for. Nothing
  /// happens where that has completed.
  void cancel();

  /// Completes the future on the thread of the loop that `inbox` is of, if nobody else does before.
  void arrive_at(const std::shared_ptr<LoopInbox>& inbox);
  /// For the inbox: completes the future with the reply that has been posted, if nobody else has.
  void complete_arrived();

  /// The future, of None, that completes when the call's arguments may be overwritten; the same one each time.
  /// InvalidArgument: this one is of no call.
  std::shared_ptr<Future> sent();

  /// `callback` gets the Python object of this future.
  std::shared_ptr<Future> then(const py::object& self, py::function callback);
  void add_done_callback(const py::object& self, py::function callback);

  /// The call, where this thread may now wait for it and take its reply: then complete() or let_go() follows.
  [[nodiscard]] bool claim() {
    looked_at_ = true;
    return !fut->completed() && pending_.call && pending_.call.claim();
  }
  [[nodiscard]] Call& call() { return pending_.call; }
  /// For messages: the call that it is of.
  [[nodiscard]] std::string text() const { return pending_.text(); }
  void complete(Result<Received> reply);
  void let_go();

 private:
  explicit Future(c10::intrusive_ptr<c10::ivalue::Future> future) : TorchFuture(std::move(future)) {}
  std::shared_ptr<Future> shared();
  void complete_on_arrival();
  void hurry();
  bool wait_completed(std::optional<Clock::time_point> until);
  std::optional<Result<Received>> take_arrived();

  std::shared_ptr<PythonAgent> agent_;
  PendingCall pending_;
  std::shared_ptr<Future> sent_;
  std::weak_ptr<Future> before_;  // the future that this one is then()'s of
  bool of_callback_ = false;      // then() made it: its callback's result, or what that raised
  bool looked_at_ = false;
  bool hurried_ = false;

  std::mutex arrival_mutex_;
  std::optional<Result<Received>> arrived_;   // posted to a loop, which has not come to it yet
  std::vector<std::shared_ptr<Gate>> gates_;  // of threads that wait: opened when it is posted
  const std::uint32_t forks_ = forks();       // a forked child's copy is completed by nobody
};

/// Calls `callable` on the thread of the loop that `inbox` is of when `future` (a torch future, perhaps one of ours)
/// has completed; at once where it is done, and returns true.
bool await_at(const py::object& future, const std::shared_ptr<LoopInbox>& inbox, py::object callable);

/// The values of `futures` (ours or torch's), in order. Waits for all, the last first, since its reply comes last; then
/// raises the first exception in order.
py::list wait_all(const py::iterable& futures, std::optional<double> timeout);

void bind_future(py::module_& module);

/// When a time-out of `seconds` from now passes; nullopt: never. ValueError: negative or not a number.
std::optional<Clock::time_point> deadline_after(std::optional<double> seconds);

}  // namespace tensorferry::python
