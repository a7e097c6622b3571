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
  submit(incoming_, {std::move(event), std::move(then)});
}

void Watcher::take_turns(Turn turn) { submit(incoming_turns_, std::move(turn)); }

template <class Thing>
void Watcher::submit(std::vector<Thing>& incoming, Thing thing) {
  const std::lock_guard lock(mutex_);
  incoming.push_back(std::move(thing));
  ++submitted_;
  changed_.notify_all();
  if (alive_) return;
  const auto before = block_signals_of_others();
  std::thread([this] { live(); }).detach();
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  alive_ = true;
}

bool Watcher::look_now() {
  std::vector<std::pair<Completion, Status>> done;
  {
    const std::lock_guard looking(looking_);
    {
      const std::lock_guard lock(mutex_);
      std::move(incoming_.begin(), incoming_.end(), std::back_inserter(watched_));
      incoming_.clear();
    }
    const OutsideGraphs outside;  // asking for an event is no part of any
    std::erase_if(watched_, [&](Watched& watched) {
      auto status = watched.event.done();
      if (status) done.emplace_back(std::move(watched.then), std::move(*status));
      return status.has_value();
    });
  }
  for (auto& [then, status] : done) complete(std::move(then), std::move(status));
  return !done.empty();
}

void Watcher::live() {
  std::vector<Turn> turns;
  std::uint64_t seen = 0;
  auto last_news = std::chrono::steady_clock::now();
  while (true) {
    const auto pause = pause_after(std::chrono::steady_clock::now() - last_news);
    const auto nothing_to_do = [&] {
      const std::lock_guard looking(looking_);
      return watched_.empty() && turns.empty();
    }();
    {
      std::unique_lock lock(mutex_);
      const auto news = [&] { return submitted_ != seen; };
      if (nothing_to_do && !changed_.wait_for(lock, idle, news)) {
        alive_ = false;
        return;
      }
      if (pause.count() > 0) changed_.wait_for(lock, pause, news);
      if (news()) last_news = std::chrono::steady_clock::now();
      std::move(incoming_turns_.begin(), incoming_turns_.end(), std::back_inserter(turns));
      incoming_turns_.clear();
      seen = submitted_;
    }
    bool any = look_now();
    std::erase_if(turns, [&](Turn& turn) {
      const auto progress = turn();
      any = any || progress != Progress::none;
      return progress == Progress::over;
    });
    if (any) last_news = std::chrono::steady_clock::now();
    if (pause.count() == 0) std::this_thread::yield();
  }
}

Background& background() {
  static auto& background = *new Background;
  return background;
}

}  // namespace tensorferry::cuda
