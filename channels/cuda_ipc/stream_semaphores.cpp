#include "channels/cuda_ipc/stream_semaphores.h"

#include "channels/cuda/event_poller.h"

namespace tensorferry::cuda_ipc {

namespace {

cuda::Word word_of(const cuda::Pinned& page, std::uint32_t number) {
  return cuda::word_at(page, number * sizeof(std::uint32_t));
}

}  // namespace

SignalSemaphores::SignalSemaphores(cuda::Pinned page) : page_(std::move(page)) {
  for (std::uint32_t word = 0; word < words; ++word) free_.push_back(word);
}

SignalSemaphores::~SignalSemaphores() {
  const auto written = [](const cuda::Pinned& page, const std::vector<std::uint32_t>& values) {
    for (std::uint32_t word = 0; word < words; ++word) {
      if (word_of(page, word).unwritten(values[word])) return false;
    }
    return true;
  };
  if (written(page_, values_)) return;
  cuda::EventPoller::of_this_process().poll_repeatedly([written, page = std::move(page_), values = std::move(values_)] {
    return written(page, values) ? cuda::EventPoller::Progress::over : cuda::EventPoller::Progress::none;
  });
}

std::optional<SignalSemaphores::Use> SignalSemaphores::write_on(CUstream stream) {
  const std::lock_guard lock(mutex_);
  for (auto left = free_.size(); left > 0; --left) {
    const auto word = free_.front();
    free_.pop_front();
    const auto at = word_of(page_, word);
    if (at.unwritten(values_[word])) {  // the offer has ended, but its stream has not written the word yet
      free_.push_back(word);
      continue;
    }
    const auto value = ++values_[word];
    if (at.write_on(stream, value) == CUDA_SUCCESS) return Use{word, value};
    --values_[word];
    free_.push_back(word);
    return std::nullopt;
  }
  return std::nullopt;
}

void SignalSemaphores::give_back(std::uint32_t word) {
  const std::lock_guard lock(mutex_);
  free_.push_back(word);
}

CUresult WaitSemaphores::wait_on(CUstream stream, std::uint32_t word, std::uint32_t value) {
  const std::lock_guard lock(mutex_);
  const auto result = word_of(page_, word).wait_on(stream, value);
  if (result == CUDA_SUCCESS) waited_for_.emplace(word, value);
  return result;
}

void WaitSemaphores::done(std::uint32_t word, std::uint32_t value) {
  const std::lock_guard lock(mutex_);
  const auto [first, last] = waited_for_.equal_range(word);
  for (auto it = first; it != last; ++it) {
    if (it->second != value) continue;
    waited_for_.erase(it);
    return;
  }
}

void WaitSemaphores::release_all() {
  // A live sender's streams may still write earlier values over a raised word, so this repeats.
  cuda::EventPoller::of_this_process().poll_repeatedly([self = shared_from_this()] {
    const std::lock_guard lock(self->mutex_);
    for (const auto& [word, value] : self->waited_for_) word_of(self->page_, word).raise_past(value);
    return self->waited_for_.empty() ? cuda::EventPoller::Progress::over : cuda::EventPoller::Progress::none;
  });
}

}  // namespace tensorferry::cuda_ipc
