/// The tables of the reference protocol: plain data, guarded by the lock of References (references.h).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/function.h"
#include "base/interval_set.h"
#include "base/status.h"
#include "rpc/core/reference_id.h"
#include "rpc/core/reference_mail.h"

namespace tensorferry {

/// The outcome of an object's creation: a value of the layer above, or the exception that the creation raised. It lives
/// as long as the object, and every fetch returns it.
struct Outcome {
  std::shared_ptr<void> value;
  bool raised = false;
};

namespace references {

/// Remembers the last `most` keys that were added. The bound limits the memory that a peer can take here.
template <class Key>
class RecentSet {
 public:
  static constexpr std::size_t most = 65536;

  void insert(const Key& key) {
    if (!keys_.insert(key).second) return;
    order_.push_back(key);
    if (order_.size() > most) {
      keys_.erase(order_.front());
      order_.pop_front();
    }
  }
  [[nodiscard]] bool contains(const Key& key) const { return keys_.contains(key); }

 private:
  std::unordered_set<Key> keys_;
  std::deque<Key> order_;
};

/// At the owner: an object.
struct OwnedObject {
  enum class State : std::uint8_t {
    awaited,  // a peer has named it, but its create request has not come
    running,  // its creation runs
    ready,
    failed,  // it will never be made
  };
  State state = State::awaited;
  Outcome outcome;                                  // if ready
  Status failure;                                   // if failed, or given up
  ForkId given_up;                                  // if running: the creator's hold, which it has given up; else 0, 0
  std::uint64_t named_by = 0;                       // if awaited: the incarnation of the peer that named it; 0: none
  std::size_t locals = 0;                           // the owner's own handles, and its own creation under way
  std::unordered_map<ForkId, std::uint64_t> forks;  // fork to its holder's incarnation
  struct Waiter {
    std::uint64_t number;
    UniqueFunction<void(Result<Outcome>)> completion;
    ForkId by;  // the hold that it uses; 0, 0: none
  };
  std::vector<Waiter> waiters;
};

/// At a user: its hold on another's object, by fork.
struct Hold {
  enum class State : std::uint8_t {
    creating,     // the create request, which tells the owner of the fork, is under way
    unconfirmed,  // it came with a message; the owner has not confirmed it yet
    confirmed,
    lost,  // `failure` says why
  };
  State state = State::creating;
  Status failure;
  AgentId owner;
  RRefId object;
  AgentId parent;
  std::size_t passing = 0;  // forks made of it that are not accepted yet; until then it keeps the object alive
  std::size_t handles = 1;  // several if the message that brought it came again
  bool abandon = false;     // its creation failed, and the owner does not know it yet
  std::vector<UniqueFunction<void(Status)>> waiters;  // completions of on_confirmed()
};

/// At a parent: a fork that it made and that its receiver has not accepted yet.
struct Child {
  AgentId receiver;
  RRefId object;
  ForkId via;              // the hold that it was made of; 0, 0: this agent owns the object
  std::uint64_t call = 0;  // the receiver's call whose reply carried it; 0: a request carried it
  bool askable = false;    // the message has ended here, so the receiver may be asked about the fork
  bool ripe = false;       // it was askable at the last ask_now() already, so the next one asks
  bool asked = false;      // the question is under way
  bool held = false;       // the receiver has it, and will accept it
};

/// The forks that this agent has made and that are on their way to a receiver.
struct Passing {
  std::unordered_map<ForkId, Child> children;
  bool asking = false;  // ask_now() is scheduled
};

/// What has ended and may still be named by a late message.
struct Past {
  RecentSet<ForkId> holds;            // that came from their objects' owners, and that this agent has ended
  RecentSet<std::uint64_t> deceased;  // incarnations of dead peers
};

/// One incarnation of a peer.
struct Peer {
  AgentId id;
  // Operations for the peer.
  std::deque<ReferenceOp> queue;
  std::vector<ReferenceOp> batch;  // under way; sent again until it is answered
  std::uint64_t batch_number = 0;
  std::int64_t delay_ms = 0;    // before the batch is sent again
  std::int64_t missing_ms = 0;  // how long the peer has been unreachable
  std::uint64_t objects = 0;    // counter of the objects that this agent asked the peer to create
  // Operations of the peer.
  std::uint64_t done = 0;     // the number of its last batch
  Bytes answer;               // the answer to that batch
  IntervalSet created;        // the counters of its objects here that were created or abandoned
  RecentSet<ForkId> refused;  // its forks that receive() must refuse
  // What it has made this agent keep. Ends with the peer.
  std::size_t awaited = 0;  // objects that it named and whose create request has not come
  std::size_t forks = 0;    // of this agent's objects
};

}  // namespace references
}  // namespace tensorferry
