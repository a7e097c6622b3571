/// `shm`: blocks of memory that two processes of one host share. One copy, by the sender.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"
#include "channels/shm/blocks.h"

namespace tensorferry {

/// CPU memory to CPU memory of another process of the same user on the same host, over links that pass descriptors.
///
/// The sender copies the buffer into a block that the receiver has mapped too, and releases it at once, inside `offer`.
/// The receiver adopts the block, or copies it where its sink wants other memory; the block goes back to the sender
/// when its last owner lets go, without a message. An offer is refused while there is no block of warm memory, except
/// as a last resort, and where receivers hold as much as they may.
///
/// A region (channels/region.h) is handed over with Sharing::shared: its descriptor goes to a peer once, then tickets
/// alone; both sides see the same bytes. Sent by value it is copied like any other memory.
///
/// Memory that was received outlives channel, driver and peer. A forked child may read it, and its writes are
/// seen by all; it cannot use the driver or its channels.
class ShmDriver final : public Driver {
 public:
  explicit ShmDriver(shm::Limits limits = {});
  ~ShmDriver() override;

  [[nodiscard]] std::string_view name() const override { return "shm"; }
  [[nodiscard]] bool shares_memory() const override { return true; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;

  /// Of blocks that were lent or could be, in bytes; receivers' returns count when a sender has looked.
  [[nodiscard]] const shm::Usage& usage() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tensorferry
