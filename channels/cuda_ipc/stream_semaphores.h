/// The stream words of one direction of a cuda_ipc channel. A stream word is a 32-bit semaphore (cuda::Word) that a
/// stream of the sender writes and a stream of the receiver waits for.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

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
  std::mutex mutex_;
  std::deque<std::uint32_t> free_;
  std::vector<std::uint32_t> values_ = std::vector<std::uint32_t>(words);  // the last value enqueued, per word
};

/// The receiver's side: waits for the words. Thread-safe.
class WaitSemaphores final : public std::enable_shared_from_this<WaitSemaphores> {
 public:
  explicit WaitSemaphores(cuda::Pinned page) : page_(std::move(page)) {}

  /// Enqueues on `stream` a wait until `word` has reached `value`. If it succeeds, the caller calls `done(word, value)`
  /// when the stream has passed the wait.
  CUresult wait_on(CUstream stream, std::uint32_t word, std::uint32_t value);
  void done(std::uint32_t word, std::uint32_t value);
  /// Releases all waiting streams when the link has ended. The event poller's thread raises the words at its next poll,
  /// and repeats that until every wait is done.
  void release_all();

 private:
  cuda::Pinned page_;
  std::mutex mutex_;
  std::multimap<std::uint32_t, std::uint32_t> waited_for_;  // word to value
};

}  // namespace tensorferry::cuda_ipc
