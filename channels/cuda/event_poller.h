/// Polls CUDA events on one background thread, so that no thread on a call's path blocks on the GPU.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/background.h"
#include "base/function.h"
#include "base/mutex.h"
#include "channels/cuda/device.h"

namespace tensorferry::cuda {

/// How often the thread polls an event: whether a peer or a caller waits for it.
enum class Watch : std::uint8_t {
  closely,  // polled without a pause at first; after 300 us without progress ever more rarely, down to once a ms
  loosely,  // polled by poll_now(); otherwise 100 us after it was added, then ever more rarely, down to once a ms
};

/// Polls events and runs poll functions (host-side work) on one thread. The first submission starts the thread; it ends
/// after about one second without work.
///
/// Each query takes a driver lock for about a microsecond, which delays launches on the device: constant polling
/// doubled the time of a 4 KB copy. So events without a waiter are polled rarely. Host functions on the stream would
/// report at once, but they cost the stream more than a query, and stall it.
///
/// Thread-safe.
class EventPoller final {
 public:
  /// Returns the process's poller of events. All agents share it, because devices belong to the process. Never
  /// destroyed.
  static EventPoller& of_this_process();
  /// Returns the process's poller for poll functions that copy on the host, so that no event waits for such a copy.
  /// Never destroyed.
  static EventPoller& of_host_copies();

  /// Runs `then` when all work that `stream` of `device` has been given so far is done; with an error if the device's
  /// context has failed. `then` runs on the poller's thread or inside poll_now(), and must not block. If the driver
  /// records no event, `then` runs with an error on the caller's thread. Call inside DeviceGuard(device).
  void when_done(Watch watch, int device, Stream stream, Completion then);
  /// The same for a recorded event; an empty one is the error.
  void when_done(Watch watch, GpuEvent event, Completion then);

  /// Polls all events on the caller's thread, and runs the completions of those that are done. Does nothing if another
  /// thread polls at the moment, or has just done so: an agent calls this for each of its channels before each message,
  /// and each query takes a driver lock.
  void poll_now();
  static constexpr std::chrono::microseconds just_polled{5};

  /// Calls `function` on the poller's thread repeatedly until it returns `over`. `some` means that it made progress:
  /// while any function or event progresses, the thread polls without a pause. `function` must not block.
  enum class Progress : std::uint8_t { none, some, over };
  using PollFunction = UniqueFunction<Progress()>;
  void poll_repeatedly(PollFunction function);

 private:
  using Clock = std::chrono::steady_clock;
  struct PolledEvent {
    GpuEvent event;
    Completion then;
    Watch watch;
    Clock::time_point since, next;  // when it was added; when it is polled next, if watched loosely
  };
  template <class Thing>
  void submit(std::vector<Thing>& incoming, Thing thing, bool closely);
  /// Polls all events, or those that are due, and runs their completions. Returns whether any event was done. `polling`
  /// is a lock of polling_, which it unlocks.
  bool poll(bool all, std::unique_lock<Mutex> polling);
  Clock::duration pause(bool functions, Clock::duration quiet);
  void run();

  Mutex mutex_;  // guards the members below
  Condition changed_;
  std::vector<PolledEvent> incoming_;
  std::vector<PollFunction> incoming_functions_;
  std::uint64_t submitted_ = 0;  // counts all poll functions and events
  bool idle_ = false;            // the thread sleeps until the next submission
  bool alive_ = false;

  Mutex polling_;  // guards the members below; taken before mutex_
  std::vector<PolledEvent> polled_;
  Clock::time_point last_poll_;  // the end of the last poll of all events
};

/// Returns the process's thread for driver calls that take milliseconds: creating contexts, page-locking, opening and
/// closing handles. Never destroyed.
Background& background();

}  // namespace tensorferry::cuda
