/// A directory of agents: they register under unique names (and ranks) in a store, and peers look them up. An agent may
/// join and leave at any time, and needs the store alone for it: there is no round of messages among all agents.
///
/// Keys in the store, under a prefix (docs/protocol.md, "Rendezvous"):
///     gen/<slot>               counter of the claims on a slot. A slot is "n/<name>" or "r/<rank>"
///     rec/<slot>/<generation>  the record of the agent that made that claim, or "void" for a claim that lost
///     barrier/<tag>/<n>/...    arrivals by incarnation, and rank 0's verdict
///     key/...                  a cluster key that the first agent generated
///
/// An agent first reads the counter and finds all generations up to it free: no record, one that left, or one whose
/// agent is dead. It wins the claim if its add(gen, 1) then returns the next number. So exactly one of several agents
/// that claim at once wins, on any store.
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

#include "agent/auth.h"
#include "agent/rendezvous/cluster_key.h"
#include "agent/rendezvous/record.h"
#include "agent/rendezvous/store.h"

namespace tensorferry {

/// One agent's access to the directory. Thread-safe. Calls block on the store.
class Directory {
 public:
  using Milliseconds = std::chrono::milliseconds;
  /// Returns whether the agent of a record is alive: dials it and compares incarnations. May take seconds.
  using Alive = std::function<bool(const Record&)>;

  /// `signing` is the user's own key. If it is empty, records are neither signed nor verified.
  Directory(std::shared_ptr<Store> store, std::string prefix, Key signing);

  /// Claims the record's name, and its rank unless that is -1. Call it once.
  /// - InvalidArgument: a living agent has the name or the rank (the text gives its name, pid and host), or one of them
  ///   is malformed;
  /// - Unauthenticated: the slot holds a record that is not signed with the key;
  /// - ResourceExhausted: too many agents claim the slot at once;
  /// - ProtocolError: the slot holds a malformed record; also the store's errors.
  Status join(const Record& record, const Alive& alive);
  /// Marks the record as left, which frees its name and rank at once. Idempotent. If the store is gone it only writes
  /// an info line to the log.
  void leave() noexcept;

  /// Returns the newest agent of that name or rank; waits up to `timeout` for one that has not left. 0 asks once.
  /// NotFound: no such agent, or it has left; Unauthenticated, ProtocolError: its record cannot be trusted; also the
  /// store's errors.
  Result<Record> find(std::string_view name, Milliseconds timeout);
  Result<Record> find(int rank, Milliseconds timeout);

  /// Waits until ranks 0..size-1 have joined, and returns their records in that order. A rank that has left counts if
  /// this agent was in the world that it had seen complete. Call it after join(). DeadlineExceeded: the text names the
  /// missing ranks; InvalidArgument: this agent's rank is not below `size`.
  Result<std::vector<Record>> wait_for_world(int size, Milliseconds timeout);

  /// Waits until every member of the world that wait_for_world() returned has called barrier() with this tag as often
  /// as this agent has. DeadlineExceeded: the text names the missing members; it fails early if one of them has left.
  /// InvalidArgument: wait_for_world() has not returned a world.
  Status barrier(const std::string& tag, Milliseconds timeout);

 private:
  struct Claim {
    std::string slot;
    std::int64_t generation = 0;
  };
  /// The state of a slot: the record of the highest generation that has one.
  struct Newest {
    std::optional<Record> record;
    std::int64_t generation = 0;
    bool hole = false;  // a later claim has set no key yet: it is under way, or its agent died within it
  };

  [[nodiscard]] std::string record_key(std::string_view slot, std::int64_t generation) const;
  [[nodiscard]] std::string counter_key(std::string_view slot) const;
  Result<Newest> newest(std::string_view slot, std::int64_t up_to, Milliseconds grace);
  Result<Claim> claim(const std::string& slot, const Record& record, const Alive& alive);
  Status confirm(const Claim& claim, bool after_hole, const Alive& alive);
  Status publish(const Claim& claim, const Record& record);
  Status give_up(const Claim& claim);
  using Accept = std::function<bool(const Record&)>;
  Result<Record> find_slot(const std::string& slot, const std::string& whom, Milliseconds timeout,
                           const Accept& accept);
  Status gather(const std::string& barrier, const std::vector<Record>& world, Milliseconds timeout);
  Status follow(const std::string& barrier, const std::vector<Record>& world, Milliseconds timeout);
  bool gone(const Record& member);

  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  const Key signing_;

  std::mutex mutex_;  // guards the members below; never held across a call of the store
  Record self_;
  std::vector<Claim> claims_;
  std::vector<Record> world_;
  std::map<std::string, int> barriers_;  // calls of barrier() by tag
};

}  // namespace tensorferry
