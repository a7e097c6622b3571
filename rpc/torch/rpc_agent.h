/// TensorFerry as the agent of torch.distributed.rpc: torch's interface RpcAgent over a member of a job.
///
/// A message of torch's travels as one call of ours (message.h), and its answer as the reply. torch's RequestCallback
/// runs on the agent's pool. Python runs only inside that callback and inside the callbacks of futures.
#pragma once

#include <torch/csrc/distributed/rpc/rpc_agent.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "rpc/member/member.h"
#include "rpc/torch/backward_passes.h"
#include "rpc/torch/faults.h"
#include "rpc/torch/late_references.h"
#include "rpc/torch/message.h"
#include "rpc/torch/timeouts.h"

namespace tensorferry::torch_rpc {

using torch::distributed::rpc::DeviceMap;
using torch::distributed::rpc::JitFuture;
using torch::distributed::rpc::WorkerInfo;
/// By the name of a peer.
using DeviceMapsByPeer = std::unordered_map<std::string, DeviceMap>;

/// Runs a call of a Python function (PYTHON_CALL), and passes its response to `respond`, once: before it returns, or
/// later on any thread. An exception that it throws becomes the response. Called on a pool thread.
using ServePythonCall = std::function<void(TorchMessage request, std::function<void(TorchMessage)> respond)>;

/// What TorchRpcAgent::create() needs beside the options of the agent underneath.
struct TorchRpcSettings {
  int world_size = 0;  // 0: agents join and leave at any time
  std::chrono::milliseconds timeout{60000};
  std::chrono::milliseconds join_timeout{300000};
  int worker_threads = 16;  // reported by getDebugInfo(); the pool grows and shrinks by itself
  DeviceMapsByPeer device_maps;
  DeviceMapsByPeer reverse_device_maps;  // for answers to each peer
  std::vector<c10::Device> devices;      // GPUs whose tensors may travel
  Faults faults;
  std::function<void()> prepare_thread;  // runs first on each thread that may enter Python
  bool (*leaves_storages)() = nullptr;   // as for CpuConverter
  ServePythonCall serve_python_call;     // null: torch's RequestCallback runs these calls too
};

/// One agent of torch.distributed.rpc. Thread-safe. No function needs the GIL; those that block must be called without
/// it. Errors of this library are thrown as std::runtime_error, errors of a call complete its future.
class TorchRpcAgent final : public torch::distributed::rpc::RpcAgent,
                            public std::enable_shared_from_this<TorchRpcAgent> {
 public:
  /// Joins, and waits for the world if there is one. Requests that come before start() wait for it. Blocks. Throws the
  /// errors of Member::create, announce and wait_for_world; for a name that two ranks have, the text contains "is not
  /// unique".
  static std::shared_ptr<TorchRpcAgent> create(RawAgentOptions options, TorchRpcSettings settings,
                                               std::unique_ptr<torch::distributed::rpc::RequestCallback> callback);
  TorchRpcAgent(std::shared_ptr<Member> member, std::shared_ptr<Converters> converters, TorchRpcSettings settings,
                std::unique_ptr<torch::distributed::rpc::RequestCallback> callback);
  ~TorchRpcAgent() override;

  /// Sends a request. The answer's tensors land by the inverse of the device map that this agent has for `to`.
  ///
  /// If the calls of this thread are waited for one by one (CallPattern), blocks for up to 200 us, because the thread
  /// that waits for a reply takes it without waking another.
  c10::intrusive_ptr<JitFuture> send(const WorkerInfo& to, TorchMessage message, float timeout_seconds,
                                     const DeviceMap& device_map) override;

  /// Sends a call for which this thread waits, and returns its response. Throws the error that the future of send()
  /// would have. The thread takes the reply itself, so no other one is woken. Blocks. Null: `interrupted`, which a
  /// signal has this ask, returned true, and the call is cancelled.
  TorchMessage call(const WorkerInfo& to, TorchMessage message, float timeout_seconds,
                    const std::function<bool()>& interrupted);

  using RpcAgent::getWorkerInfo;
  const WorkerInfo& getWorkerInfo(const std::string& name) const override;
  const WorkerInfo& getWorkerInfo(torch::distributed::rpc::worker_id_t id) const override;
  std::vector<WorkerInfo> getWorkerInfos() const override;
  DeviceMap getDeviceMap(const WorkerInfo& to) const override;
  const std::vector<c10::Device>& getDevices() const override;

  /// With `shutdown`, waits until all agents of the world are idle and have called this (Member::finish). Else waits
  /// until all have called it. `timeout_seconds` 0: no limit.
  void join(bool shutdown, float timeout_seconds) override;
  void sync() override {}
  void startImpl() override;
  void shutdownImpl() override;

  std::unordered_map<std::string, std::string> getMetrics() override;

  /// Takes a worker of a group without a world size in or out, with the devices and the maps that its calls need here.
  void update_group(const WorkerInfo& worker, const std::vector<c10::Device>& devices,
                    const DeviceMapsByPeer& reverse_device_maps, bool joins);
  [[nodiscard]] bool is_static_group() const noexcept { return settings_.world_size != 0; }

 private:
  class Workers;
  struct PendingSend;

  /// Sends a request. `interrupted`: the caller waits for the response here, until this returns true; null: it gets a
  /// future, and may wait.
  c10::intrusive_ptr<JitFuture> post(const WorkerInfo& to, TorchMessage message, float timeout_seconds,
                                     const DeviceMap& device_map, const std::function<bool()>* interrupted);
  void serve(Request request, Reply reply);
  bool serve_python_call(TorchMessage request, const std::string& caller, Reply& reply);
  void answer(JitFuture& result, std::int64_t id, const std::string& caller, Reply& reply);
  void answer(TorchMessage response, const std::string& caller, Reply& reply);
  c10::intrusive_ptr<JitFuture> hold(const ReferenceId& deleted, const WorkerInfo& to, const TorchMessage& message,
                                     float timeout_seconds);
  void expire(PendingSend& pending, std::chrono::milliseconds timeout);
  void complete(PendingSend& pending, Result<Received> reply);
  void set_result(JitFuture& future, Result<Received> reply) const;
  void prepare_thread() const;
  bool await_start();
  std::vector<c10::Stream> streams_for(const std::vector<Buffer>& buffers) const;
  [[nodiscard]] DeviceMap map_to(const std::string& peer) const;
  [[nodiscard]] DeviceMap reverse_map_to(const std::string& peer) const;
  void addGilWaitTime(std::chrono::microseconds waited) override;

  const std::shared_ptr<Member> member_;
  const std::shared_ptr<Converters> converters_;
  TorchRpcSettings settings_;                    // the maps and devices are guarded by groups_mutex_
  const std::unique_ptr<FaultInjector> faults_;  // null: none
  const std::unique_ptr<Workers> workers_;

  BackwardPasses backward_passes_;
  LateReferences late_references_;
  Timeouts timeouts_;

  mutable std::mutex groups_mutex_;
  std::vector<std::unique_ptr<const std::vector<c10::Device>>> devices_;  // the last one counts; callers hold others

  std::mutex start_mutex_;
  std::condition_variable started_;
  enum class Phase : std::uint8_t { joining, running, left };
  std::atomic<Phase> phase_{Phase::joining};

  std::atomic<std::uint64_t> gil_waits_{0}, gil_waited_us_{0};
};

}  // namespace tensorferry::torch_rpc
