/// The groups of one agent: forms them, and brings their messages.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "rpc/collectives/host_processes.h"
#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives {

/// How a group is formed.
struct GroupSettings {
  /// Names the group in errors.
  std::string label = "default";
  /// How long the formation, and each operation that gives no time-out, may take.
  Milliseconds timeout = std::chrono::minutes(30);
  /// Algorithms that are prescribed, as "all_reduce=two_shot". "": TENSORFERRY_COLLECTIVES.
  std::string algorithms;
  bool board = true;   // false: bytes go as messages
  bool memory = true;  // false: ranks do not read one another's memory
  /// Ranks that give the same text share a host. "": those of one boot of a kernel do.
  std::string host{};
  /// Tells groups of the same agents apart while they are formed. "": `label` does.
  std::string key{};
  /// A name stands for one agent for ever, so the formation fails as soon as a member is known to have died. Else an
  /// agent may still come in its place.
  bool members_are_unique = false;
};

/// The part of an agent that serves groups. Thread-safe.
///
/// Formation: every member sends JoinGroup to rank 0, which answers when all have come. The members then map the board,
/// greet one another, and tell rank 0 what they can use; rank 0 decides for all.
class Groups final : public std::enable_shared_from_this<Groups> {
 public:
  /// Serves group messages at `agent`.
  static std::shared_ptr<Groups> serve(std::shared_ptr<RawAgent> agent);

  /// Forms the group of the agents `names`, in this order; this agent is one of them. Every member calls this with the
  /// same names, key and settings. Blocks. InvalidArgument: a name is there twice, or this agent's is missing, or
  /// `algorithms` makes no sense. DeadlineExceeded: not all have come; the text of rank 0 names them. Else the
  /// errors of calls.
  Result<std::shared_ptr<RawGroup>> form(std::vector<std::string> names, GroupSettings settings);
  /// Returns why the agent `name` counts as dead: a group of which it is a member, and which this rank has not left,
  /// has noticed it. Empty if nothing is known of its end.
  [[nodiscard]] std::string why_dead(const std::string& name) const;
  /// Keeps, or returns, the name of the agent that a program knows by a number, such as its rank in the world. Empty if
  /// none is kept.
  void keep_number(std::uint64_t number, std::string name);
  [[nodiscard]] std::string name_of(std::uint64_t number) const;
  /// Returns whether the agent `name` has left, or its process was killed: RawAgent::has_gone().
  [[nodiscard]] bool has_ended(const std::string& name) const { return agent_->has_gone(name); }
  /// Asks the agent `name`, whose rank this one has too, whether it lives; it logs that. Blocks for 5 s at most.
  [[nodiscard]] bool answers(const std::string& name) const;
  /// Fails all groups with AgentClosed. The agent is about to leave.
  void leave();
  [[nodiscard]] const std::shared_ptr<RawAgent>& agent() const noexcept { return agent_; }
  /// Returns a token. While a copy of it lives, in_use() is true.
  [[nodiscard]] std::shared_ptr<const void> use() const { return use_; }
  /// Returns whether a group of this agent lives, or a token of use() does.
  [[nodiscard]] bool in_use() const;
  /// Returns the groups of this agent that exist, whether a program or a process group of torch formed them.
  [[nodiscard]] std::vector<std::shared_ptr<RawGroup>> living() const;

 private:
  struct Forming;
  explicit Groups(std::shared_ptr<RawAgent> agent);
  void handle(Request request, Reply reply);
  void handle(const Request& request, const JoinGroup& join, Reply reply);
  void handle(const Request& request, const ReadyForGroup& ready, Reply reply);
  void handle(const Request& request, const GetBoard& get, Reply reply);
  void handle_of_member(Request request, const GroupMessage& message, Reply reply);
  void take_ended_joins(std::vector<Reply>& ended);
  void drop_ended_joins();
  [[nodiscard]] std::shared_ptr<RawGroup> find(std::uint64_t id) const;
  [[nodiscard]] MemberRecord own_record(const GroupSettings& settings) const;
  Status form_levels(RawGroup& group, const Formed& formed, const GroupSettings& settings, Clock::time_point until);

  Result<Formed> gather_members(const std::vector<std::string>& names, const GroupSettings& settings,
                                Clock::time_point until, std::shared_ptr<Forming>& forming);
  Status agree_on_links(RawGroup& group, const Formed& formed, const GroupSettings& settings,
                        const std::shared_ptr<Forming>& forming, Clock::time_point until);
  Result<Decision> decide(Forming& forming, const ReadyForGroup& own, const RawGroup& group,
                          const GroupSettings& settings, Clock::time_point until);
  /// Asks rank 0 of the members `names`.
  Result<Received> ask_root(const std::vector<std::string>& names, const GroupSettings& settings,
                            const GroupMessage& message, Clock::time_point until);
  /// Returns the error of a formation of which a member is known to have died, or Ok.
  [[nodiscard]] Status dead_among(const std::vector<std::string>& names, const GroupSettings& settings) const;
  Result<Formed> join_root(const std::vector<std::string>& names, const GroupSettings& settings, std::size_t rank,
                           Clock::time_point until);
  Call greet(const RawGroup& group, const std::string& member, Clock::time_point until);
  Status greet_lower(const RawGroup& group, Clock::time_point until);
  /// Returns why this rank cannot read the memory of every other member; "": it can.
  [[nodiscard]] std::string why_no_memory(const RawGroup& group, const Formed& formed, Clock::time_point until);

  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<const void> use_ = std::make_shared<char>();
  HostProcesses processes_;
  const std::unique_ptr<std::uint64_t> probe_word_;  // its address and value prove whose memory is read
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::uint64_t, std::weak_ptr<RawGroup>> groups_;
  std::map<std::pair<std::string, std::vector<std::string>>, std::map<std::size_t, std::pair<MemberRecord, Reply>>>
      joining_;                                                // at rank 0: joins that no formation has taken
  std::map<std::uint64_t, std::shared_ptr<Forming>> forming_;  // at rank 0, until all are ready
  std::map<std::uint64_t, std::string> names_;                 // by number
  bool left_ = false;
};

}  // namespace tensorferry::collectives
