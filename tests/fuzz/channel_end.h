/// What fuzzers of channels hand to them.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "channels/buffer.h"
#include "channels/status.h"

namespace tensorferry::fuzzing {

/// Completions. Aborts where one runs twice, and in the destructor where one did not run.
class Promises {
 public:
  ~Promises() {
    for (const auto& runs : runs_) {
      if (*runs != 1) std::abort();
    }
  }
  Completion make() {
    auto runs = std::make_shared<int>(0);
    runs_.push_back(runs);
    return [runs](const Status&) {
      if (++*runs != 1) std::abort();
    };
  }
  void forget_last() { runs_.pop_back(); }  // an offer was refused: it is dropped unrun

 private:
  std::vector<std::shared_ptr<int>> runs_;
};

/// Memory of exactly so many bytes, so that a sanitizer sees a byte too many; nullopt: more than `most`.
inline std::optional<Buffer> memory_of(std::size_t bytes, std::size_t most) {
  if (bytes > most) return std::nullopt;
  std::shared_ptr<std::byte[]> memory(new std::byte[bytes]);
  return Buffer{Device{}, memory.get(), bytes, nullptr, std::move(memory)};
}

}  // namespace tensorferry::fuzzing
