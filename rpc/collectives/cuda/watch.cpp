#include "rpc/collectives/cuda/watch.h"

#include <algorithm>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"

namespace tensorferry::collectives::cuda {

Background& watcher() {
  static auto& background = *new Background;
  return background;
}

namespace {

/// The thread that fails groups. Callbacks of the program run then, and may wait for the streams that watcher()
/// releases. Never destroyed.
Background& announcer() {
  static auto& background = *new Background;
  return background;
}

Status late_replay(const RawGroup& group, const std::vector<std::size_t>& missing) {
  std::string names;
  for (const auto rank : missing) names += (names.empty() ? "" : ", ") + group.named(rank);
  return {Code::deadline_exceeded,
          formatted("a replay of a CUDA graph with operations of group \"{}\" reached its timeout: its "
                    "kernel still waits for {}, whose graph has not come so far. Raise timeout=, or see what is "
                    "replayed there",
                    group.settings().label, names)};
}

/// Returns the ranks whose streams are the furthest behind `meeting`; none if all have come. The operation may have
/// several meetings: a stream that has come to an earlier one than others waits for a stream that has not.
std::vector<std::size_t> furthest_behind(const StreamWords& words, std::uint32_t meeting, std::size_t ranks) {
  std::vector<std::size_t> out;
  std::int32_t most = 1;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const auto behind = words.behind(rank, meeting);
    if (behind > most) out.clear();
    if (behind < most) continue;
    most = behind;
    out.push_back(rank);
  }
  return out;
}

}  // namespace

void DeviceWatch::add(std::shared_ptr<Enqueued> operation) {
  const std::lock_guard lock(mutex_);
  operation->last_meeting_ = last_meeting_;
  operations_.push_back(std::move(operation));
  if (!std::exchange(looking_, true)) schedule();
}

void DeviceWatch::schedule() {
  watcher().submit([self = shared_from_this()] { self->look(); }, std::chrono::steady_clock::now() + period);
}

void DeviceWatch::meets(std::uint32_t meeting) {
  const std::lock_guard lock(mutex_);
  last_meeting_ = meeting;
  if (!operations_.empty()) operations_.back()->last_meeting_ = meeting;
}

void DeviceWatch::meets_by_flags() {
  const std::lock_guard lock(mutex_);
  flags_ = true;
  if (!operations_.empty()) operations_.back()->by_flags_ = true;
}

void DeviceWatch::watch_graphs(std::chrono::steady_clock::duration timeout) {
  const std::lock_guard lock(mutex_);
  flags_ = graphs_ = true;
  graph_timeout_ = std::max(graph_timeout_, timeout);
  if (!std::exchange(looking_, true)) schedule();
}

void DeviceWatch::stop_watching_graphs() {
  const std::lock_guard lock(mutex_);
  if (graphs_) dropped_since_ = std::chrono::steady_clock::now();
}

/// Returns whether a kernel of a graph may wait, or come to. When the group's GPUs are dropped, replays may be under
/// way, and a kernel tells for which ranks it waits only when it has waited for a while.
bool DeviceWatch::replays_may_wait(std::chrono::steady_clock::time_point now) const {
  if (!graphs_ || kernels_ended_) return graphs_ && !dropped_since_;
  if (!dropped_since_ || now < *dropped_since_ + grace) return true;
  for (std::size_t rank = 0; rank < group_->size(); ++rank) {
    if (words_->kernel_waits_for(rank) != 0) return true;
  }
  return false;
}

void DeviceWatch::drop(const Status& why) {
  const std::lock_guard lock(mutex_);
  if (operations_.empty()) return;
  operations_.back()->fail(why);
  operations_.pop_back();
}

/// Forgets the operations that have ended. Programs may keep their works for long.
void DeviceWatch::drop_ended() {
  std::erase_if(operations_, [](const auto& each) {
    if (!each->ended()) return false;
    each->keep_.clear();
    return true;
  });
}

void DeviceWatch::drain(const std::function<bool()>& interrupted) {
  constexpr auto patience = 10 * period;  // for streams that have been released
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      drop_ended();
      if (operations_.empty()) return;
      if (failed_since_ && std::chrono::steady_clock::now() >= *failed_since_ + grace + patience) return;
    }
    if (interrupted && interrupted()) return;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

/// Returns the ranks for which a kernel has waited in one meeting for longer than graphs may. An operation outside of
/// graphs has a deadline of its own, and what it waits for is no graph's.
std::vector<std::size_t> DeviceWatch::ranks_that_graphs_wait_for(std::chrono::steady_clock::time_point now) {
  std::vector<std::size_t> out;
  if (!graphs_ || !operations_.empty()) {
    waited_.clear();
    return out;
  }
  waited_.resize(group_->size());
  for (std::size_t rank = 0; rank < waited_.size(); ++rank) {
    auto& waited = waited_[rank];
    if (const auto meeting = words_->kernel_waits_for(rank); meeting != waited.meeting) waited = {meeting, now};
    if (waited.meeting != 0 && now - waited.since >= graph_timeout_) out.push_back(rank);
  }
  return out;
}

void DeviceWatch::look() {
  const auto now = std::chrono::steady_clock::now();
  const auto differ = group_->compare_announced();
  const bool compared = !group_->has_announced() || !group_->failed().ok();
  std::vector<std::size_t> late_in_graph;
  std::shared_ptr<Enqueued> late;
  std::uint32_t meeting = 0;
  bool by_flags = false;
  {
    const std::lock_guard lock(mutex_);
    drop_ended();
    if (operations_.empty() && !replays_may_wait(now) && compared && (differ.ok() || !group_->failed().ok())) {
      looking_ = false;
      return;
    }
    const auto is_late = [now](const auto& each) { return now >= each->deadline_; };
    if (const auto it = std::find_if(operations_.begin(), operations_.end(), is_late); it != operations_.end()) {
      late = *it;
      meeting = late->last_meeting_;
      by_flags = late->by_flags_;
    }
    late_in_graph = ranks_that_graphs_wait_for(now);
  }
  if (!asked_for_the_dead_.exchange(true)) {
    announcer().submit([self = shared_from_this()] {
      self->group_->look_for_the_dead();
      self->asked_for_the_dead_ = false;
    });
  }
  const auto fail = [&](const Status& why) { announcer().submit([group = group_, why] { group->fail(why, true); }); };
  if (!differ.ok() && group_->failed().ok()) fail(differ);
  if (late && group_->failed().ok() && differ.ok()) {
    std::vector<std::size_t> missing;
    for (std::size_t rank = 0; by_flags && rank < group_->size(); ++rank) {
      if (rank != group_->rank() && words_->kernel_waits_for(rank) != 0) missing.push_back(rank);
    }
    if (missing.empty()) missing = furthest_behind(*words_, meeting, group_->size());
    if (missing.empty()) missing.push_back(group_->rank());  // its own stream has not passed
    fail(group_->late(late->called_, missing));
  }
  if (!late_in_graph.empty() && group_->failed().ok()) fail(late_replay(*group_, late_in_graph));
  const std::lock_guard lock(mutex_);
  if (!group_->failed().ok()) {
    if (!failed_since_) failed_since_ = now;
    release(now >= *failed_since_ + grace);
  }
  schedule();
}

void DeviceWatch::release(bool all) {
  std::vector<std::size_t> ranks;
  bool kernels = flags_ && all;
  for (std::size_t rank = 0; flags_ && rank < group_->size(); ++rank) {
    kernels = kernels || (rank != group_->rank() && group_->has_ended(rank));
  }
  for (std::size_t rank = 0; rank < group_->size(); ++rank) {
    if (rank == group_->rank() || words_->has_come(rank, last_meeting_)) continue;
    if (all || group_->has_ended(rank)) ranks.push_back(rank);
  }
  // A rank that leaves has ended its operations, so all ranks have come to them. After another failure the streams of
  // other ranks may have been released, and looked as if they had come.
  if (ranks.empty() && !kernels && (!all || group_->failed_by_leaving())) return;
  // First the errors: a stream that is released ends its operations as if all were well.
  const auto why = group_->failed();
  for (const auto& each : operations_) {
    if (!each->ended()) each->fail(why);
  }
  for (const auto rank : ranks) words_->release(rank, last_meeting_);
  if (kernels) words_->end_kernels();
  kernels_ended_ = kernels_ended_ || kernels;
}

}  // namespace tensorferry::collectives::cuda
