/// The streams of the emulated devices. One thread runs their operations, in order within each stream.
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

/// A point in a stream's order. Its operation sets `reached` when all operations before it have run.
struct Point {
  std::atomic<bool> reached{false};
  std::chrono::steady_clock::time_point at;  // when an event was reached; set before `reached`
};
using PointPtr = std::shared_ptr<Point>;

/// One operation on a stream. The thread calls it again until it returns true; false means that it must wait.
using Operation = std::function<bool()>;

struct Stream {
  explicit Stream(bool b) : blocking(b) {}
  const bool blocking;     // true: the default stream waits for it
  bool capturing = false;  // the lock of Streams guards this and `operations`
  std::deque<Operation> operations;
};

/// All streams of this process, and the thread that runs them. Thread-safe.
class Streams {
 public:
  static Streams& of_this_process();

  Stream* make(bool blocking);
  /// Destroys a stream after all of its operations have run. Does not wait for them.
  void destroy(Stream* stream);
  Stream* default_stream() { return &default_; }

  /// Enqueues an operation. On the default stream, it first enqueues a wait for all operations that blocking streams
  /// have at this time. Waits while another thread drains. The first call starts the thread.
  void add(Stream* stream, Operation operation);
  /// Returns whether the stream has no operation left. For the default stream, the same must hold of all blocking
  /// streams.
  [[nodiscard]] bool idle(Stream* stream);
  /// Returns whether the stream is being captured. For the default stream: whether any blocking stream is.
  [[nodiscard]] bool capturing(Stream* stream);
  void capture(Stream* stream, bool on);
  /// Waits until no stream has an operation left, and blocks `add` meanwhile. So does the real driver when it frees
  /// memory: it holds a lock that is needed to enqueue work.
  void drain();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable changed_;
  Stream default_{true};
  std::vector<std::shared_ptr<Stream>> streams_, destroyed_;
  int draining_ = 0;    // how many threads are in drain()
  bool alive_ = false;  // whether the thread has been started
};

}  // namespace emulated
