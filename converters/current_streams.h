/// The streams that what has been received arrives on, made this thread's current ones.
#pragma once

#include <c10/core/Stream.h>

#include <span>
#include <vector>

#include "converters/registry.h"

namespace tensorferry {

/// While one lives, the current stream of each device that one of the buffers is on is the first such buffer's. So what
/// a handler does with its arguments, and what it returns, is in their order; only the others are waited for. On
/// devices that no buffer is on the current stream stays. Made and dropped on one thread.
class CurrentStreams final {
 public:
  CurrentStreams(const Converters& converters, std::span<const Buffer> buffers);
  ~CurrentStreams();
  CurrentStreams(const CurrentStreams&) = delete;
  CurrentStreams& operator=(const CurrentStreams&) = delete;

 private:
  std::vector<c10::Stream> before_;
};

}  // namespace tensorferry
