/// The table in which the other end of a link finds what an xth channel end has offered.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "channels/offers.h"

namespace tensorferry::xth {

/// 128 random bits, not to be guessed.
using Id = std::array<std::uint64_t, 2>;

Id random_id();

/// A number that this process alone has, by which two agents learn that they are in one; a forked child draws its own.
Id nonce_of_this_process();

/// The channel ends of this process by id. The one global of xth: the two ends of a link meet nowhere else.
class Directory {
 public:
  static Directory& of_this_process();

  void enter(const Id& id, std::shared_ptr<Offers> offers);
  void leave(const Id& id);
  std::shared_ptr<Offers> find(const Id& id);

 private:
  struct Hash {
    std::size_t operator()(const Id& id) const noexcept { return id[0]; }
  };
  std::mutex mutex_;
  std::unordered_map<Id, std::shared_ptr<Offers>, Hash> ends_;
};

}  // namespace tensorferry::xth
