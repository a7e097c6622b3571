#include "rpc/collectives/rank_watch.h"

#include <chrono>
#include <utility>

#include "agent/connections/session.h"
#include "base/host.h"
#include "rpc/collectives/board.h"
#include "rpc/collectives/messages.h"

namespace tensorferry::collectives {

RankWatch::RankWatch(std::shared_ptr<RawAgent> agent, std::shared_ptr<const Membership> group, Died died)
    : agent_(std::move(agent)),
      group_(std::move(group)),
      died_(std::move(died)),
      processes_(group_->size()),
      asked_(group_->size()),
      left_out_(group_->size()),
      dead_(group_->size()) {}

std::shared_ptr<RankWatch> RankWatch::start(std::shared_ptr<RawAgent> agent, std::shared_ptr<const Membership> group,
                                            HostProcesses& processes, Died died) {
  std::shared_ptr<RankWatch> out(new RankWatch(std::move(agent), std::move(group), std::move(died)));
  out->find_processes(processes);
  return out;
}

void RankWatch::find_processes(HostProcesses& processes) {
  const auto& own = group_->members[group_->rank].host;
  for (std::size_t other = 0; other < group_->size(); ++other) {
    const auto& host = group_->members[other].host;
    if (other == group_->rank || host.process.pid == 0 || host.boot_id != own.boot_id ||
        host.pid_namespace != own.pid_namespace) {
      continue;
    }
    if (auto found = processes.find(host.process); found.ok()) {
      processes_[other] = *std::move(found);
    } else {
      tell(other, end_of_process(other));
    }
  }
}

void RankWatch::tell(std::size_t rank, std::string_view why) {
  {
    const std::lock_guard lock(mutex_);
    if (dead_[rank].empty()) dead_[rank] = why;
    if (left_out_[rank]) return;
  }
  died_(rank, why);
}

void RankWatch::leave_out(std::size_t rank) {
  const std::lock_guard lock(mutex_);
  left_out_[rank] = true;
}

std::string RankWatch::why_dead(std::size_t rank) const {
  if (has_ended(rank)) return end_of_process(rank);
  const std::lock_guard lock(mutex_);
  return dead_[rank];
}

const cma::Process* RankWatch::process(std::size_t rank) const noexcept { return processes_[rank].get(); }

bool RankWatch::has_ended(std::size_t rank) const noexcept { return processes_[rank] && !processes_[rank]->alive(); }

std::string RankWatch::end_of_process(std::size_t rank) const {
  return std::string(process_has_ended(group_->members[rank].host.process.pid, host_name()).what());
}

bool RankWatch::is_left_out(std::size_t rank) const {
  const std::lock_guard lock(mutex_);
  return left_out_[rank];
}

void RankWatch::look() {
  const auto now = agent_->clock().now().time_since_epoch();
  auto last = looked_at_.load();
  if (now.count() - last < std::chrono::nanoseconds(longest_sleep).count() / 2 ||
      !looked_at_.compare_exchange_strong(last, now.count())) {
    return;
  }
  for (std::size_t other = 0; other < group_->size(); ++other) {
    if (other == group_->rank || is_left_out(other)) continue;
    if (has_ended(other)) {
      tell(other, end_of_process(other));
      continue;
    }
    const auto linked = agent_->linked(group_->members[other].name);
    if (linked && linked->incarnation != group_->members[other].incarnation) {
      tell(other, "another agent has its name");
    } else if (!linked) {
      ask(other);
    }
  }
}

void RankWatch::ask(std::size_t rank) {
  {
    const std::lock_guard lock(mutex_);
    if (asked_[rank]) return;
    asked_[rank] = true;
  }
  Message message;
  message.payload = encode(GroupMessage(Greet{group_->id}));
  RawCallOptions options;
  options.timeout = Milliseconds(10000);
  agent_->call(group_->members[rank].name, group_function, std::move(message), std::move(options))
      .on_done([weak = weak_from_this(), rank](const Result<Received>& reply) {
        const auto self = weak.lock();
        if (!self) return;
        {
          const std::lock_guard lock(self->mutex_);
          self->asked_[rank] = false;
        }
        if (!reply.ok()) self->tell(rank, reply.status().what());
      });
}

}  // namespace tensorferry::collectives
