/// Time limits and repetition counts of tests, whether a sanitizer watches them, counts of a process's descriptors and
/// threads, and signals to a child.
#pragma once

#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <string_view>
#include <system_error>
#include <thread>

namespace tensorferry::testing {

/// How long a test waits for what must happen: longer than a busy machine, or ThreadSanitizer, holds a process up.
inline constexpr std::chrono::seconds long_enough{60};

/// Returns whether `holds` becomes true in time. Polls it every millisecond.
template <class Condition>
bool eventually(const Condition& holds, std::chrono::milliseconds within = long_enough) {
  const auto until = std::chrono::steady_clock::now() + within;
  while (!holds()) {
    if (std::chrono::steady_clock::now() >= until) return holds();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// Whether TENSORFERRY_SOAK=1 asks for full sizes and times.
inline const bool is_soak = [] {
  const char* soak = std::getenv("TENSORFERRY_SOAK");
  return soak != nullptr && std::string_view(soak) == "1";
}();
/// Returns how often a loop runs: a hundredth of `full`, or `full` if is_soak.
inline int rounds(int full) { return is_soak ? full : std::max(1, full / 100); }

/// Whether a sanitizer watches. Its memory counts as the process's, so a bound of resident memory needs room for it;
/// what the test computes takes several times as long.
#if defined(__SANITIZE_ADDRESS__) || defined(TENSORFERRY_UNDER_TSAN)
inline constexpr bool under_sanitizer = true;
#elif defined(__has_feature)
inline constexpr bool under_sanitizer = __has_feature(address_sanitizer);
#else
inline constexpr bool under_sanitizer = false;
#endif

inline std::size_t entries_of(const char* folder) {
  std::error_code ignored;
  const std::filesystem::directory_iterator entries(folder, ignored);
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}
/// Return the open descriptors and the threads of this process at this moment. The counts include the calling thread
/// and the descriptor by which it reads /proc.
inline std::size_t open_descriptors() { return entries_of("/proc/self/fd"); }
inline std::size_t threads() { return entries_of("/proc/self/task"); }

/// Sends a signal to a child. Waits until it has stopped if it is SIGSTOP, because a busy kernel takes its time.
inline void send_signal(pid_t child, int number) {
  ::kill(child, number);
  siginfo_t stopped;
  if (number == SIGSTOP) ::waitid(P_PID, static_cast<id_t>(child), &stopped, WSTOPPED);
}

/// A stopwatch.
class Since {
 public:
  [[nodiscard]] std::chrono::milliseconds passed() const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - began_);
  }

 private:
  const std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
};

}  // namespace tensorferry::testing
