/// The implementation of an Agent (tensorferry/agent.h): an agent of bytes and buffers, and the tables of references to
/// and from its peers. Objects and calls in flight keep it alive.
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

/// A RawAgent with its references and its meeting. Thread-safe.
class AgentCore final : public std::enable_shared_from_this<AgentCore> {
 public:
  AgentCore(Meeting where, Milliseconds default_timeout) : meeting(std::move(where)), timeout(default_timeout) {}
  ~AgentCore() { leave(); }
  AgentCore(const AgentCore&) = delete;
  AgentCore& operator=(const AgentCore&) = delete;

  /// Takes ownership of an agent that peers cannot find yet, and serves the functions that references need. Called
  /// once, before any other function.
  void own(std::shared_ptr<RawAgent> agent);
  /// Closes the references, then leaves. Idempotent.
  void leave();

  [[nodiscard]] RawAgent& raw() const noexcept { return *agent_; }
  [[nodiscard]] References& tables() const noexcept { return *tables_; }
  [[nodiscard]] const PeerInfo& self() const { return agent_->self(); }
  /// Returns the options of the RawAgent's call. A negative time-out becomes the agent's.
  [[nodiscard]] RawCallOptions options_of(const CallOptions& options) const;
  /// Returns the name and incarnation of `peer` that a call would reach now. If there is no link, looks the peer up in
  /// the store and waits up to 2 s for it. Throws NotFound and the store's errors.
  AgentId id_of(const std::string& peer);

  const Meeting meeting;
  const Milliseconds timeout;

 private:
  std::shared_ptr<RawAgent> agent_;
  std::shared_ptr<References> tables_;
  std::mutex leaving_;
};

/// Collects the references inside one message to `peer`. Used by one thread; `peer` and `id` must outlive it.
class ReferenceMarshaller final {
 public:
  ReferenceMarshaller(AgentCore& core, std::string_view peer, const AgentId* id = nullptr)
      : core_(&core), peer_(peer), id_(id) {}
  /// Returns the record to send for `object`. Throws InvalidArgument if the object belongs to another agent of this
  /// process, the reference's error if the object is lost, and the errors of AgentCore::id_of.
  ReferenceRecord add(const Object& object);
  /// Returns the references added so far, for the message's sender to report how the message ended.
  ReferenceTransfer take() { return std::move(transfer_); }

  /// Makes a ReferenceMarshaller for a result that stays here. It stores the object that the result is, if it is one,
  /// and adds no reference.
  static ReferenceMarshaller keeping(AgentCore& core) {
    ReferenceMarshaller out(core, {});
    out.keeps_ = true;
    return out;
  }
  [[nodiscard]] bool keeps() const noexcept { return keeps_; }
  void keep(const Object& object) { kept_ = object; }
  [[nodiscard]] const Object& kept() const noexcept { return kept_; }

 private:
  AgentCore* core_;
  std::string_view peer_;
  const AgentId* id_;  // the peer with its incarnation; null: the present incarnation
  bool opened_ = false;
  bool keeps_ = false;
  ReferenceTransfer transfer_;
  Object kept_;
};

/// Starts a call and returns its state. If `first` is not empty, it is sent as bytes before the other arguments.
/// `shown` is the name of the function in errors. `write` writes the `arguments` values of `pack` before this returns.
/// `may_hold_object`: the reply may bring references. Throws if the arguments cannot be sent.
std::shared_ptr<Pending> start_call(const std::shared_ptr<AgentCore>& core, const CallOptions& options,
                                    std::string_view peer, std::string_view function, ByteView first,
                                    std::string_view shown, std::size_t arguments, WriteArguments write,
                                    const void* pack, bool may_hold_object);

/// Makes a handler that runs `function`. `shown` is its name in errors. The handler does not keep `core` alive.
Handler handler_of(const std::shared_ptr<AgentCore>& core, std::string shown, std::shared_ptr<Function> function);

/// Serves the functions that references need: calls of methods, and fetches of values.
void serve_objects(const std::shared_ptr<AgentCore>& core);

/// Waits until the agent, or with a world all its agents, may leave; the caller then leaves. Takes the same steps as
/// Python's agents. See Agent::shutdown.
void finish(AgentCore& core, Milliseconds timeout);

}  // namespace tensorferry::detail
