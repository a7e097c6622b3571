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

/// A thread that asks events whether they are done, and gives host-side work its turns. It looks every few microseconds
/// while that helps, then more and more rarely up to each millisecond; it begins with the first that is to be watched,
/// and ends when there was nothing to look at for a second. (Host functions on the stream would be told at once, but
/// cost the stream more than a query, and stall it.) Thread-safe.
class Watcher final {
 public:
  /// One for all agents: what is watched belongs to the process's devices. Never destroyed.
  static Watcher& of_this_process();

  /// Runs `then` on the watcher's thread as soon as what `stream` of `device` has been given so far is done; with an
  /// error where the device's context has failed. Inside OnDevice(device). `then` may not wait.
  void when_done(int device, Stream stream, Completion then);
  void when_done(Event event, Completion then);

  /// Looks at all events on the caller's thread, and completes those that are done; whether any was.
  bool look_now();

  /// Calls `turn` again and again until it is over. While turns come to something, none waits for long.
  enum class Progress : std::uint8_t { none, some, over };
  using Turn = UniqueFunction<Progress()>;
  void take_turns(Turn turn);

 private:
  struct Watched {
    Event event;
    Completion then;
  };
  template <class Thing>
  void submit(std::vector<Thing>& incoming, Thing thing);
  void live();

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<Watched> incoming_;
  std::vector<Turn> incoming_turns_;
  std::uint64_t submitted_ = 0;  // of both, ever
  bool alive_ = false;

  std::mutex looking_;  // taken before mutex_; guards
  std::vector<Watched> watched_;
};

/// A thread of the process for what takes a device or the driver milliseconds: contexts, page-locking, opening and
/// closing handles. Never destroyed.
Background& background();

}  // namespace tensorferry::cuda
