/// Receives the bytes for GPU memory that is busy into host memory first.
#pragma once

#include <cstddef>
#include <memory>

#include "base/mutex.h"
#include "channels/cuda_basic/busy_transfers.h"
#include "channels/cuda_basic/transfer.h"
#include "channels/host_memory.h"

namespace tensorferry::cuda_basic {

/// Takes the bytes for memory that the GPU still uses, so that the chunks behind them need not wait: they go to host
/// memory, and from there to the GPU when the memory's stream has come so far. The host memory is as large as the
/// transfers' own, which the receiver has reserved already. It is not page-locked, because the driver call for that may
/// wait for all kernels. Thread-safe; runs completions with no lock held.
class Detour final : public std::enable_shared_from_this<Detour> {
 public:
  explicit Detour(Device device) : device_(device) {}
  ~Detour();
  Detour(const Detour&) = delete;
  Detour& operator=(const Detour&) = delete;

  /// Makes `transfer`, whose `ready` event is not empty, one into host memory. When it is done, its bytes are copied to
  /// its former memory, and its former completions run. Returns false, and leaves it as it is, if there is no memory.
  bool divert(Transfer& transfer);
  /// Fails all transfers whose copy to the GPU has not begun. Later calls do nothing.
  void close(const Status& status) { busy_->close(status); }

 private:
  /// A transfer whose bytes are in host memory, on their way to the GPU.
  struct Copy {
    Buffer from;
    Transfer to;
    std::size_t begun = 0;
  };
  void arrived(Buffer bytes, Transfer to, const Status& status);
  void advance(std::unique_ptr<Copy> copy);
  Status copy_chunk(Copy& copy);

  const Device device_;
  HostMemory host_memory_{{.idle_bytes = 0, .floor_bytes = 0}};
  const std::shared_ptr<BusyTransfers> busy_ = std::make_shared<BusyTransfers>();
  CUstream stream_ = nullptr;  // used by the thread of cuda::background() alone
};

}  // namespace tensorferry::cuda_basic
