/// The streams of the emulated devices: operations that a thread runs, those of each stream in order.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace emulated {

/// A point in a stream's order.
struct Point {
  std::atomic<bool> reached{false};
  std::chrono::steady_clock::time_point at;  // once it is reached
};
using PointPtr = std::shared_ptr<Point>;

/// Runs until it returns true: false while it has to wait.
using Operation = std::function<bool()>;

struct Stream {
  explicit Stream(bool b) : blocking(b) {}
  const bool blocking;     // the default stream waits for it
  bool capturing = false;  // guarded, like the rest, by the lock of Streams
  std::deque<Operation> operations;
};

/// All of the process. Thread-safe.
class Streams {
 public:
  static Streams& of_this_process();

  Stream* make(bool blocking);
  /// What it was given is run all the same.
  void destroy(Stream* stream);
  Stream* default_stream() { return &default_; }

  void add(Stream* stream, Operation operation);
  [[nodiscard]] bool idle(Stream* stream);
  /// Of the default stream: whether one that it would wait for is being captured.
  [[nodiscard]] bool capturing(Stream* stream);
  void capture(Stream* stream, bool on);
  /// Waits until nothing is left to do, as the driver does when it takes memory back, with a lock held that is needed
  /// to put anything on a stream.
  void drain();

 private:
  void live();

  std::mutex mutex_;
  std::condition_variable changed_;
  Stream default_{true};
  std::vector<std::shared_ptr<Stream>> streams_, destroyed_;
  int draining_ = 0;  // threads
  bool alive_ = false;
};

}  // namespace emulated
