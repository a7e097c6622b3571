// Lists of reads and writes: the part of QueuePair that posts many work requests at once.
#include <algorithm>
#include <cerrno>
#include <utility>

#include "channels/completion.h"
#include "channels/rdma/queue_pair.h"
#include "channels/rdma/work_requests.h"

namespace tensorferry::rdma {

void QueuePair::run(std::vector<Step> steps, Completion done) {
  if (steps.empty()) return complete(std::move(done), {});
  auto list = std::make_shared<List>();
  list->left = steps.size();
  list->steps = std::move(steps);
  list->done = std::move(done);
  Status why;
  bool refused = false;
  {
    const std::lock_guard lock(mutex_);
    why = failure_;
    refused = !why.ok();
    if (!refused) {
      outstanding_ += list->left;
      waiting_.push_back({{}, {}, list});
      if (!post_waiting()) why = no_work_taken();
    }
  }
  if (refused) return complete(std::move(list->done), why);
  if (!why.ok()) fail(why);
}

/// Call under the lock.
bool QueuePair::post_waiting() {
  while (!free_.empty() && !waiting_.empty()) {
    auto& next = waiting_.front();
    if (!(next.list != nullptr ? post(next.list) : post(next.read, next.done))) return false;
    if (next.list != nullptr && next.list->posted < next.list->steps.size()) break;
    waiting_.pop_front();
  }
  return true;
}

/// Hands to the card as many steps as it has places for. Call under the lock.
bool QueuePair::post(const std::shared_ptr<List>& list) {
  const auto count = std::min(free_.size(), list->steps.size() - list->posted);
  std::vector<ibv_sge> places(count);
  std::vector<ibv_send_wr> requests(count);
  for (std::size_t i = 0; i < count; ++i) {
    const auto& step = list->steps[list->posted + i];
    places[i] = place_of(step.place.to, step.place.bytes, step.place.local_key);
    requests[i] = request_of(step.writes ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, places[i], step.place.from,
                             step.place.remote_key);
    if (step.fenced) requests[i].send_flags |= IBV_SEND_FENCE;
    requests[i].wr_id = free_[free_.size() - 1 - i];
    if (i > 0) requests[i - 1].next = &requests[i];
  }
  ibv_send_wr* refused = nullptr;
  const int error = ibv_post_send(pair_, requests.data(), &refused);
  const auto taken = error == 0 ? count : refused != nullptr ? static_cast<std::size_t>(refused - requests.data()) : 0;
  for (std::size_t i = 0; i < taken; ++i) {
    const bool reads = !list->steps[list->posted++].writes;
    with_card_[free_.back()] = {{}, reads, list};
    free_.pop_back();
    if (reads) ++reads_;
  }
  errno = error;
  return error == 0;
}

void QueuePair::end_steps(List& list, std::size_t steps, bool ok, std::vector<Ended>& ended) {
  list.failed = list.failed || !ok;
  list.left -= steps;
  if (list.left == 0) ended.push_back({std::move(list.done), !list.failed});
}

/// Call under the lock.
void QueuePair::drop_waiting(std::vector<Completion>& dropped) {
  std::vector<Ended> ended;
  for (auto& each : waiting_) {
    if (each.list == nullptr) {
      --outstanding_;
      dropped.push_back(std::move(each.done));
      continue;
    }
    const auto rest = each.list->steps.size() - std::exchange(each.list->posted, each.list->steps.size());
    outstanding_ -= rest;
    end_steps(*each.list, rest, false, ended);  // the card gives the others back
  }
  waiting_.clear();
  for (auto& each : ended) dropped.push_back(std::move(each.done));
}

}  // namespace tensorferry::rdma
