/// Log lines on stderr: one line an event, each in one write(2), so that lines of several threads and processes do not
/// mix. Lines name their subject with `peer= channel= call= bytes= us=`. A line never holds a key or a payload.
///
/// Any thread may call these functions. They do not throw: without memory the line is dropped.
#pragma once

#include <string_view>

#include "base/status.h"

namespace tensorferry {

/// Logs an event that a user should look at: a peer that was turned away, a fallback. TENSORFERRY_LOG=off silences it.
void log_warning(std::string_view line) noexcept;
/// Logs, as a warning, a call that `peer` may not make. The name of the call is cut to 200 bytes.
void log_refusal(std::string_view peer, std::string_view call, const Status& why) noexcept;
/// Logs a line if TENSORFERRY_LOG=info is set.
void log_info(std::string_view line) noexcept;

}  // namespace tensorferry
