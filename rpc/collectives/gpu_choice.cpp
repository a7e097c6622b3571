#include "rpc/collectives/gpu_choice.h"

#include <array>
#include <utility>

#include "base/text.h"
#include "rpc/collectives/board.h"

namespace tensorferry::collectives {
namespace {

constexpr std::array<std::string_view, 6> algorithms_on_gpu{"one_shot", "two_shot", "by_one",
                                                            "by_host",  "copies",   "staged"};

/// A second meeting of streams costs more than it saves, up to so many bytes, unless `tensorferry tune` has measured
/// it.
constexpr std::size_t one_shot_on_gpu = std::size_t{256} << 10;
constexpr std::size_t by_host_on_gpu = Board::gpu_slot_bytes;
/// Also a copy within a GPU waits for a turn, but one to or from the host does not. Above so many bytes the host's bus
/// takes longer than the turns.
constexpr std::size_t through_host_on_gpu = std::size_t{4} << 20;
/// Kernels that meet by flags also take the bytes of the others. Above so many bytes the copy engines do that faster.
constexpr std::size_t by_flags_on_gpu = std::size_t{10} << 20;

bool reduces(Operation operation) { return operation == Operation::all_reduce || operation == Operation::reduce; }
bool on_one_gpu(RankPlacement placement) {
  return placement == RankPlacement::one_gpu || placement == RankPlacement::one_gpu_threads;
}

bool has_kernels_that_meet(AlgorithmOnGpu algorithm) {
  return algorithm == AlgorithmOnGpu::one_shot || algorithm == AlgorithmOnGpu::two_shot ||
         algorithm == AlgorithmOnGpu::copies;
}

/// Returns the bytes up to which one_shot is used, and whether they were measured.
std::pair<std::size_t, bool> one_shot_limit(const AskedOnGpu& asked, const Crossings& crossings) {
  const auto it = crossings.find(asked.operation);
  if (it == crossings.end()) return {one_shot_on_gpu, false};
  std::size_t limit = 0;
  for (const auto& row : it->second) {
    if (row.algorithm == Algorithm::one_shot) limit = row.up_to;
  }
  return {limit, true};
}

GpuChoice chosen(const AskedOnGpu& asked, const Prescribed& prescribed, const Crossings& crossings) {
  if (!asked.reachable) return {AlgorithmOnGpu::staged, WhyOnGpu::unreachable};
  if (asked.operation == Operation::reduce_scatter) return {AlgorithmOnGpu::one_shot, WhyOnGpu::only_one};
  if (!reduces(asked.operation)) return {AlgorithmOnGpu::copies, WhyOnGpu::only_one};
  if (asked.ranks == 1) return {AlgorithmOnGpu::one_shot, WhyOnGpu::one_rank};
  if (const auto it = prescribed.find(asked.operation); it != prescribed.end()) {
    if (it->second == Algorithm::one_shot) return {AlgorithmOnGpu::one_shot, WhyOnGpu::prescribed};
    if (it->second == Algorithm::two_shot) return {AlgorithmOnGpu::two_shot, WhyOnGpu::prescribed};
  }
  // A GPU runs the kernels of several processes by turns, and each turn costs about 150 us. Copies to the host and back
  // take none. But the streams of one process share queues of copies: a copy that waits for one rank would hold up
  // those of the others.
  if (asked.placement == RankPlacement::one_gpu && asked.bytes <= by_host_on_gpu) {
    return {AlgorithmOnGpu::by_host, WhyOnGpu::small_on_one_gpu};
  }
  if (on_one_gpu(asked.placement)) {
    GpuChoice out{AlgorithmOnGpu::by_one, WhyOnGpu::one_gpu};
    out.through_host = asked.placement == RankPlacement::one_gpu && asked.bytes <= through_host_on_gpu;
    return out;
  }
  if (asked.bytes <= one_shot_limit(asked, crossings).first) {
    return {AlgorithmOnGpu::one_shot, WhyOnGpu::up_to_crossing};
  }
  return {AlgorithmOnGpu::two_shot, WhyOnGpu::above_crossing};
}

std::string kernels_meet_up_to(AlgorithmOnGpu algorithm) {
  auto out = formatted("kernels meet up to {} bytes", by_flags_on_gpu);
  if (algorithm == AlgorithmOnGpu::two_shot) out += ", and beyond if all ranks reduce symmetric memory in place";
  return out;
}

std::string text_of(const AskedOnGpu& asked, const JoinedGpus& joined) {
  switch (asked.placement) {
    case RankPlacement::gpu_each:
      return formatted("each of the {} ranks has a GPU, joined by {}: {}", asked.ranks, name_of(joined.topology),
                       joined.reason);
    case RankPlacement::some_share:
      return formatted("some of the {} ranks share a GPU, and the GPUs are joined by {}: {}", asked.ranks,
                       name_of(joined.topology), joined.reason);
    default:
      return formatted("the {} ranks share a GPU", asked.ranks);
  }
}

}  // namespace

std::string_view name_of(AlgorithmOnGpu algorithm) noexcept {
  return algorithms_on_gpu.at(static_cast<std::size_t>(algorithm));
}

bool may_meet_by_flags(const GpuChoice& choice, const AskedOnGpu& asked) noexcept {
  // A GPU runs kernels of two ranks by turns, so one that waits for the other would wait for its turn to end.
  return has_kernels_that_meet(choice.algorithm) && asked.ranks > 1 && asked.flags &&
         asked.placement == RankPlacement::gpu_each;
}

GpuChoice choose_on_gpu(const AskedOnGpu& asked, const Prescribed& prescribed, const Crossings& crossings) {
  auto out = chosen(asked, prescribed, crossings);
  if (may_meet_by_flags(out, asked) && (asked.captured || asked.bytes <= by_flags_on_gpu)) {
    out.meeting = MeetingOnGpu::by_flags;
  }
  if (!asked.aligned) out.own_input = OwnInput::copied;
  if (!asked.contiguous) out.own_input = OwnInput::made_dense;  // which begins at a multiple of 16 bytes
  return out;
}

std::string explain_on_gpu(const AskedOnGpu& asked, const JoinedGpus& joined, const Prescribed& prescribed,
                           const Crossings& crossings) {
  const auto choice = choose_on_gpu(asked, prescribed, crossings);
  const auto [limit, measured] = one_shot_limit(asked, crossings);
  const std::string_view by = measured ? "as measured by `tensorferry tune`" : "by default";
  const auto why = [&]() -> std::string {
    switch (choice.why) {
      case WhyOnGpu::one_rank:
        return "there is one rank";
      case WhyOnGpu::unreachable:
        return "the ranks do not reach one another's memory: " + joined.reason;
      case WhyOnGpu::only_one:
        return formatted("the only algorithm of {} on GPUs", name_of(asked.operation));
      case WhyOnGpu::prescribed:
        return "prescribed";
      case WhyOnGpu::small_on_one_gpu:
        return formatted(
            "the host reduces up to {} bytes, because a GPU runs the kernels of several processes by "
            "turns; by_one is for more bytes",
            by_host_on_gpu);
      case WhyOnGpu::one_gpu:
        return asked.placement == RankPlacement::one_gpu
                   ? formatted(
                         "one rank reduces for all, because a GPU runs the kernels of several processes by turns; "
                         "by_host is for up to {} bytes",
                         by_host_on_gpu)
                   : std::string(
                         "one rank reduces for all, because a GPU runs the kernels of several ranks by turns; "
                         "by_host needs a process for each rank");
      case WhyOnGpu::up_to_crossing:
        return formatted(
            "two_shot is for more than {} bytes, {}, because its ranks meet twice; by_one and by_host are "
            "for ranks that share a GPU",
            limit, by);
      case WhyOnGpu::above_crossing:
        return formatted(
            "one_shot is for up to {} bytes, {}, because each of its ranks reads all bytes; by_one and "
            "by_host are for ranks that share a GPU",
            limit, by);
    }
    return {};
  }();
  auto out = formatted("{} ({})", name_of(choice.algorithm), why);
  if (choice.meeting == MeetingOnGpu::by_flags) {
    out += ", whose kernels meet by flags in the memory of the GPUs";
  } else if (asked.ranks > 1 && has_kernels_that_meet(choice.algorithm)) {
    out += formatted(", whose streams meet by words, because {}",
                     asked.placement != RankPlacement::gpu_each ? "kernels of ranks that share a GPU run by turns"
                     : !asked.flags                             ? "a GPU is older than 7.0"
                                                                : kernels_meet_up_to(choice.algorithm));
  }
  if (asked.ranks > 1) out += "; " + text_of(asked, joined);
  if (choice.through_host) {
    out += formatted("; up to {} bytes cross the host, since copies within the GPU wait for turns too",
                     through_host_on_gpu);
  }
  if (choice.own_input == OwnInput::copied) out += "; the input is not aligned to 16 bytes, so it is copied first";
  if (choice.own_input == OwnInput::made_dense) out += "; the input has gaps, so a dense copy is made first";
  return out;
}

}  // namespace tensorferry::collectives
