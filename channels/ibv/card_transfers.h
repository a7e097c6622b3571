/// One-sided transfers by network cards: lists of RDMA reads and writes.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "channels/one_sided.h"
#include "channels/rdma/local_cards.h"
#include "channels/rdma/peer_connection.h"
#include "channels/rdma/registrations.h"

namespace tensorferry::ibv {

/// How cards reach the memory of one device other than the host. When its channel has ended, its functions fail with
/// ChannelUnavailable. Thread-safe.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  [[nodiscard]] virtual Device device() const noexcept = 0;
  /// Returns those of `ports` (indices in LocalCards::ports) that are nearest to the device.
  virtual std::vector<std::size_t> nearest(const rdma::LocalCards& local, const std::vector<std::size_t>& ports) = 0;
  /// Registers memory for this process's transfers, and may keep that. Blocks.
  virtual Result<std::shared_ptr<rdma::Registration>> reach(rdma::LocalCards& local, const Buffer& memory,
                                                            const std::vector<std::size_t>& cards) = 0;
  /// Registers it for peers, as rdma::Registrations::make_apart does.
  virtual Result<std::shared_ptr<rdma::Registration>> expose(rdma::LocalCards& local, const Buffer& memory,
                                                             rdma::Access access, const std::vector<std::size_t>& cards,
                                                             std::shared_ptr<rdma::Registration> earlier) = 0;
  /// Returns what makes the bytes that have come through these ports visible to the device. It keeps `local`.
  virtual Result<ExposedMemory::Flush> flush(const std::shared_ptr<rdma::LocalCards>& local,
                                             const std::vector<std::size_t>& ports) = 0;
};

/// Reads and writes the peer's memory by the lanes of a link's connection: all of them for a large transfer, and
/// otherwise the one with the least work. First the word is read. Then each lane gets one list. Its last step, a fenced
/// read of the word, is done when the lane's bytes are there; behind a write it also waits until they are visible to
/// the peer's processors.
///
/// This process's memory: registered where it stays so (rdma::Registrations), copied through staging memory if it is
/// small, and otherwise registered for the time of the transfer. A device's memory (`device`, or null) goes by the
/// ports nearest to it, and what was read into it is flushed.
///
/// ExposedMemory memory has a registration of its own, which covers these bytes and no others, so its end makes the
/// keys invalid. A step that meets an invalid key fails the lane at both ends (rdma::PeerConnection connects it anew):
/// that happens if the memory is withdrawn between the two looks at the word.
class CardTransfers final : public OneSided {
 public:
  explicit CardTransfers(std::shared_ptr<rdma::PeerConnection> connection,
                         std::shared_ptr<DeviceMemory> device = nullptr)
      : connection_(std::move(connection)), device_(std::move(device)) {}

  Result<Bytes> expose(const Buffer& memory, ExposedRights rights, std::shared_ptr<ExposedMemory>& exposed) override;
  void transfer(Transfer transfer, Completion done) override;
  void progress() override { connection_->poll(); }

 private:
  /// Returns Ok if the memory is one that these cards reach.
  [[nodiscard]] Status check(const Buffer& memory) const;

  const std::shared_ptr<rdma::PeerConnection> connection_;
  const std::shared_ptr<DeviceMemory> device_;
};

}  // namespace tensorferry::ibv
