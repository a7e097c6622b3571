#include "agent/calls/incoming_calls.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "base/text.h"
#include "channels/completion.h"

namespace tensorferry {

Result<std::shared_ptr<IncomingRequest>> IncomingCalls::begin(std::uint64_t call,
                                                              std::optional<Clock::time_point> deadline,
                                                              std::uint32_t order, std::size_t bytes) {
  auto incoming = std::make_shared<IncomingRequest>();
  incoming->deadline = deadline;
  incoming->order = order;
  if (order != 0) incoming->order_ticket = std::make_shared<OrderTicket>();
  const std::lock_guard lock(mutex_);
  if (requests_.contains(call))
    return Status(Code::protocol_error, "a request has the id of another request that is still open");
  if (requests_.size() >= started_.load(std::memory_order_relaxed) + bounds_.calls) {
    return Status(Code::resource_exhausted,
                  formatted("{} calls of this agent wait there for their handlers, as many as "
                            "max_queued_calls allows. Raise it or max_threads there",
                            bounds_.calls));
  }
  if (requests_.size() >= most_open)
    return Status(Code::resource_exhausted, formatted("{} calls of this agent run there", most_open));
  if (auto status = count(*incoming, bytes); !status) return status;
  auto added = requests_.end();
  try {
    added = requests_.emplace(call, incoming).first;
    if (order != 0) ordered_[order].push_back(incoming->order_ticket);
  } catch (...) {  // no memory
    if (added != requests_.end()) requests_.erase(added);
    queued_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
    throw;
  }
  return incoming;
}

Status IncomingCalls::count(IncomingRequest& incoming, std::size_t bytes) {
  auto queued = queued_bytes_.load(std::memory_order_relaxed);
  auto others = queued;
  do {
    others = queued - incoming.bytes;
    if (others != 0 && (bytes > bounds_.bytes || others > bounds_.bytes - bytes)) {
      return {Code::resource_exhausted,
              formatted("the calls of this agent that wait there for their handlers have {} "
                        "bytes, and max_queued_bytes allows {}. Raise it or max_threads there",
                        others, bounds_.bytes)};
    }
  } while (!queued_bytes_.compare_exchange_weak(queued, others + bytes, std::memory_order_relaxed));
  incoming.bytes = bytes;
  return {};
}

wire::CallStatus IncomingCalls::status(std::uint64_t call, Clock::time_point now) {
  const auto since = [now](Clock::rep then) {
    const auto passed = now - Clock::time_point(Clock::duration(then));
    return static_cast<std::uint64_t>(
        std::max<std::int64_t>(0, std::chrono::duration_cast<std::chrono::microseconds>(passed).count()));
  };
  using Stage = wire::CallStatus::Stage;
  wire::CallStatus status;
  const std::lock_guard lock(mutex_);
  const auto it = requests_.find(call);
  if (it == requests_.end() || it->second->received == 0) return status;
  const auto& incoming = *it->second;
  const bool behind = incoming.order_ticket && incoming.order_ticket->start;
  status.stage = behind ? Stage::ordered : incoming.stage.load();
  status.received_us = since(incoming.received);
  if (status.stage == Stage::running) status.started_us = since(incoming.began);
  status.busy_at_arrival = incoming.busy_at_arrival;
  return status;
}

void IncomingCalls::when_in_order(const IncomingRequest& incoming, Completion start) {
  if (incoming.order_ticket) {
    const std::lock_guard lock(mutex_);
    if (ordered_[incoming.order].front() != incoming.order_ticket) {
      incoming.order_ticket->start = std::move(start);
      return;
    }
  }
  start({});
}

void IncomingCalls::start(IncomingRequest& incoming) {
  incoming.started = true;
  started_.fetch_add(1, std::memory_order_relaxed);
  queued_bytes_.fetch_sub(std::exchange(incoming.bytes, 0), std::memory_order_relaxed);
}

void IncomingCalls::end(std::uint64_t call, IncomingRequest& incoming) {
  std::shared_ptr<IncomingRequest> dropped;  // after the lock is released
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = requests_.find(call); it != requests_.end()) {
      dropped = std::move(it->second);
      requests_.erase(it);
    }
    if (incoming.started) started_.fetch_sub(1, std::memory_order_relaxed);
  }
  queued_bytes_.fetch_sub(std::exchange(incoming.bytes, 0), std::memory_order_relaxed);
  if (incoming.order_ticket) end_order_ticket(incoming.order, *incoming.order_ticket);
}

void IncomingCalls::end_order_ticket(std::uint32_t order, const OrderTicket& order_ticket) {
  Completion next;
  {
    const std::lock_guard lock(mutex_);
    auto& queue = ordered_[order];
    const bool was_first = queue.front().get() == &order_ticket;
    if (was_first)
      queue.pop_front();
    else
      std::erase_if(queue, [&](const auto& other) { return other.get() == &order_ticket; });
    if (queue.empty())
      ordered_.erase(order);
    else if (was_first)
      next = std::move(queue.front()->start);
  }
  // The next request may be refused at once, and so may the one after it. complete() avoids a stack frame for each.
  complete(std::move(next), {});
}

void IncomingCalls::on_cancelled(IncomingRequest& incoming, UniqueFunction<void()> told) {
  {
    const std::lock_guard lock(mutex_);
    if (!incoming.cancelled) {
      incoming.on_cancelled.push_back(std::move(told));
      return;
    }
  }
  told();
}

void IncomingCalls::cancel(IncomingRequest& incoming) {
  std::vector<UniqueFunction<void()>> told;
  {
    const std::lock_guard lock(mutex_);
    incoming.cancelled = true;
    told.swap(incoming.on_cancelled);
  }
  for (auto& each : told) each();
}

std::vector<UniqueFunction<void()>> IncomingCalls::mark_cancelled(std::uint64_t call) {
  const std::lock_guard lock(mutex_);
  const auto it = requests_.find(call);
  if (it == requests_.end()) return {};
  it->second->cancelled = true;
  return std::exchange(it->second->on_cancelled, {});
}

void IncomingCalls::cancel_all(bool lost) {
  std::vector<std::shared_ptr<IncomingRequest>> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, incoming] : requests_) {
      if (!lost || !incoming->outlives_link) all.push_back(incoming);
    }
  }
  for (const auto& incoming : all) cancel(*incoming);
}

}  // namespace tensorferry
