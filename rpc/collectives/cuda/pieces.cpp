#include "rpc/collectives/cuda/pieces.h"

#include <functional>

#include "base/text.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives::cuda {

std::pair<std::size_t, std::size_t> share_of_bytes(std::size_t rank, std::size_t ranks, std::size_t bytes) {
  const auto [begin, end] = share_of(rank, ranks, (bytes + alignment - 1) / alignment);
  return {std::min(begin * alignment, bytes), std::min(end * alignment, bytes)};
}

bool overlap(const std::vector<InBytes>& inputs, const std::vector<OutBytes>& outputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    for (std::size_t o = 0; o < outputs.size(); ++o) {
      if (inputs[i].empty() || outputs[o].empty() || (i == o && inputs[i].data() == outputs[o].data())) continue;
      const std::less<const std::byte*> before;
      if (before(inputs[i].data(), outputs[o].data() + outputs[o].size()) &&
          before(outputs[o].data(), inputs[i].data() + inputs[i].size())) {
        return true;
      }
    }
  }
  return false;
}

InBytes lendable(InBytes input, OutBytes output, bool two_shots) {
  if (two_shots && input.data() == output.data()) return input;
  return overlap({input, {}}, {{}, output}) ? InBytes() : input;
}

/// Returns whether an output begins where an input of the same index does.
static bool overlaps_in_place(const std::vector<InBytes>& inputs, const std::vector<OutBytes>& outputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].empty() && !outputs[i].empty() && inputs[i].data() == outputs[i].data()) return true;
  }
  return false;
}

InBytes Pieces::lendable(std::size_t rank) const {
  auto others = taken;
  if (others[rank].data() == given[rank].data()) others[rank] = {};  // which this rank alone reads, or no rank writes
  if (overlaps_in_place(given, others) || overlap(given, others)) return {};
  if (one_for_all) return given[rank];
  for (std::size_t to = 0; to < given.size(); ++to) {
    if (given[to].size() != most || given[to].data() != given[0].data() + to * most) return {};
  }
  return {given[0].data(), given.size() * most};
}

Status overlapping(const Fingerprint& called, std::size_t slot) {
  return {Code::invalid_argument,
          formatted("inputs and outputs of {} overlap, and one has more than {} bytes: use tensors that do not overlap",
                    name_of(static_cast<Operation>(called.operation)), slot)};
}

}  // namespace tensorferry::collectives::cuda
