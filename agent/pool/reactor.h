/// The agent's background thread, a Boost.Asio reactor that is on no call's path. It accepts connections and performs
/// their handshakes, runs the timers, and ticks while something is under way. When it wakes up it preempts no other
/// thread (SCHED_BATCH): a tick would interrupt the calls that it watches, and wait for their locks.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "agent/pool/pace.h"
#include "base/function.h"

namespace tensorferry {

class Reactor final {
 public:
  /// `tick` runs on the thread from a kick() on: about every millisecond. After it has not returned Pace::run about 200
  /// times in a row, it runs every 10 or 100 ms, as it wants, or no more.
  /// `threads` false: there is no thread, and the caller of poll_one() and tick_once() decides what happens.
  explicit Reactor(std::function<Pace()> tick, bool threads = true);
  ~Reactor();

  void start();
  /// Runs the handlers that are ready, then ends the thread and joins it. Must not be called on that thread.
  void stop();
  /// Closes the reactor's descriptors. Call it after stop(), when no object made with context() is left.
  void close();
  /// Runs `job` on the reactor. Any thread, at any time. False: close() has dropped it.
  bool post(UniqueFunction<void()> job);
  /// Runs one handler that is ready, on the calling thread. False: there is none.
  bool poll_one();
  /// Ticks once.
  Pace tick_once();
  /// Returns the thread's io_context; valid until close().
  [[nodiscard]] boost::asio::io_context& context() noexcept { return loop_->context; }
  /// Returns whether the calling thread is a reactor's. No owner or completion of the program's runs there: it might
  /// wait for a lock of the program's, and deadlines and promotion would stop meanwhile.
  [[nodiscard]] static bool on_any_thread() noexcept;
  [[nodiscard]] bool on_thread() const noexcept { return thread_.get_id() == std::this_thread::get_id(); }

  /// Starts ticking every millisecond. Any thread, at any time, also after close(); costs one atomic load if the thread
  /// does so already.
  void kick() noexcept;

 private:
  struct Loop {
    boost::asio::io_context context{1};
    boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work{context.get_executor()};
    boost::asio::steady_timer timer{context};
  };
  void schedule();
  Pace tick() noexcept;

  const std::function<Pace()> tick_;
  const bool threads_;
  std::mutex close_mutex_;  // guards loop_ between close() and post() or kick(), which any thread may call at any time
  std::unique_ptr<Loop> loop_ = std::make_unique<Loop>();
  std::atomic<Pace> pace_{Pace::rest};  // at which the thread ticks now
  int slower_ticks_ = 0;                // in a row that asked for a slower pace
  std::thread thread_;
};

}  // namespace tensorferry
