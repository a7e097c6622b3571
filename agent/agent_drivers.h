/// The drivers of one agent, in order of priority, and what its hellos say of them.
///
/// Threads: any, once open() has returned; nothing changes after that.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "agent/options.h"
#include "agent/wire/frame.h"
#include "channels/channel.h"

namespace tensorferry {

class AgentDrivers final {
 public:
  static constexpr std::size_t most = 64;

  /// Makes the drivers that `options.channels` chooses, and their descriptors for `options.devices`. A driver that
  /// shares memory has no descriptors if the options forbid shared memory, unless they name the driver.
  Status open(const RawAgentOptions& options);

  [[nodiscard]] std::size_t size() const noexcept { return drivers_.size(); }
  [[nodiscard]] Driver& operator[](std::size_t index) const { return *drivers_[index]; }
  /// Returns the descriptors for the hello, one entry for each driver.
  [[nodiscard]] const std::vector<wire::Hello::Driver>& announced() const noexcept { return announced_; }

 private:
  std::vector<std::unique_ptr<Driver>> drivers_;
  std::vector<wire::Hello::Driver> announced_;
};

}  // namespace tensorferry
