/// Agents' references over a simulated network, in virtual time. Messages take random times and overtake one another.
/// They may be lost, arrive twice, or arrive after their sender was told that they failed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <queue>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "rpc/core/references.h"

namespace tensorferry::testing {

/// A queue of events that runs them in the order of their times.
class Clockwork {
 public:
  explicit Clockwork(std::uint32_t seed) : random_(seed) {}

  void at(std::int64_t delay_ms, std::function<void()> what) {
    events_.push({now_ + delay_ms, next_++, std::move(what)});
  }
  /// Runs the next event. Returns false if none is left.
  bool step() {
    if (events_.empty()) return false;
    auto event = events_.top();
    events_.pop();
    now_ = event.time;
    event.what();
    return true;
  }
  void run() {
    while (step()) {
    }
  }
  void run_for(std::int64_t ms) {
    const auto end = now_ + ms;
    while (!events_.empty() && events_.top().time <= end) step();
    now_ = end;
  }
  [[nodiscard]] std::int64_t now() const { return now_; }

  int pick(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }
  bool chance(int percent) { return pick(100) < percent; }
  /// Returns a random delay: mostly short, now and then longer than any time-out.
  std::int64_t delay() { return chance(90) ? pick(20) : pick(chance(80) ? 500 : 20000); }

 private:
  struct Event {
    std::int64_t time;
    std::uint64_t number;
    std::function<void()> what;
    bool operator<(const Event& other) const {
      return std::tie(time, number) > std::tie(other.time, other.number);  // the earliest on top
    }
  };
  std::mt19937 random_;
  std::int64_t now_ = 0;
  std::uint64_t next_ = 0;
  std::priority_queue<Event> events_;
};

class World;

/// One incarnation of one agent.
struct Life {
  AgentId id;
  bool alive = true;
  std::shared_ptr<References> references;
};

class World {
 public:
  explicit World(std::uint32_t seed, int trouble_percent = 10) : clock(seed), trouble_(trouble_percent) {}
  ~World();

  /// Starts an agent with a new incarnation. From now on the name means this life.
  std::shared_ptr<Life> start(const std::string& name);
  /// Stops the agent in the middle of its work. The other agents hear of its death one by one. Without `linked` no
  /// agent is connected to it, so none hears of it.
  void kill(const std::shared_ptr<Life>& life, bool linked = true);
  /// Returns the life that has the name now; null if none has.
  std::shared_ptr<Life> find(const std::string& name) const;

  /// Carries a message from one agent to another. Runs `arrive` with the life that has the receiver's name by then,
  /// unless the message is lost or no life has that name. Runs `fail` at the sender if it is told that the message
  /// failed. Both may run, in either order. `arrive` runs at most once, or twice if `repeatable`.
  void carry(const std::shared_ptr<Life>& from, const AgentId& to, std::function<void(Life&)> arrive,
             std::function<void(Status)> fail, bool repeatable = false);
  /// Runs `what` later, unless that life is over by then.
  void later(const std::shared_ptr<Life>& life, std::int64_t delay_ms, std::function<void()> what);

  Clockwork clock;
  std::vector<std::shared_ptr<Life>> lives;  // all that were ever started

 private:
  class Network;
  int trouble_;
  std::uint64_t next_incarnation_ = 1000;
  std::map<std::string, std::shared_ptr<Life>> names_;
};

}  // namespace tensorferry::testing
