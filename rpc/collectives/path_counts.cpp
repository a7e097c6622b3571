#include "rpc/collectives/path_counts.h"

namespace tensorferry::collectives {

std::string_view name_of(Path path) noexcept {
  constexpr std::array<std::string_view, 4> names{"host", "staged", "gpu", "graph"};
  return names.at(static_cast<std::size_t>(path));
}

void PathCounts::count(Operation operation, bool staged, Algorithm algorithm) noexcept {
  const auto at = index_of(operation, staged ? Path::staged : Path::host, static_cast<std::size_t>(algorithm));
  counts_.at(at).fetch_add(1, std::memory_order_relaxed);
}

void PathCounts::count_on_gpu(Operation operation, bool captured, AlgorithmOnGpu algorithm) noexcept {
  const auto at = index_of(operation, captured ? Path::graph : Path::gpu, static_cast<std::size_t>(algorithm));
  counts_.at(at).fetch_add(1, std::memory_order_relaxed);
}

std::vector<CountedPath> PathCounts::taken() const {
  std::vector<CountedPath> out;
  for (std::size_t i = 0; i < counts_.size(); ++i) {
    const auto count = counts_.at(i).load(std::memory_order_relaxed);
    if (count == 0) continue;
    const auto path = static_cast<Path>(i / algorithms % paths);
    const bool on_gpu = path == Path::gpu || path == Path::graph;
    const auto algorithm = static_cast<std::uint8_t>(i % algorithms);
    const auto name =
        on_gpu ? name_of(static_cast<AlgorithmOnGpu>(algorithm)) : name_of(static_cast<Algorithm>(algorithm));
    out.push_back({static_cast<Operation>(i / algorithms / paths), path, name, count});
  }
  return out;
}

}  // namespace tensorferry::collectives
