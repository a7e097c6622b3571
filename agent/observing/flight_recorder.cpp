#include "agent/observing/flight_recorder.h"

#include <algorithm>
#include <new>

#include "base/text.h"

namespace tensorferry {

std::string_view name_of(FlightSubject subject) noexcept {
  switch (subject) {
    case FlightSubject::link:
      return "link";
    case FlightSubject::calls:
      return "calls";
    case FlightSubject::group:
      return "group";
  }
  return "?";
}

void FlightRecorder::note(FlightSubject subject, std::string_view name, std::string_view text) noexcept {
  try {
    const auto now = Clock::now();
    const std::lock_guard lock(mutex_);
    const Key key(subject, name);
    if (!events_.contains(key)) make_room();
    auto& events = events_[key];
    text = text.substr(0, longest_text);
    if (!events.empty() && events.back().text == text) {
      events.back().at = now;
      ++events.back().times;
      return;
    }
    events.push_back({subject, key.second, now, std::string(text)});
    if (events.size() > most_events) events.pop_front();
  } catch (const std::bad_alloc&) {  // the event is lost
  }
}

/// Removes the subject whose last event is the oldest, if there are as many subjects as there may be.
void FlightRecorder::make_room() {
  if (events_.size() < most_subjects) return;
  const auto last_of = [](const auto& each) {
    return each.second.empty() ? Clock::time_point() : each.second.back().at;
  };
  events_.erase(std::min_element(events_.begin(), events_.end(),
                                 [&](const auto& a, const auto& b) { return last_of(a) < last_of(b); }));
}

std::vector<FlightEvent> FlightRecorder::events() const {
  std::vector<FlightEvent> all;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [key, events] : events_) all.insert(all.end(), events.begin(), events.end());
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.at < b.at; });
  return all;
}

std::string FlightRecorder::last(FlightSubject subject, std::string_view name, std::size_t count) const {
  const auto now = Clock::now();
  std::string out;
  const std::lock_guard lock(mutex_);
  const auto found = events_.find(Key(subject, name));
  if (found == events_.end()) return out;
  const auto& events = found->second;
  for (auto i = events.size() - std::min(count, events.size()); i < events.size(); ++i) {
    const auto& event = events[i];
    const auto tenths = std::chrono::duration_cast<std::chrono::milliseconds>(now - event.at).count() / 100;
    if (!out.empty()) out += "; ";
    out += formatted("{} {}.{} s ago", event.text, tenths / 10, tenths % 10);
    if (event.times > 1) out += formatted(" ({} times)", event.times);
  }
  return out;
}

}  // namespace tensorferry
