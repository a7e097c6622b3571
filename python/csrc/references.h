/// Remote references: rpc.RRef, the objects that references of peers stand for, and the calls that use them. Who holds
/// what, and until when, is rpc/core/references.h's.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "python/csrc/agent.h"
#include "rpc/core/agent_network.h"
#include "rpc/core/references.h"

namespace tensorferry::python {

/// rpc.RRef: one hold on an object, here or at a peer.
class RRef {
 public:
  RRef(std::shared_ptr<PythonAgent> agent, std::shared_ptr<Reference> reference)
      : agent_(std::move(agent)), reference_(std::move(reference)) {}
  /// rpc.RRef(value): an object of the current agent's.
  RRef(py::object value, const py::object& type_hint);

  /// A copy of the value, in the tensor `out` where that is not None, with its tensors on our `device` where that is
  /// not; else, at the owner, the value itself. Waits for it to be made.
  py::object to_here(double timeout, const py::object& out, const py::object& device);
  /// The value itself. InvalidArgument: it is not here.
  py::object local_value();
  [[nodiscard]] bool is_owner() const { return reference_->is_owner(); }
  [[nodiscard]] bool confirmed_by_owner() const;
  [[nodiscard]] std::string owner_name() const { return reference_->owner().name; }
  [[nodiscard]] std::string text() const;

  /// A call of the object's method `name`.
  [[nodiscard]] PythonAgent::Prepared prepare_method(const std::string& name, const py::args& args,
                                                     const py::kwargs& kwargs, double timeout,
                                                     const std::optional<Creation>& creation = std::nullopt) const;
  /// A call, with no time-out of its own, for the next item of the object, an iterator; those of the same order come in
  /// turn. The iterator has `seconds` for it (0: no limit); errors call it `label`.
  [[nodiscard]] PythonAgent::Prepared prepare_next(double seconds, std::uint32_t order, const std::string& label) const;
  [[nodiscard]] PythonAgent& agent() const { return *agent_; }
  [[nodiscard]] const Reference& reference() const { return *reference_; }

 private:
  std::shared_ptr<PythonAgent> agent_;
  std::shared_ptr<Reference> reference_;
};

/// The objects and references of one agent.
class RemoteObjects {
 public:
  explicit RemoteObjects(PythonAgent& agent);

  /// rpc.remote(): makes a call whose result stays at the callee, and gives the caller's reference to it.
  py::object create(const Invocation& invocation);
  /// The same for a call to `owner` that `prepare` makes, given the ids that the request carries.
  py::object create(const std::string& owner, const std::function<PythonAgent::Prepared(const Creation& ids)>& prepare);

  /// The value of an object that is here, waiting for it until `until` (Ctrl-C ends the wait); raises what its creation
  /// raised.
  py::object await(const RRefId& object, std::optional<Clock::time_point> until);

  [[nodiscard]] References& tables() { return *tables_; }

 private:
  void settle(const std::shared_ptr<Reference>& reference, PendingCall pending);

  PythonAgent& agent_;
  std::shared_ptr<References> tables_;
};

/// What an object holds, as the tables have it.
Outcome outcome_of(py::object value, bool raised);
py::object object_of(const Outcome& outcome);

/// The references in one message, to or from `peer`.
class Crossing final : public MessageReferences {
 public:
  /// `id`: which life of the peer, where that is known already.
  Crossing(PythonAgent& agent, std::string_view peer, const AgentId* id = nullptr)
      : agent_(agent), peer_(peer), id_(id) {}

  bool write(PyObject* object, ReferenceRecord& record) override;
  PyObject* read(const ReferenceRecord& record) override;
  /// The references that were written.
  Passage take() { return std::move(passage_); }

 private:
  PythonAgent& agent_;
  std::string_view peer_;
  const AgentId* id_;
  bool opened_ = false;
  Passage passage_;
};

void bind_references(py::module_& module);

}  // namespace tensorferry::python
