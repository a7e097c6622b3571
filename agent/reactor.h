/// The agent's background thread, a Boost.Asio reactor that is on no call's path. It accepts connections and performs
/// their handshakes, runs the timers, and ticks while something is under way.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace tensorferry {

class Reactor final {
 public:
  /// `tick` runs on the thread, about every millisecond, from a kick() until it has returned false (nothing is under
  /// way) about 200 times in a row.
  explicit Reactor(std::function<bool()> tick);
  ~Reactor();

  void start();
  /// Runs the handlers that are ready, then ends the thread and joins it. Must not be called on that thread.
  void stop();
  /// Closes the reactor's descriptors. Call it after stop(), when no object made with context() is left.
  void close();
  /// Returns the thread's io_context; valid until close().
  [[nodiscard]] boost::asio::io_context& context() noexcept { return loop_->context; }
  [[nodiscard]] bool on_thread() const noexcept { return thread_.get_id() == std::this_thread::get_id(); }

  /// Starts ticking. Any thread, at any time, also after close(); costs one atomic load if the thread ticks already.
  void kick() noexcept;

 private:
  struct Loop {
    boost::asio::io_context context{1};
    boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work{context.get_executor()};
    boost::asio::steady_timer timer{context};
  };
  void schedule();

  const std::function<bool()> tick_;
  std::mutex close_mutex_;  // guards loop_ between close() and kick(), which any thread may call at any time
  std::unique_ptr<Loop> loop_ = std::make_unique<Loop>();
  std::atomic<bool> ticking_{false};
  int idle_ticks_ = 0;
  std::thread thread_;
};

}  // namespace tensorferry
