#include "rpc/collectives/group_work.h"

#include <algorithm>
#include <utility>

#include "base/foreign_code.h"
#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives {

GroupWork::GroupWork(std::shared_ptr<RawGroup> group, UniqueFunction<Status(const WaitLimits&)> run, Deadline deadline)
    : group_(std::move(group)),
      steps_{.arrived = {}, .run = std::move(run), .finish = {}, .earlier = {}},
      deadline_(deadline) {}
GroupWork::GroupWork(std::shared_ptr<RawGroup> group, Deadline deadline, std::string text)
    : group_(std::move(group)), deadline_(deadline), text_(std::move(text)) {}

bool GroupWork::done() {
  if (has_ended()) return true;
  look_after();
  return false;
}

bool GroupWork::has_ended() const {
  const std::lock_guard lock(mutex_);
  return done_;
}

void GroupWork::look_after() {
  {
    const std::lock_guard lock(mutex_);
    if (!delivery_ || done_ || std::exchange(looked_after_, true)) return;
  }
  group_->look_after(shared_from_this());
}

void GroupWork::end_if_late() {
  if (group_->clock().now() < deadline_) return;
  withdraw({Code::deadline_exceeded, text_ + " reached its timeout before it ended"});
}

void GroupWork::withdraw(const Status& why) {
  if (delivery_) group_->mailbox().withdraw(delivery_, why);
}

Status GroupWork::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

void GroupWork::on_done(UniqueFunction<void(const Status&)> told) {
  std::unique_lock lock(mutex_);
  if (done_) {
    lock.unlock();
    return told(status_);
  }
  told_.push_back(std::move(told));
  lock.unlock();
  look_after();
}

void GroupWork::before_end(UniqueFunction<void()> run) {
  {
    const std::lock_guard lock(mutex_);
    if (!ending_) return before_.push_back(std::move(run));
  }
  run();
}

void GroupWork::end(Status status) {
  std::vector<UniqueFunction<void()>> before;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(ending_, true)) return;
    before = std::move(before_);
  }
  for (const auto& each : before) run_foreign("a callback of a collective operation", [&] { each(); });
  std::vector<UniqueFunction<void(const Status&)>> told;
  {
    const std::lock_guard lock(mutex_);
    status_ = std::move(status);
    done_ = true;
    told = std::move(told_);
    changed_.notify_all();
  }
  for (const auto& each : told) run_foreign("a callback of a collective operation", [&] { each(status_); });
}

bool GroupWork::wait(std::optional<Deadline> until, const std::function<bool()>& interrupted) {
  for (;;) {
    // Without a bound this thread may run the operation itself, which saves two changes of thread.
    if (!delivery_ && !until && group_->run_for(*this, interrupted)) return true;
    const auto now = group_->clock().now();
    auto wake_at = std::min(now + longest_sleep, until.value_or(Deadline::max()));
    if (delivery_) wake_at = std::min(wake_at, deadline_);
    {
      std::unique_lock lock(mutex_);
      if (group_->clock().wait_until(changed_, lock, wake_at, [&] { return done_; })) return true;
    }
    if (interrupted && interrupted()) return done();
    if (delivery_) {
      group_->look_for_the_dead();
      end_if_late();
    }
    if (until && group_->clock().now() >= *until) {
      return done();
    }
  }
}

}  // namespace tensorferry::collectives
