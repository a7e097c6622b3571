/// What the reference protocol remembers. Data alone; references.h works on it, under its lock.
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
#include "base/status.h"
#include "rpc/core/interval_set.h"
#include "rpc/core/reference_id.h"
#include "rpc/core/reference_mail.h"

namespace tensorferry {

/// What an object came to: a value of the layer above, or what its creation raised. Kept as long as the object, given
/// to everyone who asks.
struct Outcome {
  std::shared_ptr<void> value;
  bool raised = false;
};

namespace references {

/// Remembers the last `most` keys that were added: a bound on what a peer can make us keep.
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
struct Object {
  enum class State : std::uint8_t {
    awaited,  // others know of it before its create request has come
    running,  // being made
    ready,
    failed,  // will never be made
  };
  State state = State::awaited;
  Outcome outcome;                                  // ready
  Status failure;                                   // failed
  std::size_t locals = 0;                           // handles here, and a creation of our own under way
  std::unordered_map<ForkId, std::uint64_t> forks;  // to the holder's incarnation
  struct Waiter {
    std::uint64_t number;
    UniqueFunction<void(Result<Outcome>)> completion;
  };
  std::vector<Waiter> waiters;
};

/// At a user: its hold on another's object, by fork.
struct Hold {
  enum class State : std::uint8_t {
    creating,     // the create request is under way; it makes the fork known
    unconfirmed,  // came with a message; the owner is being told
    confirmed,
    lost,  // `failure` says why
  };
  State state = State::creating;
  Status failure;
  AgentId owner;
  RRefId object;
  AgentId parent;
  std::size_t passing = 0;  // forks made of it that are not accepted yet: it must stay known to the owner for them
  bool dropped = false;     // no handle is left
  bool abandon = false;     // its creation failed: the owner is to be told
  std::vector<UniqueFunction<void(Status)>> waiters;  // for confirmation
};

/// At a parent: a fork that it made and that its receiver has not accepted yet.
struct Child {
  AgentId receiver;
  RRefId object;
  ForkId via;              // the hold that it was made of; 0, 0: the object is ours
  std::uint64_t call = 0;  // came by the reply to that call of the receiver's
  bool askable = false;    // the message is over for us: the receiver may be asked
  bool ripe = false;       // and it was so when last looked
  bool asked = false;      // the question is under way
  bool held = false;       // it has come: accept will follow
};

/// Another agent's life.
struct Peer {
  AgentId id;
  // To it.
  std::deque<ReferenceOp> queue;
  std::vector<ReferenceOp> batch;  // under way; sent again until answered
  std::uint64_t batch_number = 0;
  std::int64_t delay_ms = 0;    // before the batch is sent again
  std::int64_t missing_ms = 0;  // for how long it has not been found
  std::uint64_t objects = 0;    // that we asked it to create
  // From it.
  std::uint64_t done = 0;     // the number of its last batch
  Bytes answer;               // to that
  IntervalSet created;        // its objects here that were created or abandoned
  RecentSet<ForkId> refused;  // its forks that must not come any more
};

}  // namespace references
}  // namespace tensorferry
