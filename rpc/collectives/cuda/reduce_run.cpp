// The reductions into one tensor of each rank, or of the root: all_reduce and reduce.
#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "channels/cuda/event_poller.h"
#include "rpc/collectives/board.h"
#include "rpc/collectives/cuda/stream_run.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives::cuda {

namespace driver = tensorferry::cuda;
using driver::address_of;
using driver::api;

static std::byte* pointer_to(CUdeviceptr address) {
  return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
}

/// Each rank reads the bytes of all ranks, and reduces them itself. `output` is empty if it takes no result.
void StreamRun::one_shot(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output) {
  if (ranks_ > 1) {
    take_half();
    if (!lends(rank_)) copy(half_of(rank_), input);
    meet();
  }
  reduce_halves(kernel, 0, output.size(), item, input.data(), output.data(), nullptr);
  give_back_lent();
}

/// Each rank reduces its share into its buffer, in place, and into its output. Then it takes the shares of the others.
void StreamRun::two_shot(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output) {
  const auto [begin, end] = share_of_bytes(rank_, ranks_, input.size());
  take_half();
  auto* const half = half_of(rank_);
  if (!lends(rank_)) {
    const bool aligned = is_aligned(input.data());  // the kernel reads this rank's share from the input
    copy(half, aligned ? input.first(begin) : input);
    if (aligned) copy(half + end, input.subspan(end));
  }
  meet();
  auto* const result = output.empty() ? nullptr : output.data() + begin;
  reduce_halves(kernel, begin, end - begin, item, input.data() + begin, half + begin, result);
  meet();  // what is lent has been read too
  if (output.empty()) return;
  for (std::size_t i = 1; i < ranks_; ++i) {  // each rank begins with another one
    const auto other = (rank_ + i) % ranks_;
    const auto [from, to] = share_of_bytes(other, ranks_, input.size());
    copy(output.data() + from, {half_of(other) + from, to - from});
  }
}

/// Each kernel meets the others and reduces, once the ranks have agreed. It copies the input first, unless that is
/// lent.
Status StreamRun::reduce_by_flags(const Fingerprint& called, const FlagKernel& kernel, InBytes input, OutBytes output,
                                  const WaitLimits& limits) {
  const auto item = size_of(static_cast<DType>(called.dtype));
  auto arguments = flag_arguments();
  // It meets once more than with halves.
  arguments.all_in_place = now_.lent.all_in_place && input.size() > SymmetricBuffers::flag_half_bytes;
  const auto most = arguments.all_in_place ? input.size() : SymmetricBuffers::flag_half_bytes;
  now_.by_flags = true;
  return enqueue(called, limits, [&] {
    if (!captured_) direct_->watch().meets_by_flags();
    for (std::size_t at = 0; at < input.size() && result_ == CUDA_SUCCESS; at += most) {
      const auto in = part_of(input, at, most);
      lend(arguments, at);
      arguments.input = in.data();
      arguments.output = output.empty() ? nullptr : part_of(output, at, in.size()).data();
      arguments.count = in.size() / item;
      if (at + most >= input.size()) end_by_kernel(arguments);
      then(kernel.launch(arguments, stream_));
    }
  });
}

/// The root, or rank 0 if all take the result, reduces the bytes of all ranks.
void StreamRun::by_one(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output,
                       std::size_t root) {
  const auto one = root == Mailbox::any_rank ? 0 : root;
  take_half();
  auto* const half = half_of(rank_);
  if (rank_ != one || !is_aligned(input.data())) copy(half, input);
  meet();
  if (rank_ == one) {
    auto* const to_all = root == Mailbox::any_rank ? half : nullptr;
    reduce_halves(kernel, 0, input.size(), item, input.data(), output.data(), to_all);
  }
  if (root != Mailbox::any_rank) return;
  meet();
  if (rank_ != one) copy(output.data(), {half_of(one), output.size()});
}

/// As by_one(), but the kernel reads the others' bytes in slots of the host, and leaves the result there. Of each chunk
/// the slots are another one than of the chunk before, so the other ranks give a chunk before they take that result.
void StreamRun::through_host(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output,
                             std::size_t root) {
  const bool all_take = root == Mailbox::any_rank;
  const auto one = all_take ? 0 : root;
  const auto& words = direct_->words();
  struct Taken {
    std::size_t which;  // of the slots
    OutBytes to;
    std::uint32_t meeting;
  };
  std::optional<Taken> last;  // the chunk whose result has not been taken
  const auto take_last = [&] {
    if (!last || result_ != CUDA_SUCCESS) return;
    then(words->await(stream_, last->meeting, one));
    if (all_take) take_result(one, last->which, last->to);
  };
  take_half();
  for (std::size_t at = 0; at < input.size() && result_ == CUDA_SUCCESS; at += Board::gpu_slot_bytes) {
    const auto in = part_of(input, at, Board::gpu_slot_bytes);
    const auto out = output.empty() ? output : part_of(output, at, in.size());
    const auto which = direct_->next_slot();
    const auto meeting = next_meeting();
    if (rank_ != one) {
      then(api()->memcpy_async(words->slot_on_device(rank_, which), address_of(in.data()), in.size(), stream_));
      if (result_ == CUDA_SUCCESS) then(words->come(stream_, meeting));
      take_last();
      last = {which, out, meeting};
      continue;
    }
    ReduceArguments arguments{};
    const bool aligned = is_aligned(in.data());
    if (!aligned) copy(half_of(rank_) + at, in);
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      if (rank != one) {
        then(words->await(stream_, meeting, rank));
        arguments.inputs[rank] = pointer_to(words->slot_on_device(rank, which));
      } else {
        arguments.inputs[rank] = aligned ? in.data() : half_of(rank_) + at;
      }
    }
    arguments.out = out.data();
    arguments.copy = all_take ? pointer_to(words->slot_on_device(one, which)) : nullptr;
    arguments.count = in.size() / item;
    if (result_ == CUDA_SUCCESS) then(kernel.launch(arguments, stream_));
    if (result_ == CUDA_SUCCESS) then(words->come(stream_, meeting));
  }
  take_last();
  meet();  // the next operation may write the slots
}

/// The streams copy the bytes to slots of the host, where a thread of each rank reduces them.
void StreamRun::by_host(const ReduceOp& op, DType dtype, InBytes input, OutBytes output) {
  if (result_ != CUDA_SUCCESS) return;
  const auto& words = direct_->words();
  const auto which = direct_->next_slot();
  then(api()->memcpy_async(words->slot_on_device(rank_, which), address_of(input.data()), input.size(), stream_));
  const auto meeting = next_meeting();
  if (result_ == CUDA_SUCCESS) then(words->meet_by_host(stream_, meeting));
  if (result_ != CUDA_SUCCESS) return;
  driver::EventPoller::of_host_copies().poll_repeatedly([words, operation = enqueued(), op, dtype, which, meeting,
                                                         ranks = ranks_, rank = rank_, takes = !output.empty(),
                                                         count = input.size() / size_of(dtype)] {
    using Progress = driver::EventPoller::Progress;
    if (operation->ended()) return Progress::over;  // it was released
    if (!words->all_have_come(meeting)) return Progress::none;
    std::vector<const std::byte*> inputs;
    for (std::size_t from = 0; from < ranks; ++from) inputs.push_back(words->slot(from, which));
    if (takes) collectives::reduce(op, dtype, inputs, words->slot(rank, 2), count);
    words->does_its_part(meeting);
    return Progress::over;
  });
  take_result(rank_, 2, output);
}

/// Copies a result from a slot. The driver sends fewer than 32 KB with the commands of the GPU's kernels, which costs a
/// turn, but not if they are rows.
void StreamRun::take_result(std::size_t rank, std::size_t which, OutBytes output) {
  constexpr std::size_t sent_with_commands = std::size_t{32} << 10;
  const auto& words = direct_->words();
  std::size_t done = 0;
  if (output.size() < sent_with_commands && output.size() > 1) {
    CUDA_MEMCPY2D rows{};
    rows.srcMemoryType = CU_MEMORYTYPE_HOST;
    rows.srcHost = words->slot(rank, which);
    rows.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    rows.dstDevice = address_of(output.data());
    rows.Height = 2;
    rows.srcPitch = rows.dstPitch = rows.WidthInBytes = output.size() / rows.Height;
    then(api()->memcpy_2d_async(&rows, stream_));
    done = rows.WidthInBytes * rows.Height;
  }
  if (done == output.size() || result_ != CUDA_SUCCESS) return;
  then(api()->memcpy_async(address_of(output.data() + done), words->slot_on_device(rank, which) + done,
                           output.size() - done, stream_));
}

Status StreamRun::reduce(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op,
                         std::size_t root, const WaitLimits& limits) {
  begin();
  const auto dtype = static_cast<DType>(called.dtype);
  const bool takes = root == Mailbox::any_rank || root == rank_;
  const auto asked = gpu_->ask(static_cast<Operation>(called.operation), input.size(), ranks_, captured_);
  const auto choice = choose(called, asked);
  const auto algorithm = choice.algorithm;
  count(called, algorithm);
  const bool two_shots = algorithm == AlgorithmOnGpu::two_shot;
  const bool by_flags = choice.meeting == MeetingOnGpu::by_flags;
  const bool in_place = takes && two_shots && input.data() == output.data();
  // A kernel is loaded before the ranks agree: then no rank loads one while another rank's stream waits for it.
  std::optional<Result<FlagKernel>> flag_kernel;
  if (by_flags || (two_shots && may_meet_by_flags(choice, asked))) {
    flag_kernel = FlagKernel::find(gpu_->device, dtype, op, ranks_,
                                   two_shots ? FlagKernel::Kind::two_shot : FlagKernel::Kind::one_shot);
  }
  const auto kernel = by_flags ? std::nullopt : std::optional(ReductionKernel::find(gpu_->device, dtype, op, ranks_));
  const auto lent = lendable(input, takes ? output : OutBytes(), two_shots);
  if (auto status = agree(called, by_flags, lent, input.size(), limits, in_place); !status.ok()) return status;
  if (by_flags || (flag_kernel && now_.lent.all_in_place)) {
    if (!flag_kernel->ok()) return flag_kernel->status();
    return reduce_by_flags(called, **flag_kernel, input, takes ? output : OutBytes(), limits);
  }
  if (!kernel->ok()) return kernel->status();
  const auto item = size_of(dtype);
  return enqueue(called, limits, [&] {
    const auto most = ranks_ == 1 ? std::max<std::size_t>(1, input.size()) : half_bytes;
    for (std::size_t at = 0; at < input.size(); at += most) {
      now_.chunk = at;
      const auto in = part_of(input, at, most);
      const auto out = takes ? part_of(output, at, most) : OutBytes();
      if (algorithm == AlgorithmOnGpu::one_shot) {
        one_shot(**kernel, item, in, out);
      } else if (algorithm == AlgorithmOnGpu::two_shot) {
        two_shot(**kernel, item, in, out);
      } else if (algorithm == AlgorithmOnGpu::by_host) {
        by_host(op, dtype, in, out);
      } else if (choice.through_host) {
        through_host(**kernel, item, in, out, root);
      } else {
        by_one(**kernel, item, in, out, root);
      }
    }
  });
}

}  // namespace tensorferry::collectives::cuda
