/// Learns when a GPU has come so far, without any thread that waits for it on a call's path.
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

/// Whether somebody waits for what is watched.
enum class Watch : std::uint8_t {
  closely,  // asked for every few microseconds while that helps, then more and more rarely up to each millisecond
  loosely,  // asked for by look_now(), or after a tenth of a millisecond, then more and more rarely
};

/// A thread that asks events whether they are done, and gives host-side work its turns. It begins with the first that
/// is to be watched, and ends when there was nothing to look at for a second. Asking takes the driver a microsecond,
/// for which whoever gives work to the device has to wait (a thread that asked all the time doubled a copy of 4 KB on
/// an H200, from 10 to 18 us), so what nobody waits for is asked for seldom. (Host functions on the stream would be
/// told at once, but cost the stream more than a query, and stall it.) Thread-safe.
class Watcher final {
 public:
  /// One for all agents: what is watched belongs to the process's devices. Never destroyed.
  static Watcher& of_this_process();

  /// Runs `then` on the watcher's thread, or in look_now(), when what `stream` of `device` has been given so far is
  /// done; with an error where the device's context has failed. Inside OnDevice(device). `then` may not wait.
  void when_done(Watch watch, int device, Stream stream, Completion then);
  void when_done(Watch watch, Event event, Completion then);

  /// Looks at all events on the caller's thread, and completes those that are done.
  void look_now();

  /// Calls `turn` again and again until it is over. While turns come to something, none waits for long.
  enum class Progress : std::uint8_t { none, some, over };
  using Turn = UniqueFunction<Progress()>;
  void take_turns(Turn turn);

 private:
  using Clock = std::chrono::steady_clock;
  struct Watched {
    Event event;
    Completion then;
    Watch watch;
    Clock::time_point since, next;  // to be asked for, where loosely
  };
  template <class Thing>
  void submit(std::vector<Thing>& incoming, Thing thing, bool closely);
  /// Whether any was done. `all`, or those that are due.
  bool look(bool all);
  Clock::duration pause(bool turns, Clock::duration quiet);
  void live();

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<Watched> incoming_;
  std::vector<Turn> incoming_turns_;
  std::uint64_t submitted_ = 0;  // ever: turns, and what is watched closely
  bool idle_ = false;            // the thread sleeps until something comes
  bool alive_ = false;

  std::mutex looking_;  // taken before mutex_; guards
  std::vector<Watched> watched_;
};

/// A thread of the process for what takes a device or the driver milliseconds: contexts, page-locking, opening and
/// closing handles. Never destroyed.
Background& background();

}  // namespace tensorferry::cuda
