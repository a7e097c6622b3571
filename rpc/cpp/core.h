/// What stands behind an Agent of tensorferry/agent.h: the agent of bytes and buffers, and the references that peers
/// hold here. Objects and calls in flight keep it alive.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "rpc/core/references.h"
#include "rpc/cpp/rendezvous.h"
#include "tensorferry/agent.h"

namespace tensorferry::detail {

/// Thread-safe.
class AgentCore final : public std::enable_shared_from_this<AgentCore> {
 public:
  AgentCore(Meeting where, Milliseconds default_timeout) : meeting(std::move(where)), timeout(default_timeout) {}
  ~AgentCore() { leave(); }
  AgentCore(const AgentCore&) = delete;
  AgentCore& operator=(const AgentCore&) = delete;

  /// Takes an agent that peers cannot find yet, and serves what references need.
  void own(std::shared_ptr<RawAgent> agent);
  void leave();

  [[nodiscard]] RawAgent& raw() const noexcept { return *agent_; }
  [[nodiscard]] References& tables() const noexcept { return *tables_; }
  [[nodiscard]] const PeerInfo& self() const { return agent_->self(); }
  [[nodiscard]] RawCallOptions options_of(const CallOptions& options) const;
  /// Which life of `peer` is meant by a call to it now.
  AgentId id_of(const std::string& peer);

  const Meeting meeting;
  const Milliseconds timeout;

 private:
  std::shared_ptr<RawAgent> agent_;
  std::shared_ptr<References> tables_;
  std::mutex leaving_;
};

/// The references in one message to `peer`.
class Crossing final {
 public:
  Crossing(AgentCore& core, std::string_view peer, const AgentId* id = nullptr) : core_(&core), peer_(peer), id_(id) {}
  /// The record that travels for `object`.
  ReferenceRecord add(const Object& object);
  Passage take() { return std::move(passage_); }

  /// Instead, for a result that stays here: the object that it is, where it is one.
  static Crossing keeping(AgentCore& core) {
    Crossing out(core, {});
    out.keeps_ = true;
    return out;
  }
  [[nodiscard]] bool keeps() const noexcept { return keeps_; }
  void keep(const Object& object) { kept_ = object; }
  [[nodiscard]] const Object& kept() const noexcept { return kept_; }

 private:
  AgentCore* core_;
  std::string_view peer_;
  const AgentId* id_;  // which life of the peer; null: the present one
  bool opened_ = false;
  bool keeps_ = false;
  Passage passage_;
  Object kept_;
};

/// Starts a call; `first`, where it is not empty, goes before the other arguments, as bytes.
std::shared_ptr<Pending> start_call(const std::shared_ptr<AgentCore>& core, const CallOptions& options,
                                    std::string_view peer, std::string_view function, ByteView first,
                                    std::string_view shown, std::size_t arguments, WriteArguments write,
                                    const void* pack, bool may_hold_object);

/// A handler that runs `function`, which errors call `shown`.
Handler handler_of(const std::shared_ptr<AgentCore>& core, std::string shown, std::shared_ptr<Function> function);

/// Serves what references need: methods, copies of values.
void serve_objects(const std::shared_ptr<AgentCore>& core);

/// Graceful leaving, as Python's agents do it: see Agent::shutdown.
void finish(AgentCore& core, Milliseconds timeout);

}  // namespace tensorferry::detail
