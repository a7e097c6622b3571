/// The processes of this host to which the groups of one agent belong.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/status.h"
#include "channels/cma/process.h"

namespace tensorferry::collectives {

/// Holds one handle, with one descriptor, of each process, however many groups it is in. Thread-safe.
class HostProcesses final {
 public:
  /// Returns the handle of a process. It lives as long as a group uses it. Errors: those of cma::Process::find().
  Result<std::shared_ptr<const cma::Process>> find(const cma::Identity& identity);

 private:
  std::mutex mutex_;
  std::map<std::pair<std::int32_t, std::uint64_t>, std::weak_ptr<const cma::Process>> known_;
};

}  // namespace tensorferry::collectives
