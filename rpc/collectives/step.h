/// A step of a collective operation: what one rank gives to the others and takes from them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "include/tensorferry/reduction.h"

namespace tensorferry::collectives {

/// What one rank gives and takes in a step. The ranks of a group exchange bytes step by step.
struct ExchangeStep {
  bool agreed = false;  // a later step of an operation: its first step has shown that the calls agree
  std::vector<std::span<const std::byte>> give;  // to each rank; this one's own: its input
  std::vector<std::uint64_t> take;               // the bytes from each rank
  std::vector<std::byte*> into;                  // where they go; empty if they are reduced
  const ReduceOp* reduction = nullptr;           // reduces all inputs, of `count` elements each, into `out`
  DType dtype = DType::uint8;
  std::byte* out = nullptr;
  std::size_t count = 0;

  explicit ExchangeStep(std::size_t ranks) : give(ranks), take(ranks) {}
};

/// Returns whether `rank`, which does this step, writes bytes that another rank may still read in it.
bool overwrites_given(const ExchangeStep& step, std::size_t rank);
/// Copies what the other ranks take, each byte once, and gives the copy.
void copy_given(ExchangeStep& step, std::size_t rank, std::vector<std::byte>& copy);

/// Copies what `rank` takes of its own to where it goes. Before it takes anything from another rank, because that may
/// go over its own bytes.
void take_own(const ExchangeStep& step, std::size_t rank);

/// Returns the elements that `rank` reduces for all: [first, second).
inline std::pair<std::size_t, std::size_t> share_of(std::size_t rank, std::size_t ranks, std::size_t elements) {
  return {elements * rank / ranks, elements * (rank + 1) / ranks};
}

}  // namespace tensorferry::collectives
