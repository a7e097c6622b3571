// The operations on GPUs, as copies, meetings and kernels on a stream.
#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include "base/text.h"
#include "channels/cuda/event_poller.h"
#include "rpc/collectives/cuda/direct.h"
#include "rpc/collectives/cuda/reductions.h"
#include "rpc/collectives/gpu_choice.h"
#include "rpc/collectives/reduce.h"

namespace tensorferry::collectives::cuda {
namespace {

namespace driver = tensorferry::cuda;
using driver::address_of;
using driver::api;
using InBytes = DeviceOperations::InBytes;
using OutBytes = DeviceOperations::OutBytes;

constexpr std::size_t alignment = 16;  // what kernels read at once
constexpr std::size_t half_bytes = SymmetricBuffers::half_bytes;

bool is_aligned(const void* address) { return reinterpret_cast<std::uintptr_t>(address) % alignment == 0; }

/// Returns the bytes of a chunk of `bytes` bytes that `rank` reduces for all: [first, second). Shares begin at
/// multiples of 16 bytes.
std::pair<std::size_t, std::size_t> share_of_bytes(std::size_t rank, std::size_t ranks, std::size_t bytes) {
  const auto [begin, end] = share_of(rank, ranks, (bytes + alignment - 1) / alignment);
  return {std::min(begin * alignment, bytes), std::min(end * alignment, bytes)};
}

/// Returns the largest of the sizes.
std::size_t largest(const auto& pieces) {
  std::size_t out = 0;
  for (const auto& piece : pieces) out = std::max(out, piece.size());
  return out;
}

template <class Byte>
std::span<Byte> part_of(std::span<Byte> bytes, std::size_t at, std::size_t most) {
  at = std::min(at, bytes.size());
  return bytes.subspan(at, std::min(most, bytes.size() - at));
}

/// Returns whether an input lies over an output of another index, or over its own at another address.
bool overlap(const std::vector<InBytes>& inputs, const std::vector<OutBytes>& outputs) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    for (std::size_t o = 0; o < outputs.size(); ++o) {
      if (inputs[i].empty() || outputs[o].empty() || (i == o && inputs[i].data() == outputs[o].data())) continue;
      const std::less<const std::byte*> before;
      if (before(inputs[i].data(), outputs[o].data() + outputs[o].size()) &&
          before(outputs[o].data(), inputs[i].data() + inputs[i].size())) {
        return true;
      }
    }
  }
  return false;
}

/// Returns the input if the other ranks may read it in place while this one writes its output; else nothing. In two
/// shots they may if the output is the input itself, because each share is read by the rank alone that writes it at
/// first.
InBytes lendable(InBytes input, OutBytes output, bool two_shots) {
  if (two_shots && input.data() == output.data()) return input;
  return overlap({input, {}}, {{}, output}) ? InBytes() : input;
}

/// What a rank gives and takes in an exchange of pieces, by rank. Empty pieces are neither given nor taken.
struct Pieces {
  std::vector<InBytes> given;
  std::vector<OutBytes> taken;
  bool one_for_all = false;  // `given` has one piece, at the index of this rank, for every rank that takes it
  std::size_t most = 0;      // bytes of the largest piece of all ranks

  explicit Pieces(std::size_t ranks) : given(ranks), taken(ranks) {}

  /// Returns the whole input if the other ranks may read it in place while `rank`, whose pieces these are, writes what
  /// it takes: its pieces lie one behind the other, and no output lies over one that another rank reads. Else nothing.
  [[nodiscard]] InBytes lendable(std::size_t rank) const {
    auto others = taken;
    if (others[rank].data() == given[rank].data()) others[rank] = {};  // which this rank alone reads, or no rank writes
    if (overlaps_in_place(given, others) || overlap(given, others)) return {};
    if (one_for_all) return given[rank];
    for (std::size_t to = 0; to < given.size(); ++to) {
      if (given[to].size() != most || given[to].data() != given[0].data() + to * most) return {};
    }
    return {given[0].data(), given.size() * most};
  }
  /// Returns whether an output begins where an input of the same index does.
  static bool overlaps_in_place(const std::vector<InBytes>& inputs, const std::vector<OutBytes>& outputs) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].empty() && !outputs[i].empty() && inputs[i].data() == outputs[i].data()) return true;
    }
    return false;
  }
};

/// Returns the size of the elements of which an exchange copies tensors of this dtype.
std::size_t item_of_exchange(DType dtype) { return std::min<std::size_t>(size_of(dtype), 8); }

/// The error of an operation whose pieces do not fit into one chunk of `slot` bytes, and overlap.
Status overlapping(const Fingerprint& called, std::size_t slot) {
  return {Code::invalid_argument,
          formatted("inputs and outputs of {} overlap, and one has more than {} bytes: use tensors that do not overlap",
                    name_of(static_cast<Operation>(called.operation)), slot)};
}

/// Returns the bytes of a half that are for one rank's piece.
std::size_t slot_bytes(std::size_t half, std::size_t ranks) { return half / ranks / alignment * alignment; }

/// One operation, or several that are one call. The functions of DeviceOperations run on the thread that runs the
/// group's operations.
class Run final : public DeviceRun {
 public:
  Run(std::shared_ptr<Direct> direct, std::shared_ptr<GroupGpu> gpu, CUstream stream)
      : direct_(std::move(direct)),
        gpu_(std::move(gpu)),
        stream_(stream),
        rank_(direct_->group().rank()),
        ranks_(direct_->group().size()),
        captured_(!driver::refusal_of_capture(gpu_->device, stream).ok()) {}

  [[nodiscard]] std::uint8_t number() const override {
    return captured_ ? gpu_->number | Fingerprint::captured : gpu_->number;
  }
  [[nodiscard]] bool ended() const override {
    if (!begun_.load(std::memory_order_acquire)) return false;
    if (captured_) return true;
    if (ranks_ > 1) return enqueued()->ended();
    const driver::CaptureModeGuard outside;  // the query belongs to no CUDA graph
    return end_.done().has_value();
  }
  [[nodiscard]] Status status() const override {
    return ranks_ > 1 && !captured_ && begun_.load(std::memory_order_acquire) ? enqueued()->status() : Status();
  }

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
    lent_ = {};
    lent_.at.resize(ranks_);
    by_flags_ = false;
    chunk_ = 0;
  }
  /// Enqueues the operation: `enqueue` has its copies, meetings and kernels.
  template <class Enqueue>
  Status enqueue(const Fingerprint& called, const WaitLimits& limits, const Enqueue& enqueue);
  /// Keeps the first error of the driver.
  void then(CUresult result) {
    if (result_ == CUDA_SUCCESS) result_ = result;
  }
  /// Begins a chunk: the next half of each buffer is free.
  void take_half() { half_ = gpu_->uses++ % 2; }
  [[nodiscard]] std::byte* half_of(std::size_t rank) const { return gpu_->buffers->half(rank, half_); }
  /// Lets the ranks agree on the call, and finds out whose inputs they read in place. `own` is the input that this rank
  /// lends if the others can map it; empty: none. `in_place`: it is the output too. They read `bytes` bytes of an
  /// input.
  Status agree(const Fingerprint& called, InBytes own, std::size_t bytes, const WaitLimits& limits,
               bool in_place = false);
  [[nodiscard]] bool lends(std::size_t rank) const { return lent_.at[rank] != nullptr; }
  /// Returns the bytes of the input of `rank` from `at` on, of which this chunk's half has a copy unless they are lent.
  [[nodiscard]] const std::byte* source_of(std::size_t rank, std::size_t at) const {
    return lends(rank) ? lent_.at[rank] + at : half_of(rank);
  }
  /// All ranks have read what is lent, so its owners may write it again.
  void give_back_lent() {
    if (lent_.any()) meet();
  }
  void meet();
  void copy(std::byte* to, InBytes from);
  /// Reduces [at, at + bytes) of the halves of all ranks, or of what they lend, into `out` and `copy`. `own` takes the
  /// place of this rank's half, unless it is not aligned; then the half has its bytes.
  void reduce_halves(const ReductionKernel& kernel, std::size_t at, std::size_t bytes, std::size_t item,
                     const std::byte* own, std::byte* out, std::byte* copy);
  void one_shot(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output);
  void two_shot(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output);
  void take_result(OutBytes output);
  void by_host(const ReduceOp& op, DType dtype, InBytes input, OutBytes output);
  Status reduce_by_flags(const Fingerprint& called, const FlagKernel& kernel, InBytes input, OutBytes output,
                         const WaitLimits& limits);
  /// Chooses the algorithm; all ranks have agreed on the one that the call asks for, or will.
  [[nodiscard]] GpuChoice choose(const Fingerprint& called, const AskedOnGpu& asked) const;
  void count(const Fingerprint& called, AlgorithmOnGpu algorithm) const {
    direct_->group().path_counts().count_on_gpu(static_cast<Operation>(called.operation), captured_, algorithm);
  }
  [[nodiscard]] bool meets_by_flags(const Fingerprint& called, std::size_t bytes) const;
  [[nodiscard]] FlagArguments flag_arguments() const;
  void lend(FlagArguments& arguments, std::size_t at) const;
  Status enqueue_pieces(const Fingerprint& called, const FlagKernel& kernel, std::size_t item, const Pieces& pieces,
                        const WaitLimits& limits);
  [[nodiscard]] std::optional<Result<FlagKernel>> find_exchange(const Fingerprint& called, std::size_t bytes) const;
  Status exchange_by_flags(const Fingerprint& called, const Result<FlagKernel>& kernel, const Pieces& pieces,
                           const WaitLimits& limits);
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
  const bool captured_;    // into a CUDA graph
  bool by_flags_ = false;  // how the ranks meet
  std::size_t half_ = 0;
  std::size_t chunk_ = 0;  // where the chunk begins in the inputs
  LentInputs lent_;
  CUresult result_ = CUDA_SUCCESS;
  mutable std::mutex mutex_;
  std::shared_ptr<Enqueued> enqueued_;  // guarded by mutex_: the last one, if several use this stream's order
  driver::GpuEvent end_;                // in a group of one rank
  std::atomic<bool> begun_{false};
};

template <class Enqueue>
Status Run::enqueue(const Fingerprint& called, const WaitLimits& limits, const Enqueue& enqueue) {
  const driver::DeviceGuard here(gpu_->device);
  if (!here.status().ok()) return here.status();
  if (const bool capturing = !driver::refusal_of_capture(gpu_->device, stream_).ok(); capturing != captured_) {
    return {Code::invalid_argument, "a capture of a CUDA graph has begun or ended on the stream since the call"};
  }
  if (!gpu_->staged.empty()) {
    return {Code::invalid_argument, "this operation on tensors of GPUs goes through host memory: " + gpu_->staged};
  }
  if (captured_ && !by_flags_) {
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
  const auto number = direct_->next_operation();
  const auto operation = std::make_shared<Enqueued>(direct_->words(), rank_, number, called, limits.until, lent_.keep);
  {
    const std::lock_guard lock(mutex_);
    enqueued_ = operation;
  }
  begun_.store(true, std::memory_order_release);
  direct_->watch().add(operation);
  if (result_ == CUDA_SUCCESS) enqueue();
  auto status = driver::status_of(result_, "an operation on the GPU");
  // Also after an error, so that the streams can be released that wait already.
  const auto ends = direct_->words()->end(stream_, number);
  if (ends != CUDA_SUCCESS && status.ok()) status = driver::status_of(ends, "an operation on the GPU");
  if (ends != CUDA_SUCCESS) direct_->watch().drop(status);
  direct_->ends_on(gpu_->device, stream_);
  return status;
}

Status Run::agree(const Fingerprint& called, InBytes own, std::size_t bytes, const WaitLimits& limits, bool in_place) {
  if (ranks_ == 1 || gpu_->placement != RankPlacement::gpu_each || !gpu_->staged.empty()) {
    return direct_->group().agree_on(called, limits);
  }
  auto lent = direct_->lent().agree(called, gpu_->device, own, in_place, bytes, captured_, limits);
  if (!lent.ok()) return lent.status();
  lent_ = *std::move(lent);
  return {};
}

void Run::meet() {
  if (result_ != CUDA_SUCCESS) return;
  const auto meeting = direct_->next_meeting();
  direct_->watch().meets(meeting);
  then(direct_->words()->meet(stream_, meeting));
}

void Run::copy(std::byte* to, InBytes from) {
  if (result_ != CUDA_SUCCESS || from.empty() || to == from.data()) return;
  then(api()->memcpy_async(address_of(to), address_of(from.data()), from.size(), stream_));
}

void Run::reduce_halves(const ReductionKernel& kernel, std::size_t at, std::size_t bytes, std::size_t item,
                        const std::byte* own, std::byte* out, std::byte* copy) {
  if (result_ != CUDA_SUCCESS || bytes == 0) return;
  ReduceArguments arguments{};
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    const bool here = rank == rank_ && (ranks_ == 1 || is_aligned(own));
    arguments.inputs[rank] = here ? own : source_of(rank, chunk_) + at;
  }
  arguments.out = out;
  arguments.copy = copy;
  arguments.count = bytes / item;
  then(kernel.launch(arguments, stream_));
}

/// Each rank reads the bytes of all ranks, and reduces them itself. `output` is empty if it takes no result.
void Run::one_shot(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output) {
  if (ranks_ > 1) {
    take_half();
    if (!lends(rank_)) copy(half_of(rank_), input);
    meet();
  }
  reduce_halves(kernel, 0, output.size(), item, input.data(), output.data(), nullptr);
  give_back_lent();
}

/// Each rank reduces its share into its buffer, in place, and into its output. Then it takes the shares of the others.
void Run::two_shot(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output) {
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

GpuChoice Run::choose(const Fingerprint& called, const AskedOnGpu& asked) const {
  const auto& prescribed = direct_->group().settings().algorithms;
  const auto wanted = called.algorithm();
  if (!wanted) return choose_on_gpu(asked, prescribed, gpu_->crossings);
  return choose_on_gpu(asked, {{asked.operation, static_cast<Algorithm>(*wanted)}}, gpu_->crossings);
}

/// Returns whether the kernels of all ranks meet by flags in an operation of so many bytes: the same at every rank.
bool Run::meets_by_flags(const Fingerprint& called, std::size_t bytes) const {
  const auto asked = gpu_->ask(static_cast<Operation>(called.operation), bytes, ranks_, captured_);
  const auto choice = choose(called, asked);
  return choice.meeting == MeetingOnGpu::by_flags;
}

/// Returns what all kernels of this rank have in common that meet by flags.
FlagArguments Run::flag_arguments() const {
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

/// Tells a kernel where the chunk at `at` of each lent input lies.
void Run::lend(FlagArguments& arguments, std::size_t at) const {
  for (std::size_t rank = 0; rank < ranks_; ++rank) arguments.lent[rank] = lends(rank) ? lent_.at[rank] + at : nullptr;
}

/// Enqueues the kernel for each chunk of the pieces, once the ranks have agreed. It counts elements of `item` bytes.
Status Run::enqueue_pieces(const Fingerprint& called, const FlagKernel& kernel, std::size_t item, const Pieces& pieces,
                           const WaitLimits& limits) {
  const auto slot =
      pieces.one_for_all ? SymmetricBuffers::flag_half_bytes : slot_bytes(SymmetricBuffers::flag_half_bytes, ranks_);
  // A thread may write an output over the very input that it has read, but not over one that another thread reads.
  bool over = overlap(pieces.given, pieces.taken);
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    const InBytes given = pieces.given[rank], taken = pieces.taken[rank];
    over = over || (given.data() == taken.data() && given.size() != taken.size() && !given.empty() && !taken.empty());
  }
  if (over && pieces.most > slot) return overlapping(called, slot);
  by_flags_ = true;
  return enqueue(called, limits, [&] {
    if (!captured_) direct_->watch().meets_by_flags();
    auto arguments = flag_arguments();
    arguments.slot_bytes = pieces.one_for_all ? 0 : slot;
    arguments.lent_stride = pieces.one_for_all ? 0 : pieces.most;
    for (std::size_t at = 0; at < pieces.most && result_ == CUDA_SUCCESS; at += slot) {
      lend(arguments, at);
      for (std::size_t rank = 0; rank < ranks_; ++rank) {
        const auto given = part_of(pieces.given[rank], at, slot);
        const auto taken = part_of(pieces.taken[rank], at, slot);
        arguments.inputs[rank] = given.empty() ? nullptr : given.data();
        arguments.outputs[rank] = taken.empty() ? nullptr : taken.data();
        arguments.given[rank] = given.size() / item;
        arguments.taken[rank] = taken.size() / item;
      }
      arguments.count = ranks_ * std::min(slot, pieces.most - at) / item;
      for (const bool gives : {true, false}) {
        if (!over && !gives) continue;
        arguments.gives = gives;
        arguments.takes = !over || !gives;
        then(kernel.launch(arguments, stream_));
      }
    }
  });
}

/// Returns the kernel of an exchange of so many bytes; nullopt if the ranks do not meet by flags in it. Called before
/// the ranks agree, as in reduce().
std::optional<Result<FlagKernel>> Run::find_exchange(const Fingerprint& called, std::size_t bytes) const {
  if (!meets_by_flags(called, bytes)) return std::nullopt;
  return FlagKernel::find_exchange(gpu_->device, item_of_exchange(static_cast<DType>(called.dtype)), ranks_);
}

/// Each rank takes the pieces that are for it. The ranks have agreed.
Status Run::exchange_by_flags(const Fingerprint& called, const Result<FlagKernel>& kernel, const Pieces& pieces,
                              const WaitLimits& limits) {
  if (!kernel.ok()) return kernel.status();
  return enqueue_pieces(called, *kernel, item_of_exchange(static_cast<DType>(called.dtype)), pieces, limits);
}

/// Each kernel meets the others and reduces, once the ranks have agreed. It copies the input first, unless that is
/// lent.
Status Run::reduce_by_flags(const Fingerprint& called, const FlagKernel& kernel, InBytes input, OutBytes output,
                            const WaitLimits& limits) {
  const auto item = size_of(static_cast<DType>(called.dtype));
  auto arguments = flag_arguments();
  // It meets once more than with halves.
  arguments.all_in_place = lent_.all_in_place && input.size() > SymmetricBuffers::flag_half_bytes;
  const auto most = arguments.all_in_place ? input.size() : SymmetricBuffers::flag_half_bytes;
  by_flags_ = true;
  return enqueue(called, limits, [&] {
    if (!captured_) direct_->watch().meets_by_flags();
    for (std::size_t at = 0; at < input.size() && result_ == CUDA_SUCCESS; at += most) {
      const auto in = part_of(input, at, most);
      lend(arguments, at);
      arguments.input = in.data();
      arguments.output = output.empty() ? nullptr : part_of(output, at, in.size()).data();
      arguments.count = in.size() / item;
      then(kernel.launch(arguments, stream_));
    }
  });
}

/// The root, or rank 0 if all take the result, reduces the bytes of all ranks.
void Run::by_one(const ReductionKernel& kernel, std::size_t item, InBytes input, OutBytes output, std::size_t root) {
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

/// The streams copy the bytes to slots of the host, where a thread of each rank reduces them.
void Run::by_host(const ReduceOp& op, DType dtype, InBytes input, OutBytes output) {
  if (result_ != CUDA_SUCCESS) return;
  const auto& words = direct_->words();
  const auto which = direct_->next_slot();
  then(api()->memcpy_async(words->slot_on_device(rank_, which), address_of(input.data()), input.size(), stream_));
  const auto meeting = direct_->next_meeting();
  direct_->watch().meets(meeting);
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
  take_result(output);
}

/// Copies this rank's result from its slot. The driver sends fewer than 32 KB with the commands of the GPU's kernels,
/// which costs a turn, but not if they are rows.
void Run::take_result(OutBytes output) {
  constexpr std::size_t sent_with_commands = std::size_t{32} << 10;
  const auto& words = direct_->words();
  std::size_t done = 0;
  if (output.size() < sent_with_commands && output.size() > 1) {
    CUDA_MEMCPY2D rows{};
    rows.srcMemoryType = CU_MEMORYTYPE_HOST;
    rows.srcHost = words->slot(rank_, 2);
    rows.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    rows.dstDevice = address_of(output.data());
    rows.Height = 2;
    rows.srcPitch = rows.dstPitch = rows.WidthInBytes = output.size() / rows.Height;
    then(api()->memcpy_2d_async(&rows, stream_));
    done = rows.WidthInBytes * rows.Height;
  }
  if (done == output.size() || result_ != CUDA_SUCCESS) return;
  then(api()->memcpy_async(address_of(output.data() + done), words->slot_on_device(rank_, 2) + done,
                           output.size() - done, stream_));
}

Status Run::reduce(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op, std::size_t root,
                   const WaitLimits& limits) {
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
  if (auto status = agree(called, lent, input.size(), limits, in_place); !status.ok()) return status;
  if (by_flags || (flag_kernel && lent_.all_in_place)) {
    if (!flag_kernel->ok()) return flag_kernel->status();
    return reduce_by_flags(called, **flag_kernel, input, takes ? output : OutBytes(), limits);
  }
  if (!kernel->ok()) return kernel->status();
  const auto item = size_of(dtype);
  return enqueue(called, limits, [&] {
    const auto most = ranks_ == 1 ? std::max<std::size_t>(1, input.size()) : half_bytes;
    for (std::size_t at = 0; at < input.size(); at += most) {
      chunk_ = at;
      const auto in = part_of(input, at, most);
      const auto out = takes ? part_of(output, at, most) : OutBytes();
      if (algorithm == AlgorithmOnGpu::one_shot) {
        one_shot(**kernel, item, in, out);
      } else if (algorithm == AlgorithmOnGpu::two_shot) {
        two_shot(**kernel, item, in, out);
      } else if (algorithm == AlgorithmOnGpu::by_host) {
        by_host(op, dtype, in, out);
      } else {
        by_one(**kernel, item, in, out, root);
      }
    }
  });
}

Status Run::broadcast(const Fingerprint& called, OutBytes data, std::size_t root, const WaitLimits& limits) {
  begin();
  count(called, AlgorithmOnGpu::copies);
  const auto kernel = find_exchange(called, data.size());
  const InBytes given = rank_ == root ? data : OutBytes();
  if (auto status = agree(called, given, data.size(), limits); !status.ok()) return status;
  if (kernel) {
    Pieces pieces(ranks_);
    pieces.one_for_all = true;
    pieces.most = data.size();
    pieces.given[rank_] = given;
    if (rank_ != root) pieces.taken[root] = data;
    return exchange_by_flags(called, *kernel, pieces, limits);
  }
  return enqueue(called, limits, [&] {
    for (std::size_t at = 0; ranks_ > 1 && at < data.size(); at += half_bytes) {
      const auto chunk = part_of(data, at, half_bytes);
      take_half();
      if (rank_ == root && !lends(root)) copy(half_of(rank_), chunk);
      meet();
      if (rank_ != root) copy(chunk.data(), {source_of(root, at), chunk.size()});
    }
    give_back_lent();
  });
}

Result<std::vector<std::uint64_t>> Run::tell_sizes(const Fingerprint& called, std::vector<std::uint64_t> own,
                                                   const WaitLimits& limits) {
  std::vector<std::uint64_t> all(ranks_ * own.size());
  if (ranks_ == 1) return own;
  auto status = direct_->group().tell_each_other(called, std::as_bytes(std::span(own)),
                                                 std::as_writable_bytes(std::span(all)), limits);
  if (!status.ok()) return status;
  return all;
}

Status Run::unexpected(std::size_t from, std::size_t to, std::uint64_t gives, std::uint64_t expected) const {
  const auto& group = direct_->group();
  return {Code::invalid_argument,
          formatted("{} gives {} bytes to {}, which expects {}", group.named(from), gives, group.named(to), expected)};
}

Status Run::agree_on_pieces(const Fingerprint& called, const std::vector<InBytes>& inputs, const WaitLimits& limits) {
  std::vector<std::uint64_t> own;
  for (const auto& each : inputs) own.push_back(each.size());
  const auto sizes = tell_sizes(called, std::move(own), limits);
  if (!sizes.ok()) return sizes.status();
  for (std::size_t from = 0; from < ranks_; ++from) {
    for (std::size_t to = 0; to < ranks_; ++to) {
      const auto gives = (*sizes)[from * ranks_ + to], expected = (*sizes)[to * ranks_ + to];
      if (gives != expected) return unexpected(from, to, gives, expected);
    }
  }
  return {};
}

Status Run::gather(const Fingerprint& called, InBytes input, const std::vector<OutBytes>& outputs, std::size_t root,
                   bool even, const WaitLimits& limits) {
  begin();
  count(called, AlgorithmOnGpu::copies);
  const bool takes = root == Mailbox::any_rank || root == rank_;
  std::size_t most = input.size();
  // The calls tell the size of a rank's own piece alone. So the root refuses other sizes before it agrees to the call,
  // and the group fails before anything is enqueued.
  for (std::size_t from = 0; even && takes && from < ranks_; ++from) {
    if (outputs[from].size() != most) return unexpected(from, rank_, most, outputs[from].size());
  }
  const auto kernel = find_exchange(called, even ? ranks_ * most : 0);
  Pieces pieces(ranks_);
  pieces.one_for_all = true;
  pieces.given[rank_] = input;
  if (takes) pieces.taken = outputs;
  if (even) {
    if (auto status = agree(called, pieces.lendable(rank_), most, limits); !status.ok()) return status;
  } else {
    const auto sizes = tell_sizes(called, {input.size()}, limits);
    if (!sizes.ok()) return sizes.status();
    most = *std::max_element(sizes->begin(), sizes->end());
    for (std::size_t from = 0; takes && from < ranks_; ++from) {
      if (outputs[from].size() != (*sizes)[from]) return unexpected(from, rank_, (*sizes)[from], outputs[from].size());
    }
  }
  pieces.most = most;
  if (kernel && (even || meets_by_flags(called, ranks_ * most)))
    return exchange_by_flags(called, *kernel, pieces, limits);
  return enqueue(called, limits, [&] {
    for (std::size_t at = 0; ranks_ > 1 && at < most; at += half_bytes) {
      take_half();
      if (!lends(rank_)) copy(half_of(rank_), part_of(input, at, half_bytes));
      meet();
      for (std::size_t i = 1; takes && i < ranks_; ++i) {
        const auto from = (rank_ + i) % ranks_;
        const auto chunk = part_of(outputs[from], at, half_bytes);
        copy(chunk.data(), {source_of(from, at), chunk.size()});
      }
    }
    give_back_lent();
    if (takes) copy(outputs[rank_].data(), input);
  });
}

Status Run::scatter(const Fingerprint& called, const std::vector<InBytes>& inputs, OutBytes output, std::size_t root,
                    const WaitLimits& limits) {
  begin();
  count(called, AlgorithmOnGpu::copies);
  for (std::size_t to = 0; rank_ == root && to < ranks_; ++to) {  // as in gather()
    if (inputs[to].size() != output.size()) return unexpected(rank_, to, inputs[to].size(), output.size());
  }
  const auto kernel = find_exchange(called, ranks_ * output.size());
  if (auto status = direct_->group().agree_on(called, limits); !status.ok()) return status;
  if (kernel) {
    Pieces pieces(ranks_);
    pieces.most = output.size();
    if (rank_ == root) pieces.given = inputs;
    pieces.taken[root] = output;
    return exchange_by_flags(called, *kernel, pieces, limits);
  }
  const auto slot = slot_bytes(half_bytes, ranks_);
  return enqueue(called, limits, [&] {
    for (std::size_t at = 0; ranks_ > 1 && at < output.size(); at += slot) {
      take_half();
      for (std::size_t to = 0; rank_ == root && to < ranks_; ++to) {
        if (to != rank_) copy(half_of(rank_) + to * slot, part_of(inputs[to], at, slot));
      }
      meet();
      const auto chunk = part_of(output, at, slot);
      if (rank_ != root) copy(chunk.data(), {half_of(root) + rank_ * slot, chunk.size()});
    }
    if (rank_ == root) copy(output.data(), inputs[rank_]);
  });
}

Status Run::reduce_scatter(const Fingerprint& called, const std::vector<InBytes>& inputs, OutBytes output,
                           const ReduceOp& op, bool even, const WaitLimits& limits) {
  begin();
  count(called, AlgorithmOnGpu::one_shot);
  const auto dtype = static_cast<DType>(called.dtype);
  const auto most = largest(inputs);
  const bool by_flags = meets_by_flags(called, ranks_ * most);
  Pieces pieces(ranks_);
  pieces.most = most;
  pieces.given = inputs;
  pieces.taken[rank_] = output;
  std::optional<Result<FlagKernel>> flag_kernel;
  std::optional<Result<ReductionKernel>> kernel;
  if (by_flags) {
    flag_kernel = FlagKernel::find(gpu_->device, dtype, op, ranks_, FlagKernel::Kind::reduce_pieces);
  } else {
    kernel = ReductionKernel::find(gpu_->device, dtype, op, ranks_);
  }
  if (!even) {
    if (auto status = agree_on_pieces(called, inputs, limits); !status.ok()) return status;
  } else if (by_flags) {
    // If pieces are not aligned, the threads of a kernel share out the elements in another way to reduce them than
    // to copy them. So a thread would read what a thread of another block of a rank that does not lend copies.
    const auto own = most % alignment == 0 ? pieces.lendable(rank_) : InBytes();
    if (auto status = agree(called, own, ranks_ * most, limits); !status.ok()) return status;
  } else {
    if (auto status = direct_->group().agree_on(called, limits); !status.ok()) return status;
  }
  if (by_flags) {
    if (!flag_kernel->ok()) return flag_kernel->status();
    return enqueue_pieces(called, **flag_kernel, size_of(dtype), pieces, limits);
  }
  if (!kernel->ok()) return kernel->status();
  const auto item = size_of(dtype);
  const auto slot = slot_bytes(half_bytes, ranks_);
  return enqueue(called, limits, [&] {
    if (ranks_ == 1) return one_shot(**kernel, item, inputs[0], output);
    for (std::size_t at = 0; at < most; at += slot) {
      take_half();
      for (std::size_t to = 0; to < ranks_; ++to) {
        const auto chunk = part_of(inputs[to], at, slot);
        if (to != rank_ || !is_aligned(chunk.data())) copy(half_of(rank_) + to * slot, chunk);
      }
      meet();
      const auto own = part_of(inputs[rank_], at, slot);
      const auto out = part_of(output, at, slot);
      reduce_halves(**kernel, rank_ * slot, out.size(), item, own.data(), out.data(), nullptr);
    }
  });
}

Status Run::all_to_all(const Fingerprint& called, const std::vector<InBytes>& inputs,
                       const std::vector<OutBytes>& outputs, bool even, const WaitLimits& limits) {
  begin();
  count(called, AlgorithmOnGpu::copies);
  auto most = largest(inputs);
  const auto kernel = find_exchange(called, even ? ranks_ * most : 0);
  Pieces pieces(ranks_);
  pieces.most = most;
  pieces.given = inputs;
  pieces.taken = outputs;
  if (even && kernel) {
    if (auto status = agree(called, pieces.lendable(rank_), ranks_ * most, limits); !status.ok()) return status;
  } else if (even) {
    if (auto status = direct_->group().agree_on(called, limits); !status.ok()) return status;
  } else {
    std::vector<std::uint64_t> own;
    for (const auto& each : inputs) own.push_back(each.size());
    const auto sizes = tell_sizes(called, std::move(own), limits);
    if (!sizes.ok()) return sizes.status();
    most = *std::max_element(sizes->begin(), sizes->end());
    for (std::size_t from = 0; from < ranks_; ++from) {
      const auto gives = (*sizes)[from * ranks_ + rank_];
      if (outputs[from].size() != gives) return unexpected(from, rank_, gives, outputs[from].size());
    }
  }
  pieces.most = most;
  if (kernel && (even || meets_by_flags(called, ranks_ * most)))
    return exchange_by_flags(called, *kernel, pieces, limits);
  const auto slot = slot_bytes(half_bytes, ranks_);
  // An output that lies over another rank's input is written only after all inputs have been read.
  const bool over = overlap(inputs, outputs);
  if (over && most > slot) return overlapping(called, slot);
  return enqueue(called, limits, [&] {
    for (std::size_t at = 0; ranks_ > 1 && at < most; at += slot) {
      take_half();
      for (std::size_t to = 0; to < ranks_; ++to) {
        if (to != rank_ || over) copy(half_of(rank_) + to * slot, part_of(inputs[to], at, slot));
      }
      meet();
      for (std::size_t i = 1; i < ranks_; ++i) {
        const auto from = (rank_ + i) % ranks_;
        const auto chunk = part_of(outputs[from], at, slot);
        copy(chunk.data(), {half_of(from) + rank_ * slot, chunk.size()});
      }
    }
    const bool from_half = over && ranks_ > 1;
    copy(outputs[rank_].data(),
         from_half ? InBytes(half_of(rank_) + rank_ * slot, inputs[rank_].size()) : inputs[rank_]);
  });
}

}  // namespace

std::shared_ptr<DeviceRun> make_run(std::shared_ptr<Direct> direct, std::shared_ptr<GroupGpu> gpu, CUstream stream) {
  return std::make_shared<Run>(std::move(direct), std::move(gpu), stream);
}

}  // namespace tensorferry::collectives::cuda
