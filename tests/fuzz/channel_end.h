/// Completions and memory that the fuzzers of channels hand to a channel.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.h"
#include "channels/buffer.h"
#include "tests/fuzz/must.h"

namespace tensorferry::fuzzing {

/// Makes completions that must run exactly once. Aborts if one runs twice; the destructor aborts if one has not run.
class Promises {
 public:
  ~Promises() {
    for (const auto& runs : runs_) must(*runs == 1);
  }
  Completion make() {
    auto runs = std::make_shared<int>(0);
    runs_.push_back(runs);
    return [runs](const Status&) { must(++*runs == 1); };
  }
  void forget_last() { runs_.pop_back(); }  // after a refused offer, which drops its completion without running it

 private:
  std::vector<std::shared_ptr<int>> runs_;
};

/// Returns memory of exactly `bytes` bytes, so that a sanitizer sees an access beyond them. Returns nullopt if `bytes`
/// exceeds `most`.
inline std::optional<Buffer> memory_of(std::size_t bytes, std::size_t most) {
  if (bytes > most) return std::nullopt;
  std::shared_ptr<std::byte[]> memory(new std::byte[bytes]);
  return Buffer{Device{}, memory.get(), bytes, nullptr, std::move(memory)};
}

}  // namespace tensorferry::fuzzing
