/// The stream words of one direction of a cuda_ipc channel. A stream word is a 32-bit semaphore (cuda::Word) that a
/// stream of the sender writes, and for which a stream or the host of the receiver waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "channels/cuda/event_poller.h"
#include "channels/cuda/pinned.h"
#include "channels/cuda_ipc/messages.h"

namespace tensorferry::cuda_ipc {

inline constexpr std::uint32_t words = 4096;
inline constexpr std::size_t words_bytes = words * sizeof(std::uint32_t);

/// The sender's side: signals the words. Each offer whose stream is busy has a word of its own, because streams finish
/// in any order. Thread-safe. After the destructor the page stays mapped until every enqueued stream write has
/// completed.
class SignalSemaphores final {
 public:
  explicit SignalSemaphores(cuda::Pinned page);
  ~SignalSemaphores();
  SignalSemaphores(const SignalSemaphores&) = delete;
  SignalSemaphores& operator=(const SignalSemaphores&) = delete;

  struct Use {
    std::uint32_t word, value;
  };
  /// Enqueues on `stream` the write of a free word. Returns nullopt if all words are in use, or if the driver fails.
  std::optional<Use> write_on(CUstream stream);
  /// Frees the word of an offer that has ended. The word is reused once its value has been written.
  void give_back(std::uint32_t word);

  cuda::Pinned& page() { return page_; }

 private:
  cuda::Pinned page_;
  Mutex mutex_;
  std::deque<std::uint32_t> free_;
  std::vector<std::uint32_t> values_ = std::vector<std::uint32_t>(words);  // the last value enqueued, per word
};

/// The receiver's side: waits for the words, by a stream or on the host. Thread-safe; runs completions with no lock
/// held.
///
/// A stream that waits holds up its hardware queue, and with it the work of other streams that the driver has mapped
/// there. If that work is a part of a collective for which the sender's kernel waits, both processes hang for good. A
/// host that waits holds up nothing, but the copy is enqueued only when the bytes are there.
class WaitSemaphores final : public std::enable_shared_from_this<WaitSemaphores> {
 public:
  /// `page` is page-locked if streams wait.
  explicit WaitSemaphores(cuda::Pinned page) : page_(std::move(page)) {}

  [[nodiscard]] bool reached(std::uint32_t word, std::uint32_t value) const;
  /// Enqueues on `stream` a wait until `word` has reached `value`. If it succeeds, the caller calls `done(word, value)`
  /// when the stream has passed the wait. After close() the stream does not stay in the wait.
  CUresult wait_on(CUstream stream, std::uint32_t word, std::uint32_t value);
  void done(std::uint32_t word, std::uint32_t value);

  /// Runs `then` when `word` has reached `value`: at once on the caller's thread if it has, else on the event poller's
  /// thread. After close(), or if that comes first, runs it with the error of close().
  void when_reached(std::uint32_t word, std::uint32_t value, Completion then);

  /// Fails what waits on the host, on the caller's thread, and releases the streams that wait. The event poller's
  /// thread raises the words at its next poll, and repeats that until every wait is done.
  void close(const Status& status);

 private:
  struct Waiting {
    std::uint32_t word, value;
    Completion then;
  };
  cuda::EventPoller::Progress poll();
  void release_streams();

  cuda::Pinned page_;
  Mutex mutex_;
  Status closed_;
  bool polled_ = false;
  std::vector<Waiting> waiting_;                              // on the host
  std::multimap<std::uint32_t, std::uint32_t> streams_wait_;  // word to value
};

}  // namespace tensorferry::cuda_ipc
