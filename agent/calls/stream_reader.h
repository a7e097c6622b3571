/// Decides which thread reads the connection for calls of a link.
///
/// Replies and requests come by it. A thread that waits for a reply by socket becomes its reader, if no other thread
/// reads; else it sleeps on its call. A reader that stops wakes a sleeper, which reads on. If no thread waits, the pool
/// watches the connection and reads. A waiting thread that reads a request hands it to the pool, so it never runs a
/// handler. tests/models/reader.pml models it.
///
/// Two changes of what the pool watches would add a tenth to a call. So while the peer only answers, a caller that
/// stops reading leaves it to the tick, within about a millisecond, to have the pool watch again; often the next call
/// reads before that.
///
/// Threads: any. No function here runs completions under a lock.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/call_state.h"
#include "agent/pool/readable_set.h"
#include "agent/transport/frame_stream.h"
#include "agent/transport/nudge.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace tensorferry {

class Pool;

/// A link, as the reader of its connection sees it. Threads: any.
class ReadLink {
 public:
  /// Returns the connection for calls; null until it has been made.
  [[nodiscard]] virtual std::shared_ptr<FrameStream> stream() const = 0;
  /// Returns what takes the frames that are read.
  virtual FrameSink& sink() = 0;
  /// Ends the link, because the peer has closed the connection.
  virtual void close_after_peer(const Status& status) noexcept = 0;
  /// Ends a call whose deadline has passed.
  virtual void expire(Call::State& call) = 0;
  /// Helps the channels along until a call is done whose reply is landing, or there is nothing to help with.
  virtual void progress_until_done(const Call::State& call) = 0;
  /// Makes the reactor tick the link.
  virtual void activate() = 0;

 protected:
  ~ReadLink() = default;
};

class StreamReader final {
 public:
  /// All of them outlive the reader. `pool` watches the connection when no thread waits; `clock` is the agent's.
  StreamReader(ReadLink& link, Pool& pool, const Clock& clock) : link_(link), pool_(pool), clock_(clock) {}

  /// Has the pool watch the stream, whose `readable` calls on_readable(). Threads may wait already.
  void watch(const std::shared_ptr<FrameStream>& stream, std::shared_ptr<Readable> readable);
  /// Waits for a call whose reply comes by stream: as the stream's reader, or asleep while another thread reads. Ends
  /// the call if its deadline passes. False: `until` has passed, or `interrupted` returned true.
  bool wait(Call::State& call, std::optional<Clock::time_point> until, const std::function<bool()>& interrupted);
  /// The stream has bytes, or has ended; runs on a pool thread. Reads a part: the pool reports the rest again.
  void on_readable(const std::shared_ptr<FrameStream>& stream);
  /// Wakes the threads that sleep because there was no stream to read, or because the link has ended.
  void wake_sleepers();
  /// The peer has sent a frame that is not an answer: for the next second, the pool watches again at once.
  void peer_spoke(Clock::time_point now) noexcept {
    spoke_.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  }
  /// Runs on the reactor thread while the link is active.
  void tick();
  /// Gives back what only waiting callers need. Called at least once a second.
  void give_back_if_idle() { nudge_.give_back_if_idle(); }
  /// A call has ended on this thread: wakes the reader, if the call may be its own and it sleeps in poll().
  void call_ended(const Call::State& call);
  /// Describes the reader for people; see Link::state_text.
  [[nodiscard]] std::string state_text(FrameStream& stream);

  /// While one lives, this thread reads the stream for a call of its own, so ends of calls need not wake it.
  class Taking {
   public:
    explicit Taking(const StreamReader& reader) : outer_(std::exchange(reading_, &reader)) {}
    ~Taking() { reading_ = outer_; }
    Taking(const Taking&) = delete;
    Taking& operator=(const Taking&) = delete;

   private:
    const StreamReader* const outer_;
  };

 private:
  /// Gives up the right to read a stream when the owner of a pointer to it is destroyed.
  struct Release {
    StreamReader* reader;
    void operator()(FrameStream* stream) const noexcept { reader->release(*stream); }
  };
  bool read_or_sleep(Call::State& call, std::optional<Clock::time_point> until,
                     const std::function<bool()>& interrupted, bool& slept);
  void read_until_done(Call::State& call, const std::shared_ptr<FrameStream>& stream,
                       std::optional<Clock::time_point> until, const std::function<bool()>& interrupted, bool& stopped);
  bool take(FrameStream& stream);
  void release(FrameStream& stream) noexcept;
  void arm(const FrameStream& stream);
  void disarm(const FrameStream& stream);
  [[nodiscard]] bool peer_only_answers() const;

  ReadLink& link_;
  Pool& pool_;
  const Clock& clock_;
  std::atomic<Clock::rep> spoke_{0};    // when the peer sent a frame that is not an answer
  std::atomic<bool> due_{false};        // the tick has the pool watch
  Mutex mutex_;                         // guards the choice of the reader, and the next two
  std::vector<Call::State*> sleepers_;  // calls whose threads sleep until they may read
  bool armed_ = false;                  // the pool watches the stream
  Nudge nudge_;                         // wakes a reader out of poll()

  static inline thread_local const StreamReader* reading_ = nullptr;  // whose stream this thread reads
};

}  // namespace tensorferry
