/// The table of algorithms: which one an operation uses, by its bytes, the number of ranks and their links.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <string_view>
#include <vector>

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
/// Returns the operation of that name, or InvalidArgument.
Result<Operation> operation_of(std::string_view name);

enum class Algorithm : std::uint8_t {
  direct = 0,     // each rank takes its bytes from the rank that has them, in one step
  one_shot = 1,   // each rank takes all bytes of all ranks and reduces them itself
  two_shot = 2,   // each rank reduces its share of the bytes, then takes the other shares
  ring = 3,       // each rank passes blocks on to the next, and reduces them on the way
  two_level = 4,  // the ranks of each host among themselves, one of each host for all of them, then each host again
  last = two_level,
};
std::string_view name_of(Algorithm algorithm) noexcept;

/// An algorithm, and why it was chosen.
struct AlgorithmChoice {
  Algorithm algorithm = Algorithm::direct;
  std::string reason;
};

/// Algorithms that the user prescribes, by operation.
using Prescribed = std::map<Operation, Algorithm>;
/// Parses "all_reduce=two_shot,broadcast=ring". InvalidArgument names what is wrong, and what there is.
Result<Prescribed> parse_algorithms(std::string_view text);

/// An algorithm, and the most bytes for which it is used.
struct CrossingRow {
  static constexpr std::size_t unbounded = std::numeric_limits<std::size_t>::max();
  Algorithm algorithm = Algorithm::direct;
  std::size_t up_to = unbounded;
  bool operator==(const CrossingRow&) const = default;
};
/// The sizes at which operations change from one algorithm to the next, as `tensorferry tune` has measured them
/// (tuning.h): rows from the smallest sizes to the largest, the last of which is unbounded.
using Crossings = std::map<Operation, std::vector<CrossingRow>>;
/// Parses "all_reduce=one_shot:65536:two_shot,broadcast=direct": an algorithm, the most bytes for which it is used, the
/// next algorithm, and so on. InvalidArgument says what is wrong. The text may come from another rank.
Result<Crossings> parse_crossings(std::string_view text);

/// How the ranks of a group exchange bytes.
struct Links {
  bool board = false;   // all ranks share one host and map a board; else bytes go as messages
  bool memory = false;  // with a board: each rank can read the memory of the others
  bool levels = false;  // the ranks are on several hosts, and a host has several of them
};

/// An operation that asks for its algorithm.
struct Asked {
  Operation operation = Operation::barrier;
  std::size_t bytes = 0;  // of the tensor that is reduced or broadcast; of all_gather and reduce_scatter: of all ranks
  std::size_t ranks = 1;
  Links links;
  /// Whether its reduction combines one rank after the other (reduces_in_turn()), which a ring needs.
  bool in_turn = true;
  bool even = true;  // all ranks give and take pieces of one size, which a ring of pieces needs
  bool gpu = false;  // GPUs do it among themselves (gpu_choice.h)
};
/// Chooses the algorithm: the prescribed one, else by `crossings` if they have the operation, else by the table. All
/// ranks choose alike, because all ask alike.
Algorithm choose(const Asked& asked, const Prescribed& prescribed, const Crossings& crossings = {});
/// The same with the reason, for people.
AlgorithmChoice explain_choice(const Asked& asked, const Prescribed& prescribed, const Crossings& crossings = {});
/// Finds the algorithm `name`, which one call asks for. InvalidArgument names those that fit the call if it is none of
/// them. A single rank has nothing to exchange, so all algorithms of the operation fit.
Result<Algorithm> find_algorithm(const Asked& asked, std::string_view name);

}  // namespace tensorferry::collectives
