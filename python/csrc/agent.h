/// An agent of Python's: the torch-free agent with a codec for Python objects, functions found by import, and remote
/// references.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "python/csrc/codec.h"
#include "python/csrc/exposed.h"
#include "python/csrc/functions.h"
#include "python/csrc/interpreter.h"
#include "python/csrc/profile.h"
#include "rpc/core/references.h"

namespace tensorferry::python {

class RemoteObjects;

/// By peer: our devices, and its devices that tensors on them land on.
using DeviceMaps = std::map<std::string, Placement, std::less<>>;

/// What `timeout=-1` stands for, as in torch: the agent's default.
inline constexpr double unset_timeout = -1;

/// One call as Python makes it: borrowed references, of the types that stand here.
struct Invocation {
  std::string_view verb = "rpc";   // what a profiler shows: "rpc_sync"
  PyObject* to = nullptr;          // a name, a rank, or something with a name
  PyObject* function = nullptr;    // a callable
  PyObject* args = nullptr;        // a tuple; or a published (tuple, dict or None), and no kwargs
  PyObject* kwargs = nullptr;      // a dict, or null
  double timeout = unset_timeout;  // seconds; 0: none
  std::string_view require;
  PyObject* out = nullptr;     // a tensor, or null
  PyObject* device = nullptr;  // a device of the peer's, or a dict of ours to its; or null
  bool wait_for_ready = false;
  std::uint32_t order = 0;  // CallOptions'
};

/// A call under way, and what is to be settled when it ends: the references that it carried and may bring back.
struct PendingCall {
  Call call;
  std::shared_ptr<const WireName> function;
  std::string label;  // CallOptions'
  std::string peer;
  Passage passage;
  std::uint64_t number = 0;                  // References::begin_call's
  at::Tensor out;                            // where the result goes; undefined: wherever it lands
  std::vector<WeakStorage> device_storages;  // of the result, once it has been decoded
  std::unique_ptr<CallRange> range;          // until it ends; null: nobody looks

  /// What errors call the function.
  [[nodiscard]] std::string shown() const { return label.empty() ? std::string(shown_name(function->name)) : label; }
  /// For messages: which call of whom.
  [[nodiscard]] std::string text() const;
};

/// All functions need the GIL unless they say otherwise.
class PythonAgent final : public std::enable_shared_from_this<PythonAgent> {
 public:
  /// How far peers are trusted: to call any function and have any pickle loaded, or what was exposed alone.
  enum class Trust : std::uint8_t { full, registered };
  /// Makes an agent that serves `exposed`, but that peers cannot find before announce(). Releases the GIL meanwhile.
  /// The agent lives until leave(). Raises what RawAgent::create() returns.
  static std::shared_ptr<PythonAgent> create(RawAgentOptions options, double default_timeout, Trust trust,
                                             const Exposed& exposed, DeviceMaps device_maps);
  /// Lets peers find and call the agent. Releases the GIL meanwhile. Raises what RawAgent::announce() returns.
  void announce();
  explicit PythonAgent(double default_timeout);
  ~PythonAgent();

  /// The agent that serves the call which this thread is in, else the process's default one; raises where there is
  /// none.
  static std::shared_ptr<PythonAgent> current();
  static bool is_serving();
  static std::shared_ptr<PythonAgent> default_agent();
  static void set_default_agent(std::shared_ptr<PythonAgent> agent);

  /// A call as it will go out: what prepare() makes of Python's arguments.
  struct Prepared {
    py::object peer;  // keeps peer_name
    std::string_view peer_name;
    std::shared_ptr<const WireName> function;
    Message message;
    RawCallOptions options;
    Passage passage;
    std::uint64_t number = 0;
    at::Tensor out;
    std::unique_ptr<CallRange> range;
  };
  /// With `creation` the result stays at the callee as a remote object.
  Prepared prepare(const Invocation& invocation, const std::optional<Creation>& creation = std::nullopt);
  /// A call of one of the framework's own functions, "tf:...", with `first` before the arguments; errors call it
  /// `label`.
  Prepared prepare_internal(const std::string& peer, std::shared_ptr<const WireName> function, py::handle first,
                            py::handle args, py::handle kwargs, double timeout, const std::string& label,
                            const std::optional<Creation>& creation = std::nullopt);
  /// Makes the call and waits for its result. Ctrl-C cancels it; where the result is landing in the caller's own tensor
  /// by then, the landing is waited for, unless by a second Ctrl-C.
  py::object call(Prepared prepared);
  /// Makes the call.
  PendingCall start(Prepared prepared);
  /// The value of a call's reply; raises what it raised. This or settle() once for each call that was made.
  py::object decode_reply(PendingCall& pending, Result<Received> reply);
  /// The call has ended so, and its reply will not be read. Needs no GIL.
  void settle(PendingCall& pending, const Status& status);

  /// The name of `to`: a name, a rank, or something that has a `name`. Good as long as `keep`.
  std::string_view peer_name(py::handle to, py::object& keep);
  /// Lets peers call `callable` by `name`; raises what Exposed::add does.
  void expose(const std::string& name, const py::object& callable);
  [[nodiscard]] const Exposed& exposed() const { return exposed_; }
  [[nodiscard]] bool registered() const { return trust_ == Trust::registered; }

  /// The agent that `to` names.
  PeerInfo find(py::handle to);
  /// Waits until `peer` is there, for a time-out in seconds; returns what is left of that.
  double wait_until_ready(const std::string& peer, double timeout);
  /// Which life of `peer` is meant by a call to it now.
  AgentId id_of(const std::string& peer);
  /// Waits for ranks 0 to size - 1.
  std::vector<PeerInfo> wait_for_world(int size, double timeout);

  /// The event loop that coroutines of peers' calls run on (tensorferry.serving.HandlerLoop). It starts with the first
  /// of them.
  [[nodiscard]] py::handle handler_loop() const { return loop_; }

  /// Fails pending calls with AgentClosed, ends all threads. Idempotent; nothing happens in a forked child. Lets the
  /// GIL go meanwhile.
  void leave();
  [[nodiscard]] bool left() const { return left_; }
  /// Raises AgentClosed in a forked child of the process that joined. Nothing else of the agent may be used there.
  void check_usable_here() const;
  /// For the process's end: leaves with every agent that has not, and keeps Python from being entered again.
  static void leave_all();

  /// 1 ms and above for a time-out in seconds; the default's for unset_timeout; 0: none. ValueError: another negative
  /// one.
  [[nodiscard]] Milliseconds timeout_of(double seconds) const;
  [[nodiscard]] double default_timeout() const { return default_timeout_; }
  void set_default_timeout(double seconds);

  /// Where the tensors of a call to `peer` land there, and those of its result here. `device`: as Invocation has it.
  void place(RawCallOptions& options, std::string_view peer, PyObject* device) const;
  /// The GPUs that tensors can be on, as torch's futures want them.
  [[nodiscard]] const std::vector<c10::Device>& gpus() const { return gpus_; }

  [[nodiscard]] RawAgent& agent() const { return *agent_; }
  [[nodiscard]] const PeerInfo& self() const { return agent_->self(); }
  [[nodiscard]] const Codec& codec() const { return *codec_; }
  [[nodiscard]] RemoteObjects& objects() { return *objects_; }
  /// Peers whose incarnation has ended, most recent last.
  struct LostPeer {
    PeerInfo peer;
    std::string why;
  };
  std::vector<LostPeer> lost_peers();

  /// Replies that have come and are not decoded yet, and handlers whose future has not completed yet.
  std::atomic<std::int64_t> unfinished{0};

 private:
  void write(Prepared& out, std::string_view verb, PyObject* first, PyObject* args, PyObject* kwargs,
             const std::optional<Creation>& creation);
  void forget_stale_peers();
  py::object name_of_rank(int rank);

  std::shared_ptr<RawAgent> agent_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<RemoteObjects> objects_;
  Trust trust_ = Trust::full;
  Exposed exposed_;
  double default_timeout_;
  DeviceMaps device_maps_;
  std::vector<c10::Device> gpus_;
  bool left_ = false;

  py::object loop_;
  std::map<int, py::object> names_by_rank_;
  std::atomic<bool> peers_stale_{false};  // one was lost: it may come back under another name
  std::mutex lost_mutex_;
  std::vector<LostPeer> lost_;
  bool gil_is_dear_ = false;  // the last wait without it was followed by a long one for it; guarded by it
};

/// Makes an agent the current one of this thread: PythonAgent::current() returns it. The agent outlives this scope.
/// Tasks of one event loop share a thread; each has a context variable instead (served.h).
class CurrentAgent {
 public:
  explicit CurrentAgent(PythonAgent* agent);
  ~CurrentAgent();
  CurrentAgent(const CurrentAgent&) = delete;
  CurrentAgent& operator=(const CurrentAgent&) = delete;

 private:
  PythonAgent* before_;
};

/// This thread serves a call of `agent`, which is its current agent. `answer` outlives this scope.
class Serving {
 public:
  Serving(PythonAgent* agent, Reply& answer);
  ~Serving();
  /// The duty to answer the call that this thread, or this task, serves; null: it serves none.
  static Reply* reply();
  /// The agent that this thread, or this task, works for; null: none more than another.
  static PythonAgent* agent();
  Serving(const Serving&) = delete;
  Serving& operator=(const Serving&) = delete;

 private:
  CurrentAgent agent_;
  Reply* reply_before_;
};

void bind_agent(py::module_& module);

}  // namespace tensorferry::python
