/// The devices beside host memory on which an agent of a C++ program sends and receives tensors. The core knows no such
/// device: a library that does implements this interface, and AgentOptions::devices brings it in.
#pragma once

#include <memory>
#include <span>

#include "agent/agent.h"

namespace tensorferry::detail {

/// Thread-safe. One object may serve several agents.
class DeviceTensors {
 public:
  virtual ~DeviceTensors() = default;

  /// Adds the devices to an agent's options, and the memory in which tensors for them land. Throws InvalidArgument if
  /// this process has no such device.
  virtual void add_to(RawAgentOptions& options) const = 0;

  /// Makes the streams of the received `buffers` the current streams of this thread until the returned object is
  /// destroyed, on the same thread. So a served function's work on its arguments runs behind their arrival, and blocks
  /// no stream of the program.
  [[nodiscard]] virtual std::shared_ptr<void> use_streams_of(std::span<const Buffer> buffers) const = 0;
};

}  // namespace tensorferry::detail
