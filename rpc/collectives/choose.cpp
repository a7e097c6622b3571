#include "rpc/collectives/choose.h"

#include <array>

#include "base/text.h"

namespace tensorferry::collectives {
namespace {

constexpr std::array<std::string_view, 9> operations{
    "barrier", "broadcast", "all_reduce", "reduce", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"};
constexpr std::array<std::string_view, 3> algorithms{"direct", "one_shot", "two_shot"};

bool reduces_everywhere(Operation operation) {
  return operation == Operation::all_reduce || operation == Operation::reduce;
}

/// The largest all_reduce of one_shot, in bytes. Estimated: from about here on, to read the inputs of all ranks costs
/// more than a second step.
std::size_t crossing(std::size_t ranks, Links links) {
  if (!links.board) return std::size_t{32} << 10;
  return ranks <= 2 ? std::size_t{32} << 10 : std::size_t{16} << 10;
}

}  // namespace

std::string_view name_of(Operation operation) noexcept { return operations.at(static_cast<std::size_t>(operation)); }
std::string_view name_of(Algorithm algorithm) noexcept { return algorithms.at(static_cast<std::size_t>(algorithm)); }

Result<Prescribed> parse_algorithms(std::string_view text) {
  Prescribed out;
  while (!text.empty()) {
    const auto comma = text.find(',');
    const auto item = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view() : text.substr(comma + 1);
    const auto equals = item.find('=');
    const auto operation = item.substr(0, equals);
    const auto algorithm = equals == std::string_view::npos ? std::string_view() : item.substr(equals + 1);
    if ((operation != "all_reduce" && operation != "reduce") || (algorithm != "one_shot" && algorithm != "two_shot")) {
      return Status(Code::invalid_argument,
                    formatted("\"{}\" prescribes no algorithm: there are all_reduce=one_shot, all_reduce=two_shot, "
                              "reduce=one_shot, reduce=two_shot",
                              item));
    }
    out[operation == "reduce" ? Operation::reduce : Operation::all_reduce] =
        algorithm == "one_shot" ? Algorithm::one_shot : Algorithm::two_shot;
  }
  return out;
}

Algorithm choose(Operation operation, std::size_t bytes, std::size_t ranks, Links links, const Prescribed& prescribed) {
  if (!reduces_everywhere(operation)) return Algorithm::direct;
  if (const auto it = prescribed.find(operation); it != prescribed.end()) return it->second;
  return bytes <= crossing(ranks, links) ? Algorithm::one_shot : Algorithm::two_shot;
}

AlgorithmChoice explain_choice(Operation operation, std::size_t bytes, std::size_t ranks, Links links,
                               const Prescribed& prescribed) {
  AlgorithmChoice out{choose(operation, bytes, ranks, links, prescribed), {}};
  if (!reduces_everywhere(operation)) {
    out.reason = "the only algorithm of the operation";
  } else if (prescribed.contains(operation)) {
    out.reason = "prescribed";
  } else {
    out.reason = formatted("{} bytes are {} {}, the crossing of {} ranks {}", bytes,
                           out.algorithm == Algorithm::one_shot ? "at most" : "more than", crossing(ranks, links),
                           ranks, links.board ? "on one host" : "that exchange messages");
  }
  return out;
}

}  // namespace tensorferry::collectives
