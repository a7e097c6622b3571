/// Whole agents of one process without threads of their own, and what a model knows of their calls. A seed decides
/// which agent works next and on what, which bytes arrive, what breaks, and when time goes on. So a seed's run is
/// always the same.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "tests/base/manual_clock.h"
#include "tests/simulation/stepped_network.h"

namespace tensorferry::testing {

/// Which faults a run may have.
struct SteppedFaults {
  bool ends = false;            // of connections: seen by both ends, by one, or by none
  bool partitions = false;      // for a while
  bool deaths = false;          // of agents: of the process, or silently with the host
  std::uint32_t memory = 0;     // one allocation of so many fails while agents work; 0: none does
  bool until_released = false;  // and all after it, until the reserve is given back
};

class SteppedWorld final {
 public:
  SteppedWorld(std::uint64_t seed, SteppedFaults faults);
  ~SteppedWorld();
  SteppedWorld(const SteppedWorld&) = delete;
  SteppedWorld& operator=(const SteppedWorld&) = delete;

  /// Makes calls and faults for a while, then lets everything settle, and checks what the model does not allow. Returns
  /// that, one line each.
  std::vector<std::string> run();

  // --- for tests of one situation ------------------------------------------------------------------------------------
  /// Makes a call, whose handler answers at once if `answered`, else never. Returns its number.
  std::size_t call(std::size_t from, std::size_t to, bool answered);
  /// Lets time go on in small pieces, and all be done that is possible meanwhile.
  void pass(Clock::duration time);
  [[nodiscard]] bool ended(std::size_t call) const { return calls_.at(call).ends != 0; }
  [[nodiscard]] const Status& status(std::size_t call) const { return calls_.at(call).status; }
  [[nodiscard]] RawAgent& agent(std::size_t number) { return *agents_.at(number).agent; }
  [[nodiscard]] SteppedNetwork& network() noexcept { return network_; }
  /// The agent does nothing any more, and its peers see nothing of it.
  void freeze(std::size_t number);
  /// Returns how many peers the agent has been told to be dead.
  [[nodiscard]] int lost(std::size_t number) const { return agents_.at(number).lost; }
  static constexpr Milliseconds heartbeat{1000}, peer_timeout{10'000};

  /// Returns a digest of all decisions and outcomes of the run, the same for each run of a seed.
  [[nodiscard]] std::uint64_t digest() const noexcept { return digest_; }
  [[nodiscard]] std::uint64_t steps() const noexcept { return steps_; }
  /// Returns how many allocations failed.
  [[nodiscard]] std::uint64_t failed_allocations() const noexcept { return failed_allocations_; }
  /// Returns how many calls ended with each code.
  [[nodiscard]] const std::map<Code, std::size_t>& outcomes() const noexcept { return outcomes_; }

 private:
  enum class Kind : std::uint8_t { plain, ordered, idempotent, cancelled, expiring };
  struct Made {
    Kind kind = Kind::plain;
    std::size_t from = 0, to = 0;
    std::uint32_t order = 0;
    Clock::time_point deadline;
    std::optional<bool> answered;  // at once, or never; nullopt: the seed decides
    Call call;
    int runs = 0, ends = 0;
    Status status;
    bool is_true = true;              // what the status says had happened when the call ended
    std::vector<std::size_t> wanted;  // bytes of each buffer of a reply that comes at once; none: what the request has
    std::vector<Buffer> into;         // the caller's memory for them, with what `after_end` says after the call's end
  };
  struct Agent {
    std::shared_ptr<RawAgent> agent;
    bool dead = false;
    bool silent = false;  // and its host with it
    int lost = 0;         // peers
  };

  std::size_t below(std::uint64_t bound) { return static_cast<std::size_t>(random_() % bound); }
  void note(std::uint64_t what);
  void make_agent(std::size_t number);
  void serve(std::size_t number, const Request& request, Reply reply);
  void make_call();
  void start(std::size_t number, RawCallOptions options, std::size_t bytes);
  void end(std::size_t number, const Result<Received>& reply);
  void check_reply(std::size_t number, const Received& reply);
  void break_something();
  /// Does one thing that is possible, if there is any.
  bool step();
  bool work_at(std::size_t agent);
  bool work(std::size_t agent, RawAgent::Work on);
  /// Does a job of an agent with as much memory as the faults leave it. False: the job threw std::bad_alloc.
  template <class Job>
  bool limited(const Job& job);
  bool answer_one();
  /// Works until nothing is possible without time going on.
  void exhaust();
  void advance(Clock::duration by);
  /// Moves the time to where something is due.
  void advance_to_what_is_due();
  void meet();
  void settle();
  [[nodiscard]] bool is_allowed(const Made& call) const;
  [[nodiscard]] static bool runs_well(const Made& call);
  [[nodiscard]] bool is_true(const Made& call) const;
  void check_that_all_works_again();
  void check_calls();
  void check_links();
  void leave();

  SteppedFaults faults_;
  bool met_ = false;  // all agents had sessions before faults began
  std::mt19937_64 random_;
  const std::shared_ptr<ManualClock> time_ = ManualClock::make();
  SteppedNetwork network_;
  std::shared_ptr<Store> store_;
  std::deque<Agent> agents_;
  std::deque<Made> calls_;
  std::vector<std::pair<std::size_t, Reply>> unanswered_;  // with the agent that serves it
  std::map<std::pair<std::size_t, std::size_t>, std::map<std::uint32_t, std::size_t>> last_started_;
  std::vector<std::string> problems_;
  std::map<Code, std::size_t> outcomes_;
  std::uint64_t digest_ = 14695981039346656037ULL, steps_ = 0;
  std::uint64_t memory_state_, failed_allocations_ = 0;
};

}  // namespace tensorferry::testing
