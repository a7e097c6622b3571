#include <unistd.h>

#include <algorithm>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "base/host.h"
#include "base/text.h"
#include "rpc/collectives/torch/data_parallel.h"
#include "rpc/collectives/torch/process_group.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "rpc/store_adapter.h"
#include "tensorferry/c10d.h"
#include "tensorferry/errors.h"

namespace tensorferry {
namespace {

using collectives::DeviceGroup;
using collectives::TorchGroupOptions;
using collectives::TorchProcessGroup;

c10::intrusive_ptr<TorchGroupOptions> torch_options_of(ProcessGroupOptions options) {
  auto out = c10::make_intrusive<TorchGroupOptions>();
  out->timeout = options.timeout;
  out->group_name = options.name;
  out->lazy = options.lazy;
  out->settings.key = options.name;
  out->settings.label = std::move(options.name);
  out->settings.algorithms = std::move(options.algorithms);
  out->settings.board = options.board;
  out->settings.memory = options.memory;
  out->settings.host = std::move(options.host);
  return out;
}

void check_ranks(int rank, int size) {
  if (size < 1 || rank < 0 || rank >= size)
    throw InvalidArgument(formatted("a process group of {} ranks has no rank {}", size, rank));
}

/// No two agents have one name: "rank0@host:pid/random".
std::string agent_name(int rank) { return formatted("rank{}@{}:{}/{}", rank, host_name(), ::getpid(), random_word()); }

/// Windows use the regions of the agent.
c10::intrusive_ptr<TorchGroupOptions> with_regions_of(const std::shared_ptr<Agent>& agent,
                                                      c10::intrusive_ptr<TorchGroupOptions> options) {
  options->regions = [weak = std::weak_ptr(agent)] {
    const auto living = weak.lock();
    return living ? living->core()->regions() : nullptr;
  };
  return options;
}

/// The pointer keeps the agent.
std::shared_ptr<collectives::Groups> groups_of(const std::shared_ptr<Agent>& agent) {
  return {agent, agent->core()->groups.get()};
}

std::shared_ptr<DeviceGroup> device_group_of(const ProcessGroupPointer& group) {
  auto* const ours = dynamic_cast<TorchProcessGroup*>(group.get());
  if (ours == nullptr) throw InvalidArgument("the process group is not one of make_process_group()");
  return ours->shared_group();
}

}  // namespace

ProcessGroupPointer make_process_group(const std::shared_ptr<Agent>& agent, std::vector<std::string> names,
                                       ProcessGroupOptions options) {
  const auto found = std::find(names.begin(), names.end(), agent->name());
  if (found == names.end())
    throw InvalidArgument(formatted("\"{}\" is not among the agents of the process group", agent->name()));
  detail::check(collectives::parse_algorithms(options.algorithms).status());
  const auto rank = static_cast<int>(found - names.begin());
  const auto size = static_cast<int>(names.size());
  return c10::make_intrusive<TorchProcessGroup>(
      groups_of(agent), [names = std::move(names)] { return names; }, rank, size,
      with_regions_of(agent, torch_options_of(std::move(options))));
}

ProcessGroupPointer make_process_group(const std::shared_ptr<Agent>& agent,
                                       const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       ProcessGroupOptions options) {
  check_ranks(rank, size);
  detail::check(collectives::parse_algorithms(options.algorithms).status());
  return TorchProcessGroup::meet_at(store, groups_of(agent), rank, size,
                                    with_regions_of(agent, torch_options_of(std::move(options))));
}

ProcessGroupPointer make_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       ProcessGroupOptions options, AgentOptions agent_options) {
  check_ranks(rank, size);
  agent_options.store =
      std::make_shared<StoreAdapter>(c10::make_intrusive<c10d::PrefixStore>("tensorferry/c10d", store));
  agent_options.rendezvous.clear();
  agent_options.rank = -1;
  agent_options.world_size = 0;
  if (agent_options.name.empty()) agent_options.name = agent_name(rank);
  return make_process_group(Agent::join(std::move(agent_options)), store, rank, size, std::move(options));
}

std::unique_ptr<c10d::CommHookInterface> all_reduce_hook(const ProcessGroupPointer& group) {
  return collectives::all_reduce_hook(device_group_of(group));
}
std::unique_ptr<c10d::CommHookInterface> compress_hook(const ProcessGroupPointer& group, at::ScalarType dtype) {
  return collectives::compress_hook(device_group_of(group), dtype);
}

void broadcast_coalesced(const ProcessGroupPointer& group, const std::vector<at::Tensor>& tensors, std::size_t root,
                         std::size_t bucket_bytes) {
  const auto done = collectives::broadcast_coalesced(*device_group_of(group), tensors, root, bucket_bytes);
  if (!done.ok()) throw collectives::GroupError(done);
}

}  // namespace tensorferry
