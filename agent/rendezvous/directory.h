/// A directory of agents: they register under unique names (and ranks) in a store, and peers look them up. An agent may
/// join and leave at any time, and needs the store alone for it: there is no round of messages among all agents.
///
/// Keys in the store, under a prefix (docs/protocol.md, "Rendezvous"):
///     gen/<slot>               counter of the claims on a slot. A slot is "n/<name>" or "r/<rank>"
///     rec/<slot>/<generation>  the record of the agent that made that claim, or "void" for a claim that lost
///     arrived                  counter of the agents that have a rank
///     rosters, roster/<n>      counter of the rosters of complete worlds, and the rosters
///     refused/<incarnation>    the record of an agent that was refused a slot, for the agent that has it
///     gave_up/<rank>           set by an agent whose wait for the world has timed out
///     barrier/<tag>/<n>/...    arrivals by incarnation, and rank 0's verdict
///
/// An agent first reads the counter and finds all generations up to it free: no record, one that left, or one whose
/// agent is dead. It wins the claim if its add(gen, 1) then returns the next number. So exactly one of several agents
/// that claim at once wins, on any store. The winner deletes the records before its own. An agent that is refused
/// leaves its record to the holder, and dials it once more, which lets the holder look for it.
///
/// A world of n agents takes O(n) operations of the store in all. The agent that arrives last reads the record of each
/// rank, and writes the roster, for which all others wait. Because processes that died may have left the count wrong,
/// rank 0 looks as well: when all have arrived, after 2 s, and then ever more rarely.
///
/// An agent of a world that leaves deletes its keys: the others know from the roster that it was there. The last one
/// deletes the world's. Any other agent that leaves keeps a short record in its slots, which the next one replaces.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "agent/rendezvous/record.h"
#include "agent/rendezvous/roster.h"
#include "agent/store.h"
#include "agent/transport/cluster_key.h"
#include "base/clock.h"

namespace tensorferry {

/// One agent's access to the directory. Thread-safe. Calls block on the store.
class Directory {
 public:
  using Milliseconds = std::chrono::milliseconds;
  /// Returns whether the agent of a record is alive: dials it and compares incarnations. May take seconds.
  using Alive = std::function<bool(const Record&)>;

  /// `signing` is the user's own key. If it is empty, records are neither signed nor verified.
  Directory(std::shared_ptr<Store> store, std::string prefix, Key signing, Clock clock = {});

  /// Claims the record's name, and its rank unless that is -1. Call it once.
  /// - InvalidArgument: a living agent has the name or the rank (the text gives its name, pid and host), or one of them
  ///   is malformed;
  /// - Unauthenticated: the slot holds a record that is not signed with the key;
  /// - ResourceExhausted: too many agents claim the slot at once;
  /// - ProtocolError: the slot holds a malformed record; also the store's errors.
  Status join(const Record& record, const Alive& alive);
  /// Marks the record as left, or deletes it, which frees its name and rank at once. Idempotent. While this runs, the
  /// agent must still answer peers that ask whether it is alive. If the store is gone it only writes
  /// an info line to the log.
  void leave() noexcept;

  /// Returns the record of an agent that was refused the name or the rank of this one, whose incarnation is `own`.
  /// nullopt: none was, or it has been returned before. An agent calls it when it has been dialled for its hello alone.
  std::optional<Record> take_refused(std::uint64_t own);

  /// Returns the newest agent of that name or rank; waits up to `timeout` for one that has not left. 0 asks once.
  /// NotFound: no such agent, or it has left; Unauthenticated, ProtocolError: its record cannot be trusted; also the
  /// store's errors.
  Result<Record> find(std::string_view name, Milliseconds timeout);
  Result<Record> find(int rank, Milliseconds timeout);

  /// Ends a wait with an error, if it returns one. Called about ten times a second.
  using Check = std::function<Status()>;
  /// Returns whether the agent of a record has ended without leaving, so that a process started again will take its
  /// place. `earlier`: it was in an earlier world under this prefix. May dial the agent.
  using Ended = std::function<bool(const Record&, bool earlier)>;
  /// Waits until ranks 0..size-1 have joined, and returns them in that order. A rank that has left counts if this agent
  /// was in the world that it had seen complete. One that has `ended` does not count, so that a world whose processes
  /// were killed and started again does not begin with the dead. Call it after join(). DeadlineExceeded: the text names
  /// the missing ranks; InvalidArgument: this agent's rank is not below `size`; also the errors of `check`. `check` and
  /// `ended` may be empty.
  Result<std::vector<WorldMember>> wait_for_world(int size, Milliseconds timeout, const Check& check = {},
                                                  const Ended& ended = {});

  /// Waits until every member of the world that wait_for_world() returned has called barrier() with this tag as often
  /// as this agent has. DeadlineExceeded: the text names the missing members; it fails early if one of them has left.
  /// InvalidArgument: wait_for_world() has not returned a world.
  Status barrier(const std::string& tag, Milliseconds timeout);

 private:
  /// Returns the time until `deadline`; 0 after it.
  [[nodiscard]] Milliseconds until(Clock::time_point deadline) const;
  struct Claim {
    std::string slot;
    std::int64_t generation = 0;
    std::int64_t replaced = 0;  // generation of the record before this one; 0: none
  };
  /// The state of a slot: the record of the highest generation that has one.
  struct Newest {
    std::optional<Record> record;
    std::int64_t generation = 0;
    bool hole = false;  // a later claim has set no key yet: it is under way, or its agent died within it
  };

  [[nodiscard]] std::string record_key(std::string_view slot, std::int64_t generation) const;
  [[nodiscard]] std::string counter_key(std::string_view slot) const;
  [[nodiscard]] std::string roster_key(std::int64_t number) const;
  [[nodiscard]] std::string refused_key(std::uint64_t holder) const;
  Result<Newest> newest(std::string_view slot, std::int64_t up_to, Milliseconds grace);
  Result<Claim> claim(const std::string& slot, const Record& record, const Alive& alive);
  Status confirm(const Claim& claim, const Record& record, std::uint64_t predecessor, const Alive& alive);
  Status refuse(const std::string& slot, const Record& record, const Record& holder, const Alive& alive);
  Status claim_both(const Record& record, const Alive& alive, std::vector<Claim>& claims);
  Status publish(const Claim& claim, const Record& record);
  Status give_up(const Claim& claim);
  void forget_predecessors(const Claim& claim);
  void withdraw_arrival();
  Status erase_claim(const Claim& claim, std::uint64_t incarnation);
  Result<Record> find_slot(const std::string& slot, const std::string& whom, Milliseconds timeout);
  Status absent_agent(const std::string& slot, const std::string& whom, Milliseconds timeout);
  /// Looks for all ranks of a world.
  struct Look {
    std::vector<Record> found;
    std::vector<std::string> missing;
    std::vector<std::string> gave_up;  // ranks that came, and are not there any more
    [[nodiscard]] Status incomplete() const;
  };
  /// When an agent that waits for the world looks for all ranks.
  struct Looking {
    bool looks = false;   // this agent is one of those that look
    bool looked = false;  // and has done so, in vain
    Milliseconds pause{0};
    Clock::time_point at{};
  };
  Result<bool> may_be_complete(int size, const Looking& looking);
  Result<std::int64_t> expected_roster(std::int64_t next);
  Result<Look> look_for_world(int size, Milliseconds timeout);
  Status leave_out_the_ended(Look& look, const Ended& ended);
  Status give_up_waiting(Look& look);
  Result<std::vector<std::uint64_t>> members_of_the_last_world();
  Result<std::vector<WorldMember>> begin_world(const Look& look);
  Result<std::vector<WorldMember>> adopt(Roster roster);
  Status gather(const std::string& barrier, const std::vector<WorldMember>& world, Milliseconds timeout);
  Status follow(const std::string& barrier, std::uint64_t self, const std::vector<WorldMember>& world,
                Milliseconds timeout);
  bool gone(const WorldMember& member);

  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  const Key signing_;
  const Clock clock_;

  std::mutex mutex_;  // guards the members below; never held across a call of the store
  Record self_;
  std::vector<Claim> claims_;
  bool in_world_ = false;            // wait_for_world() was called
  std::int64_t arrival_ = 0;         // the number of agents with a rank when this one arrived
  std::int64_t rosters_before_ = 0;  // the number of rosters when this one arrived
  std::vector<WorldMember> world_;
  std::uint64_t last_refused_ = 0;       // the incarnation that take_refused() has returned
  std::map<std::string, int> barriers_;  // calls of barrier() by tag
};

}  // namespace tensorferry
