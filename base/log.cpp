#include "base/log.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <compare>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "base/environment.h"
#include "base/per_process.h"
#include "base/text.h"

namespace tensorferry {

namespace {

using Clock = std::chrono::steady_clock;

enum class Verbosity { off, warning, info };

Verbosity verbosity() noexcept {
  static const Verbosity chosen = [] {
    const auto text = environment::log.value();
    if (text == "off") return Verbosity::off;
    return text == "info" ? Verbosity::info : Verbosity::warning;
  }();
  return chosen;
}

constexpr std::size_t longest = 4000;  // a pipe takes PIPE_BUF bytes at once or not at all
static_assert(longest + 96 <= PIPE_BUF);

/// Writes to a pipe or a terminal that other processes use too, without O_NONBLOCK in the descriptor that they share.
bool write_to_reader(std::string_view line) noexcept {
  pollfd writable{STDERR_FILENO, POLLOUT, 0};
  if (::poll(&writable, 1, 0) != 1 || writable.revents != POLLOUT) return false;  // full, or without a reader
  const int own = ::open("/proc/self/fd/2", O_WRONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
  const auto written = ::write(own >= 0 ? own : STDERR_FILENO, line.data(), line.size());
  if (own >= 0) ::close(own);
  return written > 0;
}

/// Writes the line at once, or returns false.
bool write_now(std::string_view line) noexcept {
  struct stat kind {};
  if (::fstat(STDERR_FILENO, &kind) != 0) return false;
  if (S_ISFIFO(kind.st_mode) || S_ISCHR(kind.st_mode)) return write_to_reader(line);
  if (S_ISSOCK(kind.st_mode)) return ::send(STDERR_FILENO, line.data(), line.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0;
  return ::write(STDERR_FILENO, line.data(), line.size()) > 0;
}

/// A place in the source that logs.
struct LineKind {
  const char* file = nullptr;
  std::uint32_t line = 0;
  auto operator<=>(const LineKind&) const = default;
};

/// What one kind may still write, and what it has not written.
struct Rate {
  double allowed = log_rate::burst;
  Clock::time_point counted = Clock::now();
  std::uint64_t kept_back = 0;
  std::string last;  // of those kept back

  /// Returns whether a line may be written now, and counts it.
  bool take(Clock::time_point now) {
    const std::chrono::duration<double> passed = now - counted;
    counted = now;
    allowed = std::min(allowed + passed.count(), double{log_rate::burst});
    if (allowed < 1) return false;
    allowed -= 1;
    return true;
  }
};

struct Lines {
  std::mutex mutex;
  std::map<LineKind, Rate> rates;
};

Lines& lines() {
  static auto& all = *new PerProcess<Lines>;  // threads may log while the process exits
  return all.get();
}

/// Writes `line`, which is not one of those kept back, or keeps it back. Under the lock.
void write_or_keep(Rate& rate, std::string line) {
  if (rate.take(Clock::now())) {
    auto whole = line;
    if (rate.kept_back != 0) whole += formatted(" (and {} more)", rate.kept_back);
    whole += '\n';
    if (write_now(whole)) {
      rate.kept_back = 0;
      return;
    }
  }
  ++rate.kept_back;
  rate.last = std::move(line);
}

void print(std::string_view severity, std::string_view line, const std::source_location& kind) noexcept {
  try {
    auto whole = formatted("tensorferry {}: {}", severity, printable(line.substr(0, longest)));
    if (whole.size() > longest) whole.resize(longest);
    auto& all = lines();
    const std::lock_guard lock(all.mutex);
    write_or_keep(all.rates[{kind.file_name(), kind.line()}], std::move(whole));
  } catch (...) {  // no memory for the line: drop it
  }
}

}  // namespace

void log_rate::write_counted() noexcept {
  try {
    auto& all = lines();
    const std::lock_guard lock(all.mutex);
    for (auto& [kind, rate] : all.rates) {
      if (rate.kept_back == 0) continue;
      --rate.kept_back;  // the last one, which is written now or kept back again
      write_or_keep(rate, std::move(rate.last));
    }
  } catch (...) {  // no memory: the next second tries again
  }
}

void log_rate::forget() noexcept {
  auto& all = lines();
  const std::lock_guard lock(all.mutex);
  all.rates.clear();
}

void log_warning(std::string_view line, std::source_location kind) noexcept {
  if (verbosity() != Verbosity::off) print("warning", line, kind);
}

void log_refusal(std::string_view peer, std::string_view call, const Status& why, std::source_location kind) noexcept {
  constexpr std::size_t enough = 200;  // bytes of a name that the peer chose
  try {
    log_warning(formatted("peer={} call={} refused: {}", peer, call.substr(0, enough), why.text()), kind);
  } catch (...) {  // no memory for the line: drop it
  }
}

void log_info(std::string_view line, std::source_location kind) noexcept {
  if (verbosity() == Verbosity::info) print("info", line, kind);
}

}  // namespace tensorferry
