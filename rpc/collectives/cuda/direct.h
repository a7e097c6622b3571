/// The GPUs of a group, in a build with CUDA: what the ranks have agreed on, and the order of the operations.
#pragma once

#include <atomic>
#include <map>
#include <mutex>

#include "channels/cuda/device.h"
#include "rpc/collectives/cuda/direct_group.h"
#include "rpc/collectives/cuda/lent_memory.h"
#include "rpc/collectives/cuda/symmetric_buffers.h"
#include "rpc/collectives/cuda/watch.h"
#include "rpc/collectives/gpu_choice.h"

namespace tensorferry::collectives::cuda {

/// A GPU of this rank, once all ranks know how they reach one another's.
struct GroupGpu {
  /// Returns the question for the algorithm of an operation.
  [[nodiscard]] AskedOnGpu ask(Operation operation, std::size_t bytes, std::size_t ranks, bool captured = false) const {
    return {operation, bytes, ranks, placement, staged.empty(), flags, captured};
  }

  int device = 0;
  std::uint8_t number = 0;  // Fingerprint::device
  std::string name;         // "NVIDIA H100 80GB HBM3"
  std::string staged;       // why its tensors go through host memory; empty: they do not
  RankPlacement placement = RankPlacement::gpu_each;
  bool apart = false;  // each rank is a process of its own
  JoinedGpus joined;
  bool flags = false;                         // the kernels of all ranks can meet by flags
  Crossings crossings;                        // measured, the same at every rank
  std::shared_ptr<SymmetricBuffers> buffers;  // null in a group of one rank
  std::size_t uses = 0;                       // of halves; used by the thread that runs operations
};

class Direct final : public DirectGroup, public std::enable_shared_from_this<Direct> {
 public:
  Direct(std::shared_ptr<RawGroup> group, Threads threads) : group_(std::move(group)), threads_(threads) {}
  ~Direct() override;

  Result<std::string> prepare(int device, StartOptions options) override;
  std::shared_ptr<DeviceRun> run_on(int device, Stream stream) override;
  std::string why_not_captured(int device) const override;
  void drain(const std::function<bool()>& interrupted) override;

  [[nodiscard]] RawGroup& group() const noexcept { return *group_; }

  // For operations, on the thread that runs them.
  [[nodiscard]] const std::shared_ptr<StreamWords>& words() const noexcept { return words_; }
  [[nodiscard]] DeviceWatch& watch() const noexcept { return *watch_; }
  [[nodiscard]] LentMemory& lent() const noexcept { return *lent_; }
  std::uint32_t next_operation() { return ++operations_; }
  std::uint32_t next_meeting() { return ++meetings_; }
  /// Returns which of a rank's slots the next operation by the host uses.
  std::size_t next_slot() { return slot_uses_++ % 2; }
  /// Makes `stream` of `device` wait for the last operation, unless it was on the same stream. The default streams of
  /// two devices have one handle.
  CUresult follow_last(int device, CUstream stream);
  /// The last operation on `stream` of `device` is enqueued.
  void ends_on(int device, CUstream stream);

 private:
  Status negotiate(GroupGpu& gpu, const WaitLimits& limits);
  std::string open_own(GroupGpu& gpu, tensorferry::cuda::BufferOffer& offer);
  void keep_notes(const std::shared_ptr<GroupGpu>& gpu);

  const std::shared_ptr<RawGroup> group_;
  const Threads threads_;
  mutable std::mutex mutex_;
  std::map<int, std::shared_ptr<GroupGpu>> gpus_;  // by device; guarded by mutex_
  // The rest is used by the thread that runs operations. All ranks count alike.
  std::shared_ptr<StreamWords> words_;
  std::shared_ptr<DeviceWatch> watch_;
  std::shared_ptr<LentMemory> lent_;
  std::atomic<std::uint32_t> operations_{0};  // drain() reads it
  std::uint32_t meetings_ = 0;
  std::size_t slot_uses_ = 0;
  int last_device_ = 0;
  CUstream last_stream_ = nullptr;
};

/// Makes an operation on `stream` of `gpu`.
std::shared_ptr<DeviceRun> make_run(std::shared_ptr<Direct> direct, std::shared_ptr<GroupGpu> gpu, CUstream stream);

}  // namespace tensorferry::collectives::cuda
