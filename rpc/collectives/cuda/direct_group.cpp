#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "base/background.h"
#include "base/text.h"
#include "rpc/collectives/cuda/direct.h"
#include "rpc/collectives/cuda/gpu_facts.h"
#include "rpc/collectives/cuda/reductions.h"
#include "rpc/collectives/tuned_inputs.h"
#include "rpc/collectives/tuning.h"

namespace tensorferry::collectives::cuda {
namespace {

namespace driver = tensorferry::cuda;
using driver::api;

// What the ranks tell one another about a GPU, in this order. A rank that cannot take part says why.

struct GpuReport {
  FixedText<256> why;
  driver::BufferOffer offer;
  GpuFacts facts;
  std::uint32_t flags = 0;  // 1: the GPU has kernels that meet by flags
  std::uint32_t unused = 0;
};
/// What a rank has found out about the ways to the others' GPUs.
struct WaysReport {
  FixedText<256> why;
  std::array<PairFacts, most_ranks> ways;
};
/// The crossings that rank 0 has read; the others' are not used.
struct CrossingsReport {
  FixedText<1024> crossings;
};

/// Returns the first reason of a rank, and whose it is; empty if none has one.
template <class Report>
std::string first_reason(const RawGroup& group, const std::vector<Report>& all) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (auto why = all[rank].why.text(); !why.empty()) return formatted("{}: {}", group.named(rank), why);
  }
  return {};
}

Fingerprint first_step() {
  Fingerprint out;
  out.operation = Fingerprint::first_on_device;
  return out;
}

/// Tells the other ranks `own`, and writes what each has told to `all`.
template <class Report>
Status tell(RawGroup& group, const Report& own, std::vector<Report>& all, const WaitLimits& limits) {
  return group.tell_each_other(first_step(), std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)),
                               limits);
}

/// Returns why ranks cannot take part that are threads of one process and share a GPU; empty if there are none.
std::string threads_that_share(const RawGroup& group, const std::vector<GpuReport>& all) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    for (std::size_t other = 0; other < rank; ++other) {
      const auto &one = all[rank], &two = all[other];
      if (one.offer.process != two.offer.process || one.offer.process == cma::Identity()) continue;
      if (one.facts.uuid != two.facts.uuid) continue;
      return formatted("{} and {} are threads of one process and share a GPU", group.named(other), group.named(rank));
    }
  }
  return {};
}

bool are_apart(const std::vector<GpuReport>& all) {
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    for (std::size_t other = 0; other < rank; ++other) {
      if (all[rank].offer.process == all[other].offer.process) return false;
    }
  }
  return true;
}

}  // namespace

std::shared_ptr<DirectGroup> DirectGroup::of(std::shared_ptr<RawGroup> group, Threads threads) {
  return std::make_shared<Direct>(std::move(group), threads);
}

/// The other ranks may still read this one's buffer. Their words tell; if the group has failed, they may not come.
Direct::~Direct() {
  constexpr std::chrono::seconds patience{10};
  if (watch_) watch_->stop_watching_graphs();
  if (!words_) return;
  struct Job {
    std::vector<std::shared_ptr<GroupGpu>> gpus;
    std::shared_ptr<StreamWords> words;
    std::uint32_t operations;
    std::size_t ranks;
    std::chrono::steady_clock::time_point until;

    static void run(const std::shared_ptr<Job>& job) {
      bool all = true;
      for (std::size_t rank = 0; rank < job->ranks; ++rank) all = all && job->words->has_ended(rank, job->operations);
      if (all || std::chrono::steady_clock::now() >= job->until) return;
      watcher().submit([job] { run(job); }, std::chrono::steady_clock::now() + DeviceWatch::period);
    }
  };
  auto job = std::make_shared<Job>();
  for (auto& [device, gpu] : gpus_) job->gpus.push_back(std::move(gpu));
  job->words = words_;
  job->operations = operations_;
  job->ranks = group_->size();
  job->until = std::chrono::steady_clock::now() + patience;
  Job::run(job);
}

Result<std::string> Direct::prepare(int device, StartOptions options) {
  std::shared_ptr<GroupGpu> gpu;
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = gpus_.find(device); it != gpus_.end()) return it->second->staged;
    gpu = std::make_shared<GroupGpu>();
    gpu->device = device;
    gpu->number = static_cast<std::uint8_t>(gpus_.size() + 1);
  }
  options.background = false;
  const auto work =
      group_->perform(std::move(options), [this, gpu](const WaitLimits& limits) { return negotiate(*gpu, limits); });
  work->wait();
  if (auto status = work->status(); !status.ok()) return status;
  keep_notes(gpu);
  const std::lock_guard lock(mutex_);
  gpus_.emplace(device, gpu);
  return gpu->staged;
}

void Direct::keep_notes(const std::shared_ptr<GroupGpu>& gpu) {
  Ways::DeviceNotes notes;
  notes.explain = [gpu, ranks = group_->size(), prescribed = group_->settings().algorithms,
                   borrowed = lent_ ? lent_->count() : nullptr](Operation operation, std::size_t bytes) {
    if (!gpu->staged.empty()) {
      return "Tensors of GPUs are copied through host memory, because " + gpu->staged +
             (gpu->joined.topology == GpuTopology::unknown
                  ? ""
                  : formatted(". The topology of the GPUs is \"{}\": {}", name_of(gpu->joined.topology),
                              gpu->joined.reason));
    }
    return "Tensors of GPUs go directly, by streams and kernels: " +
           explain_on_gpu(gpu->ask(operation, bytes, ranks), gpu->joined, prescribed, gpu->crossings) +
           (borrowed && *borrowed != 0
                ? formatted("; inputs in {} allocations of other ranks are read in place", borrowed->load())
                : "");
  };
  if (gpu->staged.empty() && gpu->placement == RankPlacement::gpu_each) {
    notes.key = gpu_tuning_key(name_of(gpu->joined.topology), gpu->name, group_->size());
  }
  group_->ways().keep_device_notes(std::move(notes));
}

std::string Direct::open_own(GroupGpu& gpu, driver::BufferOffer& offer) {
  if (driver::api() == nullptr) return driver::why_missing();
  if (driver::few_queues()) {
    return "CUDA_DEVICE_MAX_CONNECTIONS makes streams share queues, so a stream that waits would hold up others";
  }
  if (auto kernel = ReductionKernel::find(gpu.device, DType::float32, tensorferry::Reduction::sum, group_->size());
      !kernel.ok()) {
    return std::string(kernel.status().what());
  }
  if (!words_ && group_->size() > 1) {
    auto words = StreamWords::lock(group_->stream_words(), group_->rank(), group_->size(), gpu.device);
    if (!words.ok()) return std::string(words.status().what());
    const std::lock_guard lock(mutex_);
    words_ = *std::move(words);
    watch_ = std::make_shared<DeviceWatch>(group_, words_);
    lent_ = LentMemory::make(group_);
  }
  if (group_->size() == 1) return {};
  auto buffers = SymmetricBuffers::allocate(gpu.device, group_->rank(), group_->size());
  if (!buffers.ok()) return std::string(buffers.status().what());
  auto offered = (*buffers)->offer();
  if (!offered.ok()) return std::string(offered.status().what());
  offer = *offered;
  gpu.buffers = *std::move(buffers);
  return {};
}

Status Direct::negotiate(GroupGpu& gpu, const WaitLimits& limits) {
  const auto ranks = group_->size();
  if (ranks == 1) {
    driver::BufferOffer none;
    gpu.staged = open_own(gpu, none);
    return {};
  }
  if (!group_->links().board || ranks > most_ranks) {
    gpu.staged = group_->links().board ? formatted("the group has more than {} ranks", most_ranks)
                                       : "the ranks share no board: " + group_->ways().why_no_board();
    return group_->agree_on(first_step(), limits);
  }
  std::vector<GpuReport> all(ranks);
  GpuReport own;
  own.facts = facts_of(gpu.device);
  own.why = open_own(gpu, own.offer);
  own.flags = own.why.text().empty() && FlagKernel::exist_for(gpu.device) ? 1 : 0;
  gpu.name = own.facts.name.text();
  if (auto status = tell(*group_, own, all, limits); !status.ok()) return status;
  gpu.staged = first_reason(*group_, all);
  if (gpu.staged.empty() && threads_ == Threads::need_gpus_of_their_own) {
    gpu.staged = threads_that_share(*group_, all);
  }
  std::vector<GpuFacts> facts;
  for (const auto& each : all) facts.push_back(each.facts);
  gpu.apart = are_apart(all);
  gpu.placement = placement_of(facts, gpu.apart);
  gpu.flags = std::all_of(all.begin(), all.end(), [](const GpuReport& each) { return each.flags == 1; });
  if (gpu.staged.empty()) {
    WaysReport own_ways;
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      own_ways.ways.at(rank) = facts_between(gpu.device, facts[group_->rank()], facts[rank]);
      if (rank == group_->rank() || !own_ways.why.text().empty()) continue;
      const auto opened = gpu.buffers->open(rank, all[rank].offer);
      if (!opened.ok()) own_ways.why = formatted("{} ({})", opened.what(), group_->named(rank));
    }
    std::vector<WaysReport> all_ways(ranks);
    if (auto status = tell(*group_, own_ways, all_ways, limits); !status.ok()) return status;
    gpu.staged = first_reason(*group_, all_ways);
    std::vector<PairFacts> pairs;
    for (const auto& each : all_ways) pairs.insert(pairs.end(), each.ways.begin(), each.ways.begin() + ranks);
    gpu.joined = joined_gpus(facts, pairs);
  }
  if (gpu.staged.empty()) {
    std::vector<CrossingsReport> told(ranks);
    CrossingsReport mine;
    if (gpu.placement == RankPlacement::gpu_each) {
      const auto key = gpu_tuning_key(name_of(gpu.joined.topology), gpu.name, ranks);
      if (group_->rank() == 0) mine.crossings = tuned_for(key);
      lent_->lend_from(inputs_mapped_from(key));
    }
    if (auto status = tell(*group_, mine, told, limits); !status.ok()) return status;
    auto crossings = parse_crossings(told[0].crossings.text());
    if (!crossings.ok()) return {Code::protocol_error, std::string(crossings.status().what())};
    gpu.crossings = *std::move(crossings);
  }
  if (!gpu.staged.empty()) gpu.buffers.reset();
  return {};
}

std::shared_ptr<DeviceRun> Direct::run_on(int device, Stream stream) {
  const std::lock_guard lock(mutex_);
  return make_run(shared_from_this(), gpus_.at(device), static_cast<CUstream>(stream));
}

std::string Direct::why_not_captured(int device) const {
  const std::lock_guard lock(mutex_);
  const auto it = gpus_.find(device);
  if (it == gpus_.end()) return "the group has had no operation on this GPU yet: call one before the capture";
  const auto& staged = it->second->staged;
  if (!staged.empty()) return "the tensors are copied through host memory, because " + staged;
  if (group_->size() == 1) return "the group has one rank";
  if (it->second->placement != RankPlacement::gpu_each) return "ranks share a GPU";
  return it->second->flags ? "" : "a GPU is older than compute capability 7.0";
}

void Direct::drain(const std::function<bool()>& interrupted) {
  std::shared_ptr<DeviceWatch> watch;
  {
    const std::lock_guard lock(mutex_);
    watch = watch_;
  }
  if (!watch) return;
  watch->drain(interrupted);
  // The others may still read this rank's buffer, which ends with the process.
  for (std::size_t rank = 0; rank < group_->size(); ++rank) {
    while (!words_->has_ended(rank, operations_) && group_->failed().ok() && !group_->has_ended(rank)) {
      if (interrupted && interrupted()) return;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }
}

CUresult Direct::follow_last(int device, CUstream stream) {
  if (operations_ == 0 || (last_device_ == device && last_stream_ == stream)) return CUDA_SUCCESS;
  return words_->await_end(stream, operations_);
}

void Direct::ends_on(int device, CUstream stream) {
  last_device_ = device;
  last_stream_ = stream;
}

}  // namespace tensorferry::collectives::cuda
