#include "rpc/collectives/choose.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "base/text.h"

namespace tensorferry::collectives {
namespace {

constexpr std::array<std::string_view, 9> operations{
    "barrier", "broadcast", "all_reduce", "reduce", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"};
constexpr std::array<std::string_view, 5> algorithms{"direct", "one_shot", "two_shot", "ring", "two_level"};

/// Returns the algorithms that an operation may take.
std::vector<Algorithm> algorithms_of(Operation operation) {
  switch (operation) {
    case Operation::all_reduce:
    case Operation::reduce:
      return {Algorithm::one_shot, Algorithm::two_shot, Algorithm::ring, Algorithm::two_level};
    case Operation::broadcast:
      return {Algorithm::direct, Algorithm::ring, Algorithm::two_level};
    case Operation::all_gather:
    case Operation::reduce_scatter:
      return {Algorithm::direct, Algorithm::ring};
    default:
      return {Algorithm::direct};
  }
}

/// One algorithm, from so many bytes on.
struct Row {
  std::size_t from = 0;
  Algorithm algorithm = Algorithm::direct;
};

/// Returns measured rows, the largest first.
std::vector<Row> rows_of(const std::vector<CrossingRow>& crossings) {
  std::vector<Row> out;
  std::size_t from = 0;
  for (const auto& each : crossings) {
    out.push_back({from, each.algorithm});
    from = each.up_to + 1;
  }
  std::reverse(out.begin(), out.end());
  return out;
}

/// Returns the rows for an operation, the largest first. `python -m benchmarks.collectives` prints where they cross,
/// with --messages for ranks without a board.
std::vector<Row> rows_for(const Asked& asked, const Crossings& crossings) {
  constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;
  if (const auto it = crossings.find(asked.operation); it != crossings.end() && asked.ranks > 1) {
    return rows_of(it->second);
  }
  const bool reduces = asked.operation == Operation::all_reduce || asked.operation == Operation::reduce;
  if (algorithms_of(asked.operation).size() == 1 || asked.ranks == 1) {
    return {{0, reduces ? Algorithm::one_shot : Algorithm::direct}};
  }
  std::vector<Row> out;
  if (asked.links.levels && (reduces || asked.operation == Operation::broadcast)) {
    out.push_back({32 * KiB + 1, Algorithm::two_level});
  }
  // The root of a direct broadcast sends the bytes to each rank by itself, over its one link to the network.
  if (!asked.links.board && asked.ranks > 2 && asked.operation == Operation::broadcast)
    out.push_back({16 * MiB, Algorithm::ring});
  if (reduces) {
    out.push_back({(asked.links.board ? 64 : 128) * KiB + 1, Algorithm::two_shot});
    out.push_back({0, Algorithm::one_shot});
  } else {
    out.push_back({0, Algorithm::direct});
  }
  return out;
}

bool usable(const Asked& asked, Algorithm algorithm) {
  const bool combines = asked.operation != Operation::broadcast && asked.operation != Operation::all_gather;
  if (algorithm == Algorithm::two_level && !asked.links.levels) return false;
  if (algorithm == Algorithm::ring && !asked.even) return false;
  const bool in_turn = algorithm == Algorithm::ring || algorithm == Algorithm::two_level;
  return !in_turn || (asked.ranks > 1 && (asked.in_turn || !combines));
}

}  // namespace

std::string_view name_of(Operation operation) noexcept { return operations.at(static_cast<std::size_t>(operation)); }
std::string_view name_of(Algorithm algorithm) noexcept { return algorithms.at(static_cast<std::size_t>(algorithm)); }

Result<Operation> operation_of(std::string_view name) {
  for (std::size_t i = 0; i < operations.size(); ++i) {
    if (operations[i] == name) return static_cast<Operation>(i);
  }
  return Status(Code::invalid_argument, formatted("there is no operation \"{}\"", name));
}

Result<Prescribed> parse_algorithms(std::string_view text) {
  Prescribed out;
  while (!text.empty()) {
    const auto comma = text.find(',');
    const auto item = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    bool known = false;
    std::string there_are;
    for (std::size_t i = 0; i < operations.size(); ++i) {
      const auto operation = static_cast<Operation>(i);
      const auto all = algorithms_of(operation);
      for (const auto algorithm : all) {
        if (all.size() == 1) continue;
        const auto name = formatted("{}={}", operations[i], name_of(algorithm));
        there_are += (there_are.empty() ? "" : ", ") + name;
        if (name != item) continue;
        known = true;
        out[operation] = algorithm;
      }
    }
    if (!known) {
      return Status(Code::invalid_argument, formatted("\"{}\" prescribes no algorithm: there are {}", item, there_are));
    }
  }
  return out;
}

Result<Crossings> parse_crossings(std::string_view text) {
  const auto refused = [](std::string_view item, std::string_view why) {
    return Status(Code::invalid_argument, formatted("\"{}\" says no crossings: {}", item, why));
  };
  Crossings out;
  while (!text.empty()) {
    const auto comma = text.find(',');
    const auto item = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    const auto equals = item.find('=');
    const auto operation = operation_of(item.substr(0, equals));
    if (equals == std::string_view::npos || !operation.ok()) return refused(item, "it names no operation");
    const auto known = algorithms_of(*operation);
    std::vector<CrossingRow> rows;
    auto rest = item.substr(equals + 1);
    for (bool more = true; more;) {
      const auto end = rest.find(':');
      const auto name = rest.substr(0, end);
      const auto it = std::find_if(known.begin(), known.end(), [&](auto each) { return name_of(each) == name; });
      if (it == known.end()) return refused(item, "the operation has no such algorithm");
      rows.push_back({*it});
      more = end != std::string_view::npos;
      if (!more) break;
      rest = rest.substr(end + 1);
      const auto after = rest.find(':');
      const auto digits = rest.substr(0, after);
      auto& up_to = rows.back().up_to;
      const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), up_to);
      if (error != std::errc() || stop != digits.data() + digits.size() || up_to == CrossingRow::unbounded) {
        return refused(item, "a number of bytes is missing");
      }
      if (rows.size() > 1 && up_to <= rows[rows.size() - 2].up_to) return refused(item, "the bytes do not increase");
      if (after == std::string_view::npos) return refused(item, "the last algorithm is missing");
      rest = rest.substr(after + 1);
    }
    out[*operation] = std::move(rows);
  }
  return out;
}

Algorithm choose(const Asked& asked, const Prescribed& prescribed, const Crossings& crossings) {
  const auto it = prescribed.find(asked.operation);
  if (it != prescribed.end() && usable(asked, it->second)) return it->second;
  for (const auto& row : rows_for(asked, crossings)) {
    if (asked.bytes >= row.from && usable(asked, row.algorithm)) return row.algorithm;
  }
  return Algorithm::direct;
}

AlgorithmChoice explain_choice(const Asked& asked, const Prescribed& prescribed, const Crossings& crossings) {
  AlgorithmChoice out{choose(asked, prescribed, crossings), {}};
  if (algorithms_of(asked.operation).size() == 1) {
    out.reason = "the only algorithm of the operation";
  } else if (const auto it = prescribed.find(asked.operation); it != prescribed.end() && it->second == out.algorithm) {
    out.reason = "prescribed";
  } else {
    std::string rows;
    for (const auto& row : rows_for(asked, crossings)) {
      if (usable(asked, row.algorithm)) {
        rows += formatted("{}{} from {} bytes on", rows.empty() ? "" : ", ", name_of(row.algorithm), row.from);
      }
    }
    out.reason =
        formatted("{} ranks {}{}: {}", asked.ranks, asked.links.board ? "on one host" : "that exchange messages",
                  crossings.contains(asked.operation) ? ", as measured by `tensorferry tune`" : "", rows);
  }
  return out;
}

Result<Algorithm> find_algorithm(const Asked& asked, std::string_view name) {
  std::string fit;
  for (const auto algorithm : algorithms_of(asked.operation)) {
    const bool on_gpu = algorithm != Algorithm::ring && algorithm != Algorithm::two_level;
    if (asked.ranks > 1 && (asked.gpu ? !on_gpu : !usable(asked, algorithm))) continue;
    if (name_of(algorithm) == name) return algorithm;
    fit += (fit.empty() ? "" : ", ") + std::string(name_of(algorithm));
  }
  return Status(Code::invalid_argument, formatted("this {}{} cannot take the algorithm \"{}\": it can take {}",
                                                  name_of(asked.operation), asked.gpu ? " on a GPU" : "", name, fit));
}

}  // namespace tensorferry::collectives
