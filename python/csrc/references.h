/// Remote references in Python: rpc.RRef, the objects that references of peers name, and the calls that use them.
/// rpc/core/references.h keeps track of holders and lifetimes. All functions need the GIL unless they say otherwise,
/// and release it while they wait.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "python/csrc/agent.h"
#include "rpc/member/reference_marshaller.h"

namespace tensorferry::python {

/// rpc.RRef: one hold on an object, of this agent or of a peer.
class RRef {
 public:
  RRef(std::shared_ptr<PythonAgent> agent, std::shared_ptr<Reference> reference)
      : agent_(std::move(agent)), reference_(std::move(reference)) {}
  /// Implements rpc.RRef(value): makes an object that the current agent owns.
  RRef(py::object value, const py::object& type_hint);

  /// Returns a copy of the value; at the owner, the value itself. Waits until the object has been made, for `timeout`
  /// seconds at most. If `out` is not None, it is a tensor that receives the value. If `device` is not None, it is the
  /// local device on which the tensors of the value land.
  py::object to_here(double timeout, const py::object& out, const py::object& device);
  /// Returns the value itself, once it has been made. InvalidArgument: this agent is not the owner.
  py::object local_value();
  [[nodiscard]] bool is_owner() const { return reference_->is_owner(); }
  [[nodiscard]] bool confirmed_by_owner() const;
  [[nodiscard]] std::string owner_name() const { return reference_->owner().name; }
  [[nodiscard]] std::string text() const;

  /// Encodes a call of the object's method `name`.
  [[nodiscard]] PythonAgent::Prepared prepare_method(const std::string& name, const py::args& args,
                                                     const py::kwargs& kwargs, double timeout,
                                                     const std::optional<Creation>& creation = std::nullopt) const;
  /// Encodes a call for the next item of the object, an iterator. The call has no time-out of its own. Calls with the
  /// same `order` run in turn. `seconds` is the time that the iterator may take for the item (0: no limit). Errors name
  /// the call by `label`.
  [[nodiscard]] PythonAgent::Prepared prepare_next(double seconds, std::uint32_t order, const std::string& label) const;
  [[nodiscard]] PythonAgent& agent() const { return *agent_; }
  [[nodiscard]] const Reference& reference() const { return *reference_; }

 private:
  std::shared_ptr<PythonAgent> agent_;
  std::shared_ptr<Reference> reference_;
};

/// The remote objects of one agent, and its references.
class RemoteObjects {
 public:
  explicit RemoteObjects(PythonAgent& agent) : agent_(agent) {}

  /// Implements rpc.remote(): makes a call whose result stays at the callee, and returns the caller's RRef to it. If
  /// the call has `wait_for_ready`, waits for the peer first.
  py::object create(const CallArguments& invocation);
  /// Does the same with a call to `owner` that `prepare` encodes. `prepare` gets the ids that the request must carry.
  py::object create(const std::string& owner, const std::function<PythonAgent::Prepared(const Creation& ids)>& prepare);

  /// Returns the value of an object of this agent. Waits until `until` for it to be made (Ctrl-C ends the wait). Raises
  /// the exception of its creation.
  py::object await(const RRefId& object, std::optional<Clock::time_point> until, const ForkId& by = {});

 private:
  void end_call(const std::shared_ptr<Reference>& reference, PendingCall pending);

  PythonAgent& agent_;
};

/// Convert between a Python value (or a raised exception) and the opaque form in the reference tables.
Outcome outcome_of(py::object value, bool raised);
py::object object_of(const Outcome& outcome);

/// Writes or reads the references in one message to or from `peer`.
class PythonReferenceMarshaller final : public MessageReferences {
 public:
  /// As ReferenceMarshaller's.
  PythonReferenceMarshaller(PythonAgent& agent, std::string_view peer, const AgentId* id = nullptr)
      : agent_(agent), references_(agent.member(), peer, id) {}

  bool write(PyObject* object, ReferenceRecord& record) override;
  PyObject* read(const ReferenceRecord& record) override;
  /// Returns the references that were written, as one ReferenceTransfer.
  ReferenceTransfer take() { return references_.take(); }

 private:
  PythonAgent& agent_;
  ReferenceMarshaller references_;
};

void bind_references(py::module_& module);

}  // namespace tensorferry::python
