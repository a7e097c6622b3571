/// Agents of one process over a relay, and a model of what they do: each call's runs and outcome, each object's
/// holders.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "rpc/core/agent_network.h"
#include "rpc/core/references.h"
#include "tests/simulation/relay.h"

namespace tensorferry::testing {

/// What the model knows of one call.
struct CallRecord {
  enum class Kind : std::uint8_t { plain, ordered, idempotent, cancelled, expiring };
  Kind kind = Kind::plain;
  std::string route;        // "a -> b"
  std::uint32_t order = 0;  // ordered
  std::atomic<int> runs{0};
  std::atomic<int> ends{0};
  Status status;  // once it has ended; Ok also stands for the right bytes
};

/// What the model knows of one object.
struct ObjectRecord {
  std::size_t owner = 0;
  enum class Creation : std::uint8_t { under_way, done, failed };
  std::atomic<Creation> creation{Creation::under_way};
};

class World;

/// One agent with its reference tables. Serves "run", "linger", "make" and "keep".
class SimulatedAgent {
 public:
  /// `warm`: the agent has its sessions before faults begin, so the tables may give no peer up by themselves.
  SimulatedAgent(World& world, std::size_t index, bool warm);
  ~SimulatedAgent();
  SimulatedAgent(const SimulatedAgent&) = delete;
  SimulatedAgent& operator=(const SimulatedAgent&) = delete;

  [[nodiscard]] AgentId id() const { return {agent->self().name, agent->self().incarnation}; }

  std::shared_ptr<RawAgent> agent;
  std::shared_ptr<References> references;

 private:
  void make(const Request& request, Reply reply);
  void keep(const Request& request, Reply reply);
  World& world_;
  const std::size_t index_;
  std::shared_ptr<AgentNetwork> network_;
};

/// A program's handle on an object.
struct HeldReference {
  std::size_t agent = 0;
  std::shared_ptr<Reference> reference;
};

/// Thread-safe, except for the constructor and the destructor.
class World {
 public:
  World(std::uint64_t seed, std::size_t agents, bool warm);
  ~World();
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  [[nodiscard]] std::size_t size() const { return agents_.size(); }
  SimulatedAgent& at(std::size_t index) { return *agents_.at(index); }
  Relay& relay() { return relay_; }
  std::shared_ptr<Store> store() { return store_; }

  /// Makes a call. `bytes`: of its buffer; 0: none. Keeps the call, so that cancel_one() can cancel it.
  void call(CallRecord::Kind kind, std::size_t from, std::size_t to, std::size_t bytes, std::uint32_t order);
  /// Cancels the calls that are made to be cancelled.
  void cancel_calls();
  /// Makes `to` create an object for `from`, which holds it from now on.
  void create(std::size_t from, std::size_t to, bool idempotent);
  /// Passes a handle, the one with this number among those that exist, on to another agent.
  void pass(std::size_t which, std::size_t to);
  void drop(std::size_t which);
  /// Checks that the object of a confirmed handle exists.
  void probe(std::size_t which);

  /// Called by the agents' functions.
  void ran(std::size_t call);
  void hold(std::size_t agent, std::shared_ptr<Reference> reference);
  [[nodiscard]] bool may_be_gone(const RRefId& object);
  void problem(std::string text);

  /// Waits until every call has ended and all tables are settled, and checks the outcomes. Then drops all handles, and
  /// checks that every object is freed.
  void finish(bool warm);
  [[nodiscard]] std::vector<std::string> problems();

  std::atomic<int> live_objects{0};  // values of objects that exist
  std::atomic<int> deaths{0};

 private:
  void check_calls(bool warm);
  void check_references();
  std::optional<HeldReference> pick(std::size_t which);

  Relay relay_;
  std::shared_ptr<Store> store_;
  std::mutex mutex_;  // guards the rest
  std::vector<std::string> problems_;
  std::vector<std::shared_ptr<CallRecord>> calls_;
  std::vector<Call> to_cancel_;
  std::map<std::pair<std::string, std::uint32_t>, std::size_t> last_started_;  // by route and order key
  std::map<RRefId, std::shared_ptr<ObjectRecord>> objects_;
  std::vector<HeldReference> held_;
  std::atomic<int> under_way_{0};  // calls of the references
  std::vector<std::unique_ptr<SimulatedAgent>> agents_;
};

}  // namespace tensorferry::testing
