/// `Buffer`, a run of bytes on a device with its stream and its owner; and `Memory`, which allocates buffers to receive
/// into.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/function.h"
#include "base/status.h"
#include "include/tensorferry/device.h"

namespace tensorferry {

/// A device stream, in whose order bytes are read and written (cudaStream_t for cuda); null for cpu.
using Stream = void*;

/// Keeps memory alive; the memory goes back when the last holder drops it, on any thread.
using Owner = std::shared_ptr<void>;

struct Buffer {
  Device device;
  std::byte* data = nullptr;  // may be null when `bytes` is 0
  std::size_t bytes = 0;
  Stream stream = nullptr;
  Owner owner;
};

/// Runs exactly once, also on error and close; never under a lock of this library.
using Completion = UniqueFunction<void(Status)>;

/// Allocates memory for received bytes, for one type of device. Converters implement it; the CPU's is the pool in
/// channels/host_memory.h. Thread-safe.
class Memory {
 public:
  virtual ~Memory() = default;
  /// Returns `bytes` bytes of uninitialised memory on `device`, usable in the order of the returned stream. `data` is
  /// null if there is none. Never waits, because a reading thread may call it.
  virtual Buffer allocate(std::size_t bytes, Device device) = 0;
};

}  // namespace tensorferry
