#include "python/csrc/agent.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "converters/cpu.h"
#include "converters/cuda.h"
#include "python/csrc/codec_records.h"
#include "python/csrc/deadline.h"
#include "python/csrc/devices.h"
#include "python/csrc/errors.h"
#include "python/csrc/exceptions.h"
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
thread_local Reply* serving_reply = nullptr;

// The time-out of lookups: long enough for a name that is being registered at the same time, short enough to report a
// wrong name soon.
constexpr Milliseconds lookup_patience{2000};

bool leaves_storages() { return closing(); }

py::object python_text(std::string_view text) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace"));
}

}  // namespace

CurrentAgent::CurrentAgent(PythonAgent* agent) : before_(std::exchange(serving_agent, agent)) {}
CurrentAgent::~CurrentAgent() { serving_agent = before_; }

ServingScope::ServingScope(PythonAgent* agent, Reply& answer)
    : agent_(agent), reply_before_(std::exchange(serving_reply, &answer)) {}
ServingScope::~ServingScope() { serving_reply = reply_before_; }
Reply* ServingScope::reply() {
  if (serving_reply != nullptr) return serving_reply;
  auto* call = ServedCall::current();
  return call != nullptr ? call->reply() : nullptr;
}
PythonAgent* ServingScope::agent() {
  if (serving_agent != nullptr) return serving_agent;
  const auto* call = ServedCall::current();
  return call != nullptr ? &call->agent() : nullptr;
}

PythonAgent::PythonAgent(double default_timeout) : default_timeout_(default_timeout) {}
PythonAgent::~PythonAgent() = default;

std::shared_ptr<PythonAgent> PythonAgent::create(RawAgentOptions options, double default_timeout, Trust trust,
                                                 const Exposed& exposed, DeviceMaps device_maps) {
  auto self = std::make_shared<PythonAgent>(60.0);
  self->set_default_timeout(default_timeout);
  const auto converters = std::make_shared<Converters>();
  const auto cpu = std::make_shared<CpuConverter>(std::make_shared<HostMemory>(), &leaves_storages);
  converters->add(DeviceType::cpu, cpu);
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
  Result<std::shared_ptr<RawAgent>> created{nullptr};
  {
    GilReleased gil;
    created = RawAgent::create(std::move(options));
  }
  self->agent_ = value_or_raise(std::move(created));
  self->objects_ = std::make_unique<RemoteObjects>(*self);
  self->agent_->on_peer_lost([weak = std::weak_ptr(self)](const PeerInfo& peer, const Status& why) {
    const auto agent = weak.lock();
    if (!agent) return;
    agent->peers_stale_ = true;
    agent->objects_->tables().peer_lost({peer.name, peer.incarnation}, why);
    const std::lock_guard lock(agent->lost_mutex_);
    agent->lost_.push_back({peer, std::string(why.what())});
  });
  serve_python(self);
  for (const auto& [name, callable] : self->exposed_.functions()) serve_exposed(self, name, callable);
  living().push_back(self);
  return self;
}

void PythonAgent::announce() {
  Status status;
  {
    GilReleased gil;
    status = agent_->announce();
  }
  check(status);
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
bool PythonAgent::is_serving() { return ServingScope::reply() != nullptr; }
std::shared_ptr<PythonAgent> PythonAgent::default_agent() { return default_slot(); }
void PythonAgent::set_default_agent(std::shared_ptr<PythonAgent> agent) { default_slot() = std::move(agent); }

void PythonAgent::check_usable_here() const { check(agent_->usable_here()); }

void PythonAgent::leave() {
  if (!agent_->usable_here() || std::exchange(left_, true)) return;
  {
    GilReleased gil;
    objects_->tables().close();
    agent_->leave();
  }
  loop_.attr("stop")();
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

PythonAgent::Prepared PythonAgent::prepare(const Invocation& invocation, const std::optional<Creation>& creation) {
  check_usable_here();
  Prepared out;
  out.peer_name = peer_name(invocation.to, out.peer);
  out.function = wire_name_of(invocation.function);
  out.options.timeout = within_ambient_deadline(timeout_of(invocation.timeout));
  out.options.require = invocation.require;
  place(out.options, out.peer_name, invocation.device);
  out.options.wait_for_ready = invocation.wait_for_ready;
  out.options.order = invocation.order;
  if (out.function->by_value) out.options.label = name_for_people(invocation.function);
  if (invocation.out != nullptr) {
    out.out = checked_out(invocation.out, *this);
    land_in(out.out, *this, out.options);
  }
  write(out, invocation.verb, out.function->by_value ? invocation.function : nullptr, invocation.args,
        invocation.kwargs, creation);
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
  out.options.timeout = within_ambient_deadline(timeout_of(timeout));
  place(out.options, out.peer_name, nullptr);
  out.options.label = label;
  write(out, creation ? "remote" : "rpc", first.ptr(), args.ptr(), kwargs.ptr(), creation);
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
                        const std::optional<Creation>& creation) {
  PythonReferenceMarshaller marshaller(*this, out.peer_name);
  out.number = objects_->tables().begin_call();
  out.range = CallRange::begin(verb, out.function->name, self().name, out.peer_name, self().incarnation, out.number);
  if (!codec_->write_request({first, args, kwargs, creation, out.number}, &marshaller, out.message)) {
    objects_->tables().end_call(out.number);
    throw py::error_already_set();
  }
  out.transfer = marshaller.take();
}

PendingCall PythonAgent::start(Prepared prepared) {
  prepared.transfer.sent();
  // Only a message with bytes may have to wait for the bound on bytes in flight.
  const auto make = [&] {
    return agent_->call(prepared.peer_name, prepared.function->name, std::move(prepared.message),
                        std::move(prepared.options));
  };
  const auto label = prepared.options.label;
  Call call;
  if (prepared.message.bytes() == 0) {
    call = make();
  } else {
    GilReleased gil;
    call = make();
  }
  return {std::move(call),
          std::move(prepared.function),
          label,
          std::string(prepared.peer_name),
          std::move(prepared.transfer),
          prepared.number,
          std::move(prepared.out),
          {},
          std::move(prepared.range)};
}

py::object PythonAgent::call(Prepared prepared) {
  prepared.transfer.sent();
  PendingCall pending{{},
                      prepared.function,
                      prepared.options.label,
                      std::string(prepared.peer_name),
                      std::move(prepared.transfer),
                      prepared.number,
                      std::move(prepared.out),
                      {},
                      std::move(prepared.range)};
  const auto call = [&] {
    pending.call =
        agent_->call(pending.peer, prepared.function->name, std::move(prepared.message), std::move(prepared.options));
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
      back = Clock::now();
    }
    gil_is_dear_ = Clock::now() - back > executor_is_dear_from;
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
    end_call(pending, Status(Code::cancelled, "interrupted"));
    throw py::error_already_set(interruption);
  }
  return decode_reply(pending, pending.call.take());
}

void PythonAgent::end_call(PendingCall& pending, const Status& status) {
  pending.range.reset();
  pending.transfer.ended(status);
  objects_->tables().end_call(pending.number);
}

py::object PythonAgent::decode_reply(PendingCall& pending, Result<Received> reply) {
  if (!reply.ok()) {
    end_call(pending, reply.status());
    raise(reply.status());
  }
  Codec::DecodedReply outcome;
  PythonReferenceMarshaller marshaller(*this, pending.peer);
  if (!codec_->read_reply(*reply, &marshaller, outcome)) {
    py::error_already_set unreadable;
    end_call(pending, {});
    throw unreadable;
  }
  end_call(pending, {});
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

Milliseconds PythonAgent::timeout_of(double seconds) const {
  if (seconds == unset_timeout) seconds = default_timeout_;
  if (seconds == 0 || seconds > 1e9) return Milliseconds(0);
  if (!(seconds > 0)) throw py::value_error("a time-out must be more than 0 seconds, 0 (none), or -1 (the default)");
  return Milliseconds(std::max<std::int64_t>(1, std::llround(seconds * 1000)));
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
  forget_stale_peers();
  if (const auto known = names_by_rank_.find(rank); known != names_by_rank_.end()) return known->second;
  Result<PeerInfo> found = PeerInfo{};
  {
    GilReleased gil;
    found = agent_->find(rank, lookup_patience);
  }
  const auto name = python_text(value_or_raise(std::move(found)).name);
  names_by_rank_[rank] = name;
  return name;
}

void PythonAgent::forget_stale_peers() {
  if (!peers_stale_.exchange(false)) return;
  names_by_rank_.clear();
}

AgentId PythonAgent::id_of(const std::string& peer) {
  if (peer == self().name) return {peer, self().incarnation};
  // An incarnation found earlier may have ended since: without a link, this agent does not learn of it.
  if (const auto linked = agent_->linked(peer)) return {peer, linked->incarnation};
  Result<PeerInfo> found = PeerInfo{};
  {
    GilReleased gil;
    found = agent_->find(peer, lookup_patience);
  }
  return {peer, value_or_raise(std::move(found)).incarnation};
}

double PythonAgent::wait_until_ready(const std::string& peer, double timeout) {
  RawCallOptions options;
  options.timeout = within_ambient_deadline(timeout_of(timeout));
  options.wait_for_ready = true;
  const bool bounded = options.timeout.count() != 0;
  const auto until = Clock::now() + options.timeout;
  auto call = agent_->call(peer, "tf:here", {}, std::move(options));
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
  return bounded ? std::max(0.001, std::chrono::duration<double>(until - Clock::now()).count()) : 0;
}

PeerInfo PythonAgent::find(py::handle to) {
  py::object keep;
  const std::string name(peer_name(to, keep));
  if (name == self().name) return self();
  Result<PeerInfo> found = PeerInfo{};
  {
    GilReleased gil;
    found = agent_->find(name, lookup_patience);
  }
  return value_or_raise(std::move(found));
}

std::vector<PeerInfo> PythonAgent::wait_for_world(int size, double timeout) {
  const auto patience = timeout_of(timeout);
  Result<std::vector<PeerInfo>> found = std::vector<PeerInfo>{};
  {
    GilReleased gil;
    found = agent_->wait_for_world(size, patience);
  }
  auto world = value_or_raise(std::move(found));
  for (const auto& peer : world) names_by_rank_[peer.rank] = python_text(peer.name);
  return world;
}

std::vector<PythonAgent::LostPeer> PythonAgent::lost_peers() {
  const std::lock_guard lock(lost_mutex_);
  return lost_;
}

}  // namespace tensorferry::python
