#include "channels/cuda_ipc/stream_semaphores.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "channels/completion.h"
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

bool WaitSemaphores::reached(std::uint32_t word, std::uint32_t value) const {
  return word_of(page_, word).reached(value);
}

CUresult WaitSemaphores::wait_on(CUstream stream, std::uint32_t word, std::uint32_t value) {
  bool late = false;
  {
    const std::lock_guard lock(mutex_);
    const auto result = word_of(page_, word).wait_on(stream, value);
    if (result != CUDA_SUCCESS) return result;
    streams_wait_.emplace(word, value);
    late = !closed_.ok();
  }
  if (late) release_streams();
  return CUDA_SUCCESS;
}

void WaitSemaphores::done(std::uint32_t word, std::uint32_t value) {
  const std::lock_guard lock(mutex_);
  const auto [first, last] = streams_wait_.equal_range(word);
  for (auto it = first; it != last; ++it) {
    if (it->second != value) continue;
    streams_wait_.erase(it);
    return;
  }
}

void WaitSemaphores::release_streams() {
  // A live sender's streams may still write earlier values over a raised word, so this repeats.
  cuda::EventPoller::of_this_process().poll_repeatedly([self = shared_from_this()] {
    const std::lock_guard lock(self->mutex_);
    for (const auto& [word, value] : self->streams_wait_) word_of(self->page_, word).raise_past(value);
    return self->streams_wait_.empty() ? cuda::EventPoller::Progress::over : cuda::EventPoller::Progress::none;
  });
}

void WaitSemaphores::when_reached(std::uint32_t word, std::uint32_t value, Completion then) {
  Status status;
  {
    const std::lock_guard lock(mutex_);
    status = closed_;
    if (status.ok() && !word_of(page_, word).reached(value)) {
      waiting_.push_back({word, value, std::move(then)});
      if (std::exchange(polled_, true)) return;
      cuda::EventPoller::of_this_process().poll_repeatedly([self = shared_from_this()] { return self->poll(); });
      return;
    }
  }
  complete(std::move(then), std::move(status));
}

cuda::EventPoller::Progress WaitSemaphores::poll() {
  using Progress = cuda::EventPoller::Progress;
  std::vector<Waiting> reached;
  bool over = false;
  {
    const std::lock_guard lock(mutex_);
    const auto waits = [&](const Waiting& each) { return !word_of(page_, each.word).reached(each.value); };
    const auto due = std::stable_partition(waiting_.begin(), waiting_.end(), waits);
    std::move(due, waiting_.end(), std::back_inserter(reached));
    waiting_.erase(due, waiting_.end());
    over = waiting_.empty();
    if (over) polled_ = false;
  }
  for (auto& each : reached) complete(std::move(each.then), {});
  return over ? Progress::over : reached.empty() ? Progress::none : Progress::some;
}

void WaitSemaphores::close(const Status& status) {
  std::vector<Waiting> waiting;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_.ok()) return;
    closed_ = status;
    waiting.swap(waiting_);
  }
  for (auto& each : waiting) complete(std::move(each.then), status);
  release_streams();
}

}  // namespace tensorferry::cuda_ipc
