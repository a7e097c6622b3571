#include "rpc/cpp/core.h"

#include <algorithm>

#include "rpc/core/agent_network.h"
#include "rpc/cpp/failures.h"
#include "tensorferry/errors.h"

namespace tensorferry::detail {
namespace {

// Long enough for a peer that is joining right now, short enough that a caller soon learns of a wrong name.
constexpr Milliseconds lookup_patience{2000};

}  // namespace

void AgentCore::own(std::shared_ptr<RawAgent> agent) {
  agent_ = std::move(agent);
  tables_ = References::make({self().name, self().incarnation}, std::make_shared<AgentNetwork>(*agent_));
  serve_references(*agent_, tables_);
  agent_->on_peer_lost([weak = weak_from_this()](const PeerInfo& peer, const Status& why) {
    const auto self = weak.lock();
    if (self) self->tables_->peer_lost({peer.name, peer.incarnation}, why);
  });
  serve_objects(shared_from_this());
}

void AgentCore::leave() {
  const std::lock_guard lock(leaving_);
  if (tables_) tables_->close();
  if (agent_) agent_->leave();
}

RawCallOptions AgentCore::options_of(const CallOptions& options) const {
  RawCallOptions out;
  out.timeout = options.timeout.count() < 0 ? timeout : options.timeout;
  out.require = options.require;
  out.wait_for_ready = options.wait_for_ready;
  out.order = options.order;
  return out;
}

AgentId AgentCore::id_of(const std::string& peer) {
  if (peer == self().name) return {peer, self().incarnation};
  // An earlier look-up cannot be reused: without a link, this agent does not learn that the peer has ended.
  if (const auto linked = agent_->linked(peer)) return {peer, linked->incarnation};
  return {peer, value_or_throw(agent_->find(peer, lookup_patience)).incarnation};
}

ReferenceRecord ReferenceMarshaller::add(const Object& object) {
  if (!opened_) {
    transfer_ = core_->tables().pass_to(id_ != nullptr ? *id_ : core_->id_of(std::string(peer_)));
    opened_ = true;
  }
  return value_or_throw(transfer_.add(*object.reference()));
}

}  // namespace tensorferry::detail
