/// Polls CUDA events on one background thread, so that no thread on a call's path blocks on the GPU.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

#include "channels/background.h"
#include "channels/cuda/device.h"
#include "channels/function.h"

namespace tensorferry::cuda {

/// How often the thread polls an event: whether a peer or a caller waits for it.
enum class Watch : std::uint8_t {
  closely,  // polled without a pause at first; after 300 us without progress ever more rarely, down to once a ms
  loosely,  // polled by look_now(); otherwise 100 us after it was added, then ever more rarely, down to once a ms
};

/// Polls events and runs host-side work (turns) on one thread. The first submission starts the thread; it ends after
/// about one second without work.
///
/// Each query takes a driver lock for about a microsecond, which delays launches on the device: constant polling
/// doubled the time of a 4 KB copy. So events without a waiter are polled rarely. Host functions on the stream would
/// report at once, but they cost the stream more than a query, and stall it.
///
/// Thread-safe.
class Watcher final {
 public:
  /// Returns the process's only watcher. All agents share it, because devices belong to the process. Never destroyed.
  static Watcher& of_this_process();

  /// Runs `then` when all work that `stream` of `device` has been given so far is done; with an error if the device's
  /// context has failed. `then` runs on the watcher's thread or inside look_now(), and must not block. If the driver
  /// records no event, `then` runs with an error on the caller's thread. Call inside OnDevice(device).
  void when_done(Watch watch, int device, Stream stream, Completion then);
  /// The same for a recorded event; an empty one is the error.
  void when_done(Watch watch, Event event, Completion then);

  /// Polls all events on the caller's thread, and runs the completions of those that are done.
  void look_now();

  /// Calls `turn` on the watcher's thread repeatedly until it returns `over`. `some` means that it made progress: while
  /// any turn or event progresses, the thread polls without a pause. A turn must not block.
  enum class Progress : std::uint8_t { none, some, over };
  using Turn = UniqueFunction<Progress()>;
  void take_turns(Turn turn);

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    Event event;
    Completion then;
    Watch watch;
    Clock::time_point since, next;  // when it was added; when it is polled next, if watched loosely
  };
  template <class Thing>
  void submit(std::vector<Thing>& incoming, Thing thing, bool closely);
  /// Polls all events, or those that are due, and runs their completions. Returns whether any event was done.
  bool look(bool all);
  Clock::duration pause(bool turns, Clock::duration quiet);
  void live();

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::vector<Watched> incoming_;
  std::vector<Turn> incoming_turns_;
  std::uint64_t submitted_ = 0;  // counts all turns and closely watched events
  bool idle_ = false;            // the thread sleeps until the next submission
  bool alive_ = false;

  std::mutex looking_;  // guards watched_; taken before mutex_
  std::vector<Watched> watched_;
};

/// Returns the process's thread for driver calls that take milliseconds: creating contexts, page-locking, opening and
/// closing handles. Never destroyed.
Background& background();

}  // namespace tensorferry::cuda
