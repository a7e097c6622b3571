/// Which ways the operations of a group take: how they choose their algorithm, what they have chosen, and what
/// explain() says of it.
#pragma once

#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "rpc/collectives/choose.h"
#include "rpc/collectives/path_counts.h"
#include "rpc/collectives/tuning.h"

namespace tensorferry::collectives {

/// Threads: any, after the functions that say "before any operation".
class Ways final {
 public:
  /// What explain() says of tensors of GPUs, and for which groups `tensorferry tune` measures them.
  struct DeviceNotes {
    std::function<std::string(Operation, std::size_t bytes)> explain;
    TuningKey key;
  };

  explicit Ways(Prescribed prescribed) : prescribed_(std::move(prescribed)) {}

  // Before any operation:
  void use_crossings(Crossings crossings) { crossings_ = std::move(crossings); }
  /// Keeps why the ranks have no board, and why they do not read each other's memory, for explain().
  void say_why(std::string no_board, std::string no_memory);

  /// Returns `wanted`, or chooses the algorithm in host memory. Counts the operation.
  Algorithm choose(const Asked& asked, std::optional<Algorithm> wanted, bool staged);
  [[nodiscard]] PathCounts& counts() noexcept { return counts_; }
  [[nodiscard]] const PathCounts& counts() const noexcept { return counts_; }

  /// Says which algorithm the operation takes and why, and how the ranks exchange bytes.
  [[nodiscard]] std::string explain(const Asked& asked) const;
  /// Returns why the ranks have no board; empty if they have one.
  [[nodiscard]] const std::string& why_no_board() const noexcept { return no_board_; }

  /// Of the GPU that was used first or last.
  void keep_device_notes(DeviceNotes notes);
  /// Returns the key of the crossings on GPUs; nullopt before the first operation there that needs no host memory.
  [[nodiscard]] std::optional<TuningKey> gpu_tuning_key() const;

 private:
  const Prescribed prescribed_;
  Crossings crossings_;
  std::string no_board_, no_memory_;
  PathCounts counts_;
  mutable std::mutex mutex_;
  DeviceNotes devices_;
};

}  // namespace tensorferry::collectives
