/// Counts of a group's operations, by the way that they took.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "rpc/collectives/choose.h"
#include "rpc/collectives/gpu_choice.h"

namespace tensorferry::collectives {

/// Where an operation takes place.
enum class Path : std::uint8_t {
  host = 0,    // tensors of the CPU
  staged = 1,  // tensors of a device, copied through host memory
  gpu = 2,     // GPUs do it among themselves
  graph = 3,   // the same, captured into a CUDA graph: counted at its capture
  last = graph,
};
std::string_view name_of(Path path) noexcept;

/// The operations of one kind that have begun.
struct CountedPath {
  Operation operation = Operation::barrier;
  Path path = Path::host;
  std::string_view algorithm;
  std::uint64_t count = 0;
};

/// The counters of one group. Thread-safe.
class PathCounts final {
 public:
  void count(Operation operation, bool staged, Algorithm algorithm) noexcept;
  void count_on_gpu(Operation operation, bool captured, AlgorithmOnGpu algorithm) noexcept;
  /// Returns those that are not 0.
  [[nodiscard]] std::vector<CountedPath> taken() const;

 private:
  static constexpr std::size_t operations = static_cast<std::size_t>(Operation::last) + 1;
  static constexpr std::size_t paths = static_cast<std::size_t>(Path::last) + 1;
  static constexpr std::size_t algorithms = static_cast<std::size_t>(AlgorithmOnGpu::last) + 1;
  static_assert(algorithms > static_cast<std::size_t>(Algorithm::last));
  static std::size_t index_of(Operation operation, Path path, std::size_t algorithm) noexcept {
    return (static_cast<std::size_t>(operation) * paths + static_cast<std::size_t>(path)) * algorithms + algorithm;
  }
  std::array<std::atomic<std::uint64_t>, operations * paths * algorithms> counts_{};
};

}  // namespace tensorferry::collectives
