/// One agent of a job, from joining to leaving: the agent of bytes and buffers (agent/agent.h), its references, and the
/// members of its world. The C++ API and the Python API both stand on it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "rpc/core/references.h"
#include "rpc/member/runtime_lock.h"

namespace tensorferry {

class Patience;

/// A member of a world. Thread-safe. If it has a runtime lock, the callers of functions that may block hold that lock,
/// and the functions release it meanwhile. Errors are returned; no function throws.
class Member final : public std::enable_shared_from_this<Member> {
 public:
  /// Makes an agent that peers cannot find before announce(), and serves the messages of its references. Blocks.
  /// `world_size`: the number of agents that begin together; 0: agents join and leave at any time. `lock`, if not null,
  /// must outlive the member. Errors: those of RawAgent::create().
  static Result<std::shared_ptr<Member>> create(RawAgentOptions options, int world_size, RuntimeLock* lock = nullptr);
  /// Leaves, without releasing the runtime's lock.
  ~Member();
  Member(const Member&) = delete;
  Member& operator=(const Member&) = delete;

  /// Lets peers find and call the agent. Blocks. Errors: those of RawAgent::announce(). If a world cannot begin because
  /// two of its ranks have one name, all its ranks are told: the error comes when all know it, after 5 s at most.
  Status announce();
  /// Waits until all agents of the world have joined; without a world, returns at once. Timeout 0: no limit. After 5 s
  /// one log line names the ranks that are missing. Errors:
  /// DeadlineExceeded, with the ranks that are missing; InvalidArgument: two ranks of the world have one name;
  /// Cancelled: a signal ended the wait; the store's.
  Status wait_for_world(Milliseconds timeout);
  /// Returns the agents of the world in the order of their ranks. Valid after wait_for_world().
  [[nodiscard]] const std::vector<PeerInfo>& world() const noexcept { return world_; }
  /// Waits until this agent has nothing in flight (in_flight()) and, with a world, until that holds for all its agents
  /// at once and all of them wait here. The caller then leaves. Timeout 0: no limit. Errors:
  ///  - DeadlineExceeded: `timeout` passed. The text names the agents that have not come.
  ///  - ConnectionLost: an agent of the world died or left before it came. The text names it.
  ///  - Cancelled: a signal ended the wait.
  ///  - the store's: ConnectionLost, with the store's address, if its process has ended.
  /// The agent leaves in every case, and the text names it.
  Status finish(Milliseconds timeout);
  /// Closes the references, then leaves (RawAgent::leave). Blocks. Idempotent. Does nothing in a forked child.
  void leave();

  [[nodiscard]] RawAgent& agent() const noexcept { return *agent_; }
  [[nodiscard]] References& references() const noexcept { return *references_; }
  [[nodiscard]] const PeerInfo& self() const { return agent_->self(); }
  /// Returns the lock to release while a thread blocks; null: there is none.
  [[nodiscard]] RuntimeLock* lock() const noexcept { return lock_; }

  /// Looks up the agent of that name or rank. An agent to which a link is up is known without the store. Else blocks
  /// for 2 s at most, in case the agent is joining at this moment. Errors: NotFound, AgentClosed, the store's.
  Result<PeerInfo> find(std::string_view name) const;
  Result<PeerInfo> find(int rank) const;
  /// Returns the name and the incarnation of `peer` that a call would reach now. Looks the peer up as find() does if no
  /// link to it is up.
  Result<AgentId> id_of(std::string_view peer) const;

  /// Returns the number of incarnations of peers that were lost so far.
  [[nodiscard]] std::uint64_t peers_lost() const noexcept { return peers_lost_.load(std::memory_order_relaxed); }

  /// What keeps the agent from leaving.
  struct InFlight {
    std::size_t made = 0, served = 0;  // as RawAgent::in_flight()
    std::int64_t unread = 0;           // Member::unread
    bool references = false;           // whether messages about references are under way
    [[nodiscard]] bool any() const noexcept { return made != 0 || served != 0 || unread != 0 || references; }
  };
  [[nodiscard]] InFlight in_flight() const;
  /// Counts work that the layer above has begun and RawAgent does not count any more, or not yet: replies that have
  /// come and have not been read, and requests whose function has returned a future.
  std::atomic<std::int64_t> unread{0};

 private:
  Member(std::shared_ptr<RawAgent> agent, std::shared_ptr<Store> store, std::string prefix, int world_size,
         RuntimeLock* lock, const References::Options& reference_options);
  void end();
  void tell_world(const Status& refused) const;
  std::optional<Status> told_by_world() const;
  void await_readers() const;
  void tell_awaited() const;
  std::optional<std::string> why_gone(const PeerInfo& peer) const;
  bool was_lost(const PeerInfo& peer) const;
  /// The agents of a world that have not come to a round of the shutdown.
  struct Absent {
    std::string missing;  // names of those that still may
    std::string lost;     // why one will not, if one is known; "": none
  };
  Result<Absent> look_for_absent(const std::string& key, bool among_all) const;
  Status await_the_others(const std::string& base, int rounds, const Unlocked& unlocked) const;
  Status wait_until_idle(const Patience& patience, const Unlocked& unlocked) const;
  Status wait_for_all(const std::string& key, const Patience& patience, const Unlocked& unlocked) const;
  Status finish_world(const Patience& patience, const Unlocked& unlocked) const;

  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<Store> store_;
  const std::string prefix_;
  const int world_size_;
  RuntimeLock* const lock_;
  const std::shared_ptr<References> references_;
  std::vector<PeerInfo> world_;
  std::recursive_mutex leaving_;  // what a handler owns, which is destroyed meanwhile, may call leave() too
  std::atomic<std::uint64_t> peers_lost_{0};
  mutable std::mutex lost_mutex_;
  std::map<std::uint64_t, std::string> lost_;  // by incarnation: why it was lost; kept with a world only
};

}  // namespace tensorferry
