/// The `shm` channel: moves buffers through blocks of memory that two processes of one host share. The sender copies
/// once.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"
#include "channels/shm/blocks.h"

namespace tensorferry {

/// Carries CPU memory to CPU memory of another process of the same user on the same host, over links that pass
/// descriptors.
///
/// By value: the sender copies the buffer into a block that the receiver has mapped too. The sender then needs the
/// buffer no more, so `offer` itself completes `released`. The receiver adopts the block; if its sink wants other
/// memory, the receiver copies the block. The block returns to the sender, without a message, when its last owner drops
/// it.
///
/// Refusals: the channel refuses an offer while it has no block of warm memory, unless this channel is the last resort.
/// It also refuses offers while receivers hold as much as they may (Limits::held_bytes).
///
/// Shared: with Sharing::shared or Sharing::frozen the sender hands over a region (channels/region.h). The region's
/// descriptor goes to a peer once; later buffers in it need a ticket alone.
///   - `shared`: both sides see the same bytes. If the region cannot be handed over, the offer is refused.
///   - `frozen`: the receiver has its own copy of each page that it writes. If the region cannot be handed over, its
///     bytes go by value.
/// The bytes of a region that go by value are copied like any other memory.
///
/// Received memory outlives the channel, the driver and the peer. A forked child may read it. Writes of a child are
/// visible in every process that maps the memory, unless the region is frozen. A forked child cannot use the driver or
/// its channels.
class ShmDriver final : public Driver {
 public:
  explicit ShmDriver(shm::Limits limits = {});
  ~ShmDriver() override;

  [[nodiscard]] std::string_view name() const override { return "shm"; }
  [[nodiscard]] bool shares_memory() const override { return true; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;

  /// Returns the bytes of lent and of free blocks. A block that a receiver has returned counts as lent until the sender
  /// next reads the list of returned blocks.
  [[nodiscard]] const shm::Usage& usage() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tensorferry
