/// The flight recorder of an agent: the last events of each link, each group and the calls to each peer, for reports of
/// what went wrong. docs/tracing.md is the user's guide.
///
/// Events are rare: a connection begins or ends, a call fails or is slow, a group is formed or fails. A call that ends
/// well and soon leaves none, so the recorder is always on.
///
/// Threads: any. Nothing here throws: if memory is short, the event is lost.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tensorferry {

/// What an event is about.
enum class FlightSubject : std::uint8_t { link, calls, group };
/// Returns "link", "calls" or "group".
std::string_view name_of(FlightSubject subject) noexcept;

struct FlightEvent {
  FlightSubject subject{};
  std::string name;  // of the peer, or of the group
  std::chrono::steady_clock::time_point at;
  std::string text;
  std::uint32_t times = 1;  // how often it came in a row; `at` is the last time
};

class FlightRecorder final {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::size_t most_events = 32;     // of one subject; the oldest one makes room
  static constexpr std::size_t most_subjects = 512;  // the one whose last event is the oldest makes room
  static constexpr std::size_t longest_text = 240;   // bytes; the rest of a text is cut off

  void note(FlightSubject subject, std::string_view name, std::string_view text) noexcept;
  /// Returns all events, in the order of time.
  [[nodiscard]] std::vector<FlightEvent> events() const;
  /// Returns the last `count` events of a subject for an error's text, as "TEXT 1.2 s ago; TEXT 0.1 s ago"; "" if it
  /// has none.
  [[nodiscard]] std::string last(FlightSubject subject, std::string_view name, std::size_t count) const;

 private:
  using Key = std::pair<FlightSubject, std::string>;
  void make_room();

  mutable std::mutex mutex_;  // guards the next one
  std::map<Key, std::deque<FlightEvent>> events_;
};

}  // namespace tensorferry
