/// The stream words of one direction of a cuda_ipc channel: the sender's streams write them, the receiver's wait.
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

/// The sender's side. Each busy offer has a word of its own, as streams end in any order. Thread-safe. The page stays
/// until all has been written that streams were asked to write, however long their work takes.
class WordsOut final {
 public:
  explicit WordsOut(cuda::Pinned page);
  ~WordsOut();
  WordsOut(const WordsOut&) = delete;
  WordsOut& operator=(const WordsOut&) = delete;

  struct Use {
    std::uint32_t word, value;
  };
  /// Has `stream` write a word when it has come to this point. nullopt: all words are in use, or the driver fails.
  std::optional<Use> write_on(CUstream stream);
  /// The offer has ended. The word is used again once its value was written.
  void give_back(std::uint32_t word);

  cuda::Pinned& page() { return page_; }

 private:
  cuda::Pinned page_;
  std::mutex mutex_;
  std::deque<std::uint32_t> free_;
  std::vector<std::uint32_t> values_ = std::vector<std::uint32_t>(words);  // last asked to be written
};

/// The receiver's side. Thread-safe.
class WordsIn final : public std::enable_shared_from_this<WordsIn> {
 public:
  explicit WordsIn(cuda::Pinned page) : page_(std::move(page)) {}

  /// Has `stream` wait; `done` must be called when it waits no more.
  CUresult wait_on(CUstream stream, std::uint32_t word, std::uint32_t value);
  void done(std::uint32_t word, std::uint32_t value);
  /// The sender is gone: streams that wait go on, within a tick of the watcher's.
  void release_all();

 private:
  cuda::Pinned page_;
  std::mutex mutex_;
  std::multimap<std::uint32_t, std::uint32_t> waited_for_;  // word: value
};

}  // namespace tensorferry::cuda_ipc
