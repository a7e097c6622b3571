#include "python/csrc/references.h"

#include <utility>

#include "python/csrc/deadline.h"
#include "python/csrc/devices.h"
#include "python/csrc/errors.h"
#include "python/csrc/future.h"
#include "python/csrc/out.h"
#include "rpc/core/envelope.h"
#include "rpc/core/method_target.h"

namespace tensorferry::python {
namespace {

const std::shared_ptr<const WireName>& method_name() {
  static const auto& name = *new auto(std::make_shared<const WireName>(std::string(method_function), false));
  return name;
}
const std::shared_ptr<const WireName>& next_name() {
  static const auto& name = *new auto(std::make_shared<const WireName>("tf:next", false));
  return name;
}
const std::shared_ptr<const WireName>& fetch_name() {
  static const auto& name = *new auto(std::make_shared<const WireName>(std::string(fetch_function), false));
  return name;
}

py::bytes bytes_of(const MethodTarget& target) {
  const auto bytes = encode(target);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string text_of_type_hint(const py::object& hint) {
  if (hint.is_none()) return {};
  if (PyType_Check(hint.ptr())) return hint.attr("__qualname__").cast<std::string>();
  return py::str(hint).cast<std::string>();
}

}  // namespace

Outcome outcome_of(py::object value, bool raised) {
  return {std::shared_ptr<void>(share_with_any_thread(std::move(value))), raised};
}
py::object object_of(const Outcome& outcome) { return *static_cast<py::object*>(outcome.value.get()); }

// ---- RRef

RRef::RRef(py::object value, const py::object& type_hint) : agent_(PythonAgent::current()) {
  agent_->check_usable_here();
  reference_ = agent_->references().own(outcome_of(std::move(value), false), text_of_type_hint(type_hint));
}

py::object RRef::to_here(double timeout, const py::object& out, const py::object& device) {
  agent_->check_usable_here();
  const auto patience = within_ambient_deadline(agent_->timeout_of(timeout)).length;
  const auto destination = out.is_none() ? at::Tensor() : checked_out(out, *agent_);
  const auto where = device.is_none() ? std::nullopt : std::optional(device_of(device.ptr()));
  if (is_owner()) {
    auto value = agent_->objects().await(
        reference_->object(), patience.count() == 0 ? std::nullopt : std::optional(Clock().now() + patience));
    return destination.defined() ? bring_into(destination, value) : value;
  }
  check(reference_->status());
  PythonAgent::Prepared prepared;
  prepared.call.begin(agent_->member());
  prepared.peer_name = reference_->owner().name;  // valid while this reference lives
  prepared.function = fetch_name();
  prepared.options.timeout = patience;
  prepared.options.label = "to_here";
  prepared.out = destination;
  agent_->place(prepared.options, prepared.peer_name, nullptr);
  if (where) prepared.options.results = {.all = where, .map = {}};
  if (destination.defined()) land_in(destination, *agent_, prepared.options);
  Encoder message;
  message.raw(
      Fetch{reference_->owner().incarnation, reference_->object(), reference_->ids().fork, prepared.call.number()});
  prepared.message = message.take();
  try {
    return agent_->call(std::move(prepared));
  } catch (py::error_already_set&) {
    check(reference_->status());  // raises why the object could not be made, if so
    throw;
  }
}

py::object RRef::local_value() {
  agent_->check_usable_here();
  if (!is_owner()) {
    raise(Status(Code::invalid_argument, "the value is on \"" + owner_name() + "\": use to_here() for a copy of it"));
  }
  return agent_->objects().await(reference_->object(), std::nullopt);
}

bool RRef::confirmed_by_owner() const {
  agent_->check_usable_here();
  return reference_->confirmed();
}

std::string RRef::text() const {
  const auto& id = reference_->object();
  return "<RRef to " + (reference_->type_hint().empty() ? "an object" : reference_->type_hint()) + " on \"" +
         owner_name() + "\", " + std::to_string(id.incarnation) + ":" + std::to_string(id.counter) + ">";
}

PythonAgent::Prepared RRef::prepare_method(const std::string& name, const py::args& args, const py::kwargs& kwargs,
                                           double timeout, const std::optional<Creation>& creation) const {
  agent_->check_usable_here();
  check(reference_->status());
  const MethodTarget target{reference_->owner().incarnation, reference_->object(), reference_->ids().fork, name};
  return agent_->prepare_internal(owner_name(), method_name(), bytes_of(target), args, kwargs, timeout, name, creation);
}

PythonAgent::Prepared RRef::prepare_next(double seconds, std::uint32_t order, const std::string& label) const {
  check(reference_->status());
  const MethodTarget target{reference_->owner().incarnation, reference_->object(), reference_->ids().fork, "__next__"};
  auto prepared =
      agent_->prepare_internal(owner_name(), next_name(), bytes_of(target), py::make_tuple(seconds), {}, 0, label);
  prepared.options.order = order;
  return prepared;
}

// ---- objects

py::object RemoteObjects::create(const CallArguments& invocation) {
  py::object keep;
  const std::string owner(agent_.peer_name(invocation.to, keep));
  auto timely = invocation;
  if (invocation.wait_for_ready) {
    timely.timeout = agent_.wait_until_ready(owner, invocation.timeout);
    timely.rest_of_default = invocation.timeout == unset_timeout;
  }
  return create(owner, [&](const Creation& ids) { return agent_.prepare(timely, ids); });
}

py::object RemoteObjects::create(const std::string& owner,
                                 const std::function<PythonAgent::Prepared(const Creation& ids)>& prepare) {
  agent_.check_usable_here();
  if (agent_.left()) raise(Status(Code::agent_closed, "the agent \"" + agent_.self().name + "\" was shut down"));
  auto reference = agent_.references().begin_creation(value_or_raise(agent_.member().id_of(owner)));
  PythonAgent::Prepared prepared;
  try {
    prepared = prepare(reference->ids());
  } catch (...) {
    agent_.references().end_creation(*reference,
                                     Status(Code::cancelled, "the call that creates the object was never sent"));
    throw;
  }
  end_call(reference, agent_.start(std::move(prepared)));
  return py::cast(std::make_shared<RRef>(agent_.shared_from_this(), std::move(reference)));
}

void RemoteObjects::end_call(const std::shared_ptr<Reference>& reference, PendingCall pending) {
  auto call = std::move(pending.call);
  ++agent_.member().unread;
  call.on_done([agent = agent_.shared_from_this(), reference,
                pending = std::move(pending)](Result<Received> reply) mutable {
    auto status = reply.status();
    // The object keeps the exception that its function raised. So an exception in the reply means that no object
    // exists.
    if (status.ok() && (reply->payload.empty() || reply->payload.front() != std::byte{0})) {
      status = Status(Code::remote_error, "\"" + pending.peer + "\" could not read the call that creates the object");
    }
    agent->references().end_creation(*reference, status);
    pending.end(status);
    --agent->member().unread;
  });
}

py::object RemoteObjects::await(const RRefId& object, std::optional<Clock::time_point> until, const ForkId& by) {
  struct FetchedObject {
    Gate gate;
    std::optional<Result<Outcome>> outcome;
  };
  const auto slot = std::make_shared<FetchedObject>();
  const auto take = [slot](Result<Outcome> outcome) {
    slot->outcome = std::move(outcome);
    slot->gate.open();
  };
  agent_.references().fetch(object, until, take, by);
  slot->gate.wait(std::nullopt, "an object that is created here");  // the fetch enforces the deadline
  const auto outcome = value_or_raise(*std::move(slot->outcome));
  auto value = object_of(outcome);
  if (!outcome.raised) return value;
  PyErr_SetObject(py::type::of(value).ptr(), value.ptr());
  throw py::error_already_set();
}

// ---- references in messages

bool PythonReferenceMarshaller::write(PyObject* object, ReferenceRecord& record) {
  try {
    record = value_or_raise(references_.add(py::handle(object).cast<RRef&>().reference()));
    return true;
  } catch (py::error_already_set& error) {
    error.restore();
    return false;
  }
}

PyObject* PythonReferenceMarshaller::read(const ReferenceRecord& record) {
  return guarded([&] {
    auto reference = value_or_raise(references_.receive(record));
    return py::cast(std::make_shared<RRef>(agent_.shared_from_this(), std::move(reference))).release().ptr();
  });
}

// ---- bindings

namespace {

/// Returns the method `verb` of RRef, whose result calls methods of the object by the private method of that verb.
auto proxy_maker(const char* verb) {
  return [verb](const py::object& self, double timeout, bool idempotent) -> py::object {
    return attribute_of("tensorferry.references", "Proxy")(self.attr(verb), timeout, idempotent);
  };
}

py::object sync_method(const RRef& self, const std::string& name, double timeout, bool idempotent, const py::args& args,
                       const py::kwargs& kwargs) {
  auto prepared = self.prepare_method(name, args, kwargs, timeout);
  prepared.options.idempotent = idempotent;
  return self.agent().call(std::move(prepared));
}
std::shared_ptr<PythonFuture> async_method(const RRef& self, const std::string& name, double timeout, bool idempotent,
                                           const py::args& args, const py::kwargs& kwargs) {
  auto& agent = self.agent();
  auto prepared = self.prepare_method(name, args, kwargs, timeout);
  prepared.options.idempotent = idempotent;
  return PythonFuture::of(agent.shared_from_this(), agent.start(std::move(prepared)));
}
py::object remote_method(const RRef& self, const std::string& name, double timeout, bool idempotent,
                         const py::args& args, const py::kwargs& kwargs) {
  return self.agent().objects().create(self.owner_name(), [&](const Creation& ids) {
    auto prepared = self.prepare_method(name, args, kwargs, timeout, ids);
    prepared.options.idempotent = idempotent;
    return prepared;
  });
}

using BoundReference = py::class_<RRef, std::shared_ptr<RRef>>;

void bind_object(BoundReference& reference) {
  reference
      .def(py::init<py::object, const py::object&>(), py::arg("value"), py::arg("type_hint") = py::none(),
           "__init__(self, value: _T, type_hint: object = None) -> None")
      .def("to_here", &RRef::to_here, py::arg("timeout") = unset_timeout, py::kw_only(), py::arg("out") = py::none(),
           py::arg("device") = py::none(),
           R"(to_here(self, timeout: float = -1.0, *, out: torch.Tensor | None = None, )"
           R"(device: int | str | torch.device | None = None) -> _T

Returns a copy of the value; at the owner, the value itself.

Args:
    timeout: seconds; 0: no limit; -1: the agent's default.
    out: a tensor that receives the value, one tensor of the same dtype and shape, as for :func:`rpc_sync`.
    device: where tensors in the value land here, such as ``"cuda:1"`` or ``"cpu"``; None: by the agent's device map for
        the owner, else on the device of the same index. At the owner it has no effect.

Returns:
    The value; ``out`` if it is given.

Raises:
    ConnectionLost: the owner is gone. DeadlineExceeded. Otherwise the exception that the object's creation raised.
    ValueError, TypeError: the value does not fit ``out``.

Example::

    weights, theirs = torch.empty(10, 10), rpc.remote("server", torch.ones, args=(10, 10))
    for _ in range(3):
        theirs.to_here(out=weights))")
      .def("local_value", &RRef::local_value, R"(local_value(self) -> _T

Returns the value itself, at its owner.

Raises:
    InvalidArgument: this agent is not the owner. Otherwise the exception that the object's creation raised.)")
      .def("is_owner", &RRef::is_owner, R"(is_owner(self) -> bool

Returns whether the object is at this agent.)")
      .def("owner_name", &RRef::owner_name, R"(owner_name(self) -> str

Returns the name of the agent that has the object. Works after this agent has left, too.)")
      .def_property_readonly(
          "_agent",
          py::cpp_function([](const RRef& self) { return self.agent().shared_from_this(); }, "(self) -> typing.Any"))
      .def(
          "owner", [](const py::object& self) { return attribute_of("tensorferry.references", "owner_of")(self); },
          R"(owner(self) -> typing.Any

Returns the :class:`WorkerInfo` of the agent that has the object.

Raises:
    NotFound: that agent has left. AgentClosed: this agent has left.)")
      .def("confirmed_by_owner", &RRef::confirmed_by_owner, R"(confirmed_by_owner(self) -> bool

Returns whether the owner knows of this reference.)");
}

void bind_calls(BoundReference& reference) {
  const auto timeout = py::arg("timeout") = unset_timeout;
  const auto idempotent = py::arg("idempotent") = false;
  reference
      .def("rpc_sync", proxy_maker("_rpc_sync"), timeout, py::kw_only(), idempotent,
           R"(rpc_sync(self, timeout: float = -1.0, *, idempotent: bool = False) -> typing.Any

Returns a proxy: ``rref.rpc_sync().method(...)`` calls a method of the object at its owner and waits for the result.

Args:
    timeout: of the call, seconds; 0: no limit; -1: the agent's default.
    idempotent: as for :func:`rpc_sync`.

Raises:
    Calling the method: as :func:`rpc_sync`, and the exception that the object's creation raised.)")
      .def("rpc_async", proxy_maker("_rpc_async"), timeout, py::kw_only(), idempotent,
           R"(rpc_async(self, timeout: float = -1.0, *, idempotent: bool = False) -> typing.Any

Returns a proxy: ``rref.rpc_async().method(...)`` returns a :class:`Future` of the method's result.

Args:
    timeout: of the call, seconds; 0: no limit; -1: the agent's default.
    idempotent: as for :func:`rpc_sync`.

Raises:
    Calling the method: as :func:`rpc_async`; ConnectionLost: the owner is known to be gone.)")
      .def("remote", proxy_maker("_remote"), timeout, py::kw_only(), idempotent,
           R"(remote(self, timeout: float = -1.0, *, idempotent: bool = False) -> typing.Any

Returns a proxy: ``rref.remote().method(...)`` returns an :class:`RRef` to the method's result, which stays at the
owner.

Args:
    timeout: of the call, seconds; 0: no limit; -1: the agent's default.
    idempotent: as for :func:`rpc_sync`.

Raises:
    Calling the method: as :func:`remote`; ConnectionLost: the owner is known to be gone.)");
}

void bind_internals(BoundReference& reference) {
  reference
      .def(
          "_check", [](const RRef& self) { check(self.reference().status()); }, "_check(self) -> None")
      .def(
          "_next",
          [](const RRef& self, double seconds, std::uint32_t order, const std::string& label) {
            auto& agent = self.agent();
            return PythonFuture::of(agent.shared_from_this(), agent.start(self.prepare_next(seconds, order, label)));
          },
          py::arg("seconds"), py::arg("order"), py::arg("label"),
          "_next(self, seconds: float, order: int, label: str) -> Future[typing.Any]")
      .def("_rpc_sync", &sync_method,
           "_rpc_sync(self, name: str, timeout: float, idempotent: bool, *args: typing.Any, **kwargs: typing.Any) -> "
           "typing.Any")
      .def("_rpc_async", &async_method,
           "_rpc_async(self, name: str, timeout: float, idempotent: bool, *args: typing.Any, **kwargs: typing.Any) -> "
           "Future[typing.Any]")
      .def("_remote", &remote_method,
           "_remote(self, name: str, timeout: float, idempotent: bool, *args: typing.Any, **kwargs: typing.Any) -> "
           "RRef[typing.Any]")
      .def(
          "_get_type",
          [](const py::object& self, double seconds, bool blocking) {
            return attribute_of("tensorferry.references", "type_of")(self, seconds, blocking);
          },
          py::arg("timeout") = unset_timeout, py::arg("blocking") = true,
          "_get_type(self, timeout: float = -1.0, blocking: bool = True) -> typing.Any")
      .def("__repr__", &RRef::text, "__repr__(self) -> str")
      .def(
          "__reduce__",
          [](const py::object&) -> py::object {
            throw py::type_error("a reference can be pickled only as a part of a call's arguments or result");
          },
          "__reduce__(self) -> typing.NoReturn")
      .def_static(
          "__class_getitem__",
          [](const py::object& item) {
            return attribute_of("types", "GenericAlias")(attribute_of("tensorferry._C", "RRef"), item);
          },
          "__class_getitem__(item: object) -> types.GenericAlias");
}

}  // namespace

void bind_references(py::module_& module) {
  py::options options;
  options.disable_function_signatures();  // each docstring begins with its own, whose types are more exact

  BoundReference reference(module, "RRef", R"(A reference to an object at an agent, its owner.

:func:`remote` makes one. The constructor makes one to a value here. References can be passed to any agent, in the
arguments and results of calls. The object lives as long as there is a reference to it.

Args:
    value: the object to refer to; it is not copied.
    type_hint: its type, for the text of the reference (``repr``).

Raises:
    RuntimeError: there is no agent to own the object. AgentClosed, from any use of the reference: the agent that holds
        the reference has left, or belongs to the parent of this forked process.

Example::

    counter = rpc.remote("worker1", collections.Counter, args=("hello",))
    assert counter.to_here()["l"] == 2 and counter.rpc_sync().most_common(1) == [("l", 2)]
    total, copied = counter.rpc_async().total().wait(), counter.remote().copy()
    assert counter.owner().name == counter.owner_name() == "worker1"
    assert not counter.is_owner() and counter.confirmed_by_owner() in (True, False)
    mine = rpc.RRef([1, 2], type_hint=list)
    assert mine.is_owner() and mine.local_value() == [1, 2]
)");
  bind_object(reference);
  bind_calls(reference);
  bind_internals(reference);
  module.attr("PyRRef") = module.attr("RRef");
}

}  // namespace tensorferry::python
