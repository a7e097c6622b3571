#include "python/csrc/future.h"

#include <torch/csrc/Exceptions.h>

#include <optional>
#include <utility>
#include <vector>

#include "converters/current_streams.h"
#include "python/csrc/device_streams.h"
#include "python/csrc/errors.h"
#include "rpc/torch_futures.h"

namespace tensorferry::python {
namespace {

/// Returns the Python error that is set, in a form that a torch future can hold and raise repeatedly.
std::exception_ptr current_python_error() {
  python_error error;
  error.persist();
  return std::make_exception_ptr(std::move(error));
}

c10::IValue holding(const py::object& value) { return torch::jit::toIValue(value, c10::PyObjectType::get()); }

/// Runs `callback`, which holds Python objects, with the GIL when `future` has completed: torch runs and drops
/// callbacks without the GIL. On whichever thread it runs, its current agent is the one of the code that added it.
template <class Callback>
void on_completion(c10::ivalue::Future& future, Callback callback) {
  struct Added {
    std::shared_ptr<PythonAgent> agent;
    Callback callback;
  };
  auto* const agent = ServingScope::agent();
  auto added =
      share_with_any_thread(Added{agent != nullptr ? agent->shared_from_this() : nullptr, std::move(callback)});
  future.addCallback(
      [added = std::move(added)](c10::ivalue::Future& completed) {
        if (closing()) return;
        GilHeld gil;
        const CallbackStreams streams(completed);
        const CurrentAgent current(added->agent.get());
        added->callback();
      },
      /*uses_future=*/false);
}

constexpr const char* callback_raised = "a callback that was passed to then() raised";

/// Logs an error that no program code has seen. Preserves a Python error that is set.
void report_unseen(const std::string& what, const py::object& error) {
  const py::error_scope undisturbed;
  try {
    attribute_of("tensorferry.futures", "report_unseen")(what, error);
  } catch (py::error_already_set& unreported) {
    unreported.discard_as_unraisable("tensorferry.futures.report_unseen");
  }
}

/// Holds the exception that a signal handler raised during a wait, while other Python code runs.
class Interruption {
 public:
  Interruption() {
    if (PyErr_Occurred() != nullptr) error_.emplace();
  }
  void rethrow() const {
    if (error_) throw py::error_already_set(*error_);
  }

 private:
  std::optional<py::error_already_set> error_;
};

[[noreturn]] void raise_time_out(const char* what) { raise(Status(Code::deadline_exceeded, what)); }

}  // namespace

std::optional<Clock::time_point> deadline_after(std::optional<double> seconds) {
  if (!seconds) return std::nullopt;
  if (!(*seconds >= 0)) throw py::value_error("a time-out must be 0 or more seconds, or None");
  if (*seconds > 1e9) return std::nullopt;
  return Clock().now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(*seconds));
}

std::shared_ptr<PythonFuture> PythonFuture::make(c10::intrusive_ptr<c10::ivalue::Future> torch_future) {
  auto* future = new PythonFuture(std::move(torch_future));
  // The first shared_ptr is of torch's class, so that its shared_from_this() works.
  const std::shared_ptr<TorchFuture> owner(static_cast<TorchFuture*>(future),
                                           [](TorchFuture* made) { delete static_cast<PythonFuture*>(made); });
  return {owner, future};
}

std::shared_ptr<PythonFuture> PythonFuture::shared() { return {TorchFuture::shared_from_this(), this}; }

PythonFuture::~PythonFuture() {
  if (looked_at_ || closing() || (pending_.call ? agent_->left() : !of_callback_)) return;
  // Another owner of the torch future means that torch's code (collect_all) uses it, and so sees the error.
  if (!fut->completed() || fut.use_count() > 1) return;
  GilHeld gil;
  if (!fut->hasError()) return;
  const py::error_scope undisturbed;
  try {
    (void)value();
    return;
  } catch (const std::exception&) {  // Python's, or torch's
    set_error_of_exception();
  }
  const py::error_already_set error;
  report_unseen(pending_.call ? "the call of \"" + pending_.shown() + "\" to \"" + pending_.peer + "\" failed"
                              : std::string(callback_raised),
                error.value());
}

std::shared_ptr<PythonFuture> PythonFuture::of(std::shared_ptr<PythonAgent> agent, PendingCall pending) {
  auto future = make(c10::make_intrusive<c10::ivalue::Future>(c10::PyObjectType::get(), agent->gpus()));
  future->agent_ = std::move(agent);
  future->pending_ = std::move(pending);
  ++future->agent_->member().unread;
  future->complete_on_arrival();
  return future;
}

void PythonFuture::complete_on_arrival() {
  pending_.call.on_done(
      [self = shared()](Result<Received> reply) mutable {
        if (closing()) return;
        GilHeld gil;  // also if the agent closes: then a thread outside the executor runs this
        const auto future = std::exchange(self, nullptr);
        future->complete(std::move(reply));
      },
      true, escalated_ ? Call::Notice::prompt : Call::Notice::lazy);
}

void PythonFuture::arrive_at(const std::shared_ptr<LoopInbox>& inbox) {
  escalated_ = true;
  if (!claim()) return escalate();
  pending_.call.on_done([self = shared(), inbox](Result<Received> reply) mutable {
    if (closing()) return;
    const auto future = std::exchange(self, nullptr);
    std::vector<std::shared_ptr<Gate>> gates;
    {
      const std::lock_guard lock(future->arrival_mutex_);
      future->arrived_ = std::move(reply);
      gates.swap(future->gates_);
    }
    for (const auto& gate : gates) gate->open();
    // If the agent is finishing, it waits for this reply, and the loop may not run: perhaps its thread is the one that
    // waits. finish() looks for posted replies after it has said so.
    if (inbox->post(future) && !future->agent_->finishing()) return;
    GilHeld gil;
    future->complete_arrived();
  });
}

std::optional<Result<Received>> PythonFuture::take_arrived() {
  const std::lock_guard lock(arrival_mutex_);
  return std::exchange(arrived_, std::nullopt);
}

void PythonFuture::complete_arrived() {
  if (auto reply = take_arrived()) complete(*std::move(reply));
}

void PythonFuture::complete(Result<Received> reply) {
  // Uses the streams of the received buffers, not those of the thread that completes the future: those streams may hold
  // work that need not wait for this reply.
  std::optional<CurrentStreams> streams;
  if (reply.ok() && !pending_.out.defined()) streams.emplace(agent_->codec().converters(), reply->buffers);
  py::object value;
  std::exception_ptr error;
  try {
    value = agent_->decode_reply(pending_, std::move(reply));
  } catch (py::error_already_set& raised) {
    raised.restore();
    error = current_python_error();
  } catch (const py::builtin_exception& raised) {
    raised.set_error();
    error = current_python_error();
  } catch (const std::exception& raised) {  // torch's error, from a copy into out=
    PyErr_SetString(PyExc_RuntimeError, raised.what());
    error = current_python_error();
  }
  settle(*fut, [&] {
    if (error) return fut->setErrorIfNeeded(std::move(error));
    fut->markCompleted(holding(value), std::move(pending_.device_storages));
  });
  --agent_->member().unread;
}

void PythonFuture::let_go() { complete_on_arrival(); }

py::object PythonFuture::wait(std::optional<double> timeout) {
  await(timeout);
  return value();
}

void PythonFuture::await(std::optional<double> timeout) {
  if (fut->completed()) return;
  const auto until = deadline_after(timeout);
  if (!claim()) {
    if (!wait_completed(until)) raise_time_out("the future has not completed within wait(timeout=)");
    return;
  }
  bool done = false;
  {
    GilReleased gil;
    done = call().wait(until, [&] { return interrupted(gil.state()); });
  }
  if (!done) {
    describe_interruption(pending_.text());
    const Interruption interruption;
    let_go();
    interruption.rethrow();
    raise_time_out("the future has not completed within wait(timeout=); its call continues");
  }
  complete(call().take());
}

void PythonFuture::escalate() {
  looked_at_ = escalated_ = true;
  if (!pending_.call || fut->completed()) return;
  if (forks_ == forks()) return pending_.call.escalate();
  if (claim()) complete(call().take());
}

bool PythonFuture::wait_completed(std::optional<Clock::time_point> until) {
  if (forks_ != forks()) {
    raise(Status(Code::agent_closed,
                 "the future belongs to the parent of this forked process, and will not complete here"));
  }
  const auto what = pending_.call ? pending_.text() : "a future that a callback or another future completes";
  const auto wait_for = [&](bool arrival_too) {
    const auto gate = std::make_shared<Gate>();
    if (arrival_too) {
      const std::lock_guard lock(arrival_mutex_);
      gates_.push_back(gate);
      if (arrived_) gate->open();
    }
    fut->addCallback([gate](c10::ivalue::Future&) { gate->open(); }, /*uses_future=*/false);
    return gate->wait(until, what);
  };
  if (!wait_for(true)) return false;
  complete_arrived();
  return fut->completed() || wait_for(false);  // another thread took the posted reply, and decodes it
}

py::object PythonFuture::value() {
  looked_at_ = true;
  if (!fut->completed() && done()) (void)wait_completed(std::nullopt);
  if (!fut->completed()) raise(Status(Code::invalid_argument, "the future has not completed: wait() for it first"));
  if (!fut->devices().empty()) fut->wait();  // makes the current streams wait for tensors on GPUs
  try {
    return TorchFuture::value();
  } catch (python_error& error) {
    error.restore();
    throw py::error_already_set();
  }
}

py::object PythonFuture::exception(std::optional<double> timeout) {
  await(timeout);
  try {
    value();
  } catch (py::error_already_set& error) {
    return error.value();
  }
  return py::none();
}

void PythonFuture::cancel() {
  looked_at_ = true;
  if (call() && !fut->completed()) call().cancel();
  if (const auto before = before_.lock()) before->cancel();
}

std::shared_ptr<PythonFuture> PythonFuture::sent() {
  if (sent_) return sent_;
  if (!pending_.call) raise(Status(Code::invalid_argument, "only the future of a call, such as rpc_async's, has sent"));
  auto said = c10::make_intrusive<c10::ivalue::Future>(c10::PyObjectType::get());
  sent_ = make(said);
  pending_.call.on_sent(
      [said = std::move(said)](const Status&) { settle(*said, [&] { said->markCompleted(c10::IValue()); }); }, true);
  return sent_;
}

std::shared_ptr<PythonFuture> PythonFuture::then(const py::object& self, py::function callback) {
  escalate();
  auto result = fut->createInstance(c10::PyObjectType::get());
  on_completion(*fut, [result, self, callback = std::move(callback)] {
    settle(*result, [&] {
      try {
        const auto value = callback(self);
        result->markCompleted(holding(value),
                              result->devices().empty() ? std::nullopt : std::optional(device_storages_of(value)));
      } catch (py::error_already_set& error) {
        if (result.use_count() == 1) report_unseen(callback_raised, error.value());  // its future was dropped
        error.restore();
        result->setErrorIfNeeded(current_python_error());
      }
    });
  });
  auto next = make(std::move(result));
  next->before_ = shared();
  next->of_callback_ = true;
  return next;
}

void PythonFuture::add_done_callback(const py::object& self, py::function callback) {
  escalate();
  on_completion(*fut, [self, callback = std::move(callback)] {
    try {
      callback(self);
    } catch (py::error_already_set& error) {
      error.restore();
      PyErr_WriteUnraisable(callback.ptr());
    }
  });
}

py::list wait_all(const py::iterable& futures, std::optional<double> timeout) {
  struct Waited {
    py::object object;
    PythonFuture* future = nullptr;  // null: a future of torch's class
    bool claimed = false;
    bool done = false;
  };
  const auto until = deadline_after(timeout);
  std::vector<Waited> all;
  for (const auto future : futures) {
    auto& waited = all.emplace_back(Waited{py::reinterpret_borrow<py::object>(future)});
    if (py::isinstance<PythonFuture>(future)) waited.future = future.cast<PythonFuture*>();
  }
  // From here on nothing throws before each claimed call has been completed or let go.
  for (auto& waited : all) waited.claimed = waited.future != nullptr && waited.future->claim();
  bool stopped = false;
  const PythonFuture* waited_for = nullptr;  // the future whose wait was stopped
  {
    GilReleased gil;
    for (auto waited = all.rbegin(); waited != all.rend() && !stopped; ++waited) {
      if (!waited->claimed) continue;
      waited->done = waited->future->call().wait(until, [&] { return interrupted(gil.state()); });
      stopped = !waited->done;
      if (stopped) waited_for = waited->future;
    }
  }
  if (waited_for != nullptr) describe_interruption(waited_for->text());
  const Interruption interruption;
  for (auto& waited : all) {
    if (!waited.claimed) continue;
    if (waited.done) {
      waited.future->complete(waited.future->call().take());
    } else {
      waited.future->let_go();
    }
  }
  interruption.rethrow();
  if (stopped) raise_time_out("not all futures have completed within wait_all(timeout=); their calls continue");

  py::list values(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    const auto left = until
                          ? std::optional(std::max(std::chrono::duration<double>(*until - Clock().now()).count(), 0.0))
                          : std::nullopt;
    values[i] = all[i].future != nullptr ? all[i].future->wait(left) : all[i].object.attr("wait")();
  }
  return values;
}

bool await_at(const py::object& future, const std::shared_ptr<LoopInbox>& inbox, py::object callable) {
  auto* ours = py::isinstance<PythonFuture>(future) ? future.cast<PythonFuture*>() : nullptr;
  auto& torch_future = *future.cast<TorchFuture&>().fut;
  if (ours != nullptr ? ours->done() : torch_future.completed()) return true;
  // torch would run a callback that uses the future on streams of all of its GPUs, and make a context on each.
  torch_future.addCallback(
      [inbox, callable = share_with_any_thread(std::move(callable))](c10::ivalue::Future&) { inbox->post(callable); },
      /*uses_future=*/false);
  if (ours != nullptr) ours->arrive_at(inbox);
  return false;
}

namespace {

using BoundFuture = py::class_<PythonFuture, TorchFuture, std::shared_ptr<PythonFuture>>;

void bind_results(BoundFuture& future) {
  future
      .def("wait", &PythonFuture::wait, py::arg("timeout") = py::none(),
           R"(wait(self, timeout: float | None = None) -> _T

Waits until the future has completed, and returns its value.

Args:
    timeout: seconds to wait here at most; ``None``: no limit beside the call's own time-out. The call goes on if this
        time passes.

Raises:
    DeadlineExceeded: ``timeout`` passed. Otherwise the error of the call.)")
      .def("exception", &PythonFuture::exception, py::arg("timeout") = py::none(),
           R"(exception(self, timeout: float | None = None) -> BaseException | None

Waits as :meth:`wait` does, and returns the exception that :meth:`wait` would raise; ``None`` if it would raise none.

Args:
    timeout: as for :meth:`wait`.

Raises:
    DeadlineExceeded: ``timeout`` passed.)")
      .def("done", &PythonFuture::done, R"(done(self) -> bool

Returns whether :meth:`wait` would return, or raise, at once.)")
      .def("value", &PythonFuture::value, R"(value(self) -> _T

Returns the value of a completed future.

Raises:
    InvalidArgument: the future has not completed. Otherwise the error of the call.)")
      .def("cancel", &PythonFuture::cancel, R"(cancel(self) -> None

Cancels the call: it fails with :class:`Cancelled`, and the peer is told. On a future that :meth:`then` returned,
cancels the call that the future depends on. Does nothing if that call has completed.)")
      .def_property_readonly("sent", py::cpp_function(&PythonFuture::sent, "(self) -> Future[None]"),
                             R"(A :class:`Future` of ``None`` that completes when the arguments may be overwritten.

It completes when every tensor among the call's arguments has been read or copied, on any channel; that may be long
before the reply. After a time-out it may complete later than the call. If the peer is lost, it completes when the link
to the peer ends. It never fails. Memory handed over by :func:`share` stays shared.

Raises:
    InvalidArgument: the future belongs to no call; :meth:`then` returned it, for example.

Example::

    gradients = torch.ones(100_000)
    future = rpc.rpc_async("server", torch.sum, args=(gradients,))
    future.sent.wait()
    gradients.zero_()   # while the server still works on its own copy
    future.wait())");
}

void bind_callbacks(BoundFuture& future) {
  future
      .def(
          "then",
          [](const py::object& self, py::function callback) {
            return self.cast<PythonFuture&>().then(self, std::move(callback));
          },
          py::arg("callback"),
          R"(then(self, callback: collections.abc.Callable[[Future[_T]], _S]) -> Future[_S]

Returns a future of the result of ``callback(self)``, which runs when this future has completed.

Args:
    callback: gets this future, which has completed. It runs on a thread of the agent, or at once on this thread if the
        future has completed already. It should not block.

Raises:
    Nothing. If the callback raises an exception, waiting for the returned future raises it.)")
      .def(
          "add_done_callback",
          [](const py::object& self, py::function callback) {
            self.cast<PythonFuture&>().add_done_callback(self, std::move(callback));
          },
          py::arg("callback"),
          R"(add_done_callback(self, callback: collections.abc.Callable[[Future[_T]], object]) -> None

Runs ``callback(self)`` when this future has completed.

Args:
    callback: as for :meth:`then`. If it raises an exception, the exception is printed and otherwise ignored.

Raises:
    Nothing.)")
      .def(
          "__await__", [](const py::object& self) { return attribute_of("tensorferry.futures", "await_")(self); },
          "__await__(self) -> collections.abc.Generator[typing.Any, None, _T]")
      .def_static(
          "__class_getitem__",
          [](const py::object& item) {
            return attribute_of("types", "GenericAlias")(attribute_of("tensorferry._C", "Future"), item);
          },
          "__class_getitem__(item: object) -> types.GenericAlias");
}

void bind_waits(py::module_& module) {
  module.def("_await_at", &await_at, py::arg("future"), py::arg("inbox"), py::arg("callable"),
             R"(_await_at(future: torch._C.Future[typing.Any], inbox: _LoopInbox, callable: typing.Any) -> bool

Returns True if the future has completed. Otherwise returns False, and posts `callable` when it has completed.)");
  module.def(
      "wait_all", &wait_all, py::arg("futures"), py::arg("timeout") = py::none(),
      R"(wait_all(futures: collections.abc.Iterable[torch._C.Future[typing.Any]], timeout: float | None = None) )"
      R"(-> list[typing.Any]

Waits until all futures have completed, and returns their values in order.

Args:
    futures: futures of :func:`rpc_async`. There may be torch's own futures among them.
    timeout: seconds to wait here at most; ``None``: no limit beside the calls' own time-outs.

Raises:
    DeadlineExceeded: ``timeout`` passed. Otherwise, once all have completed, the error of the first failed future in
        the list.

Example::

    futures = [rpc.rpc_async("worker1", max, args=(i, 5)) for i in range(10)]
    assert tensorferry.wait_all(futures, timeout=30) == [5, 5, 5, 5, 5, 5, 6, 7, 8, 9]
)");
}

}  // namespace

void bind_future(py::module_& module) {
  // The exception that torch's functions (collect_all, wait_all) throw for one of our futures.
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (python_error& error) {
      error.restore();
    }
  });

  py::options options;
  options.disable_function_signatures();  // each docstring begins with its own, whose types are more exact

  BoundFuture future(module, "Future", R"(The result of a call that is under way.

A :class:`torch._C.Future`, so ``torch.futures.collect_all`` and ``wait_all`` accept it. It can be awaited.

Example::

    future = rpc.rpc_async("worker1", max, args=(1, 2))
    doubled = future.then(lambda done: 2 * done.value())
    future.add_done_callback(lambda done: print("came", done.value()))
    assert future.exception() is None and future.done()
    assert (future.wait(), await future, doubled.wait()) == (2, 2, 4)
    rpc.rpc_async("worker1", max, args=(1, 2)).cancel()
)");
  bind_results(future);
  bind_callbacks(future);
  bind_waits(module);
}

}  // namespace tensorferry::python
