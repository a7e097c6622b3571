/// Sends the control messages of a link's channels, so that they leave in the order of their ids.
///
/// Threads: any. The caller must hold none of the locks of the channel set.
#pragma once

#include <cstdint>

#include "agent/buffers/channel_link.h"
#include "base/mutex.h"
#include "channels/channel.h"

namespace tensorferry {

class OutgoingControls final {
 public:
  /// `link` outlives it.
  explicit OutgoingControls(ChannelLink& link) : link_(link) {}

  /// Sends a message about the channel with this code (ChannelBinding::code), and returns its id. `operation`: a
  /// ChannelBinding::Control.
  ControlId send(std::uint32_t code, std::uint8_t operation, ByteView bytes, Descriptors descriptors);

 private:
  ChannelLink& link_;
  Mutex mutex_;  // from the choice of an id until its message is queued
  ControlId sent_ = 0;
};

}  // namespace tensorferry
