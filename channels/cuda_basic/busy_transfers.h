/// The transfers of a cuda_basic channel whose memory the GPU still uses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>

#include "base/function.h"
#include "base/mutex.h"
#include "channels/cuda_basic/transfer.h"

namespace tensorferry::cuda_basic {

/// Keeps transfers until their `ready` events have passed. The host waits, by the event poller: a stream that waited
/// for one transfer would hold up all later ones. Thread-safe; runs completions and callbacks with no lock held.
class BusyTransfers final : public std::enable_shared_from_this<BusyTransfers> {
 public:
  /// Receives the transfer, whose `ready` is empty, and its id: Ok if its memory may be used now, or the error of the
  /// GPU. Runs on the event poller's thread or inside poll_now(), and must not block.
  using Then = UniqueFunction<void(std::uint64_t id, Transfer transfer, const Status& status)>;

  /// Keeps a transfer until its `ready` event, which is not empty, has passed; then runs `then`. Returns the transfer's
  /// id. Ids count up from 1. After close() it fails and leaves `transfer` as it is.
  Result<std::uint64_t> add(Transfer& transfer, Then then);
  /// Gives back a transfer for which `then` has not run and will not run. Returns nullopt if there is none.
  std::optional<Transfer> take(std::uint64_t id);
  /// Returns how many transfers are kept.
  [[nodiscard]] std::size_t size();
  /// Completes all transfers with `status`, an error, without waiting for their events. Later calls do nothing.
  void close(const Status& status);

 private:
  struct Entry {
    Transfer transfer;
    Then then;
  };
  void passed(std::uint64_t id, const Status& status);

  Mutex mutex_;  // guards the members below
  Status closed_;
  std::uint64_t last_ = 0;
  std::unordered_map<std::uint64_t, Entry> entries_;
};

}  // namespace tensorferry::cuda_basic
