/// An agent in a C++ program: makes and serves typed calls. Its peers are written in C++ or Python.
///
///     auto agent = tensorferry::Agent::join({.name = "sim", .rendezvous = "tcp://trainer:29500"});
///     agent->serve("step", [](tensorferry::TensorOf<float> action, int n) { return simulate(action, n); });
///     auto loss = agent->call<double>("trainer", "loss", batch).get();
///
/// Threads: an Agent may be used from any thread at once, a Future by one thread at a time. Errors: every failure is
/// thrown as one of the exceptions of errors.h. Nothing here needs torch.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tensorferry/errors.h"
#include "tensorferry/function.h"
#include "tensorferry/future.h"
#include "tensorferry/group.h"
#include "tensorferry/object.h"
#include "tensorferry/region.h"
#include "tensorferry/store.h"
#include "tensorferry/values.h"
#include "tensorferry/versions.h"

namespace tensorferry {

class Agent;
class Registry;
namespace detail {
class DeviceTensors;
}

/// The devices beside host memory on which an agent's tensors may lie; gpus() of tensorferry/gpus.h makes one.
using Devices = std::shared_ptr<const detail::DeviceTensors>;
/// Maps devices of this process to those of a peer.
using DeviceMap = std::vector<std::pair<Device, Device>>;

/// Options of Agent::join. They mean the same as in Python's tensorferry.Agent.
struct AgentOptions {
  /// The agent's name, unique in the job. "": "worker" followed by the rank.
  std::string name{};
  /// The agent's rank, unique, counted from 0. -1: RANK of the environment if `rendezvous` is env:// and `store` is
  /// null, else no rank.
  int rank = -1;
  /// The number of ranks that begin together; join() waits until all have joined. 0: WORLD_SIZE of the environment
  /// under the same conditions as RANK. If that is not set either, agents join and leave at any time. As in Python,
  /// agents with a world size and agents without one do not meet.
  int world_size = 0;
  /// The store where the agents meet. Ignored if `store` is set.
  ///
  /// - "tcp://host:port": torch's TCPStore, served by a Python process (rank 0, or torchrun).
  /// - "env://", or "": the same store, at MASTER_ADDR and MASTER_PORT of the environment, as torchrun sets them.
  /// - "store://host:port": a StoreServer of either language. Rank 0 serves it unless the port is served already.
  std::string rendezvous{};
  /// An open store, instead of `rendezvous`: see store.h.
  std::shared_ptr<Store> store{};
  /// The cluster key. "": TENSORFERRY_KEY_FILE or TENSORFERRY_KEY. Agents on more than one host need a key.
  std::string key{};
  /// The channels that may carry tensors. "shm,basic": only these, in this order. "-shm": all except shm.
  /// "cma:90": gives cma this priority.
  /// "": TENSORFERRY_CHANNELS, or all.
  std::string channels{};
  /// Adds channels of the program's own to those of the library. Runs once, inside join(). `channels` chooses among all
  /// of them. See tensorferry/channel.h.
  std::function<void(Registry&)> register_channels{};
  /// The GPUs on which this agent sends and receives tensors: gpus() of tensorferry/gpus.h. Null: none; a peer's
  /// tensors arrive in host memory, and a tensor on a GPU cannot be sent.
  Devices devices{};
  /// By name of the peer, the peer's devices on which the tensors of this agent's arguments land; its results come back
  /// by the inverse map. A tensor on a device that the map lacks lands on the peer's device of the same type and index
  /// if there is one, else on the first device of that type, else in host memory. join() throws InvalidArgument if a
  /// map is not one to one or has more than 64 entries.
  std::map<std::string, DeviceMap> device_maps{};
  /// The number of served functions that run at once, without those that wait for a call of their own. Further calls
  /// wait up to their deadlines, and start in turn by peer.
  int threads = 1024;
  /// The number of calls of one peer that may wait for their functions to start, and the bytes that they may have.
  /// Further ones fail with ResourceExhausted.
  int max_queued_calls = 65536;
  std::size_t max_queued_bytes = std::size_t{16} << 30;
  /// The time-out of calls whose CallOptions give none. 0: calls have no time-out.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// How long join() waits for the store, and then for the world.
  std::chrono::milliseconds join_timeout = std::chrono::seconds(300);
  /// The time between heartbeats to a peer on another host. When three in a row are missing, the connections to it are
  /// closed and dialled again.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(5);
  /// A peer that cannot be reached for this long counts as dead: references to its objects are lost, and it loses those
  /// that it holds.
  std::chrono::milliseconds peer_timeout = std::chrono::seconds(60);
  /// The bound on the bytes in flight to one peer, for calls and for results each. Callers beyond it wait. When a peer
  /// does not take its results, no further function that it calls starts.
  std::size_t max_bytes_in_flight = std::size_t{1} << 30;
  /// The network interfaces to listen on, in the order in which peers try them: "ib0,eth0". "":
  /// TENSORFERRY_SOCKET_IFNAME, else the one that leads to the rendezvous.
  std::string interface {};
  /// The TCP ports to listen on: "7000" or "7000-7099". "": any.
  std::string ports{};
  /// TLS 1.3 on all TCP connections, those of a store:// rendezvous too. "key": the cluster key proves both ends.
  /// "certificate=FILE,private_key=FILE,ca=FILE" (PEM): each end has a certificate of that CA, and verifies the
  /// other's. "off": none. "": TENSORFERRY_TLS, else none. All agents of a job need the same form. See
  /// docs/security.md.
  std::string tls{};
  /// The folder of unix sockets. "": TENSORFERRY_SOCKET_DIR, else abstract sockets, which have no file.
  std::string socket_dir{};
  /// A file beside which leave() writes a trace of all calls, for Perfetto: "out.json" becomes "out.NAME.PID.json".
  /// "": TENSORFERRY_TRACE, else no trace.
  std::string trace{};
  /// False: processes of one host use TCP too.
  bool unix_sockets = true;
  /// False: the agent shares no memory with peers, unless `channels` names a channel that does.
  bool shared_memory = true;
  /// Runs before peers can find the agent, so that the functions which it serves are there from the first call on.
  std::function<void(Agent&)> prepare{};
};

/// Options of one call.
struct CallOptions {
  /// The time-out of the call. 0: none. Negative: AgentOptions::timeout. A call made inside a served function does not
  /// inherit that function's deadline: the function passes the time that is left until CallContext::deadline(). In a
  /// Python function, calls inherit the deadline of the call that the function serves if its caller gave a time-out
  /// here; a negative one bounds this call alone.
  std::chrono::milliseconds timeout{-1};
  /// The only channel that may carry the tensors. "": any.
  std::string require{};
  /// True: if the peer has not joined yet, or restarts, the call waits for it until the deadline.
  bool wait_for_ready = false;
  /// Calls to one peer with the same non-zero key run one after the other, in the order in which they were made.
  std::uint32_t order = 0;
  /// True: if the call's connection is lost, the call is sent again over the next connection to the same process,
  /// within its time-out. So the function may run more than once. The call then fails with ConnectionLost only if the
  /// peer has left or its process has ended. The arguments must not change until the call has ended. Not with `order`,
  /// nor with tensors that are handed over: InvalidArgument.
  bool idempotent = false;
  /// The peer's devices on which the tensors among the arguments land, in place of AgentOptions::device_maps. Empty:
  /// those. Throws InvalidArgument as join() does.
  DeviceMap devices{};
};

/// One member of a job: calls functions of its peers, and serves functions to them.
///
/// Thread-safe. One process can have several agents. A served function must not drop the last shared_ptr to its agent.
class Agent {
 public:
  /// Joins the job and returns the agent. With a world size, returns when all ranks have joined. Throws:
  ///
  /// - InvalidArgument: a living agent has the name or the rank, or an option makes no sense.
  /// - Unauthenticated: the cluster key is missing or wrong.
  /// - DeadlineExceeded: `join_timeout` passed; the text names the missing ranks.
  /// - the store's errors, and any exception that `prepare` throws.
  static std::shared_ptr<Agent> join(AgentOptions options);
  /// Calls leave().
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  /// Returns this agent's name.
  [[nodiscard]] const std::string& name() const;
  /// Returns this agent's rank; -1: it has none.
  [[nodiscard]] int rank() const;
  /// Returns the name of the agent of that rank, and waits up to 2 s for it to join. Throws NotFound.
  [[nodiscard]] std::string peer(int rank) const;

  /// Makes `function` callable under `name`, and replaces an earlier function of that name. Throws InvalidArgument if
  /// the name is empty, is longer than 4096 bytes, or begins with py:, op: or tf:.
  ///
  /// `function` is a function, a lambda or another object with one operator(). It takes its parameters by value or by
  /// const reference; their types and the result's have a Value (values.h). Its first parameter may be a
  /// `const CallContext&`. If it returns a Future, the caller gets the reply when that future completes.
  ///
  /// `function` runs on threads of the agent's pool, for several calls at once. It may block, and it may call other
  /// agents.
  ///
  /// `parameters` names the parameters, for signatures and for Python's keyword arguments. The caller may leave out
  /// parameters of type std::optional: trailing ones, or any if it passes the others by keyword.
  ///
  /// Errors at the caller: an exception of errors.h arrives as the same class, any other exception as RemoteError with
  /// its what(). Arguments that do not fit are InvalidArgument; its text has the function's name, its signature and the
  /// types that came.
  template <class F>
  void serve(std::string name, F function, std::vector<std::string> parameters = {}) {
    serve_function(std::move(name), detail::function_of<F>(std::move(function), std::move(parameters)));
  }

  /// Calls `function` at the agent named `peer` and returns a future of the result. `function` is one of:
  ///
  /// - a name that the peer serves, by serve() in C++ or by rpc.expose() in Python;
  /// - "py:module:qualified.name": any function that a Python peer can import.
  ///
  /// T is the type of the result; void discards it. The arguments are encoded before the call returns, except the
  /// memory of tensors: it is read later, and may be written again when the future has completed. A tensor with gaps
  /// between its elements is copied first. Waits while more bytes than max_bytes_in_flight are in flight to the peer.
  ///
  /// Errors come through the future, except those of arguments that cannot be sent, which are thrown here. A value
  /// throws InvalidArgument. An Object may also throw NotFound (the peer has not joined within 2 s), ConnectionLost
  /// (the object is lost), AgentClosed, or an error of the store.
  template <class T = void, class... A>
  Future<T> call(std::string_view peer, std::string_view function, const A&... arguments) {
    return call_with<T>(CallOptions(), peer, function, arguments...);
  }
  /// The same with options.
  template <class T = void, class... A>
  Future<T> call_with(const CallOptions& options, std::string_view peer, std::string_view function,
                      const A&... arguments) {
    static_assert((WritableValue<std::decay_t<A>> && ...),
                  "an argument's type has no Value<T> that writes it: see tensorferry/values.h");
    const std::tuple<const A&...> pack(arguments...);
    return Future<T>(start(options, peer, function, sizeof...(A), &detail::write_arguments<const A&...>, &pack,
                           detail::MayHoldObject<T>::value),
                     &detail::take_reply<T>);
  }

  /// Makes the memory of a tensor a region, which peers read and write without a call: see region.h. `tensor` is
  /// contiguous host memory; its owner is kept until the region is dropped and no transfer uses it. Throws
  /// InvalidArgument: another tensor, or a name of more than 256 bytes.
  OwnRegion region(const Tensor& tensor, RegionOptions options = {});
  /// Opens the region that the peer `owner` has under `name`, or that a handle names. `timeout` as in TransferOptions.
  /// Throws NotFound, PermissionDenied, ConnectionLost, DeadlineExceeded (region.h); InvalidArgument if the tensor
  /// there is not row-major, which only Python makes.
  PeerRegion find_region(std::string_view owner, std::string_view name,
                         std::chrono::milliseconds timeout = std::chrono::milliseconds(-1));
  PeerRegion open_region(const RegionHandle& handle, std::chrono::milliseconds timeout = std::chrono::milliseconds(-1));

  /// Publishes a set of tensors, as version 1: see versions.h. The tensors are contiguous host memory. Throws
  /// InvalidArgument: other tensors, a name of more than 256 bytes or that this agent publishes already, or options
  /// that versions.h does not allow.
  OwnPublication publish(std::string name, const std::vector<NamedTensor>& tensors, PublicationOptions options = {});
  /// Subscribes to what the peer `publisher` publishes under `name`. `timeout` as in versions.h. Throws NotFound,
  /// ConnectionLost or DeadlineExceeded.
  PeerPublication subscribe(std::string_view publisher, std::string_view name,
                            std::chrono::milliseconds timeout = std::chrono::milliseconds(-1));

  /// Shares an object of this process by reference. The program passes the returned Object to peers as an argument or a
  /// result, and the peers call the given methods. The object lives as long as any agent holds a reference to it.
  /// Methods run on several threads at once, so the object does its own locking.
  ///
  ///     agent->serve("make_env", [agent = agent.get()] {
  ///       return agent->share_object("CartPole", std::make_shared<CartPole>(), method("step", &CartPole::step));
  ///     });
  template <class T, class... M>
  Object share_object(std::string type_name, std::shared_ptr<T> object, Method<M>... methods) {
    std::vector<std::pair<std::string, std::unique_ptr<detail::Function>>> table;
    (table.emplace_back(
         std::move(methods.name),
         detail::function_of<M>(detail::Bound<T, M>{object, std::move(methods.member)}, std::move(methods.parameters))),
     ...);
    return share(std::move(type_name), std::move(table));
  }

  /// Returns as text which channel carries tensors of `bytes` bytes from `local` to `remote` at `peer`, and why each
  /// other channel does not. Opens the link if there is none. Throws InvalidArgument (the peer has no such device),
  /// NotFound, or ConnectionLost.
  [[nodiscard]] std::string explain(std::string_view peer, Device local = {}, Device remote = {},
                                    std::size_t bytes = std::size_t{1} << 20) const;
  /// Returns the state of the link to `peer` and of its calls in flight as text, for bug reports on calls that do not
  /// end. Opens no link.
  [[nodiscard]] std::string link_state(std::string_view peer) const;
  /// Records the calls that begin from now on, made and served here. Returns the recording's number.
  [[nodiscard]] std::size_t start_trace();
  /// Ends a recording, and returns the calls that have ended meanwhile as a Chrome trace (JSON).
  std::string stop_trace(std::size_t recording);
  /// Returns the number of calls made here that have not completed, and of calls served here that have not been
  /// answered.
  [[nodiscard]] std::pair<std::size_t, std::size_t> in_flight() const;

  /// Waits until no call made or served here is in flight, then leaves. With a world, it also waits until every other
  /// agent of the world, of either language, is in its own shutdown and idle.
  ///
  /// `timeout` 0: no time-out. Throws DeadlineExceeded, ConnectionLost (a peer died before its shutdown, or the process
  /// that serves the store has died), or another error of the store; the agent has left even then. Must not be called
  /// from a served function.
  void shutdown(std::chrono::milliseconds timeout = {});
  /// Leaves at once: fails calls in flight with AgentClosed, ends all threads and frees the name. A served function
  /// that still runs keeps its thread until it returns. Idempotent. Must not be called from a served function.
  void leave();

  /// For the library only.
  [[nodiscard]] const std::shared_ptr<detail::AgentCore>& core() const noexcept { return core_; }

 private:
  explicit Agent(std::shared_ptr<detail::AgentCore> core) : core_(std::move(core)) {}
  void serve_function(std::string name, std::unique_ptr<detail::Function> function);
  std::shared_ptr<detail::Pending> start(const CallOptions& options, std::string_view peer, std::string_view function,
                                         std::size_t arguments, detail::WriteArguments write, const void* pack,
                                         bool may_hold_object);
  Object share(std::string type_name, std::vector<std::pair<std::string, std::unique_ptr<detail::Function>>> methods);

  std::shared_ptr<detail::AgentCore> core_;
};

template <class T, class... A>
Future<T> Object::call(std::string_view method, const A&... arguments) const {
  return call_with<T>(CallOptions(), method, arguments...);
}
template <class T, class... A>
Future<T> Object::call_with(const CallOptions& options, std::string_view method, const A&... arguments) const {
  static_assert((WritableValue<std::decay_t<A>> && ...),
                "an argument's type has no Value<T> that writes it: see tensorferry/values.h");
  const std::tuple<const A&...> pack(arguments...);
  return Future<T>(start(options, method, sizeof...(A), &detail::write_arguments<const A&...>, &pack,
                         detail::MayHoldObject<T>::value),
                   &detail::take_reply<T>);
}

}  // namespace tensorferry
