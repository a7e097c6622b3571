#include "python/csrc/serve.h"

#include <optional>
#include <string>
#include <utility>

#include "base/log.h"
#include "converters/current_streams.h"
#include "python/csrc/device_streams.h"
#include "python/csrc/errors.h"
#include "python/csrc/exceptions.h"
#include "python/csrc/exposed.h"
#include "python/csrc/functions.h"
#include "python/csrc/future.h"
#include "python/csrc/profile.h"
#include "python/csrc/references.h"
#include "python/csrc/served.h"
#include "rpc/core/envelope.h"
#include "rpc/core/method_target.h"

namespace tensorferry::python {

// ---- answers

namespace {

/// Tells the program's log of the exception, because the caller may not show it.
void log_raised(const std::string& caller, const RemoteException& described) {
  try {
    attribute_of("tensorferry.serving", "log_raised")(caller, described.traceback);
  } catch (py::error_already_set&) {  // a handler of the log raised
  }
}

/// Runs `body`, which answers, or answers with the error that it throws.
template <class Body>
void answer_or_fail(PythonReply& answer, Body body) {
  try {
    return body();
  } catch (py::error_already_set& raised) {
    return answer.error(raised);
  } catch (const py::builtin_exception& raised) {
    raised.set_error();
  } catch (const std::exception& raised) {
    PyErr_SetString(PyExc_RuntimeError, raised.what());
  }
  py::error_already_set error;
  answer.error(error);
}

}  // namespace

void PythonReply::value(py::handle result) {
  if (call_.creates()) return call_.keep(outcome_of(py::reinterpret_borrow<py::object>(result), false));
  Message message;
  PythonReferenceMarshaller marshaller(*agent_, call_.caller().name, &call_.caller());
  if (!agent_->codec().write_result(result.ptr(), &marshaller, message)) {
    py::error_already_set unsendable;
    return error(unsendable);
  }
  call_.send(std::move(message), marshaller.take());
}

void PythonReply::error(py::error_already_set& raised) {
  auto described = describe_exception(raised, agent_->self().name);
  log_raised(call_.caller().name, described);
  answer_with(raised, std::move(described));
}

void PythonReply::answer_with(py::error_already_set& raised, RemoteException described) {
  if (call_.creates()) return call_.keep(outcome_of(raised.value(), true));
  Message message;
  PythonReferenceMarshaller marshaller(*agent_, call_.caller().name, &call_.caller());
  if (!agent_->codec().write_exception(std::move(described), raised.value().ptr(), &marshaller, message)) {
    PyErr_Clear();
    return fail(Status(Code::internal, "no memory for the exception that the function raised"));
  }
  call_.send(std::move(message), marshaller.take());
}

void PythonReply::outcome(const Result<Outcome>& outcome) {
  if (!outcome.ok()) return fail(outcome.status());
  const auto object = object_of(*outcome);
  if (!outcome->raised) return value(object);
  PyErr_SetObject(py::type::of(object).ptr(), object.ptr());
  py::error_already_set raised;
  answer_with(raised, describe_exception(raised, agent_->self().name));
}

void PythonReply::refuse(const Status& why) {
  if (!call_.creates()) return fail(why);
  set_error(why);
  py::error_already_set refusal;
  answer_with(
      refusal,
      describe_exception(refusal, agent_->self().name));  // gives the error to agents that the object was passed on to
}

void PythonReply::future(py::object future) {
  if (!py::isinstance<TorchFuture>(future)) {
    throw py::type_error("a function under functions.async_execution must return a torch.futures.Future, not " +
                         py::repr(py::type::of(future)).cast<std::string>());
  }
  struct Pending {
    PythonReply answer;
    py::object future;
  };
  auto& torch_future = *future.cast<TorchFuture&>().fut;
  ++agent_->member().unread;
  auto pending = share_with_any_thread(Pending{std::move(*this), std::move(future)});
  torch_future.addCallback(
      [pending](c10::ivalue::Future& completed) {
        if (closing()) return;
        GilHeld gil;
        auto& answer = pending->answer;
        const std::shared_ptr<void> read(nullptr, [&](void*) { --answer.agent().member().unread; });
        const ServingScope serving(&answer.agent(), answer.call());
        const CallbackStreams streams(completed);
        answer_or_fail(answer, [&] { answer.value(pending->future.attr("value")()); });
      },
      /*uses_future=*/false);
}

namespace {

// ---- requests

/// The decoded arguments of a request.
struct Incoming {
  py::tuple args;
  py::object kwargs;  // a dict, or null

  [[nodiscard]] py::object first(const char* what) const {
    if (args.empty()) throw py::value_error(what);
    return args[0];
  }
  [[nodiscard]] py::tuple without_first() const {
    return py::reinterpret_steal<py::tuple>(PyTuple_GetSlice(args.ptr(), 1, PY_SSIZE_T_MAX));
  }
};

/// Decodes the arguments and begins the answer. nullopt: the call has been answered with an error. Throws the decoding
/// error, or Refused.
std::optional<Incoming> read_arguments(const Received& received, PythonReply& answer) {
  Codec::Arguments arguments;
  const auto& caller = answer.call().caller();
  PythonReferenceMarshaller marshaller(answer.agent(), caller.name, &caller);
  std::optional<py::error_already_set> unreadable;
  if (!answer.agent().codec().read_request(received, &marshaller, arguments)) unreadable.emplace();
  if (unreadable && answer.agent().registered() &&
      unreadable->matches(attribute_of("tensorferry.errors", "PermissionDenied"))) {
    throw Refused(py::str(unreadable->value()).cast<std::string>());
  }
  if (!answer.call().begin(arguments.call, arguments.timed, arguments.creation)) return std::nullopt;
  if (unreadable) throw py::error_already_set(*unreadable);
  return Incoming{py::reinterpret_steal<py::tuple>(arguments.args.release()),
                  py::reinterpret_steal<py::object>(arguments.kwargs.release())};
}

void run(const ServedFunction::Found& found, const py::tuple& args, const py::object& kwargs, PythonReply& answer) {
  auto result = call_object(found.callable, args, kwargs);
  if (PyCoro_CheckExact(result.ptr())) {
    serve_coroutine(result, answer);
  } else if (found.async) {
    answer.future(std::move(result));
  } else {
    answer.value(result);
  }
}

/// Begins a range of torch's profiler for the run of a function, with the same sequence number as the caller's range.
std::unique_ptr<CallRange> range_of(std::string_view function, PythonReply& answer) {
  const auto& caller = answer.call().caller();
  return CallRange::begin("rpc_handler", function, caller.name, answer.agent().self().name, caller.incarnation,
                          answer.call().number());
}

void run_function(ServedFunction& function, const Received& received, PythonReply& answer) {
  const auto incoming = read_arguments(received, answer);
  if (!incoming) return;
  const auto range = range_of(function.name(), answer);
  const auto& self = answer.agent().self().name;
  if (!function.by_value()) return run(function.find(self, {}), incoming->args, incoming->kwargs, answer);
  run(function.find(self, incoming->first("tf:call without a callable")), incoming->without_first(), incoming->kwargs,
      answer);
}

MethodTarget target_of(py::handle bytes, PythonReply& answer) {
  char* data = nullptr;
  Py_ssize_t size = 0;
  if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) throw py::error_already_set();
  return value_or_raise(answer.call().target_of(view_of(std::string_view(data, static_cast<std::size_t>(size)))));
}

/// Returns the object that `target` names; waits for it until the call's deadline.
py::object object_of_target(const MethodTarget& target, PythonReply& answer) {
  return answer.agent().objects().await(target.object, answer.reply().deadline(), target.fork);
}

void run_method(const Received& received, PythonReply& answer) {
  const auto incoming = read_arguments(received, answer);
  if (!incoming) return;
  const auto range = range_of(method_function, answer);
  const auto target = target_of(incoming->first("tf:method without a target"), answer);
  const auto object = object_of_target(target, answer);
  const auto& agent = answer.agent();
  const auto method = agent.registered() ? agent.exposed().method(object, target.method)
                                         : py::object(object.attr(target.method.c_str()));
  run({method, is_async_execution(method)}, incoming->without_first(), incoming->kwargs, answer);
}

void run_next(const Received& received, PythonReply& answer) {
  const auto incoming = read_arguments(received, answer);
  if (!incoming) return;
  const auto target = target_of(incoming->first("tf:next without a target"), answer);
  if (target.object.incarnation != answer.call().caller().incarnation) {
    throw Refused("the next item of a stream that another agent opened");
  }
  const auto object = object_of_target(target, answer);
  auto* const kind = Py_TYPE(object.ptr());
  const bool generator = kind == &PyGen_Type || kind == &PyAsyncGen_Type;
  if (answer.agent().registered() && !generator && !answer.agent().exposed().has(kind)) {
    throw Refused(std::string("the next item of a ") + kind->tp_name + ": only generators may be iterated over");
  }
  const auto next = attribute_of("tensorferry.streams", "next_item");
  run({next, false}, py::make_tuple(object) + incoming->without_first(), {}, answer);
}

void answer_fetch(const Received& received, PythonReply answer) {
  const auto fetch = answer.call().begin_fetch(received);
  if (!fetch.ok()) return answer.fail(fetch.status());
  auto& agent = answer.agent();
  const auto deadline = answer.reply().deadline();
  const auto pending = share_with_any_thread(std::move(answer));
  const auto end = [pending](const Result<Outcome>& outcome) {
    if (closing()) return;
    GilHeld gil;
    const ServingScope serving(&pending->agent(), pending->call());
    answer_or_fail(*pending, [&] { pending->outcome(outcome); });
  };
  agent.references().fetch(fetch->object, deadline, end, fetch->fork);
}

/// Makes a handler that runs `body` with current() set, and answers with the error that it throws. The executor gives
/// it the GIL.
template <class Body>
Handler handler(const std::shared_ptr<PythonAgent>& agent, Body body) {
  return [weak = std::weak_ptr(agent), body = std::move(body)](const Request& request, Reply reply) {
    const auto self = weak.lock();
    if (!self || closing()) return reply.fail(Status(Code::agent_closed, "the agent is leaving"));
    PythonReply answer(self, request.peer, std::move(reply));
    const ServingScope serving(self.get(), answer.call());
    const CurrentStreams streams(self->codec().converters(), request.arguments.buffers);
    answer_or_fail(answer, [&] {
      try {
        body(request.arguments, answer);
      } catch (const Refused& refused) {
        const Status why(Code::permission_denied, "\"" + self->self().name + "\" refuses this call: " + refused.what());
        log_refusal(request.peer.name, request.function, why);
        answer.refuse(why);
      }
    });
  };
}

}  // namespace

namespace {

Handler handler_of(const std::shared_ptr<PythonAgent>& agent, std::string_view name, const py::object& callable) {
  const auto found = share_with_any_thread(ServedFunction::Found{callable, is_async_execution(callable)});
  return handler(agent, [found, name = std::string(name)](const Received& received, PythonReply& answer) {
    const auto incoming = read_arguments(received, answer);
    if (!incoming) return;
    const auto range = range_of(name, answer);
    run(*found, incoming->args, incoming->kwargs, answer);
  });
}

}  // namespace

void serve_exposed(const std::shared_ptr<PythonAgent>& agent, const std::string& name, const py::object& callable) {
  agent->agent().serve(name, handler_of(agent, name, callable), {.executor = true});
}

void serve_python(const std::shared_ptr<PythonAgent>& agent) {
  constexpr HandlerOptions with_gil{.executor = true};
  agent->agent().serve("tf:here", [](const Request&, Reply reply) { reply.send({}); });
  agent->agent().serve(std::string(method_function), handler(agent, &run_method), with_gil);
  agent->agent().serve("tf:next", handler(agent, &run_next), with_gil);
  agent->agent().serve(
      std::string(fetch_function),
      handler(agent, [](const Received& received, PythonReply& answer) { answer_fetch(received, std::move(answer)); }),
      with_gil);
  using Served = std::optional<std::pair<Handler, HandlerOptions>>;
  agent->agent().resolve_with([weak = std::weak_ptr(agent)](std::string_view name) -> Result<Served> {
    Served served;
    const auto self = weak.lock();
    if (!self) return served;
    if (self->registered()) {
      if (const auto exposed = is_python_function(name) ? self->exposed().known_as(name) : py::object()) {
        return Served({handler_of(self, name, exposed), {.executor = true}});
      }
      return Status(Code::permission_denied,
                    "\"" + self->self().name + "\" has exposed no \"" + std::string(name.substr(0, 200)) + "\"");
    }
    if (!is_python_function(name)) return served;
    const auto function = share_with_any_thread(ServedFunction(name));
    served.emplace(handler(self, [function](const Received& received,
                                            PythonReply& answer) { run_function(*function, received, answer); }),
                   HandlerOptions{.executor = true});
    return served;
  });
}

}  // namespace tensorferry::python
