/// Table in which the other end of a link finds the offers of an xth channel end, and the tickets that name them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "base/record.h"
#include "channels/offers.h"

namespace tensorferry::xth {

/// 128 random bits that cannot be guessed.
using Id = std::array<std::uint64_t, 2>;

Id random_id();

/// The ticket of a channel within one process (xth, cuda_xth): the id of the offering channel end, and the offer's
/// number there.
struct XthTicket {
  Id end{};
  std::uint64_t number = 0;
  static constexpr std::tuple fields{&XthTicket::end, varint(&XthTicket::number)};
};

/// Returns a number that only this process has, by which two agents learn that they share a process. A forked child
/// draws its own.
Id nonce_of_this_process();

/// Holds the channel ends of this process by id. Thread-safe. It is global, because the two ends of a link meet nowhere
/// else.
class ChannelEnds {
 public:
  static ChannelEnds& of_this_process();

  void enter(const Id& id, std::shared_ptr<Offers> offers);
  void leave(const Id& id);
  /// Returns the offers of the channel end `id`; null if there is no such end.
  std::shared_ptr<Offers> find(const Id& id);

 private:
  struct Hash {
    std::size_t operator()(const Id& id) const noexcept { return id[0]; }
  };
  std::mutex mutex_;
  std::unordered_map<Id, std::shared_ptr<Offers>, Hash> ends_;
};

}  // namespace tensorferry::xth
