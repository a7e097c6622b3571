/// TensorPipe's contexts in this process, with their threads.
#pragma once

#include <tensorpipe/tensorpipe.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>

#include "base/background.h"
#include "base/status.h"
#include "include/tensorferry/device.h"

namespace tensorferry::tp {

/// Holds one context for pipes between CPUs and one for pipes between GPUs. Each is made at its first use, so a process
/// that sends no GPU tensors starts no CUDA part of TensorPipe.
///
/// Transport: uv (TCP) alone. TensorPipe's shm polls its rings without a pause, which takes a core as long as the
/// context lives. Its ibv needs more than a host can be expected to have. Channels: basic and cma for CPUs; cuda_basic,
/// cuda_ipc and cuda_xth for GPUs.
///
/// Contexts are never destroyed: the destructor waits for callbacks, and such a callback may drop the last reference to
/// an agent. A forked child has none of the parent's threads, and makes its own contexts.
class Contexts final {
 public:
  static Contexts& of_this_process();

  /// Returns the context for pipes of this type. Takes milliseconds the first time, then none. TensorPipe's threads run
  /// completions, so never call it while holding the GIL or a similar lock. If such a lock may be held, call it from a
  /// job of background().
  Result<tensorpipe::Context*> of(DeviceType type);

  /// Returns why no pipe here carries this device's memory; "" if one does. Makes the context at its first use.
  std::string why_not(Device device);

  /// Runs jobs that wait for one of TensorPipe's threads: listening and dialling.
  Background& background() { return background_; }

 private:
  struct ContextEntry {
    std::unique_ptr<tensorpipe::Context> context;
    std::shared_ptr<tensorpipe::channel::Context> any;  // the channel that reaches every device of the type
    Status failed;
  };
  ContextEntry& entry(DeviceType type);

  std::mutex mutex_;
  std::array<ContextEntry, 2> entries_;
  Background background_;
};

/// Returns `device` as TensorPipe names it ("cuda:1").
tensorpipe::Device device_of(Device device);

}  // namespace tensorferry::tp
