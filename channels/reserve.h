/// Reserves receive memory, for channels whose `pull` fails at once if there is none.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"
#include "base/text.h"
#include "channels/channel.h"

namespace tensorferry {

/// Returns `bytes` bytes of the sink's memory on `device`, for a buffer from `peer`; ResourceExhausted if there is
/// none.
inline Result<Buffer> reserve(Sink& sink, std::uint64_t bytes, Device device, std::string_view peer) {
  auto memory = sink.reserve(bytes);
  if (!memory || memory->bytes < bytes) {
    return Status(Code::resource_exhausted,
                  formatted("no memory on {} for a buffer of {} bytes from {}", text_of(device), bytes, peer));
  }
  memory->bytes = bytes;
  return std::move(*memory);
}

}  // namespace tensorferry
