#include "rpc/member/reference_marshaller.h"

#include <string>

namespace tensorferry {

Result<ReferenceRecord> ReferenceMarshaller::add(const Reference& reference) {
  if (!opened_) {
    auto receiver = id_ != nullptr ? Result<AgentId>(*id_) : member_->id_of(peer_);
    if (!receiver.ok()) return receiver.status();
    transfer_ = member_->references().pass_to(*std::move(receiver));
    opened_ = true;
  }
  return transfer_.add(reference);
}

Result<std::shared_ptr<Reference>> ReferenceMarshaller::receive(const ReferenceRecord& record) const {
  // A reply comes from the incarnation that the call reached. Only the record names it.
  return member_->references().receive(record,
                                       id_ != nullptr ? *id_ : AgentId{std::string(peer_), record.parent.incarnation});
}

}  // namespace tensorferry
