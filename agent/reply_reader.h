/// Decides which thread reads the replies of a link's outgoing stream.
///
/// A thread that waits for a call by socket becomes the stream's reader, if no other thread reads; else it sleeps on
/// its call. A reader that stops wakes a sleeper, which reads on. If no thread waits, but calls with completions are in
/// flight, the pool reads. tests/models/reader.pml models it.
///
/// Threads: any. No function here runs completions under a lock.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/call_state.h"
#include "agent/transport/frame_stream.h"
#include "agent/transport/nudge.h"
#include "base/mutex.h"

namespace tensorferry {

class Link;

class ReplyReader final {
 public:
  explicit ReplyReader(Link& link);

  /// Waits for a call whose reply comes by stream: as the stream's reader, or asleep while another thread reads. Ends
  /// the call if its deadline passes. False: `until` has passed, or `interrupted` returned true.
  bool wait(Call::State& call, std::optional<Clock::time_point> until, const std::function<bool()>& interrupted);
  /// Makes the pool read the stream. Does nothing if there is none yet.
  void expect_frames();
  /// The stream has bytes, or has ended; runs on a pool thread. May run before the link shows the stream. The events
  /// are edge-triggered: bytes that stay unread, or an end behind a reply, are not reported again. So this reads until
  /// nothing is left.
  void on_readable(const std::shared_ptr<FrameStream>& stream);
  /// A call was given up: its reply may come when no call is in flight, and no thread reads then.
  void expect_late_reply() { late_.store(true, std::memory_order_relaxed); }
  /// Makes the pool read as long as late replies come. Else the peer would read none of this side's frames at last (see
  /// Link::hold_requests). Called at least once a second.
  void read_late_replies();
  /// Wakes the threads that sleep because there was no stream to read, or because the link has ended.
  void wake_sleepers();
  /// Gives back what only waiting callers need. Called at least once a second.
  void give_back_if_idle() { nudge_.give_back_if_idle(); }
  /// A call has ended on this thread: wakes the reader, if the call may be its own and it sleeps in poll().
  void call_ended(const Call::State& call);
  /// Describes the reader for people; see Link::state_text.
  [[nodiscard]] std::string state_text(FrameStream& stream);

  /// While one lives, this thread reads the stream for a call of its own, so ends of calls need not wake it.
  class Taking {
   public:
    explicit Taking(const ReplyReader& reader) : outer_(std::exchange(reading_, &reader)) {}
    ~Taking() { reading_ = outer_; }
    Taking(const Taking&) = delete;
    Taking& operator=(const Taking&) = delete;

   private:
    const ReplyReader* const outer_;
  };

 private:
  bool read_or_sleep(Call::State& call, std::optional<Clock::time_point> until,
                     const std::function<bool()>& interrupted, bool& slept);
  void read_until_done(Call::State& call, const std::shared_ptr<FrameStream>& stream,
                       std::optional<Clock::time_point> until, const std::function<bool()>& interrupted, bool& stopped);
  void stop_reading(const std::shared_ptr<FrameStream>& stream);

  Link& link_;
  Mutex mutex_;                         // guards the choice of the stream's reader, and the next four
  std::vector<Call::State*> sleepers_;  // calls whose threads sleep until they may read
  bool armed_ = false;                  // the pool is to read the stream
  bool missed_ = false;                 // the pool met an event while a caller read: arm again for the unread rest
  Nudge nudge_;                         // wakes a reader out of poll()
  bool draining_ = false;               // the pool reads late replies
  std::atomic<bool> late_{false};       // a call was given up

  static inline thread_local const ReplyReader* reading_ = nullptr;  // whose stream this thread reads
};

}  // namespace tensorferry
