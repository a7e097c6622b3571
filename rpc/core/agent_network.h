/// The reference protocol over real agents.
#pragma once

#include <memory>
#include <string_view>

#include "agent/agent.h"
#include "rpc/core/references.h"
#include "rpc/core/timer.h"

namespace tensorferry {

/// The function under which an agent takes its peers' reference messages.
inline constexpr std::string_view reference_function = "tf:ref";

/// Carries References' messages as calls of an agent's. The agent must outlive it; close the References, then let the
/// agent leave.
class AgentNetwork final : public References::Network {
 public:
  explicit AgentNetwork(RawAgent& agent) : agent_(agent) {}

  void send(const AgentId& peer, Bytes message, UniqueFunction<void(Result<Bytes>)> done) override;
  void after(Milliseconds delay, UniqueFunction<void()> what) override { timer_.after(delay, std::move(what)); }

 private:
  RawAgent& agent_;
  Timer timer_;
};

/// Serves `tf:ref` at `agent` for `references`, which it does not keep alive. Where the agent hears of a peer's end
/// (RawAgent::on_peer_lost), References::peer_lost must be told: by whoever registers that callback.
void serve_references(RawAgent& agent, const std::shared_ptr<References>& references);

}  // namespace tensorferry
