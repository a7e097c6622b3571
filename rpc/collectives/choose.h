/// The table of algorithms: which one an operation uses, by its bytes, the number of ranks and their links.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tensorferry::collectives {

enum class Operation : std::uint8_t {
  barrier = 0,
  broadcast = 1,
  all_reduce = 2,
  reduce = 3,
  all_gather = 4,
  reduce_scatter = 5,
  gather = 6,
  scatter = 7,
  all_to_all = 8,
  last = all_to_all,
};
std::string_view name_of(Operation operation) noexcept;

enum class Algorithm : std::uint8_t {
  direct = 0,    // each rank takes its bytes from the rank that has them, in one step
  one_shot = 1,  // each rank takes all bytes of all ranks and reduces them itself
  two_shot = 2,  // each rank reduces its share of the bytes, then takes the other shares
};
std::string_view name_of(Algorithm algorithm) noexcept;

/// An algorithm, and why it was chosen.
struct AlgorithmChoice {
  Algorithm algorithm = Algorithm::direct;
  std::string reason;
};

/// Algorithms that the user prescribes, by operation.
using Prescribed = std::map<Operation, Algorithm>;
/// Parses "all_reduce=two_shot,reduce=one_shot". InvalidArgument names what is wrong, and what there is.
Result<Prescribed> parse_algorithms(std::string_view text);

/// How the ranks of a group exchange bytes.
struct Links {
  bool board = false;   // all ranks share one host and map a board; else bytes go as messages
  bool memory = false;  // with a board: each rank can read the memory of the others
};

/// Chooses the algorithm. All ranks choose alike, because all have the same arguments.
Algorithm choose(Operation operation, std::size_t bytes, std::size_t ranks, Links links, const Prescribed& prescribed);
/// The same with the reason, for people.
AlgorithmChoice explain_choice(Operation operation, std::size_t bytes, std::size_t ranks, Links links,
                               const Prescribed& prescribed);

}  // namespace tensorferry::collectives
