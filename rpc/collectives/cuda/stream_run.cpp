#include "rpc/collectives/cuda/stream_run.h"

#include <algorithm>
#include <utility>

namespace tensorferry::collectives::cuda {

namespace driver = tensorferry::cuda;
using driver::address_of;
using driver::api;

/// The largest input that is never lent to kernels that meet by flags, in bytes.
static constexpr std::size_t never_lent = std::size_t{64} << 10;

Status StreamRun::status() const {
  if (ranks_ == 1 || captured_ || !begun_.load(std::memory_order_acquire)) return {};
  const auto operation = enqueued();
  // The watch may not have looked since. It also fails the group.
  if (operation->ended() || !direct_->group().failed().ok()) (void)direct_->group().compare_announced();
  return operation->status();
}

Status StreamRun::enqueue_all(const Fingerprint& called, const WaitLimits& limits,
                              const std::function<void()>& enqueue) {
  const driver::DeviceGuard here(gpu_->device);
  if (!here.status().ok()) return here.status();
  if (const bool capturing = !driver::refusal_of_capture(gpu_->device, stream_).ok(); capturing != captured_) {
    return {Code::invalid_argument, "a capture of a CUDA graph has begun or ended on the stream since the call"};
  }
  if (!gpu_->staged.empty()) {
    return {Code::invalid_argument, "this operation on tensors of GPUs goes through host memory: " + gpu_->staged};
  }
  if (captured_ && !now_.by_flags) {
    return {Code::invalid_argument, "a CUDA graph is being captured on the stream, and the ranks do not meet by flags"};
  }
  if (captured_) {
    enqueue();
    // Of the operation's time, the ranks may have used up a part until they agreed. So the bound is at least the
    // group's.
    const auto left = limits.until - std::chrono::steady_clock::now();
    direct_->watch().watch_graphs(
        std::max<std::chrono::steady_clock::duration>(left, direct_->group().settings().timeout));
    begun_.store(true, std::memory_order_release);
    return driver::status_of(result_, "recording an operation in a CUDA graph");
  }
  then(direct_->follow_last(gpu_->device, stream_));
  if (ranks_ == 1) {
    enqueue();
    end_ = driver::GpuEvent::record(gpu_->device, stream_);
    begun_.store(static_cast<bool>(end_), std::memory_order_release);
    return driver::status_of(result_, "an operation on the GPU");
  }
  now_.number = direct_->next_operation();
  const auto operation = std::make_shared<Enqueued>(direct_->words(), rank_, now_.number, called, limits.until,
                                                    std::exchange(now_.lent.keep, {}));
  {
    const std::lock_guard lock(mutex_);
    if (!early_.ok()) return early_;
    enqueued_ = operation;
  }
  begun_.store(true, std::memory_order_release);
  direct_->watch().add(operation);
  if (result_ == CUDA_SUCCESS) enqueue();
  auto status = driver::status_of(result_, "an operation on the GPU");
  if (!now_.ends_by_kernel || !status.ok()) {
    // Also after an error, so that the streams can be released that wait already.
    const auto ends = direct_->words()->end(stream_, now_.number);
    if (ends != CUDA_SUCCESS && status.ok()) status = driver::status_of(ends, "an operation on the GPU");
    if (ends != CUDA_SUCCESS) direct_->watch().drop(status);
  }
  direct_->ends_on(gpu_->device, stream_);
  return status;
}

Status StreamRun::agree(const Fingerprint& called, bool by_flags, InBytes own, std::size_t bytes,
                        const WaitLimits& limits, bool in_place) {
  if (ranks_ == 1 || gpu_->placement != RankPlacement::gpu_each || !gpu_->staged.empty()) {
    return direct_->group().agree_on(called, limits);
  }
  if (by_flags && bytes <= never_lent) {
    const bool kernels_meet = bytes != 0;
    if (captured_ || !gpu_->apart || !kernels_meet) return direct_->group().agree_on(called, limits);
    const auto differ = [weak = weak_from_this(), before = enqueued()](const Status& why) {
      const auto self = weak.lock();
      if (!self) return;
      const std::lock_guard lock(self->mutex_);
      if (self->enqueued_ == before) {
        self->early_ = why;
      } else {
        self->enqueued_->fail(why);
      }
    };
    return direct_->group().announce(called, differ, limits);
  }
  auto lent = direct_->lent().agree(called, gpu_->device, own, in_place, bytes, captured_, limits);
  if (!lent.ok()) return lent.status();
  now_.lent = *std::move(lent);
  return {};
}

std::uint32_t StreamRun::next_meeting() {
  const auto meeting = direct_->next_meeting();
  direct_->watch().meets(meeting);
  return meeting;
}

void StreamRun::meet() {
  if (result_ == CUDA_SUCCESS) then(direct_->words()->meet(stream_, next_meeting()));
}

void StreamRun::copy(std::byte* to, InBytes from) {
  if (result_ != CUDA_SUCCESS || from.empty() || to == from.data()) return;
  then(api()->memcpy_async(address_of(to), address_of(from.data()), from.size(), stream_));
}

void StreamRun::reduce_halves(const ReductionKernel& kernel, std::size_t at, std::size_t bytes, std::size_t item,
                              const std::byte* own, std::byte* out, std::byte* copy) {
  if (result_ != CUDA_SUCCESS || bytes == 0) return;
  ReduceArguments arguments{};
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    const bool here = rank == rank_ && (ranks_ == 1 || is_aligned(own));
    arguments.inputs[rank] = here ? own : source_of(rank, now_.chunk) + at;
  }
  arguments.out = out;
  arguments.copy = copy;
  arguments.count = bytes / item;
  then(kernel.launch(arguments, stream_));
}

GpuChoice StreamRun::choose(const Fingerprint& called, const AskedOnGpu& asked) const {
  const auto& prescribed = direct_->group().settings().algorithms;
  const auto wanted = called.algorithm();
  if (!wanted) return choose_on_gpu(asked, prescribed, gpu_->crossings);
  return choose_on_gpu(asked, {{asked.operation, static_cast<Algorithm>(*wanted)}}, gpu_->crossings);
}

/// Returns whether the kernels of all ranks meet by flags in an operation of so many bytes: the same at every rank.
bool StreamRun::meets_by_flags(const Fingerprint& called, std::size_t bytes) const {
  const auto asked = gpu_->ask(static_cast<Operation>(called.operation), bytes, ranks_, captured_);
  const auto choice = choose(called, asked);
  return choice.meeting == MeetingOnGpu::by_flags;
}

/// Returns what all kernels of this rank have in common that meet by flags.
FlagArguments StreamRun::flag_arguments() const {
  const auto& words = *direct_->words();
  FlagArguments out{};
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    out.halves[rank] = gpu_->buffers->flag_halves(rank);
    out.flags[rank] = gpu_->buffers->flags(rank);
  }
  out.half_bytes = SymmetricBuffers::flag_half_bytes;
  out.epochs = gpu_->buffers->epochs(rank_);
  out.abort = reinterpret_cast<const unsigned*>(words.abort_word());  // NOLINT(performance-no-int-to-ptr)
  out.waits = reinterpret_cast<unsigned*>(words.wait_words());        // NOLINT(performance-no-int-to-ptr)
  out.rank = static_cast<unsigned>(rank_);
  return out;
}

void StreamRun::end_by_kernel(FlagArguments& arguments) {
  if (captured_) return;
  const auto& words = *direct_->words();
  arguments.ended = reinterpret_cast<unsigned*>(words.ended_word());  // NOLINT(performance-no-int-to-ptr)
  arguments.operation = now_.number;
  arguments.blocks_ended = gpu_->buffers->blocks_ended(rank_);
  now_.ends_by_kernel = true;
}

/// Tells a kernel where the chunk at `at` of each lent input lies.
void StreamRun::lend(FlagArguments& arguments, std::size_t at) const {
  for (std::size_t rank = 0; rank < ranks_; ++rank)
    arguments.lent[rank] = lends(rank) ? now_.lent.at[rank] + at : nullptr;
}

std::shared_ptr<DeviceRun> make_run(std::shared_ptr<Direct> direct, std::shared_ptr<GroupGpu> gpu, CUstream stream) {
  return std::make_shared<StreamRun>(std::move(direct), std::move(gpu), stream);
}

}  // namespace tensorferry::collectives::cuda
