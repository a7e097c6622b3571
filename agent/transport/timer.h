/// A timer of a reactor, on the agent's clock.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <memory>
#include <utility>

#include "base/clock.h"

namespace tensorferry {

/// Threads: the reactor's.
class Timer final {
 public:
  Timer(boost::asio::io_context& context, Clock clock)
      : clock_(std::move(clock)), state_(std::make_shared<State>(context)) {}
  ~Timer() { cancel(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  /// Runs `expired` on the reactor when the clock has come to `at`, unless the timer is cancelled, set again or
  /// destroyed before.
  template <class Expired>
  void call_at(Clock::time_point at, Expired expired) {
    set(at);
    state_->timer.async_wait(
        [state = state_, set = state_->sets, expired = std::move(expired)](const boost::system::error_code& error) {
          if (set == state->sets && (!error || state->rung)) expired();
        });
  }
  /// Suspends the calling coroutine until then, or until cancel().
  boost::asio::awaitable<void> wait_until(Clock::time_point at) {
    set(at);
    boost::system::error_code cancelled;
    co_await state_->timer.async_wait(boost::asio::redirect_error(boost::asio::use_awaitable, cancelled));
  }
  void cancel() {
    alarm_.reset();
    ++state_->sets;
    state_->timer.cancel();
  }

 private:
  struct State {
    explicit State(boost::asio::io_context& of) : context(of), timer(of) {}
    boost::asio::io_context& context;
    boost::asio::steady_timer timer;
    std::uint64_t sets = 0;
    bool rung = false;
  };

  void set(Clock::time_point at) {
    cancel();
    state_->rung = false;
    if (clock_.is_steady()) {
      state_->timer.expires_at(at);
      return;
    }
    state_->timer.expires_at(Clock::time_point::max());
    const auto ring = [state = std::weak_ptr(state_), set = state_->sets, &context = state_->context] {
      boost::asio::post(context, [state, set] {
        const auto alive = state.lock();
        if (!alive || alive->sets != set) return;
        alive->rung = true;
        alive->timer.cancel();
      });
    };
    alarm_ = clock_.set_alarm(at, ring);
    if (!alarm_) ring();
  }

  const Clock clock_;
  const std::shared_ptr<State> state_;
  std::unique_ptr<TimeSource::Alarm> alarm_;  // of another clock than the system's
};

}  // namespace tensorferry
