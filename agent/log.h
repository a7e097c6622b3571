/// One line an event, on stderr, in one write, so that lines of several threads and processes do not mix.
/// `peer= channel= call= bytes= us=` is how a line names what it is about. Never a key, never a payload.
#pragma once

#include <string_view>

#include "channels/status.h"

namespace tensorferry {

/// Something that a user should look at: a peer that was turned away, a fallback. TENSORFERRY_LOG=off silences it.
void log_warning(std::string_view line) noexcept;
/// A call that `peer` may not make.
void log_refusal(std::string_view peer, std::string_view call, const Status& why) noexcept;
/// Printed with TENSORFERRY_LOG=info.
void log_info(std::string_view line) noexcept;

}  // namespace tensorferry
