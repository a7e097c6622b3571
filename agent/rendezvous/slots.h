/// What the sources of the directory share: its slots in the store, and how long it waits for the store.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/text.h"

namespace tensorferry::slots {

/// The claims of one slot at most: Directory::newest() may have to read each.
inline constexpr std::int64_t most_generations = 100'000;
/// The longest wait of one get() if the loop around it also polls for other changes.
inline constexpr std::chrono::milliseconds polling_slice{1000};

/// Returns the slot of a name, or of a rank.
inline std::string of_name(std::string_view name) { return formatted("n/{}", name); }
inline std::string of_rank(std::int64_t rank) { return formatted("r/{}", rank); }

/// Returns whether Store::get() says that there is no such key yet.
inline bool absent(const Status& status) { return status.code() == Code::deadline_exceeded; }

/// Shows a time for errors: "1.5 s".
inline std::string seconds_of(std::chrono::milliseconds time) {
  return fixed(static_cast<double>(time.count()) / 1000, 1) + " s";
}

}  // namespace tensorferry::slots
