/// A scope in which the streams of received buffers are this thread's current streams.
#pragma once

#include <c10/core/Stream.h>

#include <span>
#include <vector>

#include "converters/registry.h"

namespace tensorferry {

/// Sets, for each device that holds a buffer, the current stream to the stream of the first buffer on that device. So a
/// handler's work on its arguments, and its results, are ordered behind that buffer's arrival without a wait. Further
/// buffers on the device have other streams; to_storage() makes the current stream wait for those. The current streams
/// of other devices do not change. The destructor restores the streams. Construct and destroy it on the same thread.
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
