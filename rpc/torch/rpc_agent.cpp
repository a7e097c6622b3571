#include "rpc/torch/rpc_agent.h"

#include <ATen/ThreadLocalState.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/rpc/request_callback.h>
#include <torch/csrc/distributed/rpc/utils.h>

#include <algorithm>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>

#include "base/text.h"
#include "converters/cpu.h"
#include "converters/cuda.h"
#include "converters/current_streams.h"
#include "rpc/torch/call_pattern.h"
#include "rpc/torch_futures.h"

namespace tensorferry::torch_rpc {
namespace {

namespace rpc = torch::distributed::rpc;

constexpr std::string_view served_name = "torch.distributed.rpc";
constexpr std::chrono::microseconds longest_wait_in_send{200};

/// Waits for the reply in send() if this thread would wait next anyway. True: it has come.
bool waited_in_send(Call& call, const c10::intrusive_ptr<JitFuture>& future) {
  thread_local CallPattern pattern;
  if (!pattern.expects_wait()) {
    pattern.leave(future);
    return false;
  }
  if (call.wait(Clock().now() + longest_wait_in_send)) return true;
  pattern.slow();
  return false;
}

Device device_of(const c10::Device& device) {
  return {device.is_cpu() ? DeviceType::cpu : DeviceType::cuda,
          static_cast<std::uint8_t>(std::max<int>(device.index(), 0))};
}

Placement placement_of(const DeviceMap& map) {
  Placement placement;
  for (const auto& [from, to] : map) placement.map.emplace_back(device_of(from), device_of(to));
  return placement;
}

Placement inverse_of(const DeviceMap& map) {
  Placement placement;
  for (const auto& [from, to] : map) placement.map.emplace_back(device_of(to), device_of(from));
  return placement;
}

/// Returns why `map` cannot carry the tensors; "": it can. As with TensorPipe, a tensor on a GPU needs an entry.
std::string missing_mapping(const rpc::Message& message, const DeviceMap& map, const std::string& peer, bool response) {
  for (const auto& tensor : message.tensors()) {
    if (!tensor.defined() || tensor.is_cpu() || map.contains(tensor.device())) continue;
    const std::string kind = response ? "Response" : "Request";
    return kind + " device mapping is not available for destination " + peer + ": it has no entry for " +
           tensor.device().str() + ". The RPC backend only supports CPU tensors by default, please move your tensors " +
           "to CPU before sending them over RPC, or call `set_device_map` on the backend options";
  }
  return {};
}

/// Whether the program may wait for a message of that type. The others are torch's own.
bool is_call(rpc::MessageType type) {
  switch (type) {
    case rpc::SCRIPT_CALL:
    case rpc::PYTHON_CALL:
    case rpc::SCRIPT_RREF_FETCH_CALL:
    case rpc::PYTHON_RREF_FETCH_CALL:
    case rpc::FORWARD_AUTOGRAD_REQ:
      return true;
    default:
      return false;
  }
}

bool creates_reference(rpc::MessageType type) {
  return type == rpc::PYTHON_REMOTE_CALL || type == rpc::SCRIPT_REMOTE_CALL;
}

std::exception_ptr error_of(const std::string& text) { return std::make_exception_ptr(std::runtime_error(text)); }

std::exception_ptr timed_out(std::chrono::milliseconds timeout) {
  // torch's own text, which programs compare with.
  return error_of(rpc::makeRPCError(
      c10::str("RPC ran for more than set timeout (", timeout.count(), " ms) and will now be marked with an error"),
      rpc::TIMEOUT));
}

c10::intrusive_ptr<JitFuture> failed_future(std::exception_ptr error) {
  auto future = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
  future->setError(std::move(error));
  return future;
}

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.text());
}

std::chrono::milliseconds milliseconds_of(float seconds) {
  return std::chrono::milliseconds(static_cast<std::int64_t>(seconds * rpc::kSecToMsConversion));
}

}  // namespace

/// A request whose answer has not come.
struct TorchRpcAgent::PendingSend {
  PendingSend(c10::intrusive_ptr<JitFuture> f, const TorchMessage& sent)
      : future(std::move(f)), message(creates_reference(sent->type()) ? sent : TorchMessage()) {}
  const c10::intrusive_ptr<JitFuture> future;
  const TorchMessage message;  // null: it creates no reference
  std::atomic_flag done;       // the reply and the time-out compete to complete the future
  std::optional<Timeouts::Key> timeout;
  std::mutex mutex;  // guards the next two
  bool answered = false;
  std::optional<ReferenceId> late;  // the reference that it creates, once it has timed out
};

/// The workers of the group, by name and by id. References stay valid after a worker has left. Thread-safe.
class TorchRpcAgent::Workers final {
 public:
  void add(const WorkerInfo& worker) {
    const std::lock_guard lock(mutex_);
    auto shared = std::make_shared<const WorkerInfo>(worker.name_, worker.id_);
    by_name_[worker.name_] = shared;
    by_id_[worker.id_] = shared;
    all_.push_back(std::move(shared));
  }
  void remove(const WorkerInfo& worker) {
    const std::lock_guard lock(mutex_);
    by_name_.erase(worker.name_);
    by_id_.erase(worker.id_);
  }
  [[nodiscard]] const WorkerInfo& find(const std::string& name) const {
    const std::lock_guard lock(mutex_);
    const auto found = by_name_.find(name);
    TORCH_CHECK(found != by_name_.end(), "could not find destination: unknown destination worker ", name);
    return *found->second;
  }
  [[nodiscard]] const WorkerInfo& find(rpc::worker_id_t id) const {
    const std::lock_guard lock(mutex_);
    const auto found = by_id_.find(id);
    TORCH_CHECK(found != by_id_.end(), "could not find destination: unknown destination worker id ", id);
    return *found->second;
  }
  [[nodiscard]] std::vector<WorkerInfo> list() const {
    const std::lock_guard lock(mutex_);
    std::vector<WorkerInfo> workers;
    for (const auto& [id, worker] : by_id_) workers.emplace_back(worker->name_, worker->id_);
    return workers;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<const WorkerInfo>> by_name_;
  std::map<rpc::worker_id_t, std::shared_ptr<const WorkerInfo>> by_id_;
  std::vector<std::shared_ptr<const WorkerInfo>> all_;
};

// ---- joining and leaving

std::shared_ptr<TorchRpcAgent> TorchRpcAgent::create(RawAgentOptions options, TorchRpcSettings settings,
                                                     std::unique_ptr<rpc::RequestCallback> callback) {
  const auto converters = std::make_shared<Converters>();
  const auto cpu = std::make_shared<CpuConverter>(std::make_shared<HostMemory>(), settings.leaves_storages);
  converters->add(DeviceType::cpu, cpu);
  options.memory.emplace(DeviceType::cpu, cpu->memory());
  if (const auto cuda = make_cuda_converter(settings.leaves_storages); cuda && options.devices.size() > 1) {
    converters->add(DeviceType::cuda, cuda);
    options.memory.emplace(DeviceType::cuda, cuda->memory());
  } else {
    options.devices = {Device()};
  }
  auto member = Member::create(std::move(options), settings.world_size);
  check(member.status());
  const auto agent = std::make_shared<TorchRpcAgent>(*member, converters, std::move(settings), std::move(callback));
  agent->member_->agent().serve(std::string(served_name),
                                [weak = agent->weak_from_this()](Request request, Reply reply) {
                                  if (const auto self = weak.lock()) self->serve(std::move(request), std::move(reply));
                                });
  auto joined = agent->member_->announce();
  if (joined.ok()) joined = agent->member_->wait_for_world(agent->settings_.join_timeout);
  if (!joined.ok()) {
    agent->member_->leave();
    const auto& name = agent->member_->self().name;
    if (joined.code() == Code::invalid_argument)
      throw std::runtime_error(
          formatted("the name or the rank of worker \"{}\" is not unique: {}", name, joined.what()));
    check(joined);
  }
  for (const auto& peer : agent->member_->world())
    agent->workers_->add({peer.name, static_cast<rpc::worker_id_t>(peer.rank)});
  return agent;
}

TorchRpcAgent::TorchRpcAgent(std::shared_ptr<Member> member, std::shared_ptr<Converters> converters,
                             TorchRpcSettings settings, std::unique_ptr<rpc::RequestCallback> callback)
    : RpcAgent(WorkerInfo(member->self().name, static_cast<rpc::worker_id_t>(member->self().rank)), std::move(callback),
               settings.timeout),
      member_(std::move(member)),
      converters_(std::move(converters)),
      settings_(std::move(settings)),
      faults_(settings_.faults.any() ? std::make_unique<FaultInjector>(settings_.faults) : nullptr),
      workers_(std::make_unique<Workers>()) {
  devices_.push_back(std::make_unique<const std::vector<c10::Device>>(settings_.devices));
  workers_->add(RpcAgent::getWorkerInfo());
}

TorchRpcAgent::~TorchRpcAgent() {
  if (rpcAgentRunning_) shutdown();
  member_->leave();
}

void TorchRpcAgent::startImpl() {
  const std::lock_guard lock(start_mutex_);
  phase_ = Phase::running;
  started_.notify_all();
}

void TorchRpcAgent::shutdownImpl() {
  rpcAgentRunning_ = false;
  {
    const std::lock_guard lock(start_mutex_);
    phase_ = Phase::left;
    started_.notify_all();
  }
  member_->leave();
  timeouts_.stop();
}

bool TorchRpcAgent::await_start() {
  if (phase_.load(std::memory_order_acquire) == Phase::running) return true;
  std::unique_lock lock(start_mutex_);
  started_.wait(lock, [&] { return phase_ != Phase::joining; });
  return phase_ == Phase::running;
}

void TorchRpcAgent::join(bool shutdown, float timeout_seconds) {
  const auto timeout = milliseconds_of(timeout_seconds);
  if (shutdown || !is_static_group()) return check(member_->finish(timeout));
  check(member_->agent().barrier("torch.distributed.rpc join", timeout));
}

void TorchRpcAgent::prepare_thread() const {
  if (settings_.prepare_thread) settings_.prepare_thread();
}

// ---- calls made here

c10::intrusive_ptr<JitFuture> TorchRpcAgent::send(const WorkerInfo& to, TorchMessage message, float timeout_seconds,
                                                  const DeviceMap& device_map) {
  return post(to, std::move(message), timeout_seconds, device_map, nullptr);
}

TorchMessage TorchRpcAgent::call(const WorkerInfo& to, TorchMessage message, float timeout_seconds,
                                 const std::function<bool()>& interrupted) {
  bool ended = false;
  const std::function<bool()> asked = [&] { return ended = interrupted(); };
  const auto response = post(to, std::move(message), timeout_seconds, {}, &asked);
  if (ended) return nullptr;
  response->waitAndThrow();
  return response->value().toCustomClass<rpc::Message>();
}

c10::intrusive_ptr<JitFuture> TorchRpcAgent::post(const WorkerInfo& to, TorchMessage message, float timeout_seconds,
                                                  const DeviceMap& device_map,
                                                  const std::function<bool()>* interrupted) {
  TORCH_CHECK(message->isRequest(), "an agent sends requests only, not a message of type ", message->type());
  TORCH_CHECK(rpcAgentRunning_.load(), "Node ", RpcAgent::getWorkerInfo().id_, " tried to send() a message of type ",
              message->type(), " but RPC is no longer running on this node.");
  auto timeout = timeout_seconds == rpc::kUnsetRpcTimeout ? getRpcTimeout() : milliseconds_of(timeout_seconds);
  if (timeout_seconds > 0) timeout = std::max(timeout, std::chrono::milliseconds(1));
  if (faults_ && faults_->fails(message->type(), {message->payload().data(), message->payload().size()}))
    return failed_future(error_of(rpc::makeRPCError("Send attempt failed intentionally", rpc::INTENTIONAL_FAILURE)));
  if (const auto deleted = late_references_.empty() ? std::nullopt : reference_deleted_by(*message)) {
    if (auto held = hold(*deleted, to, message, timeout_seconds)) return held;
  }
  const auto own_map = map_to(to.name_);
  const auto& map = device_map.empty() ? own_map : device_map;
  if (const auto missing = missing_mapping(*message, map, to.name_, false); !missing.empty())
    TORCH_CHECK(false, missing);
  auto encoded = encode(message, *converters_);
  if (!encoded.ok()) TORCH_CHECK(false, encoded.status().text());

  RawCallOptions options;
  options.timeout = Milliseconds(0);  // Timeouts says why
  options.arguments = placement_of(map);
  options.results = inverse_of(own_map);
  auto pending =
      std::make_shared<PendingSend>(c10::make_intrusive<JitFuture>(at::AnyClassType::get(), getDevices()), message);
  auto future = pending->future;
  const auto began = Clock().now();
  const auto start_timeout = [&] {
    if (timeout.count() == 0 || pending->timeout) return;
    pending->timeout = timeouts_.add(began + timeout, [this, pending, timeout] { expire(*pending, timeout); });
  };
  if (const auto delay = faults_ ? faults_->delay(message->type()) : Milliseconds(0); delay.count() != 0) {
    start_timeout();
    std::this_thread::sleep_for(delay);
  }
  ++member_->unread;
  auto call = member_->agent().call(to.name_, served_name, *std::move(encoded), std::move(options));
  const bool counts = is_call(message->type());
  const auto until = timeout.count() == 0 ? std::nullopt : std::optional(began + timeout);
  if (interrupted != nullptr ? call.wait(until, *interrupted) : counts && waited_in_send(call, future)) {
    complete(*pending, call.take());
    return future;
  }
  if (interrupted == nullptr)
    start_timeout();
  else if (until && Clock().now() >= *until)
    expire(*pending, timeout);  // complete() still counts the late reply
  else
    call.cancel();  // complete() takes its end
  call.on_done(
      [self = shared_from_this(), pending, call](Result<Received> reply) {
        self->prepare_thread();
        self->complete(*pending, std::move(reply));
      },
      /*with_executor=*/false, counts ? Call::Notice::lazy : Call::Notice::prompt);
  return future;
}

// Returns the future of a deletion that waits for the answer of the call that creates the reference; null: that call
// is not late.
c10::intrusive_ptr<JitFuture> TorchRpcAgent::hold(const ReferenceId& deleted, const WorkerInfo& to,
                                                  const TorchMessage& message, float timeout_seconds) {
  auto future = c10::make_intrusive<JitFuture>(at::AnyClassType::get());
  const auto& known = getWorkerInfo(to.id_);  // stays valid
  const auto send_now = [this, future, &known, message, timeout_seconds] {
    settle(*future, [&] {  // send() throws once the agent has left
      send(known, message, timeout_seconds, {})->addCallback([future](JitFuture& sent) {
        settle(*future, [&] {
          if (sent.hasError()) return future->setError(sent.exception_ptr());
          future->markCompleted(sent.value());
        });
      });
    });
  };
  return late_references_.hold(deleted, send_now) ? future : c10::intrusive_ptr<JitFuture>();
}

void TorchRpcAgent::expire(PendingSend& pending, std::chrono::milliseconds timeout) {
  if (pending.done.test_and_set()) return;
  if (pending.message) {
    const auto created = reference_created_by(*pending.message);
    const std::lock_guard lock(pending.mutex);
    if (created && !pending.answered) late_references_.add(pending.late.emplace(*created));
  }
  settle_error(*pending.future, timed_out(timeout));
}

void TorchRpcAgent::complete(PendingSend& pending, Result<Received> reply) {
  if (pending.timeout) timeouts_.remove(*pending.timeout);
  if (!pending.done.test_and_set()) {
    settle(*pending.future, [&] { set_result(*pending.future, std::move(reply)); });
  }
  if (pending.message) {
    {
      const std::lock_guard lock(pending.mutex);
      pending.answered = true;
    }
    if (pending.late) {
      for (const auto& send_held : late_references_.remove(*pending.late)) send_held();
    }
  }
  // The callbacks of the future have run. They may have made calls, for which join() must wait too.
  --member_->unread;
}

void TorchRpcAgent::set_result(JitFuture& future, Result<Received> reply) const {
  if (!reply.ok()) return future.setError(error_of(reply.status().text()));
  const CurrentStreams streams(*converters_, reply->buffers);
  auto decoded = decode(*reply, *converters_);
  if (!decoded.ok()) return future.setError(error_of(decoded.status().text()));
  if (decoded->message->type() == rpc::EXCEPTION) {
    const auto& text = decoded->message->payload();
    return future.setError(error_of({text.begin(), text.end()}));
  }
  future.markCompleted(std::move(decoded->message), std::move(decoded->device_storages));
}

// ---- calls served here

void TorchRpcAgent::serve(Request request, Reply reply) {
  prepare_thread();
  if (!await_start()) return reply.fail({Code::agent_closed, "\"" + member_->self().name + "\" has left"});
  const CurrentStreams current(*converters_, request.arguments.buffers);
  auto decoded = decode(request.arguments, *converters_);
  if (!decoded.ok()) return reply.fail(decoded.status());
  auto& message = *decoded->message;
  if (serve_python_call(decoded->message, request.peer.name, reply)) return;
  // After one profiled request, torch would record nothing of the next one on the same thread.
  std::optional<at::ThreadLocalStateGuard> clean;
  if (message.type() == rpc::RUN_WITH_PROFILING_REQ) {
    thread_local const at::ThreadLocalState unused_thread;
    clean.emplace(unused_thread);
  }
  std::shared_ptr<BackwardPasses::Request> backward;
  c10::intrusive_ptr<JitFuture> result;
  try {
    backward = backward_passes_.enter(message);
    result = (*cb_)(message, streams_for(request.arguments.buffers));
  } catch (const std::exception&) {
    result = failed_future(std::current_exception());
  }
  if (backward) backward->handled();
  result->addCallback([self = shared_from_this(), id = message.id(), caller = request.peer.name,
                       reply = std::make_shared<Reply>(std::move(reply)), backward](JitFuture& done) mutable {
    backward.reset();
    // The thread that completes the future may be one of the program's, with callbacks of its own behind this one. If
    // this throws, the end of `reply` fails the call.
    run_foreign("an answer of torch.distributed.rpc", [&] { self->answer(done, id, caller, *reply); });
  });
}

/// Runs a call of a Python function without the futures of torch's RequestCallback. False: the message is another one,
/// or GPUs are in use, whose streams torch's callback keeps.
bool TorchRpcAgent::serve_python_call(TorchMessage request, const std::string& caller, Reply& reply) {
  const auto& payload = request->payload();
  constexpr char runs_at_once = 0;  // 1: under functions.async_execution
  if (!settings_.serve_python_call || request->type() != rpc::PYTHON_CALL || payload.empty() ||
      payload.front() != runs_at_once || !getDevices().empty())
    return false;
  const auto id = request->id();
  const auto held = std::make_shared<Reply>(std::move(reply));
  const auto respond = [self = shared_from_this(), caller, held](TorchMessage response) {
    run_foreign("an answer of torch.distributed.rpc", [&] { self->answer(std::move(response), caller, *held); });
  };
  try {
    settings_.serve_python_call(std::move(request), respond);
  } catch (const std::exception& error) {
    respond(rpc::createExceptionResponse(error, id));
  }
  return true;
}

void TorchRpcAgent::answer(JitFuture& result, std::int64_t id, const std::string& caller, Reply& reply) {
  answer(result.hasError() ? rpc::createExceptionResponse(result.tryRetrieveErrorMessage(), id)
                           : result.value().toCustomClass<rpc::Message>(),
         caller, reply);
}

void TorchRpcAgent::answer(TorchMessage message, const std::string& caller, Reply& reply) {
  const auto failure = [id = message->id()](const std::string& text) { return rpc::createExceptionResponse(text, id); };
  if (const auto missing = missing_mapping(*message, reverse_map_to(caller), caller, true); !missing.empty())
    message = failure(missing);
  auto encoded = encode(message, *converters_);
  if (!encoded.ok()) encoded = encode(failure(encoded.status().text()), *converters_);
  if (encoded.ok())
    reply.send(*std::move(encoded));
  else
    reply.fail(encoded.status());
}

// Gives the callback one stream for each device, as torch's own agent does: where the arguments lie, the current one.
std::vector<c10::Stream> TorchRpcAgent::streams_for(const std::vector<Buffer>& buffers) const {
  std::vector<c10::Stream> streams;
  std::set<int> with_arguments;
  for (const auto& buffer : buffers) {
    if (buffer.device.type == DeviceType::cuda) with_arguments.insert(buffer.device.index);
  }
  for (const auto& device : getDevices()) {
    if (device.is_cpu()) continue;
    const c10::impl::VirtualGuardImpl guard(device.type());
    streams.push_back(with_arguments.contains(device.index()) ? guard.getStream(device)
                                                              : guard.getStreamFromGlobalPool(device));
  }
  return streams;
}

// ---- workers and devices

const WorkerInfo& TorchRpcAgent::getWorkerInfo(const std::string& name) const { return workers_->find(name); }
const WorkerInfo& TorchRpcAgent::getWorkerInfo(rpc::worker_id_t id) const { return workers_->find(id); }
std::vector<WorkerInfo> TorchRpcAgent::getWorkerInfos() const { return workers_->list(); }
DeviceMap TorchRpcAgent::getDeviceMap(const WorkerInfo& to) const { return map_to(to.name_); }

const std::vector<c10::Device>& TorchRpcAgent::getDevices() const {
  const std::lock_guard lock(groups_mutex_);
  return *devices_.back();
}

DeviceMap TorchRpcAgent::map_to(const std::string& peer) const {
  const std::lock_guard lock(groups_mutex_);
  const auto found = settings_.device_maps.find(peer);
  return found == settings_.device_maps.end() ? DeviceMap() : found->second;
}

DeviceMap TorchRpcAgent::reverse_map_to(const std::string& peer) const {
  const std::lock_guard lock(groups_mutex_);
  const auto found = settings_.reverse_device_maps.find(peer);
  return found == settings_.reverse_device_maps.end() ? DeviceMap() : found->second;
}

void TorchRpcAgent::update_group(const WorkerInfo& worker, const std::vector<c10::Device>& devices,
                                 const DeviceMapsByPeer& reverse_device_maps, bool joins) {
  if (!joins) {
    workers_->remove(worker);
    const std::lock_guard lock(groups_mutex_);
    settings_.reverse_device_maps.erase(worker.name_);
    return;
  }
  workers_->add(worker);
  const std::lock_guard lock(groups_mutex_);
  for (const auto& [peer, map] : reverse_device_maps) settings_.reverse_device_maps.insert_or_assign(peer, map);
  auto all = *devices_.back();
  for (const auto& device : devices) {
    if (std::find(all.begin(), all.end(), device) == all.end()) all.push_back(device);
  }
  if (all.size() != devices_.back()->size())
    devices_.push_back(std::make_unique<const std::vector<c10::Device>>(std::move(all)));
}

// ---- metrics

void TorchRpcAgent::addGilWaitTime(std::chrono::microseconds waited) {
  ++gil_waits_;
  gil_waited_us_ += static_cast<std::uint64_t>(waited.count());
}

std::unordered_map<std::string, std::string> TorchRpcAgent::getMetrics() {
  const auto now = member_->in_flight();
  const auto counters = member_->agent().counters();
  std::unordered_map<std::string, std::string> metrics{
      {"agent.thread_pool_size", std::to_string(settings_.worker_threads)},
      {"agent.client_active_calls", std::to_string(now.made)},
      {"agent.server_active_calls", std::to_string(now.served)},
      {"agent.calls_sent", std::to_string(counters.calls_sent)},
      {"agent.calls_served", std::to_string(counters.calls_served)},
      {"agent.calls_failed", std::to_string(counters.calls_failed)},
  };
  for (const auto& [channel, bytes] : counters.bytes_sent)
    metrics["agent.bytes_sent." + channel] = std::to_string(bytes);
  for (const auto& [channel, bytes] : counters.bytes_received)
    metrics["agent.bytes_received." + channel] = std::to_string(bytes);
  if (isGILProfilingEnabled()) {
    const auto waits = gil_waits_.load();
    metrics["agent.gil_average_wait_time_us"] = std::to_string(waits == 0 ? 0 : gil_waited_us_.load() / waits);
  }
  return metrics;
}

}  // namespace tensorferry::torch_rpc
