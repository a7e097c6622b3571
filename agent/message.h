/// What travels in a call: a payload, buffers, and the devices on which the buffers land. And who is at either end.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "channels/buffer.h"
#include "channels/channel.h"

namespace tensorferry {

using Milliseconds = std::chrono::milliseconds;

/// Identifies one incarnation of one agent. A restarted agent of the same name has another incarnation number.
struct PeerInfo {
  std::string name;
  int rank = -1;                  // -1: joined without one
  std::uint64_t incarnation = 0;  // random, never 0
  bool operator==(const PeerInfo&) const = default;
};

/// The peer's device on which a buffer lands.
struct Destination {
  Device device;
  /// True for a tensor's buffer: the call's Placement and the peer's devices decide on which device it lands.
  /// False: the buffer lands on `device`, or the message cannot be sent.
  bool anywhere = false;
  bool operator==(const Destination&) const = default;
};

/// Maps the sender's devices to the receiver's devices on which tensors land. A call fails with InvalidArgument if the
/// receiver has no such device. A tensor that neither `all` nor `map` names lands on the receiver's device of the same
/// type and index if there is one, else on the first device of that type, else on the CPU.
struct Placement {
  std::optional<Device> all;                   // for every source device; takes precedence over `map`
  std::vector<std::pair<Device, Device>> map;  // from, to; at most 64
  [[nodiscard]] bool empty() const noexcept { return !all && map.empty(); }
  [[nodiscard]] std::optional<Device> find(Device from) const;
  bool operator==(const Placement&) const = default;
};

/// The payload and the buffers of a call or a reply. The payload is opaque to the agent; a payload that does not fit a
/// frame travels as a buffer.
struct Message {
  Bytes payload;
  std::vector<Buffer> buffers;            // must not change until the call's on_sent() completion runs
  std::vector<Destination> destinations;  // per buffer; buffers without one land on the peer's CPU
  std::vector<Sharing> sharing;           // per buffer; missing ones go by value

  [[nodiscard]] Destination destination_of(std::size_t buffer) const {
    return buffer < destinations.size() ? destinations[buffer] : Destination{};
  }
  [[nodiscard]] Sharing sharing_of(std::size_t buffer) const {
    return buffer < sharing.size() ? sharing[buffer] : Sharing::by_value;
  }
  /// Returns the bytes of the buffers that go by value. Shared and frozen buffers count nothing.
  [[nodiscard]] std::size_t bytes() const;
};

/// A message as the receiver gets it. The receiver owns every buffer, except those that the sender shares.
struct Received {
  Bytes payload;
  std::vector<Buffer> buffers;
};

/// Returns the function's name for errors and logs: the last part of a name that may have scopes ("py:module:f").
std::string_view shown_name(std::string_view function);

}  // namespace tensorferry
