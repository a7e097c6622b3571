/// Log lines on stderr: one line an event, each in one write(2), so that lines of several threads and processes do not
/// mix. Lines name their subject with `peer= channel= call= bytes= us=`. A line never holds a key or a payload.
///
/// A line holds no control characters (printable() of base/text.h) and is cut at 4000 bytes. Each kind of line has a
/// rate: after `burst` lines, one a second. The lines above it are counted, and the next one of the kind ends with
/// "(and N more)". A kind is a place in the source that logs.
///
/// Any thread may call these functions. They do not throw: without memory the line is dropped. They do not block: if
/// no process reads the pipe or the terminal, the line is dropped and counted.
#pragma once

#include <cstddef>
#include <source_location>
#include <string_view>

#include "base/status.h"

namespace tensorferry {

namespace log_rate {

inline constexpr int burst = 5;  // of one kind, and one more for each second

/// Writes the last of the lines of each kind that were counted and not written, if its rate allows. An agent calls it
/// every second, so that the last lines of a flood are told too.
void write_counted() noexcept;
/// Forgets what was logged. For tests: the next lines of each kind are written.
void forget() noexcept;

}  // namespace log_rate

/// Logs an event that a user should look at: a peer that was turned away, a fallback. TENSORFERRY_LOG=off silences it.
void log_warning(std::string_view line, std::source_location kind = std::source_location::current()) noexcept;
/// Logs, as a warning, a call that `peer` may not make. The name of the call is cut to 200 bytes.
void log_refusal(std::string_view peer, std::string_view call, const Status& why,
                 std::source_location kind = std::source_location::current()) noexcept;
/// Logs a line if TENSORFERRY_LOG=info is set.
void log_info(std::string_view line, std::source_location kind = std::source_location::current()) noexcept;

}  // namespace tensorferry
