/// The references inside one message to or from a peer.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "rpc/member/member.h"

namespace tensorferry {

/// Makes the records of the references that a message carries, and takes over the references that one brought. Used by
/// one thread.
class ReferenceMarshaller {
 public:
  /// `id` is the peer's name and incarnation; null: they are looked up if the message carries a reference. `member`,
  /// `peer` and `id` must outlive this.
  ReferenceMarshaller(const Member& member, std::string_view peer, const AgentId* id = nullptr)
      : member_(&member), peer_(peer), id_(id) {}

  /// Returns the record to send for `reference`. May block to look the peer up. Errors: those of Member::id_of and
  /// ReferenceTransfer::add.
  Result<ReferenceRecord> add(const Reference& reference);
  /// Takes the reference that came with `record` in a message of the peer. Errors: those of References::receive.
  [[nodiscard]] Result<std::shared_ptr<Reference>> receive(const ReferenceRecord& record) const;
  /// Returns the references added so far, for the message's sender to report how the message ended.
  ReferenceTransfer take() { return std::move(transfer_); }

 private:
  const Member* member_;
  std::string_view peer_;
  const AgentId* id_;
  bool opened_ = false;
  ReferenceTransfer transfer_;
};

}  // namespace tensorferry
