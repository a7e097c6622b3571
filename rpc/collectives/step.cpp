#include "rpc/collectives/step.h"

#include <cstring>

namespace tensorferry::collectives {
namespace {

bool overlap(std::span<const std::byte> a, const std::byte* b, std::size_t bytes) {
  return !a.empty() && bytes != 0 && a.data() < b + bytes && b < a.data() + a.size();
}

}  // namespace

bool overwrites_given(const ExchangeStep& step, std::size_t rank) {
  for (std::size_t to = 0; to < step.give.size(); ++to) {
    if (to == rank) continue;
    if (step.reduction != nullptr && overlap(step.give[to], step.out, step.count * size_of(step.dtype))) return true;
    for (std::size_t from = 0; from < step.into.size(); ++from) {
      const bool stays = from == rank && step.into[from] == step.give[from].data();
      if (!stays && overlap(step.give[to], step.into[from], step.take[from])) return true;
    }
  }
  return false;
}

void copy_given(ExchangeStep& step, std::size_t rank, std::vector<std::byte>& copy) {
  std::size_t bytes = 0;
  for (std::size_t to = 0; to < step.give.size(); ++to) bytes += to == rank ? 0 : step.give[to].size();
  copy.resize(bytes);
  std::size_t at = 0;
  for (std::size_t to = 0; to < step.give.size(); ++to) {
    auto& given = step.give[to];
    if (to == rank || given.empty()) continue;
    std::memcpy(copy.data() + at, given.data(), given.size());
    given = {copy.data() + at, given.size()};
    at += given.size();
  }
}

void take_own(const ExchangeStep& step, std::size_t rank) {
  const auto own = step.give[rank];
  if (!own.empty() && step.into[rank] != own.data()) std::memmove(step.into[rank], own.data(), own.size());
}

}  // namespace tensorferry::collectives
