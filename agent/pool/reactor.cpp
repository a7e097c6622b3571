#include "agent/pool/reactor.h"

#include <pthread.h>

#include <boost/asio/post.hpp>
#include <new>
#include <utility>

#include "base/log.h"
#include "base/out_of_memory.h"
#include "base/threads.h"

namespace tensorferry {
namespace {

thread_local bool is_reactor = false;

constexpr int ticks_until_slower = 200;  // so that not every call of a burst pays for waking this thread
constexpr int ticks_until_stroll = 20;   // from Pace::walk

std::chrono::milliseconds interval_of(Pace pace) {
  if (pace == Pace::run) return std::chrono::milliseconds(1);
  return std::chrono::milliseconds(pace == Pace::walk ? 10 : 100);
}

/// Runs handlers. False: one had no memory; what it held is destroyed, which ends its connection or its dial.
template <class Run>
bool run_handlers(const Run& run) {
  try {
    run();
    return true;
  } catch (const std::bad_alloc&) {
    out_of_memory::release_reserve();
    log_warning("out of memory: a handler of the reactor was dropped");
    return false;
  }
}

/// Marks the calling thread as a reactor's while it lives.
class OnReactor final {
 public:
  OnReactor() : before_(std::exchange(is_reactor, true)) {}
  ~OnReactor() { is_reactor = before_; }
  OnReactor(const OnReactor&) = delete;
  OnReactor& operator=(const OnReactor&) = delete;

 private:
  const bool before_;
};

}  // namespace

Reactor::Reactor(std::function<Pace()> tick, bool threads) : tick_(std::move(tick)), threads_(threads) {}

Reactor::~Reactor() { stop(); }

void Reactor::start() {
  thread_ = start_thread([this] {
    ::pthread_setname_np(::pthread_self(), "tf-reactor");
    is_reactor = true;
    preempt_no_thread();
    while (!run_handlers([this] { loop_->context.run(); })) {
    }
  });
}

bool Reactor::on_any_thread() noexcept { return is_reactor; }

void Reactor::stop() {
  if (!thread_.joinable()) return;
  boost::asio::post(loop_->context, [this] {
    loop_->timer.cancel();
    loop_->work.reset();
    // Posted behind the handlers that are ready now: the handler of a connection that has just been accepted still
    // drops it and tells the dialler.
    boost::asio::post(loop_->context, [this] { loop_->context.stop(); });
  });
  thread_.join();
}

void Reactor::close() {
  std::unique_ptr<Loop> closed;  // destroyed after the lock is released, because its pending handlers may call kick()
  const std::lock_guard lock(close_mutex_);
  closed = std::move(loop_);
}

bool Reactor::poll_one() {
  const OnReactor here;
  bool any = false;
  return loop_ && (!run_handlers([&] { any = loop_->context.poll_one() != 0; }) || any);
}

Pace Reactor::tick_once() {
  const OnReactor here;
  return tick();
}

bool Reactor::post(UniqueFunction<void()> job) {
  const std::lock_guard lock(close_mutex_);
  if (!loop_) return false;
  boost::asio::post(loop_->context, [job = std::move(job)] { job(); });
  return true;
}

void Reactor::kick() noexcept {
  if (!threads_) return;
  if (pace_.load(std::memory_order_seq_cst) == Pace::run) return;
  if (pace_.exchange(Pace::run, std::memory_order_seq_cst) == Pace::run) return;
  const std::lock_guard lock(close_mutex_);
  if (!loop_) return;
  try {
    boost::asio::post(loop_->context, [this] {
      slower_ticks_ = 0;
      schedule();  // replaces the slow wait, if there is one
    });
  } catch (const std::bad_alloc&) {
    out_of_memory::release_reserve();
    pace_.store(Pace::rest, std::memory_order_seq_cst);  // the next kick() tries again
  }
}

/// Ticks. If there was no memory for a part of it, the next tick does that part.
Pace Reactor::tick() noexcept {
  try {
    return tick_();
  } catch (const std::bad_alloc&) {
    out_of_memory::release_reserve();
    return Pace::run;
  }
}

void Reactor::schedule() {
  loop_->timer.expires_after(interval_of(pace_.load(std::memory_order_relaxed)));
  loop_->timer.async_wait([this](const boost::system::error_code& error) {
    if (error) return;
    const auto pace = pace_.load(std::memory_order_seq_cst);
    auto wanted = tick();
    slower_ticks_ = wanted < pace ? slower_ticks_ + 1 : 0;
    if (wanted > pace) {
      pace_.store(wanted, std::memory_order_seq_cst);
    } else if (slower_ticks_ > (pace == Pace::run ? ticks_until_slower : ticks_until_stroll) ||
               (pace != Pace::run && wanted == Pace::rest)) {
      auto before = pace;
      if (!pace_.compare_exchange_strong(before, wanted, std::memory_order_seq_cst)) return;  // kick() schedules
      slower_ticks_ = 0;
      // A thread that began something before it saw the new pace has not kicked, so tick once more.
      const auto again = tick();
      if (again > wanted) {
        if (!pace_.compare_exchange_strong(wanted, again, std::memory_order_seq_cst)) return;
      } else if (wanted == Pace::rest) {
        return;
      }
    }
    schedule();
  });
}

}  // namespace tensorferry
