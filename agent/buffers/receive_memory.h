/// The memory in which the buffers of incoming messages land, by type of device.
///
/// Threads: any.
#pragma once

#include <map>
#include <memory>
#include <utility>

#include "channels/channel.h"
#include "channels/host_memory.h"

namespace tensorferry {

class ReceiveMemory final {
 public:
  /// `given`: the memory that the program brings. The CPU's is this agent's own pool unless the program brings another.
  explicit ReceiveMemory(std::map<DeviceType, std::shared_ptr<Memory>> given) : given_(std::move(given)) {}

  /// Returns the memory of a type of device; the host's if the program brings none.
  [[nodiscard]] Memory& of(DeviceType type) {
    const auto it = given_.find(type);
    return it != given_.end() ? *it->second : host_;
  }
  /// Returns the use of host memory, of this agent's pool and of a converter's.
  [[nodiscard]] HostMemory::Usage usage() const {
    auto usage = host_.usage();
    for (const auto& [type, memory] : given_) {
      if (const auto* pool = dynamic_cast<const HostMemory*>(memory.get())) {
        usage.held_bytes += pool->usage().held_bytes;
        usage.idle_bytes += pool->usage().idle_bytes;
      }
    }
    return usage;
  }
  /// Gives back host memory that was not needed for a while, of this agent's pool and of a converter's.
  void trim() {
    host_.trim();
    for (const auto& [type, memory] : given_) {
      if (auto* pool = dynamic_cast<HostMemory*>(memory.get())) pool->trim();
    }
  }

 private:
  HostMemory host_;
  const std::map<DeviceType, std::shared_ptr<Memory>> given_;
};

}  // namespace tensorferry
