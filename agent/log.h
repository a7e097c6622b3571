/// One line an event, on stderr, in one write, so that lines of several threads and processes do not mix.
/// `peer= channel= call= bytes= us=` is how a line names what it is about. Never a key, never a payload.
#pragma once

#include <string_view>

namespace tensorferry {

/// Something that a user should look at: a peer that was turned away, a fallback. TENSORFERRY_LOG=off silences it.
void log_warning(std::string_view line) noexcept;
/// Printed with TENSORFERRY_LOG=info.
void log_info(std::string_view line) noexcept;

}  // namespace tensorferry
