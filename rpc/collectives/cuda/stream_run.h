/// An operation of a group on memory of GPUs, as copies, meetings and kernels on a stream.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "rpc/collectives/cuda/direct.h"
#include "rpc/collectives/cuda/pieces.h"
#include "rpc/collectives/cuda/reductions.h"
#include "rpc/collectives/gpu_choice.h"

namespace tensorferry::collectives::cuda {

/// The operation that the host enqueues now.
struct StreamOperation {
  bool by_flags = false;  // how the ranks meet
  bool ends_by_kernel = false;
  std::uint32_t number = 0;  // unless it is captured
  std::size_t half = 0;      // of each buffer, for this chunk
  std::size_t chunk = 0;     // where the chunk begins in the inputs
  LentInputs lent;
};

/// One operation, or several that are one call. The functions of DeviceOperations run on the thread that runs the
/// group's operations.
class StreamRun final : public DeviceRun, public std::enable_shared_from_this<StreamRun> {
 public:
  StreamRun(std::shared_ptr<Direct> direct, std::shared_ptr<GroupGpu> gpu, CUstream stream)
      : direct_(std::move(direct)),
        gpu_(std::move(gpu)),
        stream_(stream),
        rank_(direct_->group().rank()),
        ranks_(direct_->group().size()),
        captured_(!tensorferry::cuda::refusal_of_capture(gpu_->device, stream).ok()) {}

  [[nodiscard]] std::uint8_t number() const override {
    return captured_ ? gpu_->number | Fingerprint::captured : gpu_->number;
  }
  [[nodiscard]] bool ended() const override {
    if (!begun_.load(std::memory_order_acquire)) return false;
    if (captured_) return true;
    if (ranks_ > 1) return enqueued()->ended();
    const tensorferry::cuda::CaptureModeGuard outside;  // the query belongs to no CUDA graph
    return end_.done().has_value();
  }
  [[nodiscard]] Status status() const override;

  Status reduce(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op, std::size_t root,
                const WaitLimits& limits) override;
  Status broadcast(const Fingerprint& called, OutBytes data, std::size_t root, const WaitLimits& limits) override;
  Status gather(const Fingerprint& called, InBytes input, const std::vector<OutBytes>& outputs, std::size_t root,
                bool even, const WaitLimits& limits) override;
  Status scatter(const Fingerprint& called, const std::vector<InBytes>& inputs, OutBytes output, std::size_t root,
                 const WaitLimits& limits) override;
  Status reduce_scatter(const Fingerprint& called, const std::vector<InBytes>& inputs, OutBytes output,
                        const ReduceOp& op, bool even, const WaitLimits& limits) override;
  Status all_to_all(const Fingerprint& called, const std::vector<InBytes>& inputs, const std::vector<OutBytes>& outputs,
                    bool even, const WaitLimits& limits) override;

 private:
  /// Begins an operation: several may use this one after another.
  void begin() {
    now_ = {};
    now_.lent.at.resize(ranks_);
    const std::lock_guard lock(mutex_);
    early_ = {};
  }
  /// Enqueues the operation: `enqueue` has its copies, meetings and kernels.
  template <class Enqueue>
  Status enqueue(const Fingerprint& called, const WaitLimits& limits, const Enqueue& enqueue) {
    return enqueue_all(called, limits, std::cref(enqueue));  // which takes no memory
  }
  Status enqueue_all(const Fingerprint& called, const WaitLimits& limits, const std::function<void()>& enqueue);
  /// Keeps the first error of the driver.
  void then(CUresult result) {
    if (result_ == CUDA_SUCCESS) result_ = result;
  }
  /// Begins a chunk: the next half of each buffer is free.
  void take_half() { now_.half = gpu_->uses++ % 2; }
  [[nodiscard]] std::byte* half_of(std::size_t rank) const { return gpu_->buffers->half(rank, now_.half); }
  /// Lets the ranks agree on the call, and finds out whose inputs they read in place. `own` is the input that this rank
  /// lends if the others can map it; empty: none. `in_place`: it is the output too. They read `bytes` bytes of an
  /// input. `by_flags`: so their kernels meet.
  ///
  /// A small input is not lent: its copy takes less time than the meeting after the last read. Then kernels that meet
  /// by flags need no word of the hosts, so the calls are compared later (RawGroup::announce()), except among threads
  /// of one process: one thread's driver calls could wait for a kernel that waits for the other's.
  Status agree(const Fingerprint& called, bool by_flags, InBytes own, std::size_t bytes, const WaitLimits& limits,
               bool in_place = false);
  [[nodiscard]] bool lends(std::size_t rank) const { return now_.lent.at[rank] != nullptr; }
  /// Returns the bytes of the input of `rank` from `at` on, of which this chunk's half has a copy unless they are lent.
  [[nodiscard]] const std::byte* source_of(std::size_t rank, std::size_t at) const {
    return lends(rank) ? now_.lent.at[rank] + at : half_of(rank);
  }
  /// All ranks have read what is lent, so its owners may write it again.
  void give_back_lent() {
    if (now_.lent.any()) meet();
  }
  void meet();
  void copy(std::byte* to, InBytes from);
  /// Reduces [at, at + bytes) of the halves of all ranks, or of what they lend, into `out` and `copy`. `own` takes the
  /// place of this rank's half, unless it is not aligned; then the half has its bytes.
  void reduce_halves(const ReductionKernel& kernel, std::size_t at, std::size_t bytes, std::size_t item,
                     const std::byte* own, std::byte* out, std::byte* copy);
  void one_shot(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output);
  void two_shot(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output);
  std::uint32_t next_meeting();
  void take_result(std::size_t rank, std::size_t which, OutBytes output);
  void by_host(const ReduceOp& op, DType dtype, InBytes input, OutBytes output);
  Status reduce_by_flags(const Fingerprint& called, const FlagKernel& kernel, InBytes input, OutBytes output,
                         const WaitLimits& limits);
  /// Chooses the algorithm; all ranks have agreed on the one that the call asks for, or will.
  [[nodiscard]] GpuChoice choose(const Fingerprint& called, const AskedOnGpu& asked) const;
  void count(const Fingerprint& called, AlgorithmOnGpu algorithm) const {
    direct_->group().ways().counts().count_on_gpu(static_cast<Operation>(called.operation), captured_, algorithm);
  }
  [[nodiscard]] bool meets_by_flags(const Fingerprint& called, std::size_t bytes) const;
  [[nodiscard]] FlagArguments flag_arguments() const;
  /// Lets the launch that is enqueued next tell that the operation has ended.
  void end_by_kernel(FlagArguments& arguments);
  void lend(FlagArguments& arguments, std::size_t at) const;
  Status enqueue_pieces(const Fingerprint& called, const FlagKernel& kernel, std::size_t item, const Pieces& pieces,
                        const WaitLimits& limits);
  [[nodiscard]] std::optional<Result<FlagKernel>> find_exchange(const Fingerprint& called, std::size_t bytes) const;
  Status exchange_by_flags(const Fingerprint& called, const Result<FlagKernel>& kernel, const Pieces& pieces,
                           const WaitLimits& limits);
  void through_host(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output, std::size_t root);
  void by_one(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output, std::size_t root);
  Result<std::vector<std::uint64_t>> tell_sizes(const Fingerprint& called, std::vector<std::uint64_t> own,
                                                const WaitLimits& limits);
  [[nodiscard]] std::shared_ptr<Enqueued> enqueued() const {
    const std::lock_guard lock(mutex_);
    return enqueued_;
  }
  /// Agrees on the call and on the sizes of the pieces, which every rank gives alike.
  Status agree_on_pieces(const Fingerprint& called, const std::vector<InBytes>& inputs, const WaitLimits& limits);
  [[nodiscard]] Status unexpected(std::size_t from, std::size_t to, std::uint64_t gives, std::uint64_t expected) const;

  const std::shared_ptr<Direct> direct_;
  const std::shared_ptr<GroupGpu> gpu_;
  const CUstream stream_;
  const std::size_t rank_, ranks_;
  const bool captured_;  // into a CUDA graph
  StreamOperation now_;
  CUresult result_ = CUDA_SUCCESS;
  mutable std::mutex mutex_;
  std::shared_ptr<Enqueued> enqueued_;  // guarded by mutex_: the last one, if several use this stream's order
  Status early_;                     // and this: why the operation that has been announced, and is enqueued next, fails
  tensorferry::cuda::GpuEvent end_;  // in a group of one rank
  std::atomic<bool> begun_{false};
};

}  // namespace tensorferry::collectives::cuda
