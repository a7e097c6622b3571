/// The one thread that is on no call's path: accepts and dials, finishes writes, and ticks while something is under
/// way.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace tensorferry {

class Housekeeping final {
 public:
  /// `tick` runs about every millisecond from a kick() until it returned false for a while (that nothing is under way).
  explicit Housekeeping(std::function<bool()> tick);
  ~Housekeeping();

  void start();
  /// Ends the thread, having run what was posted. Not from it.
  void stop();
  /// After stop(), when nothing that was made with context() is left: gives its descriptors back.
  void close();
  /// Until close().
  [[nodiscard]] boost::asio::io_context& context() noexcept { return loop_->context; }
  [[nodiscard]] bool on_thread() const noexcept { return thread_.get_id() == std::this_thread::get_id(); }

  /// Any thread, any time; one atomic load where it ticks already.
  void kick() noexcept;

 private:
  struct Loop {
    boost::asio::io_context context{1};
    boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work{context.get_executor()};
    boost::asio::steady_timer timer{context};
  };
  void schedule();

  const std::function<bool()> tick_;
  std::mutex close_mutex_;  // kicks come at any time: guards loop_ against them while it goes
  std::unique_ptr<Loop> loop_ = std::make_unique<Loop>();
  std::atomic<bool> ticking_{false};
  int idle_ticks_ = 0;
  std::thread thread_;
};

}  // namespace tensorferry
