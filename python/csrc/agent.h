/// The agent of Python programs: the torch-free RawAgent with a codec for Python objects, functions found by import,
/// and remote references.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "python/csrc/codec.h"
#include "python/csrc/deadline.h"
#include "python/csrc/exposed.h"
#include "python/csrc/functions.h"
#include "python/csrc/interpreter.h"
#include "python/csrc/profile.h"
#include "rpc/member/incoming_call.h"
#include "rpc/member/member.h"
#include "rpc/member/outgoing_call.h"

namespace tensorferry::python {

class RemoteObjects;

/// By peer name: pairs of a local device and the peer's device on which tensors from it land.
using DeviceMaps = std::map<std::string, Placement, std::less<>>;

/// The value of `timeout` that selects the agent's default, as in torch.
inline constexpr double unset_timeout = -1;

/// The arguments of one call, as Python passes them. The pointers are borrowed references.
struct CallArguments {
  std::string_view verb = "rpc";   // the kind of call that a profiler shows: "rpc_sync"
  PyObject* to = nullptr;          // a name (str), a rank (int), or an object with an attribute `name`
  PyObject* function = nullptr;    // a callable, or the name (str) of a function that the peer exposed
  PyObject* args = nullptr;        // a tuple; or a published (tuple, dict or None): then no kwargs
  PyObject* kwargs = nullptr;      // a dict, or null
  double timeout = unset_timeout;  // seconds; 0: none
  bool rest_of_default = false;    // `timeout` is what is left of the default
  std::string_view require;
  PyObject* out = nullptr;     // a tensor, or null
  PyObject* device = nullptr;  // a device of the peer, or a dict of local devices to the peer's; or null
  bool wait_for_ready = false;
  bool idempotent = false;
  std::uint32_t order = 0;  // as in RawCallOptions
};

/// A call in flight, with the state to release when it ends.
struct PendingCall : OutgoingCall {
  std::shared_ptr<const WireName> function;
  std::string label;  // as in RawCallOptions
  std::string peer;
  at::Tensor out;                            // receives the result; undefined: the result is a new tensor
  std::vector<WeakStorage> device_storages;  // the result's memory on GPUs, once it has been decoded
  std::unique_ptr<CallRange> range;          // the profiler's range, until the call ends; null: no profiler is active

  /// Ends the call as OutgoingCall::end(), and its profiler range. Needs no GIL.
  void end(const Status& status) {
    range.reset();
    OutgoingCall::end(status);
  }
  /// Returns the function's name for errors.
  [[nodiscard]] std::string shown() const { return label.empty() ? std::string(shown_name(function->name)) : label; }
  /// Describes the call for messages: the function and the peer.
  [[nodiscard]] std::string text() const;
};

/// One agent of this process, with Python values.
///
/// All functions need the GIL unless they say otherwise. Errors are Python exceptions.
class PythonAgent final : public std::enable_shared_from_this<PythonAgent> {
 public:
  /// `full`: peers may call any function, and the agent loads any pickle. `registered`: peers may use exposed functions
  /// and classes alone, and the agent refuses pickles.
  enum class Trust : std::uint8_t { full, registered };
  /// Makes an agent that serves `exposed`. Peers cannot find it before announce(). Releases the GIL while the agent
  /// starts. The process keeps the agent alive until leave(). Raises the error of RawAgent::create().
  /// `world_size`: as in Member::create().
  static std::shared_ptr<PythonAgent> create(RawAgentOptions options, int world_size, double default_timeout,
                                             Trust trust, const Exposed& exposed, DeviceMaps device_maps);
  /// Lets peers find and call the agent. Releases the GIL meanwhile. Raises the error of RawAgent::announce().
  void announce();
  /// Waits until the world has joined, without the GIL; Ctrl-C ends the wait. `timeout` is in seconds; 0: none. Raises
  /// the errors of Member::wait_for_world.
  void wait_for_world(double timeout);
  /// Waits until the agent may leave, without the GIL; Ctrl-C ends the wait. `timeout` is in seconds; 0: none. Raises
  /// the errors of Member::finish.
  void finish(double timeout);
  explicit PythonAgent(double default_timeout);
  ~PythonAgent();

  /// Returns the agent that serves the call of this thread or asyncio task; else the process's default agent. In a
  /// forked child that has a default agent of its own, returns that one. Raises RuntimeError if there is none.
  static std::shared_ptr<PythonAgent> current();
  /// Whether this thread, or this asyncio task, serves a call of a peer.
  static bool is_serving();
  static std::shared_ptr<PythonAgent> default_agent();
  static void set_default_agent(std::shared_ptr<PythonAgent> agent);

  /// An encoded call that has not been sent. Made by prepare().
  struct Prepared {
    py::object peer;  // owns the text of peer_name
    std::string_view peer_name;
    std::shared_ptr<const WireName> function;
    Message message;
    RawCallOptions options;
    OutgoingCall call;
    at::Tensor out;
    std::unique_ptr<CallRange> range;
  };
  /// Encodes a call. With `creation`, the result stays at the callee as a remote object.
  Prepared prepare(const CallArguments& invocation, const std::optional<Creation>& creation = std::nullopt);
  /// Encodes a call of one of the framework's own functions ("tf:..."). `first` becomes the first argument. Errors name
  /// the call by `label`.
  Prepared prepare_internal(const std::string& peer, std::shared_ptr<const WireName> function, py::handle first,
                            py::handle args, py::handle kwargs, double timeout, const std::string& label,
                            const std::optional<Creation>& creation = std::nullopt);
  /// Sends the call and waits for its result, without the GIL. Ctrl-C cancels the call and raises KeyboardInterrupt. If
  /// the reply is landing in the caller's tensor (`out`) at that moment, the function waits until it has landed, or
  /// until a second Ctrl-C.
  py::object call(Prepared prepared);
  /// Sends the call. May block, without the GIL, until the bound on bytes in flight leaves room.
  PendingCall start(Prepared prepared);
  /// Decodes the reply and returns its value; raises the error of the call, or the exception that the function raised.
  py::object decode_reply(PendingCall& pending, Result<Received> reply);

  /// Returns the name of the peer `to`: a name, a rank, or an object with an attribute `name`. The result is valid
  /// while `keep` lives. A rank that is not known yet is looked up, for 2 s at most, without the GIL.
  std::string_view peer_name(py::handle to, py::object& keep);
  /// Lets peers call `callable` by `name`. Raises the errors of Exposed::add.
  void expose(const std::string& name, const py::object& callable);
  [[nodiscard]] const Exposed& exposed() const { return exposed_; }
  [[nodiscard]] bool registered() const { return trust_ == Trust::registered; }

  /// Looks up the agent `to`, for 2 s at most. Raises NotFound.
  PeerInfo find(py::handle to);
  /// Waits until `peer` answers, for `timeout` seconds at most. Returns the seconds left, at least 0.001; 0 if there is
  /// no time-out. Raises DeadlineExceeded.
  double wait_until_ready(const std::string& peer, double timeout);

  /// Returns the event loop that runs the coroutines which peers call (tensorferry.serving.HandlerLoop). It starts with
  /// the first such call.
  [[nodiscard]] py::handle handler_loop() const { return loop_; }

  /// Fails pending calls with AgentClosed and ends all threads of the agent. Releases the GIL meanwhile. Idempotent.
  /// Does nothing in a forked child.
  void leave();
  [[nodiscard]] bool left() const { return left_; }
  /// Returns whether finish() has begun. Any thread.
  [[nodiscard]] bool finishing() const noexcept { return finishing_; }
  /// Raises AgentClosed in a forked child of the process that made the agent. The child must not use the agent for
  /// anything else.
  void check_usable_here() const;
  /// Prepares for the process's end: every agent leaves, and no thread of the library enters Python afterwards.
  static void leave_all();

  /// Converts a time-out in seconds to milliseconds, at least 1. unset_timeout gives the default; 0 means none. Raises
  /// ValueError for other negative values and NaN.
  [[nodiscard]] TimeOut timeout_of(double seconds) const;
  [[nodiscard]] double default_timeout() const { return default_timeout_; }
  void set_default_timeout(double seconds);

  /// Sets the devices on which a call's tensors land: those of the arguments at `peer`, those of the result here.
  /// `device` is that of Invocation, and overrides the agent's device map.
  void place(RawCallOptions& options, std::string_view peer, PyObject* device) const;
  /// Returns the GPUs that the agent uses, in the form that torch's futures take.
  [[nodiscard]] const std::vector<c10::Device>& gpus() const { return gpus_; }

  [[nodiscard]] Member& member() const { return *member_; }
  [[nodiscard]] RawAgent& agent() const { return member_->agent(); }
  [[nodiscard]] References& references() const { return member_->references(); }
  [[nodiscard]] const PeerInfo& self() const { return member_->self(); }
  [[nodiscard]] const Codec& codec() const { return *codec_; }
  [[nodiscard]] RemoteObjects& objects() { return *objects_; }

 private:
  void write(Prepared& out, std::string_view verb, PyObject* first, PyObject* args, PyObject* kwargs,
             const std::optional<Creation>& creation, bool timed);
  py::object name_of_rank(int rank);

  std::shared_ptr<Member> member_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<RemoteObjects> objects_;
  Trust trust_ = Trust::full;
  Exposed exposed_;
  double default_timeout_;
  DeviceMaps device_maps_;
  std::vector<c10::Device> gpus_;
  bool left_ = false;
  std::atomic<bool> finishing_{false};

  py::object loop_;
  std::map<int, py::object> names_by_rank_;
  std::uint64_t peers_lost_ = 0;  // when names_by_rank_ began: the rank of a lost peer may return under another name
  bool gil_is_dear_ = false;      // the last call waited long to take the GIL back; guarded by the GIL
};

/// Makes `agent` the current one of this thread while the scope lives: PythonAgent::current() returns it. `agent`
/// outlives the scope. The tasks of one event loop share a thread; each uses a context variable instead (served.h).
class CurrentAgent {
 public:
  explicit CurrentAgent(PythonAgent* agent);
  ~CurrentAgent();
  CurrentAgent(const CurrentAgent&) = delete;
  CurrentAgent& operator=(const CurrentAgent&) = delete;

 private:
  PythonAgent* before_;
};

/// Marks this thread as serving `call` of `agent`, which becomes its current agent. `call` outlives the scope.
class ServingScope {
 public:
  ServingScope(PythonAgent* agent, IncomingCall& call);
  ~ServingScope();
  /// Returns the call that this thread, or this asyncio task, serves; null if it serves none.
  static IncomingCall* call();
  /// Returns the agent that this thread, or this asyncio task, works for; null if there is none.
  static PythonAgent* agent();
  ServingScope(const ServingScope&) = delete;
  ServingScope& operator=(const ServingScope&) = delete;

 private:
  CurrentAgent agent_;
  IncomingCall* call_before_;
};

void bind_agent(py::module_& module);

}  // namespace tensorferry::python
