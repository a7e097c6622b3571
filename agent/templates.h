/// Payload deltas: sends a payload as its difference from a similar payload that went the same direction on the same
/// link before (docs/protocol.md, "Templates").
///
/// A template is a payload that the receiver has kept under a number. Each end of a link has one table of templates for
/// each direction.
///
/// A template lives as long as its link and is never replaced: frames of one direction overtake each other, so a number
/// must not mean two payloads. Therefore the table is bounded. Once it is half full, it admits a payload only if one of
/// the same length was seen shortly before.
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

/// Bounds on the table of one direction. The search for a template costs more than it saves on payloads below `least`.
struct TemplateBounds {
  static constexpr std::size_t count = 1024;
  static constexpr std::size_t bytes = std::size_t{4} << 20;                // of all payloads together
  static constexpr std::size_t least = 192, most = std::size_t{256} << 10;  // bytes of one payload
};

/// The sender's table. Thread-safe.
class SentTemplates final {
 public:
  /// How a payload travels: whole; whole, for the receiver to keep under a number; or as its differences from the
  /// template of that number.
  struct Way {
    wire::Template what;
    Bytes differences;
  };
  /// Decides how `payload` travels, and records it if the receiver shall keep it. `next_release` returns the release id
  /// by which the receiver will acknowledge that it has kept the payload; it runs under the table's lock, and its ids
  /// must increase.
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
  /// Drops the payload of this release id, because its message was not sent. The number is not used again. Skips ids
  /// that are not a template's.
  void forget(std::uint64_t release);
  /// Records that the receiver has kept the payload of this release id. Skips ids that are not a template's.
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
  std::deque<Kept> kept_;  // indexed by number
  std::multimap<std::size_t, std::uint16_t> by_length_;
  std::size_t bytes_ = 0;
  std::array<std::size_t, 16> seen_{};  // lengths of the last payloads without a similar template; a ring
  std::size_t next_seen_ = 0;
};

/// The receiver's table. Thread-safe. Checks everything that a peer sends and returns ProtocolError if it is invalid.
class ReceivedTemplates final {
 public:
  /// Keeps a copy of `payload` as the template of that number. ProtocolError: the number is too large or taken, or the
  /// table would hold more bytes than it may.
  Status keep(std::uint16_t number, ByteView payload);
  /// Returns the payload that has these differences from the template. ProtocolError: there is no such template, or the
  /// differences do not fit it.
  Result<Bytes> restore(std::uint16_t number, ByteView differences) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::uint16_t, Bytes> kept_;  // entries are never removed, so restore() reads one without the lock
  std::size_t bytes_ = 0;
};

/// Returns the differences of `to` from `from`, which is as long: any number of {varint count of equal bytes, varint
/// count of changed bytes, the changed bytes}. nullopt: they take more than `most` bytes.
std::optional<Bytes> differences(ByteView from, ByteView to, std::size_t most);
/// Applies differences to `from`. nullopt: they are malformed, or do not fit its length.
std::optional<Bytes> apply_differences(ByteView from, ByteView differences);

}  // namespace tensorferry
