#include "agent/execution_record.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/text.h"

namespace tensorferry {
namespace {

std::size_t bytes_of(const Result<Message>& answer) {
  if (!answer.ok()) return answer.status().what().size();
  std::size_t bytes = answer->payload.size();
  for (const auto& buffer : answer->buffers) bytes += buffer.bytes;
  return bytes;
}

void send(Reply reply, const Result<Message>& answer) {
  if (answer.ok())
    reply.send(*answer);
  else
    reply.fail(answer.status());
}

Status forgotten() {
  return {Code::connection_lost,
          formatted("the connection was lost, and the callee has forgotten the call since: it keeps {} answers with {} "
                    "MiB for each caller, and none for a caller that it takes for dead. The call may have run once, "
                    "and will not run again",
                    ExecutionRecord::most_answers, ExecutionRecord::most_bytes >> 20)};
}

}  // namespace

bool ExecutionRecord::admit(const wire::IdempotencyKey& key, Reply& reply, std::function<void()> cancel) {
  std::shared_ptr<const Result<Message>> answer;
  std::function<void()> cancel_first;
  Dropped dropped;
  {
    const std::lock_guard lock(mutex_);
    settle_below(key.settled, dropped);
    const auto known = executions_.find(key.key);
    if (known == executions_.end() && !retired_ && key.key >= settled_ && !forgotten_.contains(key.key)) {
      next_key_ = std::max(next_key_, key.key + 1);
      auto& execution = executions_[key.key];
      execution.cancel = std::move(cancel);
      execution.deadline = reply.deadline();
      return true;
    }
    if (known == executions_.end()) {
      answer = std::make_shared<const Result<Message>>(forgotten());
    } else if (known->second.answer) {
      answer = known->second.answer;
    } else {
      cancel_first = known->second.cancel;
    }
  }
  if (answer) {
    send(std::move(reply), *answer);
    return false;
  }
  // Before end() can take the reply.
  reply.on_cancelled([cancel_first = std::move(cancel_first)] { cancel_first(); });
  std::vector<Reply> lost;  // each keeps its link, with connections and rings; dropped after the lock is released
  {
    const std::lock_guard lock(mutex_);
    const auto known = executions_.find(key.key);
    if (known != executions_.end() && !known->second.answer) {
      auto& waiting = known->second.waiting;
      const auto ended = std::partition(waiting.begin(), waiting.end(), [](const Reply& each) { return !each.lost(); });
      lost.assign(std::move_iterator(ended), std::move_iterator(waiting.end()));
      waiting.erase(ended, waiting.end());
      waiting.push_back(std::move(reply));
      return false;
    }
    if (known != executions_.end()) answer = known->second.answer;
  }
  send(std::move(reply), answer ? *answer : forgotten());
  return false;
}

void ExecutionRecord::end(std::uint64_t key, Result<Message> answer) {
  const auto kept = std::make_shared<const Result<Message>>(std::move(answer));
  std::vector<Reply> waiting;
  std::function<void()> cancel;
  Dropped dropped;
  {
    const std::lock_guard lock(mutex_);
    const auto at = executions_.find(key);
    if (at == executions_.end()) return;
    auto& execution = at->second;
    waiting.swap(execution.waiting);
    std::swap(cancel, execution.cancel);
    execution.answer = kept;
    execution.bytes = bytes_of(*kept);
    ++answers_;
    bytes_ += execution.bytes;
    if (key < settled_) forget(at, dropped);
    for (auto oldest = executions_.begin(); answers_ > most_answers || bytes_ > most_bytes;) {
      oldest = oldest->second.answer ? forget(oldest, dropped) : std::next(oldest);
    }
  }
  for (auto& reply : waiting) send(std::move(reply), *kept);
}

std::uint64_t ExecutionRecord::retire() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(retired_, true) || next_key_ == 0) return 0;
  return std::max(next_key_, settled_);
}

void ExecutionRecord::cancel_all() {
  std::vector<std::function<void()>> cancels;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, execution] : executions_) {
      if (!execution.answer) cancels.push_back(execution.cancel);
    }
  }
  for (const auto& cancel : cancels) cancel();
}

std::size_t ExecutionRecord::answers() const {
  const std::lock_guard lock(mutex_);
  return answers_;
}

ExecutionRecord::Dropped ExecutionRecord::expire(Clock::time_point now) {
  Dropped dropped;
  const std::lock_guard lock(mutex_);
  for (auto at = executions_.begin(); at != executions_.end();) {
    const auto& execution = at->second;
    const bool over = execution.answer && execution.deadline && *execution.deadline <= now;
    at = over ? forget(at, dropped) : std::next(at);
  }
  return dropped;
}

/// Drops the answers of keys below `key`, of which the caller sends no request any more.
void ExecutionRecord::settle_below(std::uint64_t key, Dropped& dropped) {
  if (key <= settled_) return;
  settled_ = key;
  for (auto at = executions_.begin(); at != executions_.end() && at->first < settled_;) {
    at = at->second.answer ? forget(at, dropped) : std::next(at);
  }
  forgotten_.erase_below(settled_);
}

ExecutionRecord::Executions::iterator ExecutionRecord::forget(Executions::iterator execution, Dropped& dropped) {
  --answers_;
  bytes_ -= execution->second.bytes;
  dropped.push_back(std::move(execution->second.answer));
  if (execution->first >= settled_) forgotten_.insert(execution->first);
  return executions_.erase(execution);
}

}  // namespace tensorferry
