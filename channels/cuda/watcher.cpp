#include "channels/cuda/watcher.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "channels/completion.h"
#include "channels/thread_signals.h"

namespace tensorferry::cuda {
namespace {

using std::chrono::microseconds;

constexpr microseconds eager{300};  // so long after something has come it looks without a pause
constexpr microseconds longest_pause{1000};
constexpr std::chrono::seconds idle{1};

microseconds pause_after(std::chrono::steady_clock::duration quiet) {
  const auto so_far = std::chrono::duration_cast<microseconds>(quiet);
  return so_far < eager ? microseconds{0} : std::min(longest_pause, so_far / 8);
}

}  // namespace

Watcher& Watcher::of_this_process() {
  static auto& watcher = *new Watcher;
  return watcher;
}

void Watcher::when_done(int device, Stream stream, Completion then) {
  when_done(Event::record(device, stream), std::move(then));
}

void Watcher::when_done(Event event, Completion then) {
  if (!event) return complete(std::move(then), {Code::internal, "the CUDA driver records no event"});
  submit({std::move(event), std::move(then), {}});
}

void Watcher::take_turns(Turn turn) { submit({{}, {}, std::move(turn)}); }

void Watcher::submit(Watched watched) {
  const std::lock_guard lock(mutex_);
  incoming_.push_back(std::move(watched));
  changed_.notify_all();
  if (alive_) return;
  const auto before = block_signals_of_others();
  std::thread([this] { live(); }).detach();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  alive_ = true;
}

Background& background() {
  static auto& background = *new Background;
  return background;
}

/// Whether it is over; then it has been completed.
bool Watcher::look(Watched& watched) {
  if (watched.turn) return watched.turn();
  auto done = watched.event.done();
  if (!done) return false;
  complete(std::move(watched.then), std::move(*done));
  return true;
}

void Watcher::live() {
  std::vector<Watched> watching;
  auto last_news = std::chrono::steady_clock::now();
  while (true) {
    const auto pause = pause_after(std::chrono::steady_clock::now() - last_news);
    {
      std::unique_lock lock(mutex_);
      const auto news = [&] { return !incoming_.empty(); };
      if (watching.empty() && !changed_.wait_for(lock, idle, news)) {
        alive_ = false;
        return;
      }
      if (pause.count() > 0) changed_.wait_for(lock, pause, news);
      if (news()) last_news = std::chrono::steady_clock::now();
      std::move(incoming_.begin(), incoming_.end(), std::back_inserter(watching));
      incoming_.clear();
    }
    const auto over = std::erase_if(watching, look);
    if (over > 0) last_news = std::chrono::steady_clock::now();
    if (pause.count() == 0) std::this_thread::yield();
  }
}

}  // namespace tensorferry::cuda
