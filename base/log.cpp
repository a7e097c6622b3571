#include "base/log.h"

#include <unistd.h>

#include <string>

#include "base/environment.h"
#include "base/text.h"

namespace tensorferry {

namespace {

enum class Verbosity { off, warning, info };

Verbosity verbosity() noexcept {
  static const Verbosity chosen = [] {
    const auto text = environment::log.value();
    if (text == "off") return Verbosity::off;
    return text == "info" ? Verbosity::info : Verbosity::warning;
  }();
  return chosen;
}

// One write(2) keeps the line whole among lines of other processes on the same terminal or pipe.
void print(std::string_view severity, std::string_view line) noexcept {
  try {
    std::string whole("tensorferry ");
    whole.append(severity).append(": ").append(line);
    for (char& c : whole) {
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';  // a peer's name must not forge a second line
    }
    whole += '\n';
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, whole.data(), whole.size());
  } catch (...) {  // no memory for the line: drop it
  }
}

}  // namespace

void log_warning(std::string_view line) noexcept {
  if (verbosity() != Verbosity::off) print("warning", line);
}

void log_refusal(std::string_view peer, std::string_view call, const Status& why) noexcept {
  constexpr std::size_t enough = 200;  // bytes of a name that the peer chose
  try {
    log_warning(formatted("peer={} call={} refused: {}", peer, call.substr(0, enough), why.text()));
  } catch (...) {  // no memory for the line: drop it
  }
}

void log_info(std::string_view line) noexcept {
  if (verbosity() == Verbosity::info) print("info", line);
}

}  // namespace tensorferry
