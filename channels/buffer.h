/// A run of bytes on a device, and who keeps it alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "channels/function.h"
#include "channels/status.h"
#include "include/tensorferry/device.h"

namespace tensorferry {

/// A device stream in whose order bytes are read and written (cudaStream_t for cuda); null for cpu.
using Stream = void*;

/// Keeps memory alive; the last holder to let go gives it back. May be dropped on any thread.
using Owner = std::shared_ptr<void>;

struct Buffer {
  Device device;
  std::byte* data = nullptr;  // may be null when `bytes` is 0
  std::size_t bytes = 0;
  Stream stream = nullptr;
  Owner owner;
};

/// Runs exactly once, also on error and close; never under a lock of ours.
using Completion = UniqueFunction<void(Status)>;

/// Where received bytes live, for one type of device. Implemented by converters; the CPU's is the pool of
/// channels/host_memory.h. Thread-safe.
class Memory {
 public:
  virtual ~Memory() = default;
  /// `bytes` of uninitialised memory on `device`, usable in the order of the returned stream; data is null where there
  /// is none to be had. Never waits: a reader may stand behind it.
  virtual Buffer allocate(std::size_t bytes, Device device) = 0;
};

}  // namespace tensorferry
