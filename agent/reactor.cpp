#include "agent/reactor.h"

#include <pthread.h>

#include <boost/asio/post.hpp>

#include "base/thread_signals.h"

namespace tensorferry {
namespace {

constexpr std::chrono::milliseconds tick_interval{1};
constexpr int idle_ticks_until_sleep = 200;  // so that not every call of a burst pays for waking this thread

}  // namespace

Reactor::Reactor(std::function<bool()> tick) : tick_(std::move(tick)) {}

Reactor::~Reactor() { stop(); }

void Reactor::start() {
  thread_ = std::thread([this] {
    block_signals_of_others();
    ::pthread_setname_np(::pthread_self(), "tf-reactor");
    loop_->context.run();
  });
}

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

void Reactor::kick() noexcept {
  if (ticking_.load(std::memory_order_seq_cst) || ticking_.exchange(true, std::memory_order_seq_cst)) return;
  const std::lock_guard lock(close_mutex_);
  if (!loop_) return;
  boost::asio::post(loop_->context, [this] {
    idle_ticks_ = 0;
    schedule();
  });
}

void Reactor::schedule() {
  loop_->timer.expires_after(tick_interval);
  loop_->timer.async_wait([this](const boost::system::error_code& error) {
    if (error) return;
    idle_ticks_ = tick_() ? 0 : idle_ticks_ + 1;
    if (idle_ticks_ > idle_ticks_until_sleep) {
      ticking_.store(false, std::memory_order_seq_cst);
      // A thread that began something before it saw this store has not kicked, so tick once more.
      if (!tick_() || ticking_.exchange(true, std::memory_order_seq_cst)) return;
      idle_ticks_ = 0;
    }
    schedule();
  });
}

}  // namespace tensorferry
