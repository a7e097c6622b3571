/// This process's part of TensorPipe: its contexts, with their threads.
#pragma once

#include <tensorpipe/tensorpipe.h>

#include <array>
#include <memory>
#include <mutex>
#include <string>

#include "channels/background.h"
#include "channels/status.h"
#include "include/tensorferry/device.h"

namespace tensorferry::tp {

/// One context for pipes between CPUs and one for pipes between GPUs, each made when first asked for, so that who sends
/// no tensors on GPUs has no part of CUDA's.
///
/// Transport: uv (TCP) alone. TensorPipe's shm polls its rings without a pause, a core for as long as the context
/// lives; ibv needs more than a host can be expected to have. Channels: basic and cma; cuda_basic, cuda_ipc and
/// cuda_xth.
///
/// Contexts are never destroyed: that waits for callbacks, which may be what lets go of the last agent. A forked child
/// has none of the parent's threads, and makes its own.
class Contexts final {
 public:
  static Contexts& of_this_process();

  /// Takes milliseconds the first time, then none. Never under the GIL's like: use background() where that may be held,
  /// for TensorPipe's threads run completions.
  Result<tensorpipe::Context*> of(DeviceType type);

  /// Why no pipe of ours carries this device's memory; "": one does.
  std::string why_not(Device device);

  /// For what waits for one of TensorPipe's threads: listening and dialling.
  Background& background() { return background_; }

 private:
  struct Slot {
    std::unique_ptr<tensorpipe::Context> context;
    std::shared_ptr<tensorpipe::channel::Context> any;  // the channel that reaches every device of the type
    Status failed;
  };
  Slot& slot(DeviceType type);

  std::mutex mutex_;
  std::array<Slot, 2> slots_;
  Background background_;
};

/// "cuda:1" as TensorPipe writes it.
tensorpipe::Device device_of(Device device);

}  // namespace tensorferry::tp
