/// The reference protocol over an agent: carries its messages as calls.
#pragma once

#include <memory>
#include <string_view>
#include <utility>

#include "agent/agent.h"
#include "base/background.h"
#include "rpc/core/references.h"

namespace tensorferry {

/// The function under which an agent receives its peers' reference messages.
inline constexpr std::string_view reference_function = "tf:ref";

/// Sends the messages of References as calls of an agent, and keeps the agent alive, because a message may be on its
/// way to it when the References have been closed. Thread-safe. Close the References first, then let the agent leave. A
/// forked child may destroy it.
class AgentNetwork final : public References::Network {
 public:
  explicit AgentNetwork(std::shared_ptr<RawAgent> agent) : agent_(std::move(agent)), timer_(agent_->clock()) {}

  void send(const AgentId& peer, Bytes message, UniqueFunction<void(Result<Bytes>)> done) override;
  void after(Milliseconds delay, UniqueFunction<void()> what) override;
  [[nodiscard]] Clock clock() const override { return agent_->clock(); }

 private:
  const std::shared_ptr<RawAgent> agent_;
  Background timer_;
};

/// Serves `tf:ref` at `agent` for `references`, and does not keep `references` alive. The code that registers
/// RawAgent::on_peer_lost must call References::peer_lost from it.
void serve_references(RawAgent& agent, const std::shared_ptr<References>& references);

}  // namespace tensorferry
