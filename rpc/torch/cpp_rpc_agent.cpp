#include <torch/csrc/distributed/rpc/request_callback_no_python.h>

#include <memory>
#include <utility>
#include <vector>

#include "rpc/cpp/core.h"
#include "rpc/torch/rpc_agent.h"
#include "tensorferry/errors.h"
#include "tensorferry/torch_rpc.h"

namespace tensorferry {
namespace {

using torch_rpc::TorchRpcAgent;
using torch_rpc::TorchRpcSettings;

c10::Device torch_device(Device device) {
  return device.type == DeviceType::cpu ? c10::Device(c10::kCPU)
                                        : c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device.index));
}

/// An agent, and the store's server if this process has it.
struct ServedRpcAgent {
  std::shared_ptr<TcpStoreServer> server;
  std::shared_ptr<TorchRpcAgent> agent;
};

}  // namespace

std::shared_ptr<torch::distributed::rpc::RpcAgent> make_rpc_agent(
    AgentOptions options, std::unique_ptr<torch::distributed::rpc::RequestCallback> callback) {
  auto meeting = detail::meet(options);
  if (meeting.rank < 0) throw InvalidArgument("an agent of torch's RPC needs a rank: set AgentOptions::rank");
  TorchRpcSettings settings;
  settings.world_size = meeting.world_size;
  settings.timeout = options.timeout;
  settings.join_timeout = options.join_timeout;
  for (const auto& [peer, map] : options.device_maps) {
    (void)detail::placement_of(map);  // checks it
    for (const auto& [from, to] : map) {
      settings.device_maps[peer].emplace(torch_device(from), torch_device(to));
    }
    settings.reverse_device_maps[peer] = settings.device_maps[peer];  // answers go by the way of requests
  }
  auto raw = detail::raw_options_of(options, meeting);
  for (const auto device : raw.devices) {
    if (device.type == DeviceType::cuda) settings.devices.push_back(torch_device(device));
  }
  raw.memory.clear();  // TorchRpcAgent brings its own
  if (!callback) callback = std::make_unique<torch::distributed::rpc::RequestCallbackNoPython>();
  const auto served = std::make_shared<ServedRpcAgent>(
      ServedRpcAgent{meeting.server, TorchRpcAgent::create(std::move(raw), std::move(settings), std::move(callback))});
  return {served, served->agent.get()};
}

}  // namespace tensorferry
