/// One-sided transfers by network cards: lists of RDMA reads and writes.
#pragma once

#include <memory>
#include <utility>

#include "channels/one_sided.h"
#include "channels/rdma/peer_connection.h"

namespace tensorferry::ibv {

/// Reads and writes the peer's memory by the lanes of a link's connection: all of them for a large transfer, and
/// otherwise the one with the least work. First the word is read. Then each lane gets one list. Its last step, a fenced
/// read of the word, is done when the lane's bytes are there; behind a write it also waits until they are visible to
/// the peer's processors.
///
/// This process's memory: registered where it stays so (rdma::Registrations), copied through staging memory if it is
/// small, and otherwise registered for the time of the transfer.
///
/// ExposedMemory memory has a registration of its own, which covers these bytes and no others, so its end makes the
/// keys invalid. A step that meets an invalid key fails the lane at both ends (rdma::PeerConnection connects it anew):
/// that happens if the memory is withdrawn between the two looks at the word.
class CardTransfers final : public OneSided {
 public:
  explicit CardTransfers(std::shared_ptr<rdma::PeerConnection> connection) : connection_(std::move(connection)) {}

  Result<Bytes> expose(const Buffer& memory, ExposedRights rights, std::shared_ptr<ExposedMemory>& exposed) override;
  void transfer(Transfer transfer, Completion done) override;
  void progress() override { connection_->poll(); }

 private:
  const std::shared_ptr<rdma::PeerConnection> connection_;
};

}  // namespace tensorferry::ibv
