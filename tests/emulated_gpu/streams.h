/// The streams of the emulated devices. One thread runs their operations, in order within each stream.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace emulated {

inline constexpr int most_devices = 8;
inline constexpr int usual_devices = 2;  // unless EMULATED_GPUS says otherwise

/// One operation on a stream. The thread calls it again until it returns true; false means that it must wait. It may
/// have a state: a graph keeps a copy that is never called.
using Operation = std::function<bool()>;

/// The work that a capture has recorded, in order. A launch enqueues it again.
struct Graph {
  std::vector<Operation> nodes;
};

/// A capture under way. The lock of Streams guards it.
struct Capture {
  bool global = false;   // forbids unsafe calls of all threads that are in the global mode
  bool invalid = false;  // a forbidden call has ended it: the rest of the calls fail
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
};
using CapturePtr = std::shared_ptr<Capture>;

/// A point in a stream's order. Its operation sets `reached` when all operations before it have run.
struct Point {
  std::atomic<bool> reached{false};
  std::chrono::steady_clock::time_point at;  // when an event was reached; set before `reached`
  CapturePtr captured;  // the capture in which an event was recorded; such a point is never reached
};
using PointPtr = std::shared_ptr<Point>;

struct Stream;

/// A hardware queue. Its first operation holds up all others, those of other streams too.
struct Queue {
  std::deque<std::pair<Stream*, Operation>> operations;
};

struct Stream {
  Stream(int d, bool b) : device(d), blocking(b) {}
  const int device;
  const bool blocking;  // true: the default stream of its device waits for it
  CapturePtr capture;   // the lock of Streams guards this and the rest
  std::shared_ptr<Queue> queue;
  std::size_t pending = 0;  // operations that have not run
};

/// What the driver says to an attempt to enqueue work.
enum class Enqueued { on_stream, in_graph, capture_invalid, capture_implicit };

/// All streams of this process, and the thread that runs them. Thread-safe.
class Streams {
 public:
  static Streams& of_this_process();

  /// Makes a stream. If CUDA_DEVICE_MAX_CONNECTIONS is set, the streams of a device share so many queues; else each
  /// stream has a queue of its own.
  Stream* make(int device, bool blocking);
  /// Destroys a stream after all of its operations have run. Does not wait for them.
  void destroy(Stream* stream);
  Stream* default_stream(int device) { return &default_.at(static_cast<std::size_t>(device)); }

  /// Enqueues an operation, or records it if the stream is being captured. On a default stream, it first enqueues a
  /// wait for all operations that blocking streams of the device have at this time; if one of them is being captured,
  /// that capture becomes invalid. Waits while another thread drains. The first call starts the thread.
  Enqueued add(Stream* stream, Operation operation);
  /// Returns whether the stream has no operation left. For a default stream, the same must hold of all blocking
  /// streams of its device.
  [[nodiscard]] bool idle(Stream* stream);

  /// Returns the capture under way on the stream, or null. For a default stream: that of any blocking stream.
  [[nodiscard]] CapturePtr capture_of(Stream* stream);
  /// Begins a capture, or makes the stream join one.
  void capture(Stream* stream, CapturePtr capture);
  /// Ends the capture on all streams that take part, and returns its graph; null if it is invalid or not under way.
  std::unique_ptr<Graph> end_capture(Stream* stream);
  void invalidate(const CapturePtr& capture);
  /// Makes all captures in global mode invalid. Returns whether there was one.
  bool invalidate_global();

  /// Waits until no stream has an operation left, and blocks `add` meanwhile. So does the real driver when it frees
  /// memory: it holds a lock that is needed to enqueue work.
  void drain();

 private:
  Streams();
  void push(Stream* stream, Operation operation);
  void run();
  bool run_queue(Queue& queue, std::unique_lock<std::mutex>& lock, bool& any);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<Stream, most_devices> default_{{Stream{0, true}, Stream{1, true}, Stream{2, true}, Stream{3, true},
                                             Stream{4, true}, Stream{5, true}, Stream{6, true}, Stream{7, true}}};
  std::vector<std::shared_ptr<Stream>> streams_, destroyed_;
  std::array<std::vector<std::shared_ptr<Queue>>, most_devices> shared_;  // if the streams share queues
  std::array<std::size_t, most_devices> made_{};                          // streams that were made, by device
  int draining_ = 0;                                                      // how many threads are in drain()
  bool alive_ = false;                                                    // whether the thread has been started
};

}  // namespace emulated
