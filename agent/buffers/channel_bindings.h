/// The channel bindings of one link: which channels connect each pair of devices, in order of priority. Negotiates them
/// with the peer, and finds the binding that a frame of the peer names.
///
/// Threads: any. No lock is held across a call of a channel.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/buffers/channel_binding.h"
#include "agent/message.h"
#include "agent/wire/frame.h"
#include "base/mutex.h"
#include "channels/channel.h"

namespace tensorferry {

/// The channels of one pair of devices, in order of priority.
struct ChannelOrder {
  std::vector<std::pair<std::string, ChannelBinding*>> all;  // by name; null: does not reach
  std::map<std::string, std::string> reasons;                // why those with null do not reach
  std::vector<ChannelBinding*> bindings;                     // those that reach
};

class ChannelBindings final : private Carriers {
 public:
  explicit ChannelBindings(WireParts parts);
  ~ChannelBindings();

  /// Learns the peer's devices, drivers and features from its first hello. Later hellos change nothing. `uid`: the
  /// peer's user, as the kernel tells; nullopt: the kernel does not know.
  void meet(const wire::Hello& hello, std::optional<uid_t> uid);
  /// Returns whether the peer reads bundles.
  [[nodiscard]] bool bundles() const noexcept { return peer_.bundles; }
  /// Returns the peer's device on which a buffer lands; see arrival() in agent/buffers/placement.h.
  Result<Device> arrival(Device source, const Placement& placement, bool* elsewhere) const;

  /// Returns whether the peer has announced the device, or it is the host.
  [[nodiscard]] bool has(Device theirs) const;

  /// Returns the pair's channels. The first call for a pair opens those that reach. The reference stays valid, and the
  /// list does not change.
  const ChannelOrder& order(DevicePair pair);
  /// Returns the binding that the peer names by its own driver number and device pair; opens the channel if the peer
  /// was the first to use it. Null: this end does not want that channel, and the peer is told so if `refuses`, once.
  /// ProtocolError: the peer has never announced such a driver, or not for that device.
  Result<ChannelBinding*> of_peer(std::uint8_t driver, DevicePair theirs, bool refuses = true);
  /// The same for a code of the peer's (ChannelBinding::code).
  Result<ChannelBinding*> of_code(std::uint32_t code, bool refuses = true);

  /// Returns the open channels.
  [[nodiscard]] std::vector<Channel*> channels() const;
  /// The link has ended with `status`: no channel is opened any more. Returns the open channels, which the caller
  /// closes; one that another thread opens at this moment is closed by that thread. Nullopt: it had ended before.
  std::optional<std::vector<Channel*>> end(const Status& status);
  /// Destroys the channels; see ChannelSet.
  void destroy_channels();

 private:
  using Key = std::pair<std::size_t, DevicePair>;  // index of this side's driver, device pair
  struct Announcement {                            // of the peer's first hello
    bool met = false;
    bool bundles = false;
    std::optional<uid_t> uid;  // by the kernel's word, not by the hello's
    std::vector<wire::Hello::Driver> drivers;
    std::vector<Device> devices;
  };

  [[nodiscard]] std::optional<Refusal> reach(std::size_t driver, DevicePair pair) const;
  const ChannelOrder& open_all(DevicePair pair);
  ChannelBinding* open(std::size_t driver, DevicePair pair);
  [[nodiscard]] std::vector<Channel*> open_channels() const;
  Wire::Carrier best() override;
  Wire::Carrier named(std::string_view name) override;
  void refuse(const std::string& driver, DevicePair pair, const std::string& reason);

  const WireParts parts_;
  Mutex open_mutex_;  // one thread opens channels at a time; locked before the next one

  mutable Mutex mutex_;  // guards the members below
  Announcement peer_;
  std::optional<Status> ended_;
  std::map<Key, std::unique_ptr<ChannelBinding>> bindings_;
  std::map<DevicePair, ChannelOrder> orders_;
  std::set<std::uint32_t> refused_;  // codes of the channels that the peer has opened and this end does not want
};

}  // namespace tensorferry
