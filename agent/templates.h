/// Structures that are sent again: of a payload that is like one that went the same way before, only what differs goes.
/// A payload that the receiver has kept is a template; both ends of a link have a table of them for each direction.
///
/// Templates stay as long as the link and are never replaced: frames of one direction overtake each other, so a number
/// must not mean two things. So the table is bounded, and once it is half full takes in only what comes again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>

#include "agent/wire/frame.h"
#include "channels/bytes.h"
#include "channels/status.h"

namespace tensorferry {

/// What a direction's table may hold. Shorter payloads cost less than the looking.
struct TemplateBounds {
  static constexpr std::size_t count = 1024;
  static constexpr std::size_t bytes = std::size_t{4} << 20;                // of all
  static constexpr std::size_t least = 192, most = std::size_t{256} << 10;  // of one
};

/// The sender's table. Thread-safe.
class SentTemplates final {
 public:
  /// How a payload goes: whole; whole, to be kept under a number; or as what differs from the one of that number.
  struct Way {
    wire::Template what;
    Bytes differences;
  };
  /// `next_release`: gives the id by which the receiver says that it has kept the payload.
  template <class NextRelease>
  Way way(ByteView payload, const NextRelease& next_release) {
    if (payload.size() < TemplateBounds::least || payload.size() > TemplateBounds::most) return {};
    const std::lock_guard lock(mutex_);
    Way way;
    if (find(payload, way) || !worth_keeping(payload.size())) return way;
    way.what = {wire::Template::Use::keep, number_of_next(), next_release()};
    add(payload, way.what.release);
    return way;
  }
  /// A payload that went with this id goes nowhere after all.
  void forget(std::uint64_t release);
  /// The receiver has kept the payload that went with this id. Ids of something else are skipped.
  void acknowledged(std::uint64_t release);

 private:
  struct Kept {
    Bytes payload;
    std::uint64_t release;
    bool acknowledged;
  };
  bool find(ByteView payload, Way& way) const;
  std::deque<Kept>::iterator of(std::uint64_t release);
  bool worth_keeping(std::size_t bytes);
  [[nodiscard]] std::uint16_t number_of_next() const { return static_cast<std::uint16_t>(kept_.size()); }
  void add(ByteView payload, std::uint64_t release);

  static constexpr std::size_t most_alike = 4;  // templates of one length

  std::mutex mutex_;
  std::deque<Kept> kept_;  // by number
  std::multimap<std::size_t, std::uint16_t> by_length_;
  std::size_t bytes_ = 0;
  std::array<std::size_t, 16> seen_{};  // lengths of the last payloads that were like none
  std::size_t next_seen_ = 0;
};

/// The receiver's table. Thread-safe. What a peer sends is checked; ProtocolError where it makes no sense.
class ReceivedTemplates final {
 public:
  Status keep(std::uint16_t number, ByteView payload);
  Result<Bytes> restore(std::uint16_t number, ByteView differences) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::uint16_t, Bytes> kept_;  // never removed
  std::size_t bytes_ = 0;
};

/// `to`, which is as long as `from`, as what differs: any number of {varint bytes that are the same, varint bytes that
/// are not, those}. nullopt: longer than `most`.
std::optional<Bytes> differences(ByteView from, ByteView to, std::size_t most);
/// Undoes it. nullopt: these are differences of something else.
std::optional<Bytes> apply_differences(ByteView from, ByteView differences);

}  // namespace tensorferry
