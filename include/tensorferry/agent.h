/// The agent in a C++ program: typed calls to peers and from them, in C++ or Python.
///
///     auto agent = tensorferry::Agent::join({.name = "sim", .rendezvous = "tcp://trainer:29500"});
///     agent->serve("step", [](tensorferry::TensorOf<float> action, int n) { return simulate(action, n); });
///     auto loss = agent->call<double>("trainer", "loss", batch).get();
///
/// Everything that fails throws one of errors.h. Nothing here needs torch.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
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
#include "tensorferry/object.h"
#include "tensorferry/store.h"
#include "tensorferry/values.h"

namespace tensorferry {

class Agent;

struct AgentOptions {
  /// Unique among the agents that meet; "": worker<rank>.
  std::string name{};
  /// Unique, from 0; -1: the environment's RANK where `rendezvous` is env://, or none.
  int rank = -1;
  /// So many ranks begin together, and join() waits for them; 0: the environment's WORLD_SIZE where the rank is the
  /// environment's too, else agents join and leave at any time. As in Python, agents that give a size and agents that
  /// give none do not meet.
  int world_size = 0;
  /// Where they meet: "env://" (or "": MASTER_ADDR and MASTER_PORT, what torchrun sets), "tcp://host:port": a store of
  /// torch's, which a Python process (rank 0, or torchrun) serves. "store://host:port": a StoreServer of either
  /// language. Not looked at where `store` is given.
  std::string rendezvous{};
  std::shared_ptr<Store> store{};
  /// The cluster key; "": TENSORFERRY_KEY_FILE or TENSORFERRY_KEY. Needed beyond this host.
  std::string key{};
  /// "shm,basic": these alone, in this order; "-shm": all others; "": TENSORFERRY_CHANNELS, or all.
  std::string channels{};
  /// Served functions that run at once; calls beyond them fail with ResourceExhausted.
  int threads = 1024;
  /// Of calls, unless their CallOptions say otherwise; 0: none.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// How long join() waits for the store and for the world.
  std::chrono::milliseconds join_timeout = std::chrono::seconds(300);
  /// Between signs of life to a peer on another host, which is lost when three are missing.
  std::chrono::milliseconds heartbeat = std::chrono::seconds(5);
  /// Bytes under way to one peer, beyond which callers wait.
  std::size_t max_bytes_in_flight = std::size_t{1} << 30;
  /// The network interface to listen on; "": TENSORFERRY_SOCKET_IFNAME, else the one that leads to the rendezvous.
  std::string interface {};
  /// "7000" or "7000-7099"; "": any.
  std::string ports{};
  /// The folder of unix sockets; "": TENSORFERRY_SOCKET_DIR, else they have no file.
  std::string socket_dir{};
  /// False: TCP also between processes of one host.
  bool unix_sockets = true;
  /// False: no memory is shared with peers.
  bool shared_memory = true;
  /// Runs before peers can find the agent: what it serves is there from the first call on.
  std::function<void(Agent&)> prepare{};
};

struct CallOptions {
  /// 0: none; negative: AgentOptions::timeout. A call made inside a served function ends with that one's deadline
  /// where the function passes what CallContext::deadline() leaves.
  std::chrono::milliseconds timeout{-1};
  /// The only channel that may carry the tensors; "": any.
  std::string require{};
  /// A peer that is not there yet, or restarts, is waited for up to the deadline.
  bool wait_for_ready = false;
  /// Calls to one peer with the same non-zero key run in the order in which they were made, one after the other.
  std::uint32_t order = 0;
};

/// A process among its peers. Thread-safe. Several can live in one process.
class Agent {
 public:
  /// Joins; with a world, when all have. Throws InvalidArgument (the name or rank is taken by an agent that lives, an
  /// option makes no sense), Unauthenticated, DeadlineExceeded (says who is missing), and the store's errors.
  static std::shared_ptr<Agent> join(AgentOptions options);
  /// leave().
  ~Agent();
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  [[nodiscard]] const std::string& name() const;
  [[nodiscard]] int rank() const;
  /// The name of the agent of that rank. NotFound.
  [[nodiscard]] std::string peer(int rank) const;

  /// Makes a function callable under `name` (which has none of the prefixes py:, op:, tf:); a second one replaces the
  /// first. `function` is a function, a lambda or another object with one operator(); its parameters and its result are
  /// types of values.h, taken by value or const reference. It may take a `const CallContext&` first. It may return a
  /// Future, and the caller has its answer when that is done.
  ///
  /// Runs on threads of the agent's pool, side by side; may block, and may call other agents. An exception of errors.h
  /// arrives at the caller as that one; any other as RemoteError with its what(). Arguments that do not fit are
  /// InvalidArgument at the caller, which names the function, its signature and what came.
  ///
  /// `parameters`: their names, for signatures and for Python's keyword arguments. Trailing std::optional ones may be
  /// left out by the caller.
  template <class F>
  void serve(std::string name, F function, std::vector<std::string> parameters = {}) {
    serve_function(std::move(name), detail::function_of<F>(std::move(function), std::move(parameters)));
  }

  /// Calls `function` of `peer` (its name) and gives a future of its result. `function` is a name that the peer serves:
  /// by serve() in C++, by rpc.expose() in Python; or "py:module:qualified.name" for any function that a
  /// Python peer can import.
  ///
  /// Tensors are not copied here: their memory may be written again when the future has completed. Errors come through
  /// the future, except InvalidArgument for arguments that cannot be sent. May wait, where more bytes are under way to
  /// the peer than max_bytes_in_flight.
  template <class T = void, class... A>
  Future<T> call(std::string_view peer, std::string_view function, const A&... arguments) {
    return call_with<T>(CallOptions(), peer, function, arguments...);
  }
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

  /// Gives peers the use of an object of this process: the result is passed to them among arguments and results, and
  /// they call the given methods. It is kept alive until nobody holds it. Methods run side by side, on several threads:
  /// the object locks where it has to.
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

  /// Which channel carries tensors of `bytes` bytes to `peer` and why not another, as text.
  [[nodiscard]] std::string explain(std::string_view peer, Device local = {}, Device remote = {},
                                    std::size_t bytes = std::size_t{1} << 20) const;
  /// The link to `peer` and its calls in flight, as text: for reports of calls that do not end.
  [[nodiscard]] std::string link_state(std::string_view peer) const;
  /// Calls made here that have not completed, and calls served here that have not been answered.
  [[nodiscard]] std::pair<std::size_t, std::size_t> in_flight() const;

  /// Leaves when nothing is under way: waits for the calls made and served here; with a world for everybody's, and
  /// until everybody, of either language, has come here. Throws DeadlineExceeded (`timeout`; 0: none) or ConnectionLost
  /// (a peer died before it came here); the agent has left all the same. Not from a served function.
  void shutdown(std::chrono::milliseconds timeout = {});
  /// Leaves at once: fails calls under way with AgentClosed, ends all threads, frees the name. Served functions that
  /// still run keep their threads until they return. Idempotent. Not from a served function.
  void leave();

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
