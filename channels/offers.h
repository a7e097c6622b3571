/// What a channel end has offered and its peer has not acknowledged: sources that are kept until then.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "channels/buffer.h"
#include "channels/status.h"

namespace tensorferry {

/// The open offers of one channel end. Thread-safe; runs completions with no lock held.
///
/// Life of an offer: `add`, perhaps `begin_copy` and `end_copy` by whoever copies it within this process, `end` by its
/// channel. The source is never given back under a copy: an offer that ends while it is copied is released by
/// `end_copy`.
class Offers {
 public:
  /// nullopt once closed: `released` is dropped unrun.
  std::optional<std::uint64_t> add(Buffer buffer, Completion released, bool shared = false);

  /// What to copy, valid until `end_copy`; or, where `shared`, to take over with its owner. Fails where `number` names
  /// no offer of `bytes` bytes that was not copied before, and with the status of `close` after it.
  struct Source {
    Buffer buffer;
    bool shared;
  };
  Result<Source> begin_copy(std::uint64_t number, std::uint64_t bytes);
  void end_copy(std::uint64_t number);

  /// Ends an offer, where there is one.
  void end(std::uint64_t number);
  /// Ends all offers with `status`. Ok counts as ConnectionLost.
  void close(Status status);

 private:
  struct Entry {
    Buffer buffer;
    Completion released;
    bool shared = false;
    enum { waiting, copying, copied } state = waiting;
    bool ended = false;
    Status status;
  };

  std::mutex mutex_;
  std::uint64_t next_ = 1;
  std::unordered_map<std::uint64_t, Entry> entries_;
  std::optional<Status> closed_;
};

}  // namespace tensorferry
