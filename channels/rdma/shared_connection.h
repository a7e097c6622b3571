/// The queue pairs of one link, and the channels of the link that use them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/function.h"
#include "base/status.h"
#include "channels/rdma/peer_connection.h"
#include "channels/rdma/shared_cards.h"
#include "channels/wire_use.h"

namespace tensorferry::rdma {

/// Gives all channels of a link that use the same cards one PeerConnection. Each channel joins with its wire, and hands
/// over the connection's messages (ConnectPorts, PortsConnected, PortLost) that come to it.
///
/// The connection sends its messages by the wire of any channel that has joined. So it does not matter which channel
/// was opened first at which end. The connection has no messages for one channel alone.
///
/// Thread-safe. Held by a shared_ptr, by each of the channels.
class SharedConnection final : public std::enable_shared_from_this<SharedConnection> {
 public:
  /// Returns the connection of the link that lends `wire`. Each channel of the link that uses `cards` gets the same one
  /// (Wire::shared). `cards` outlives the result.
  static std::shared_ptr<SharedConnection> of(Wire& wire, SharedCards& cards);

  explicit SharedConnection(SharedCards& cards) : cards_(cards) {}
  SharedConnection(const SharedConnection&) = delete;
  SharedConnection& operator=(const SharedConnection&) = delete;

  /// Adds a channel. From now on `changed` runs when the connection comes up (Ok) or goes down (why), on the thread of
  /// SharedCards::connecting; without it, Wire::ready. The first channel begins the connection. A channel leaves when
  /// `wire` expires or ends. Never blocks.
  using Changed = UniqueFunction<void(const Status&)>;
  void join(std::weak_ptr<WireUse> wire, Changed changed = {});

  /// Returns what explain() says of the lanes: "mlx5_0 port 1, RoCE v2, 100 Gbit/s"; "" if there are none.
  [[nodiscard]] std::string describe() const;

  /// Returns the connection, which ends with the first of its channels: a link ends for all of them.
  [[nodiscard]] const std::shared_ptr<PeerConnection>& connection() const noexcept { return connection_; }

 private:
  void send(const Bytes& message);
  void changed(const Status& status);

  SharedCards& cards_;
  std::shared_ptr<PeerConnection> connection_;

  // Only for jobs of SharedCards::connecting, on which the connection's listener runs too:
  struct User {
    std::weak_ptr<WireUse> wire;
    std::shared_ptr<Changed> changed;
    void tell(const Status& status) const;
  };
  std::vector<User> users_;
  std::optional<Status> state_;  // what the connection said last
};

}  // namespace tensorferry::rdma
