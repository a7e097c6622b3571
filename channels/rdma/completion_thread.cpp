#include "channels/rdma/completion_thread.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <system_error>
#include <utility>

#include "base/fork.h"
#include "base/text.h"
#include "base/threads.h"

namespace tensorferry::rdma {

namespace {

constexpr std::chrono::milliseconds retire_tick{20};

/// What a descriptor in the epoll set is for: card 0's completions are 0, its events 1, card 1's completions 2, ...
constexpr std::uint64_t woken_tag = ~std::uint64_t{0};

bool watch(int poll, int descriptor, std::uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = tag;
  return ::epoll_ctl(poll, EPOLL_CTL_ADD, descriptor, &event) == 0;
}

}  // namespace

CompletionThread::CompletionThread(std::vector<std::shared_ptr<OpenCard>> cards) : cards_(std::move(cards)) {}

void CompletionThread::end() {
  if (born_in_ != forks()) {
    if (thread_.joinable()) thread_.detach();  // the thread is the parent's
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    ended_ = true;
  }
  if (!thread_.joinable()) return;
  wake();
  thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
}

Status CompletionThread::add(std::shared_ptr<QueuePair> pair) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_) return {Code::agent_closed, "the agent has been closed"};
    if (auto started = start(); !started.ok()) return started;
    added_.push_back(std::move(pair));
  }
  wake();
  return {};
}

void CompletionThread::retire(const std::shared_ptr<QueuePair>& pair) {
  bool runs = false;
  {
    const std::lock_guard lock(mutex_);
    runs = started_ && !ended_;
    if (runs) to_retire_.push_back(pair);
  }
  runs ? wake() : pair->destroy();
}

Status CompletionThread::start() {
  if (started_) return {};
  const auto no = [](int error, const char* what) { return status_of(error, formatted("making {}", what)); };
  poll_ = FileDescriptor(::epoll_create1(EPOLL_CLOEXEC));
  woken_ = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!poll_ || !woken_ || !watch(poll_.get(), woken_.get(), woken_tag)) return no(errno, "a set of descriptors");
  for (std::size_t i = 0; i < cards_.size(); ++i) {
    if (!watch(poll_.get(), cards_[i]->events()->fd, 2 * i) ||
        !watch(poll_.get(), cards_[i]->context()->async_fd, 2 * i + 1))
      return no(errno, "a set of descriptors");
  }
  try {
    thread_ = start_thread([kept = shared_from_this()] { kept->run(); });
  } catch (const std::system_error& error) {
    return no(error.code().value(), "a thread");
  }
  started_ = true;
  return {};
}

void CompletionThread::wake() noexcept {
  const std::uint64_t one = 1;
  if (woken_) (void)!::write(woken_.get(), &one, sizeof one);
}

void CompletionThread::run() {
  ::pthread_setname_np(::pthread_self(), "tf-rdma");
  std::array<epoll_event, 32> events{};
  for (;;) {
    const int wait_ms = retired_.empty() ? -1 : static_cast<int>(retire_tick.count());
    const int count = ::epoll_wait(poll_.get(), events.data(), static_cast<int>(events.size()), wait_ms);
    for (int i = 0; i < count; ++i) {
      const auto tag = events[static_cast<std::size_t>(i)].data.u64;
      if (tag == woken_tag) {
        std::uint64_t times = 0;
        (void)!::read(woken_.get(), &times, sizeof times);
      }
    }
    {
      const std::lock_guard lock(mutex_);
      if (ended_) break;
    }
    take_over();
    for (int i = 0; i < count; ++i) {
      const auto tag = events[static_cast<std::size_t>(i)].data.u64;
      if (tag == woken_tag) continue;
      auto& card = *cards_[tag / 2];
      if (tag % 2 == 0) {
        on_completions(card);
      } else {
        on_events(card);
      }
    }
    (void)poll_busy();
    while (!busy_.empty() && spin_.until([this] { return poll_busy(); })) continue;
    busy_.clear();  // the card announces what comes later
    destroy_retired();
  }
  take_over();
  for (auto& [number, pair] : pairs_) {
    pair->fail(Status(Code::agent_closed, "the agent has been closed"));
    (void)pair->poll();
    pair->destroy();
  }
  pairs_.clear();
  retired_.clear();
}

void CompletionThread::take_over() {
  std::vector<std::shared_ptr<QueuePair>> added, to_retire;
  {
    const std::lock_guard lock(mutex_);
    added.swap(added_);
    to_retire.swap(to_retire_);
  }
  for (auto& pair : added) pairs_.emplace(pair.get(), std::move(pair));
  for (auto& pair : to_retire) {
    busy_.push_back(pair.get());  // its work may have come back already
    retired_.push_back({std::move(pair), Clock::now() + patience});
  }
}

void CompletionThread::on_completions(OpenCard& card) {
  ibv_cq* queue = nullptr;
  void* context = nullptr;
  while (card.verbs().get_cq_event(card.events(), &queue, &context) == 0) {
    card.verbs().ack_cq_events(queue, 1);
    auto found = pairs_.find(context);
    if (found == pairs_.end()) {  // it may have been added, and have completed work, since this round began
      take_over();
      found = pairs_.find(context);
    }
    if (found == pairs_.end()) continue;
    found->second->announced();  // first: a completion that comes during the poll is announced
    busy_.push_back(found->second.get());
  }
}

void CompletionThread::on_events(OpenCard& card) {
  ibv_async_event event{};
  while (card.verbs().get_async_event(card.context(), &event) == 0) {
    const auto failure = failure_of(card, event);
    card.verbs().ack_async_event(&event);  // first: what follows may destroy the queue pair, which waits for this
    if (failure) fail(card, *failure);
  }
}

std::optional<CompletionThread::Failure> CompletionThread::failure_of(const OpenCard& card,
                                                                      const ibv_async_event& event) {
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
      return Failure{event.element.qp->qp_context, 0,
                     formatted("the card {} reports an error of a queue pair", card.name())};
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
      return Failure{event.element.qp->qp_context, 0,
                     formatted("the card {} refused a read or write of the peer's", card.name())};
    case IBV_EVENT_CQ_ERR:
      return Failure{event.element.cq->cq_context, 0,
                     formatted("a completion queue of the card {} overran", card.name())};
    case IBV_EVENT_PORT_ERR:
      return Failure{nullptr, event.element.port_num,
                     formatted("port {} of the card {} went down", event.element.port_num, card.name())};
    case IBV_EVENT_DEVICE_FATAL:
      return Failure{nullptr, 0, formatted("the card {} has failed", card.name())};
    default:
      return std::nullopt;
  }
}

void CompletionThread::fail(OpenCard& card, const Failure& failure) {
  const Status status(Code::channel_unavailable, failure.why);
  take_over();  // it may be of a queue pair that was added since this round began
  std::vector<std::shared_ptr<QueuePair>> failed;
  for (const auto& [number, each] : pairs_) {
    const bool meant = failure.pair != nullptr
                           ? number == failure.pair
                           : &each->card() == &card && (failure.port == 0 || each->port() == failure.port);
    if (meant) failed.push_back(each);
  }
  for (const auto& each : failed) {
    each->fail(status);
    busy_.push_back(each.get());
  }
}

/// Polls the queue pairs that may have completions, and forgets those without work. Returns whether there were any.
bool CompletionThread::poll_busy() {
  std::sort(busy_.begin(), busy_.end());
  busy_.erase(std::unique(busy_.begin(), busy_.end()), busy_.end());
  bool any = false;
  for (auto* const pair : busy_) any |= pair->poll();
  std::erase_if(busy_, [](const auto* pair) { return pair->outstanding() == 0; });
  return any;
}

void CompletionThread::destroy_retired() {
  for (const auto& each : retired_) (void)each.pair->poll();
  const auto now = Clock::now();
  std::erase_if(retired_, [&](const Retired& each) {
    if (each.pair->outstanding() > 0 && now < each.until) return false;
    each.pair->destroy();
    pairs_.erase(each.pair.get());
    return true;
  });
}

}  // namespace tensorferry::rdma
