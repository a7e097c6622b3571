/// The ends of channels within one process (xth, cuda_xth), and the tickets by which they find each other's offers.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

#include "base/mutex.h"
#include "base/record.h"
#include "channels/channel.h"
#include "channels/offers.h"

namespace tensorferry::xth {

/// 128 random bits that cannot be guessed.
using Id = std::array<std::uint64_t, 2>;

Id random_id();

/// The ticket of a channel within one process: the id of the offering channel end, and the offer's
/// number there.
struct XthTicket {
  Id end{};
  std::uint64_t number = 0;
  static constexpr std::tuple fields{&XthTicket::end, varint(&XthTicket::number)};
};

/// Returns a number that only this process has, by which two agents learn that they share a process. A forked child
/// draws its own.
Id nonce_of_this_process();

/// A channel's descriptor: the number of this process.
Bytes descriptor();
/// Returns nullopt if both descriptors are of one process.
std::optional<Refusal> reaches(ByteView mine, ByteView theirs);

/// One end of a channel within this process, with its offers. Its peer finds it by the id in the tickets. Thread-safe.
class LocalEnd {
 public:
  /// `channel` is the channel's name. A ticket is good only for the end of the same channel that has the pair's devices
  /// exchanged.
  LocalEnd(std::string_view channel, DevicePair pair, const Wire& wire);
  ~LocalEnd() { close({}); }
  LocalEnd(const LocalEnd&) = delete;
  LocalEnd& operator=(const LocalEnd&) = delete;

  /// Adds an offer (channels/offers.h) and returns its ticket. Refuses after `close`.
  Offer offer(Buffer buffer, Completion released, bool shared = false);
  /// Ends the offer of a ticket that this end made.
  void withdraw(const Ticket& ticket);

  /// The source of the other end's ticket. It is valid until `end_copy`.
  struct Source : Offers::OfferedMemory {
    std::shared_ptr<Offers> offers;
    std::uint64_t number = 0;
    void end_copy() const { offers->end_copy(number); }
  };
  /// Finds the source of a ticket. ConnectionLost: this end or the other one is closed. ProtocolError: the ticket is
  /// malformed, names no open offer, or names one of another channel or another pair of devices.
  Result<Source> begin_copy(const Ticket& ticket);

  /// Ends all offers with `status`, and finds no sources from then on.
  void close(Status status);

 private:
  /// What the other ends of this process know of an end.
  struct Shown {
    std::string_view channel;
    DevicePair pair;
    std::shared_ptr<Offers> offers;
  };
  struct Ends;
  Result<std::shared_ptr<Offers>> find(const Id& end);

  const std::string_view channel_;
  const DevicePair pair_;
  const Wire& wire_;
  const Id id_ = random_id();
  const std::shared_ptr<Offers> offers_ = std::make_shared<Offers>();
  Mutex mutex_;
  bool closed_ = false;
  Id theirs_id_{};
  std::shared_ptr<Offers> theirs_;
};

}  // namespace tensorferry::xth
