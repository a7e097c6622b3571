#include "python/csrc/agent.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "agent/buffers/placement.h"
#include "converters/cpu.h"
#include "converters/cuda.h"
#include "python/csrc/codec_records.h"
#include "python/csrc/devices.h"
#include "python/csrc/errors.h"
#include "python/csrc/exceptions.h"
#include "python/csrc/inbox.h"
#include "python/csrc/out.h"
#include "python/csrc/references.h"
#include "python/csrc/serve.h"
#include "python/csrc/served.h"
#include "rpc/core/envelope.h"
#include "rpc/core/method_target.h"

namespace tensorferry::python {
namespace {

// The process's default agent, and its agents that have not left. The GIL guards them. They hold Python objects and are
// never destroyed, because static destructors run after the interpreter's end.
std::shared_ptr<PythonAgent>& default_slot() {
  static auto& slot = *new std::shared_ptr<PythonAgent>;
  return slot;
}
std::vector<std::shared_ptr<PythonAgent>>& living() {
  static auto& agents = *new std::vector<std::shared_ptr<PythonAgent>>;
  return agents;
}

thread_local PythonAgent* serving_agent = nullptr;
thread_local IncomingCall* serving_call = nullptr;

bool leaves_storages() { return closing(); }

class GilLock final : public RuntimeLock {
 public:
  void* release() override { return PyEval_SaveThread(); }
  void acquire(void* released) override { take_gil(static_cast<PyThreadState*>(released)); }
  bool interrupted(void* released) override { return python::interrupted(static_cast<PyThreadState*>(released)); }
};
GilLock& gil_lock = *new GilLock;  // never destroyed, as the agents

/// Converts the time-out of joining or of leaving: no more than 0 seconds is none.
Milliseconds long_wait(double seconds) {
  if (!(seconds > 0) || seconds > 1e9) return Milliseconds(0);
  return Milliseconds(std::max<std::int64_t>(1, std::llround(seconds * 1000)));
}

/// Raises the error of `status` if it is one. If a signal handler's exception ended the wait, raises that exception.
void check_wait(const Status& status) {
  if (PyErr_Occurred() == nullptr) return check(status);
  constexpr std::string_view prefix = "interrupted while waiting for ";  // describe_interruption() adds it too
  describe_interruption(status.what().substr(prefix.size()));
  throw py::error_already_set();
}

py::object python_text(std::string_view text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

}  // namespace

CurrentAgent::CurrentAgent(PythonAgent* agent) : before_(std::exchange(serving_agent, agent)) {}
CurrentAgent::~CurrentAgent() { serving_agent = before_; }

ServingScope::ServingScope(PythonAgent* agent, IncomingCall& call)
    : agent_(agent), call_before_(std::exchange(serving_call, &call)) {}
ServingScope::~ServingScope() { serving_call = call_before_; }
IncomingCall* ServingScope::call() {
  if (serving_call != nullptr) return serving_call;
  auto* served = ServedCall::current();
  return served != nullptr ? served->call() : nullptr;
}
PythonAgent* ServingScope::agent() {
  if (serving_agent != nullptr) return serving_agent;
  const auto* call = ServedCall::current();
  return call != nullptr ? &call->agent() : nullptr;
}

PythonAgent::PythonAgent(double default_timeout) : default_timeout_(default_timeout) {}
PythonAgent::~PythonAgent() = default;

std::shared_ptr<PythonAgent> PythonAgent::create(RawAgentOptions options, int world_size, double default_timeout,
                                                 Trust trust, const Exposed& exposed, DeviceMaps device_maps) {
  auto self = std::make_shared<PythonAgent>(60.0);
  self->set_default_timeout(default_timeout);
  const auto converters = std::make_shared<Converters>();
  const auto cpu = std::make_shared<CpuConverter>(std::make_shared<HostMemory>(), &leaves_storages);
  converters->add(DeviceType::cpu, cpu);
  converters->add_registered();
  options.memory.emplace(DeviceType::cpu, cpu->memory());
  if (const auto cuda = make_cuda_converter(&leaves_storages); cuda && options.devices.size() > 1) {
    converters->add(DeviceType::cuda, cuda);
    options.memory.emplace(DeviceType::cuda, cuda->memory());
    for (const auto device : options.devices) {
      if (device.type == DeviceType::cuda) self->gpus_.push_back(torch_device(device));
    }
  } else {
    options.devices = {Device()};
  }
  self->device_maps_ = std::move(device_maps);
  options.executor = make_executor();
  self->loop_ = attribute_of("tensorferry.serving", "HandlerLoop")(options.name);
  self->codec_ = std::make_unique<Codec>(converters);
  self->codec_->register_reference_type(reinterpret_cast<PyTypeObject*>(py::type::of<RRef>().ptr()));
  self->trust_ = trust;
  if (trust == Trust::registered) self->codec_->refuse_pickle();
  self->exposed_ = exposed;
  if (trust == Trust::registered) self->codec_->records().take_only(self->exposed_);
  self->member_ = value_or_raise(Member::create(std::move(options), world_size, &gil_lock));
  self->objects_ = std::make_unique<RemoteObjects>(*self);
  serve_python(self);
  for (const auto& [name, callable] : self->exposed_.functions()) serve_exposed(self, name, callable);
  living().push_back(self);
  return self;
}

void PythonAgent::announce() { check(member_->announce()); }

void PythonAgent::wait_for_world(double timeout) {
  check_wait(member_->wait_for_world(long_wait(timeout)));
  for (const auto& peer : member_->world()) names_by_rank_[peer.rank] = python_text(peer.name);
}

void PythonAgent::finish(double timeout) {
  finishing_ = true;
  LoopInbox::complete_posted(*this);
  check_wait(member_->finish(long_wait(timeout)));
}

void PythonAgent::expose(const std::string& name, const py::object& callable) {
  exposed_.add(name, callable);
  serve_exposed(shared_from_this(), name, callable);
}

std::shared_ptr<PythonAgent> PythonAgent::current() {
  auto* const serving = ServingScope::agent();
  const auto& agent = default_slot();
  // A served function may have forked, and the child may have started an agent of its own.
  const bool own = agent && agent->agent().usable_here().ok();
  if (serving != nullptr && !(own && !serving->agent().usable_here().ok())) {
    return serving->shared_from_this();
  }
  if (agent) return agent;
  throw std::runtime_error("RPC has not been initialized. Call tensorferry.rpc.init_rpc first.");
}
bool PythonAgent::is_serving() { return ServingScope::call() != nullptr; }
std::shared_ptr<PythonAgent> PythonAgent::default_agent() { return default_slot(); }
void PythonAgent::set_default_agent(std::shared_ptr<PythonAgent> agent) { default_slot() = std::move(agent); }

void PythonAgent::check_usable_here() const { check(agent().usable_here()); }

void PythonAgent::leave() {
  if (!agent().usable_here() || std::exchange(left_, true)) return;
  member_->leave();
  loop_.attr("stop")();
  if (member_->in_flight().served == 0) (void)exposed_.take_functions();  // else a handler may use them now
  std::erase(living(), shared_from_this());
}

void PythonAgent::leave_all() {
  const auto agents = living();
  for (const auto& agent : agents) agent->leave();
  set_closing();
}

// ---- calls

std::string PendingCall::text() const {
  if (function->name == method_function) return "the method \"" + label + "\" of an object on \"" + peer + "\"";
  if (call && call.function() == fetch_function) return "an object on \"" + peer + "\"";
  if (!call) return "room to send to \"" + peer + "\"";
  return "\"" + shown() + "\" on \"" + peer + "\"";
}

PythonAgent::Prepared PythonAgent::prepare(const CallArguments& invocation, const std::optional<Creation>& creation) {
  check_usable_here();
  Prepared out;
  out.peer_name = peer_name(invocation.to, out.peer);
  out.function = wire_name_of(invocation.function);
  auto own = timeout_of(invocation.timeout);
  own.set = own.set && !invocation.rest_of_default;
  const auto patience = within_ambient_deadline(own);
  out.options.timeout = patience.length;
  out.options.require = invocation.require;
  place(out.options, out.peer_name, invocation.device);
  out.options.wait_for_ready = invocation.wait_for_ready;
  out.options.idempotent = invocation.idempotent;
  out.options.order = invocation.order;
  if (out.function->by_value) out.options.label = name_for_people(invocation.function);
  if (invocation.out != nullptr) {
    out.out = checked_out(invocation.out, *this);
    land_in(out.out, *this, out.options);
  }
  write(out, invocation.verb, out.function->by_value ? invocation.function : nullptr, invocation.args,
        invocation.kwargs, creation, patience.set);
  return out;
}

PythonAgent::Prepared PythonAgent::prepare_internal(const std::string& peer, std::shared_ptr<const WireName> function,
                                                    py::handle first, py::handle args, py::handle kwargs,
                                                    double timeout, const std::string& label,
                                                    const std::optional<Creation>& creation) {
  Prepared out;
  out.peer = python_text(peer);
  out.peer_name = peer_name(out.peer, out.peer);
  out.function = std::move(function);
  const auto patience = within_ambient_deadline(timeout_of(timeout));
  out.options.timeout = patience.length;
  place(out.options, out.peer_name, nullptr);
  out.options.label = label;
  write(out, creation ? "remote" : "rpc", first.ptr(), args.ptr(), kwargs.ptr(), creation, patience.set);
  return out;
}

void PythonAgent::place(RawCallOptions& options, std::string_view peer, PyObject* device) const {
  if (!device_maps_.empty()) {
    if (const auto map = device_maps_.find(peer); map != device_maps_.end()) {
      options.arguments = map->second;
      options.results = reversed(map->second);
    }
  }
  if (device == nullptr) return;
  options.arguments = placement_of(device);
  if (!options.arguments.all) options.results = reversed(options.arguments);
}

void PythonAgent::write(Prepared& out, std::string_view verb, PyObject* first, PyObject* args, PyObject* kwargs,
                        const std::optional<Creation>& creation, bool timed) {
  PythonReferenceMarshaller marshaller(*this, out.peer_name);
  out.call.begin(*member_);
  const auto number = out.call.number();
  out.range = CallRange::begin(verb, out.function->name, self().name, out.peer_name, self().incarnation, number);
  if (!codec_->write_request({first, args, kwargs, creation, number, timed}, &marshaller, out.message)) {
    throw py::error_already_set();
  }
  out.call.carry(marshaller.take());
}

namespace {

PendingCall pending_of(PythonAgent::Prepared& prepared) {
  return {std::move(prepared.call),        std::move(prepared.function), prepared.options.label,
          std::string(prepared.peer_name), std::move(prepared.out),      {},
          std::move(prepared.range)};
}

}  // namespace

PendingCall PythonAgent::start(Prepared prepared) {
  auto pending = pending_of(prepared);
  pending.start(*member_, pending.peer, pending.function->name, std::move(prepared.message),
                std::move(prepared.options));
  return pending;
}

py::object PythonAgent::call(Prepared prepared) {
  auto pending = pending_of(prepared);
  const auto call = [&] {
    pending.send(*member_, pending.peer, pending.function->name, std::move(prepared.message),
                 std::move(prepared.options));
  };
  // Releasing the GIL beside a busy thread costs 5 ms (the switch interval). Only a message with bytes may have to wait
  // for room, and so needs to release it here.
  if (prepared.message.bytes() == 0) call();
  bool done = pending.call && pending.call.spin_wait(gil_is_dear_ ? executor_patience : std::chrono::nanoseconds());
  if (!done) {
    Clock::time_point back;
    {
      GilReleased gil;
      if (!pending.call) call();
      done = pending.call.wait(std::nullopt, [&] { return interrupted(gil.state()); });
      back = Clock().now();
    }
    gil_is_dear_ = Clock().now() - back > executor_is_dear_from;
  }
  if (!done) {
    describe_interruption(pending.text());
    const py::error_already_set interruption;
    pending.call.cancel();
    if (pending.out.defined()) {
      GilReleased gil;
      (void)pending.call.wait(std::nullopt, [&] { return interrupted(gil.state()); });
    }
    PyErr_Clear();
    pending.end(Status(Code::cancelled, "interrupted"));
    throw py::error_already_set(interruption);
  }
  return decode_reply(pending, pending.call.take());
}

py::object PythonAgent::decode_reply(PendingCall& pending, Result<Received> reply) {
  if (!reply.ok()) {
    pending.end(reply.status());
    raise(reply.status());
  }
  Codec::DecodedReply outcome;
  PythonReferenceMarshaller marshaller(*this, pending.peer);
  if (!codec_->read_reply(*reply, &marshaller, outcome)) {
    py::error_already_set unreadable;
    pending.end({});
    throw unreadable;
  }
  pending.end({});
  if (outcome.described) {
    raise_remote(*outcome.described, py::reinterpret_steal<py::object>(outcome.exception.release()),
                 registered() ? &exposed_ : nullptr);
  }
  auto value = py::reinterpret_steal<py::object>(outcome.value.release());
  if (!pending.out.defined()) {
    pending.device_storages = std::move(outcome.device_storages);
    return value;
  }
  auto out = bring_into(pending.out, value);
  if (!pending.out.is_cpu()) pending.device_storages = {pending.out.storage().getWeakStorageImpl()};
  return out;
}

TimeOut PythonAgent::timeout_of(double seconds) const {
  const bool set = seconds != unset_timeout;
  if (!set) seconds = default_timeout_;
  if (seconds == 0 || seconds > 1e9) return {Milliseconds(0), set};
  if (!(seconds > 0)) throw py::value_error("a time-out must be more than 0 seconds, 0 (none), or -1 (the default)");
  return {Milliseconds(std::max<std::int64_t>(1, std::llround(seconds * 1000))), set};
}

void PythonAgent::set_default_timeout(double seconds) {
  if (!(seconds >= 0)) throw py::value_error("the default time-out must be 0 (none) or more seconds");
  default_timeout_ = seconds;
}

// ---- peers

std::string_view PythonAgent::peer_name(py::handle to, py::object& keep) {
  if (PyUnicode_Check(to.ptr())) {
    keep = py::reinterpret_borrow<py::object>(to);
  } else if (PyLong_Check(to.ptr()) && !PyBool_Check(to.ptr())) {
    keep = name_of_rank(to.cast<int>());
  } else {
    keep = py::reinterpret_steal<py::object>(PyObject_GetAttrString(to.ptr(), "name"));
    if (!keep || !PyUnicode_Check(keep.ptr())) {
      PyErr_Clear();
      throw py::type_error("a peer is its name, its rank, or a WorkerInfo, not " + py::repr(to).cast<std::string>());
    }
  }
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(keep.ptr(), &size);
  if (text == nullptr) throw py::error_already_set();
  return {text, static_cast<std::size_t>(size)};
}

py::object PythonAgent::name_of_rank(int rank) {
  if (const auto lost = member_->peers_lost(); std::exchange(peers_lost_, lost) != lost) names_by_rank_.clear();
  if (const auto known = names_by_rank_.find(rank); known != names_by_rank_.end()) return known->second;
  const auto name = python_text(value_or_raise(member_->find(rank)).name);
  names_by_rank_[rank] = name;
  return name;
}

double PythonAgent::wait_until_ready(const std::string& peer, double timeout) {
  RawCallOptions options;
  options.timeout = within_ambient_deadline(timeout_of(timeout)).length;
  options.wait_for_ready = true;
  const bool bounded = options.timeout.count() != 0;
  const auto until = Clock().now() + options.timeout;
  auto call = agent().call(peer, "tf:here", {}, std::move(options));
  bool answered = false;
  {
    GilReleased gil;
    answered = call.wait(std::nullopt, [&] { return interrupted(gil.state()); });
  }
  if (!answered) {
    const py::error_already_set interruption;
    call.cancel();
    throw py::error_already_set(interruption);
  }
  check(call.take().status());
  return bounded ? std::max(0.001, std::chrono::duration<double>(until - Clock().now()).count()) : 0;
}

PeerInfo PythonAgent::find(py::handle to) {
  py::object keep;
  const std::string name(peer_name(to, keep));
  return name == self().name ? self() : value_or_raise(member_->find(name));
}

}  // namespace tensorferry::python
