#include "rpc/collectives/host_processes.h"

namespace tensorferry::collectives {

Result<std::shared_ptr<const cma::Process>> HostProcesses::find(const cma::Identity& identity) {
  const std::lock_guard lock(mutex_);
  std::erase_if(known_, [](const auto& each) { return each.second.expired(); });
  auto& known = known_[{identity.pid, identity.started}];
  if (auto process = known.lock(); process && process->alive()) return process;
  auto found = cma::Process::find(identity);
  if (!found.ok()) return found.status();
  auto process = std::make_shared<const cma::Process>(std::move(*found));
  known = process;
  return process;
}

}  // namespace tensorferry::collectives
