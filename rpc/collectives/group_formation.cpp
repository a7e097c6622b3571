// The formation of a group: its members join rank 0, agree on their links, and form its levels.
#include "rpc/collectives/group_formation.h"

#include <algorithm>
#include <set>

#include "agent/observing/flight_recorder.h"
#include "base/environment.h"
#include "base/host.h"
#include "base/long_wait.h"
#include "base/text.h"
#include "channels/region.h"
#include "rpc/collectives/member_memory.h"
#include "rpc/collectives/tuning.h"

namespace tensorferry::collectives {
namespace {

Milliseconds left_until(Clock::time_point until, const Clock& clock) {
  const auto left = std::chrono::duration_cast<Milliseconds>(until - clock.now());
  return std::max(left, Milliseconds(1));
}

/// Returns the quoted names of the members beyond rank 0 that `has_come` does not know.
template <class HasCome>
std::string missing_among(const std::vector<std::string>& names, const HasCome& has_come) {
  std::string missing;
  for (std::size_t rank = 1; rank < names.size(); ++rank) {
    if (!has_come(rank)) missing += (missing.empty() ? "\"" : ", \"") + names[rank] + "\"";
  }
  return missing;
}

}  // namespace

Result<std::shared_ptr<RawGroup>> Groups::form(std::vector<std::string> names, GroupSettings settings) {
  const auto self = agent_->self().name;
  const auto here = std::find(names.begin(), names.end(), self);
  if (here == names.end() || std::set(names.begin(), names.end()).size() != names.size()) {
    return Status(
        Code::invalid_argument,
        formatted("a group needs each name once, and this agent's (\"{}\") among them: {}", self, joined(names, ", ")));
  }
  if (settings.key.empty()) settings.key = settings.label;
  if (settings.algorithms.empty()) settings.algorithms = environment::collectives.value();
  auto prescribed = parse_algorithms(settings.algorithms);
  if (!prescribed.ok()) return prescribed.status();
  const auto rank = static_cast<std::size_t>(here - names.begin());
  const auto until = agent_->clock().now() + settings.timeout;
  const RawGroup::Settings kept{settings.label, settings.timeout, *std::move(prescribed)};

  std::shared_ptr<Forming> forming;
  auto formed = Formed();
  if (rank == 0) {
    auto begun = gather_members(names, settings, until, forming);
    if (!begun.ok()) return begun.status();
    formed = *std::move(begun);
  } else {
    auto joined_root = join_root(names, settings, rank, until);
    if (!joined_root.ok()) return joined_root.status();
    formed = *std::move(joined_root);
    if (!std::ranges::equal(formed.members, names, {}, &MemberRecord::name))
      return Status(Code::protocol_error, "rank 0 formed another group");
  }
  auto group = std::make_shared<RawGroup>(agent_, Membership{formed.group, rank, formed.members}, kept);
  group->watch_processes(processes_);
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(groups_, [](const auto& each) { return each.second.expired(); });
    groups_.emplace(formed.group, group);
  }
  auto status = agree_on_links(*group, formed, settings, forming, until);
  if (forming) {
    const std::lock_guard lock(mutex_);
    forming_.erase(formed.group);
  }
  if (status.ok()) status = form_levels(*group, formed, settings, until);
  if (!status.ok()) return status;
  agent_->note(FlightSubject::group, kept.label, formatted("formed by {} ranks; this one is {}", names.size(), rank));
  return group;
}

Status Groups::form_levels(RawGroup& group, const Formed& formed, const GroupSettings& settings,
                           Clock::time_point until) {
  std::vector<std::string> hosts;
  std::vector<std::size_t> host_of, leaders;  // by rank; by host
  for (std::size_t rank = 0; rank < formed.members.size(); ++rank) {
    const auto& host = formed.members[rank].host.boot_id;
    host_of.push_back(static_cast<std::size_t>(std::find(hosts.begin(), hosts.end(), host) - hosts.begin()));
    if (host_of.back() != hosts.size()) continue;
    hosts.push_back(host);
    leaders.push_back(rank);
  }
  const bool known = std::find(hosts.begin(), hosts.end(), "") == hosts.end();
  if (!settings.board || !known || hosts.size() < 2 || hosts.size() == formed.members.size()) return {};

  const auto form_of = [&](const std::vector<std::size_t>& ranks, std::string_view which) {
    std::vector<std::string> names;
    for (const auto rank : ranks) names.push_back(formed.members[rank].name);
    auto below = settings;
    below.label = formatted("{}, {}", settings.label, which);
    below.key = formatted("{}, {}", settings.key, which);
    below.timeout = left_until(until, agent_->clock());
    auto out = form(std::move(names), std::move(below));
    if (out.ok()) (*out)->show_as(settings.label, ranks);
    return out;
  };
  const auto own = host_of[group.rank()];
  std::vector<std::size_t> neighbours;
  for (std::size_t rank = 0; rank < host_of.size(); ++rank) {
    if (host_of[rank] == own) neighbours.push_back(rank);
  }
  auto host = form_of(neighbours, "one host");
  if (!host.ok()) return host.status();
  std::shared_ptr<RawGroup> leading;
  if (leaders[own] == group.rank()) {
    auto formed_leaders = form_of(leaders, "one rank of each host");
    if (!formed_leaders.ok()) return formed_leaders.status();
    leading = *std::move(formed_leaders);
  }
  group.use_levels({*std::move(host), std::move(leading), std::move(host_of)});
  return {};
}

Result<Formed> Groups::gather_members(const std::vector<std::string>& names, const GroupSettings& settings,
                                      Clock::time_point until, std::shared_ptr<Forming>& forming) {
  Formed formed;
  formed.group = random_word();
  forming = std::make_shared<Forming>();
  forming->id = formed.group;
  forming->names = names;
  std::map<std::size_t, std::pair<MemberRecord, Reply>> members;
  {
    std::unique_lock lock(mutex_);
    const auto key = std::pair(settings.key, names);
    const auto all_here = [&] {
      auto& waiting = joining_[key];
      std::erase_if(waiting, [](const auto& each) { return each.second.second.cancelled(); });
      return left_ || waiting.size() + 1 == names.size();
    };
    const auto missing = [&] {
      return missing_among(names, [&](std::size_t rank) { return joining_[key].contains(rank); });
    };
    LongWait long_wait(agent_->clock());
    while (!all_here() && agent_->clock().now() < until) {
      agent_->clock().wait_until(changed_, lock, std::min(until, agent_->clock().now() + longest_sleep));
      long_wait.tell([&] { return formatted("group \"{}\" waits for {} to form it too", settings.label, missing()); });
      lock.unlock();
      auto dead = dead_among(names, settings);
      lock.lock();
      if (!dead.ok()) return dead;
    }
    if (left_) return Status(Code::agent_closed, "the agent was shut down");
    auto& waiting = joining_[key];
    if (waiting.size() + 1 != names.size()) {
      return Status(Code::deadline_exceeded,
                    formatted("group \"{}\" was not formed in time: {} did not join", settings.label, missing()));
    }
    members = std::move(waiting);
    joining_.erase(key);
  }
  formed.members.push_back(own_record(settings));
  for (const auto& [rank, member] : members) formed.members.push_back(member.first);
  if (settings.board && names.size() > 1) {
    if (auto board = Regions::of_this_process().make(Board::bytes_for(names.size())); board.ok()) {
      forming->board = *std::move(board);
    } else {
      forming->no_board = board.status().what();
    }
  }
  {
    const std::lock_guard lock(mutex_);
    forming_.emplace(formed.group, forming);  // whole: the others may ask for the board from now on
  }
  for (auto& [rank, member] : members) member.second.send(message_of(formed));
  return formed;
}

Result<Received> Groups::ask_root(const std::vector<std::string>& names, const GroupSettings& settings,
                                  const GroupMessage& message, Clock::time_point until) {
  LongWait long_wait(agent_->clock());
  const auto tell_if_long = [&] {
    long_wait.tell([&] {
      return formatted("group \"{}\" waits for \"{}\", its rank 0, which has not formed it with all members so far",
                       settings.label, names[0]);
    });
  };
  for (;;) {
    RawCallOptions options;
    options.timeout = left_until(until, agent_->clock());
    options.wait_for_ready = true;
    options.label = "the formation of a group";
    auto call = agent_->call(names[0], group_function, message_of(message), std::move(options));
    while (!call.wait(agent_->clock().now() + longest_sleep)) {
      tell_if_long();
      if (auto dead = dead_among(names, settings); !dead.ok()) {
        call.cancel();
        return dead;
      }
    }
    auto reply = call.take();
    // Rank 0 may not serve groups yet. If it serves exposed functions alone, its refusal has the second code.
    const auto code = reply.ok() ? Code::ok : reply.status().code();
    const bool early = code == Code::not_found || code == Code::permission_denied;
    if (!early) return reply;
    tell_if_long();
    if (agent_->clock().now() >= until) {
      return Status(Code::deadline_exceeded,
                    formatted("group \"{}\" was not formed in time: \"{}\", its rank 0, has formed no group",
                              settings.label, names[0]));
    }
    agent_->clock().sleep_for(std::chrono::milliseconds(10));
  }
}

Result<Formed> Groups::join_root(const std::vector<std::string>& names, const GroupSettings& settings, std::size_t rank,
                                 Clock::time_point until) {
  auto reply = ask_root(names, settings,
                        JoinGroup{settings.key, names, static_cast<std::uint32_t>(rank), own_record(settings)}, until);
  if (!reply.ok()) return reply.status();
  auto formed = decode<Formed>(reply->payload);
  if (!formed) return Status(Code::protocol_error, "a malformed answer of rank 0");
  return *std::move(formed);
}

Call Groups::greet(const RawGroup& group, const std::string& member, Clock::time_point until) {
  RawCallOptions options;
  options.timeout = left_until(until, agent_->clock());
  return agent_->call(member, group_function, message_of(GroupMessage(Greet{group.id()})), std::move(options));
}

Status Groups::greet_lower(const RawGroup& group, Clock::time_point until) {
  // A session stands between each two members afterwards, so each learns of the other's death.
  std::vector<Call> calls;
  for (std::size_t other = 0; other < group.rank(); ++other) calls.push_back(greet(group, group.names()[other], until));
  Status status;
  for (auto& call : calls) {
    call.wait();
    const auto reply = call.take();
    if (!reply.ok() && status.ok()) status = reply.status();
  }
  return status;
}

std::string Groups::why_no_memory(const RawGroup& group, const Formed& formed, Clock::time_point until) {
  const auto check = [&](const MemberRecord& other) {
    auto checked = agent_->check_process(other.name, other.host.process.pid);
    if (checked.code() != Code::connection_lost) return checked;
    // A higher rank has not greeted this one yet.
    greet(group, other.name, until).wait();
    return agent_->check_process(other.name, other.host.process.pid);
  };
  for (const auto& member : formed.members) {
    if (auto why = why_unreadable(formed.members[group.rank()], member, check); !why.empty()) return why;
  }
  return {};
}

Status Groups::agree_on_links(RawGroup& group, const Formed& formed, const GroupSettings& settings,
                              const std::shared_ptr<Forming>& forming, Clock::time_point until) {
  if (group.size() == 1) return {};
  const bool one_host = std::all_of(formed.members.begin(), formed.members.end(), [&](const MemberRecord& member) {
    return member.host.boot_id == formed.members[0].host.boot_id && !member.host.boot_id.empty();
  });
  ReadyForGroup ready{group.id(), static_cast<std::uint32_t>(group.rank()), {}, {}};
  Buffer board;
  if (!settings.board) ready.no_board = "the option board is off";
  if (ready.no_board.empty() && !one_host) ready.no_board = "the ranks are on several hosts";
  if (ready.no_board.empty() && forming) board = forming->board;
  if (ready.no_board.empty() && !forming) {
    auto reply = ask_root(group.names(), settings, GetBoard{group.id()}, until);
    if (reply.ok() && reply->buffers.size() == 1 && reply->buffers[0].device == Device() &&
        reply->buffers[0].bytes >= Board::bytes_for(group.size())) {
      board = std::move(reply->buffers[0]);
    } else {
      ready.no_board = reply.ok() ? "rank 0 has no board" : reply.status().text();
    }
  }
  if (auto greeted = greet_lower(group, until); !greeted.ok()) return greeted;
  ready.no_memory = settings.memory ? ready.no_board : "the option memory is off";
  if (ready.no_memory.empty()) ready.no_memory = why_no_memory(group, formed, until);

  Decision decision;
  if (forming) {
    auto decided = decide(*forming, ready, group, settings, until);
    if (!decided.ok()) return decided.status();
    decision = *std::move(decided);
  } else {
    auto reply = ask_root(group.names(), settings, ready, until);
    if (!reply.ok()) return reply.status();
    auto decided = decode<Decision>(reply->payload);
    if (!decided) return {Code::protocol_error, "a malformed answer of rank 0"};
    decision = *std::move(decided);
  }
  const bool board_lacks = decision.no_board.empty() && !ready.no_board.empty();
  if (board_lacks || (decision.no_memory.empty() && !ready.no_memory.empty()))
    return {Code::protocol_error, formatted("rank 0 has decided for links that this rank lacks: {}",
                                            board_lacks ? ready.no_board : ready.no_memory)};
  auto crossings = parse_crossings(decision.crossings);
  if (!crossings.ok()) return {Code::protocol_error, formatted("rank 0 has decided: {}", crossings.status().what())};
  group.ways().use_crossings(*std::move(crossings));
  if (decision.no_board.empty()) group.exchange().use_board(std::move(board), decision.no_memory.empty());
  group.ways().say_why(decision.no_board, decision.no_memory);
  return {};
}

Result<Decision> Groups::decide(Forming& forming, const ReadyForGroup& own, const RawGroup& group,
                                const GroupSettings& settings, Clock::time_point until) {
  const auto ranks = group.size();
  std::unique_lock lock(mutex_);
  const auto all_ready = [&] { return left_ || forming.ready.size() + 1 == ranks; };
  const auto& clock = agent_->clock();
  while (!clock.wait_until(changed_, lock, std::min(until, clock.now() + longest_sleep), all_ready) &&
         clock.now() < until) {
    lock.unlock();
    auto dead = dead_among(group.names(), settings);
    lock.lock();
    if (!dead.ok()) return dead;
  }
  if (!all_ready()) {
    const auto missing = missing_among(group.names(), [&](std::size_t rank) { return forming.ready.contains(rank); });
    return Status(Code::deadline_exceeded,
                  formatted("group \"{}\" was not formed in time: {} joined, but was not ready", group.settings().label,
                            missing));
  }
  if (left_) return Status(Code::agent_closed, "the agent was shut down");
  Decision decision{forming.no_board.empty() ? own.no_board : forming.no_board,
                    forming.no_memory.empty() ? own.no_memory : forming.no_memory,
                    {}};
  auto ready = std::move(forming.ready);
  lock.unlock();
  // All have mapped the board.
  if (const auto board = Regions::of_this_process().find(forming.board.data, forming.board.bytes))
    board->region->close_descriptor();
  if (decision.no_board.empty() && decision.no_memory.empty()) decision.crossings = tuned_for(host_tuning_key(ranks));
  for (auto& [rank, reply] : ready) reply.send(message_of(decision));
  return decision;
}

}  // namespace tensorferry::collectives
