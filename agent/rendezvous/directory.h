/// Who is there: agents register under unique names (and ranks) in a store, and are looked up by them. Joining and
/// leaving need the store alone, at any time; nobody talks to everybody.
///
/// Keys in the store, under a prefix (docs/protocol.md, "Rendezvous"):
///     gen/<slot>               counter: how many claims a slot has seen. A slot is "n/<name>" or "r/<rank>"
///     rec/<slot>/<generation>  the record of the agent that made that claim, or "void" for a claim that lost
///     barrier/<tag>/<n>/...    arrivals by incarnation, and rank 0's verdict
///     key/...                  a cluster key made up at rendezvous
/// A claim is won by the one agent whose add(gen, 1) returns the number right after the generations that it has just
/// found to be free (nobody's, left, or dead): so of any number that claim at once one wins, whatever the store is.
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

/// One agent's view of the others. Thread-safe; calls block on the store.
class Directory {
 public:
  using Milliseconds = std::chrono::milliseconds;
  /// Whether the agent of a record lives: dials it, and compares incarnations. May take a while.
  using Alive = std::function<bool(const Record&)>;

  /// `signing`: the user's own key, empty where there is none: records are then neither signed nor checked.
  Directory(std::shared_ptr<Store> store, std::string prefix, Key signing);

  /// Claims the record's name and, from 0 on, its rank. Once. InvalidArgument: the name or the rank belongs to an agent
  /// that lives (says which, pid and host), or is malformed; Unauthenticated: it is claimed by a record that the key
  /// does not fit; the store's errors.
  Status join(const Record& record, const Alive& alive);
  /// Marks the record as left; the name is free at once. Idempotent; quiet where the store is gone.
  void leave() noexcept;

  /// The newest agent of that name or rank, waiting up to `timeout` for one that has not left. 0 asks once.
  /// NotFound: nobody, or it left; Unauthenticated, ProtocolError: a record that cannot be trusted; the store's errors.
  Result<Record> find(std::string_view name, Milliseconds timeout);
  Result<Record> find(int rank, Milliseconds timeout);

  /// Waits until ranks 0..size-1 are registered (or have already left a world that had this agent in it) and returns
  /// them in that order. DeadlineExceeded: names the ranks that are missing. After join().
  Result<std::vector<Record>> wait_for_world(int size, Milliseconds timeout);

  /// Waits until every member of the world that wait_for_world() returned has called barrier() with this tag as often
  /// as this agent has. DeadlineExceeded: names who is missing. Also fails when a missing one is found to have left.
  Status barrier(const std::string& tag, Milliseconds timeout);

 private:
  struct Claim {
    std::string slot;
    std::int64_t generation = 0;
  };
  /// What a slot holds: the record of the highest generation that has one.
  struct Newest {
    std::optional<Record> record;
    std::int64_t generation = 0;
    bool hole = false;  // a later claim has neither a record nor lost: in the middle of it, or died there
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

  std::mutex mutex_;  // guards what follows; never held across a call of the store
  Record self_;
  std::vector<Claim> claims_;
  std::vector<Record> world_;
  std::map<std::string, int> barriers_;  // calls of barrier() by tag
};

}  // namespace tensorferry
