#include "channels/cuda/event_poller.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/out_of_memory.h"
#include "base/threads.h"
#include "channels/completion.h"

namespace tensorferry::cuda {
namespace {

using std::chrono::microseconds;

constexpr microseconds eager{300};     // after progress the thread polls for this long without a pause
constexpr microseconds patience{100};  // the shortest time between two polls of a loosely watched event
constexpr microseconds longest_pause{1000};
// With nothing to poll the thread still wakes each `longest_pause` for this long, so that loose events need no wake-up.
constexpr microseconds doze{10'000};
// Then it sleeps until a submission wakes it, and ends after this long without one.
constexpr std::chrono::seconds idle{1};

/// Returns the pause between polls after `quiet` without progress.
template <class Duration>
microseconds backed_off(Duration quiet) {
  return std::min(longest_pause, std::chrono::duration_cast<microseconds>(quiet) / 8);
}

}  // namespace

EventPoller& EventPoller::of_this_process() {
  static auto& poller = *new EventPoller;
  return poller;
}

EventPoller& EventPoller::of_host_copies() {
  static auto& poller = *new EventPoller;
  return poller;
}

void EventPoller::when_done(Watch watch, int device, Stream stream, Completion then) {
  when_done(watch, GpuEvent::record(device, stream), std::move(then));
}

void EventPoller::when_done(Watch watch, GpuEvent event, Completion then) {
  if (!event) return complete(std::move(then), {Code::internal, "the CUDA driver records no event"});
  const auto now = Clock::now();
  submit(incoming_, {std::move(event), std::move(then), watch, now, now + patience}, watch == Watch::closely);
}

void EventPoller::poll_repeatedly(PollFunction function) { submit(incoming_functions_, std::move(function), true); }

template <class Thing>
void EventPoller::submit(std::vector<Thing>& incoming, Thing thing, bool closely) {
  const std::lock_guard lock(mutex_);
  incoming.push_back(std::move(thing));
  ++submitted_;
  if (closely || idle_) changed_.notify_all();
  if (alive_) return;
  start_thread([this] { run(); }).detach();
  alive_ = true;
}

void EventPoller::poll_now() {
  std::unique_lock polling(polling_, std::try_to_lock);
  if (!polling || Clock::now() < last_poll_ + just_polled) return;
  poll(true, std::move(polling));
}

bool EventPoller::poll(bool all, std::unique_lock<Mutex> polling) {
  std::vector<std::pair<Completion, Status>> done;
  {
    const std::lock_guard lock(mutex_);
    polled_.reserve(polled_.size() + incoming_.size());  // what throws comes before anything moves
    std::move(incoming_.begin(), incoming_.end(), std::back_inserter(polled_));
    incoming_.clear();
  }
  {
    const auto now = Clock::now();
    const CaptureModeGuard outside;  // the queries belong to no CUDA graph
    std::erase_if(polled_, [&](PolledEvent& event) {
      if (!all && event.watch == Watch::loosely && now < event.next) return false;
      std::optional<Status> status;  // without memory for an error it is asked for again
      out_of_memory::with_reserve([&] { status = event.event.done(); });
      if (status && done.empty()) done.reserve(polled_.size());  // nothing has moved yet
      if (status) done.emplace_back(std::move(event.then), std::move(*status));
      event.next = now + std::max(patience, backed_off(now - event.since));
      return status.has_value();
    });
  }
  if (all) last_poll_ = Clock::now();
  polling.unlock();
  for (auto& [then, status] : done) complete(std::move(then), std::move(status));
  return !done.empty();
}

/// Returns the time until the next poll. Zero: poll at once. `idle`: there is nothing to poll.
EventPoller::Clock::duration EventPoller::pause(bool functions, Clock::duration quiet) {
  const std::lock_guard polling(polling_);
  bool closely = functions;
  auto next = Clock::time_point::max();
  for (const auto& event : polled_) {
    closely = closely || event.watch == Watch::closely;
    next = std::min(next, event.next);
  }
  if (closely && quiet < eager) return {};
  if (closely) return backed_off(quiet);
  if (!polled_.empty()) return std::clamp<Clock::duration>(next - Clock::now(), {}, longest_pause);
  return quiet < doze ? Clock::duration(longest_pause) : Clock::duration(idle);
}

void EventPoller::run() {
  std::vector<PollFunction> functions;
  std::uint64_t seen = 0;
  auto last_news = Clock::now();
  while (true) {
    const auto pause = this->pause(!functions.empty(), Clock::now() - last_news);
    {
      std::unique_lock lock(mutex_);
      idle_ = pause >= idle;
      const auto news = [&] { return submitted_ != seen; };  // poll_now() may have taken it out of incoming_
      const bool any = pause.count() > 0 ? changed_.wait_for(lock, pause, news) : news();
      if (!any && idle_) {
        alive_ = idle_ = false;
        return;
      }
      idle_ = false;
      if (any || !incoming_.empty()) last_news = Clock::now();
      const auto all = functions.size() + incoming_functions_.size();
      if (out_of_memory::with_reserve([&] { functions.reserve(all); })) {
        std::move(incoming_functions_.begin(), incoming_functions_.end(), std::back_inserter(functions));
        incoming_functions_.clear();
        seen = submitted_;
      }
    }
    bool any = false;
    out_of_memory::with_reserve([&] { any = poll(false, std::unique_lock(polling_)); });
    std::erase_if(functions, [&](PollFunction& function) {
      auto progress = Progress::none;  // without memory it goes on the next time
      out_of_memory::with_reserve([&] { progress = function(); });
      any = any || progress != Progress::none;
      return progress == Progress::over;
    });
    if (any) last_news = Clock::now();
    if (pause.count() == 0) std::this_thread::yield();
  }
}

Background& background() {
  static auto& background = *new Background;
  return background;
}

}  // namespace tensorferry::cuda
