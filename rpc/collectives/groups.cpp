#include "rpc/collectives/groups.h"

#include <unistd.h>

#include <algorithm>

#include "agent/rendezvous/record.h"
#include "base/host.h"
#include "base/log.h"
#include "base/text.h"
#include "rpc/collectives/group_formation.h"

namespace tensorferry::collectives {

Groups::Groups(std::shared_ptr<RawAgent> agent)
    : agent_(std::move(agent)), probe_word_(std::make_unique<std::uint64_t>(random_word())) {}

std::shared_ptr<Groups> Groups::serve(std::shared_ptr<RawAgent> agent) {
  std::shared_ptr<Groups> groups(new Groups(std::move(agent)));
  const std::weak_ptr weak(groups);
  groups->agent_->serve(std::string(group_function), [weak](Request request, Reply reply) {
    const auto self = weak.lock();
    if (!self) return reply.fail({Code::agent_closed, "the agent was shut down"});
    self->handle(std::move(request), std::move(reply));
  });
  return groups;
}

std::shared_ptr<RawGroup> Groups::find(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto it = groups_.find(id);
  return it == groups_.end() ? nullptr : it->second.lock();
}

bool Groups::in_use() const {
  const std::lock_guard lock(mutex_);
  return use_.use_count() > 1 ||
         std::any_of(groups_.begin(), groups_.end(), [](const auto& each) { return !each.second.expired(); });
}

std::vector<std::shared_ptr<RawGroup>> Groups::living() const {
  std::vector<std::shared_ptr<RawGroup>> out;
  const std::lock_guard lock(mutex_);
  for (const auto& [id, group] : groups_) {
    if (auto alive = group.lock()) out.push_back(std::move(alive));
  }
  return out;
}

MemberRecord Groups::own_record(const GroupSettings& settings) const {
  MemberRecord out;
  out.name = agent_->self().name;
  out.incarnation = agent_->self().incarnation;
  out.host.boot_id = settings.host.empty() ? boot_id() : settings.host;
  out.host.uid = ::geteuid();
  out.host.pid_namespace = own_namespace("pid");
  out.host.user_namespace = own_namespace("user");
  out.host.process = cma::own_identity().value_or(cma::Identity{});
  out.host.probe_address = reinterpret_cast<std::uintptr_t>(probe_word_.get());
  out.host.probe_word = *probe_word_;
  return out;
}

std::string Groups::why_dead(const std::string& name) const {
  std::vector<std::shared_ptr<RawGroup>> groups;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, group] : groups_) groups.push_back(group.lock());
  }
  for (const auto& group : groups) {
    const auto rank = group ? group->rank_of(name) : std::nullopt;
    if (!rank || *rank == group->rank() || group->closed()) continue;
    group->look_for_the_dead();
    if (auto why = group->why_dead(*rank); !why.empty()) return why;
  }
  return {};
}

void Groups::keep_number(std::uint64_t number, std::string name) {
  const std::lock_guard lock(mutex_);
  names_.insert_or_assign(number, std::move(name));
}

std::string Groups::name_of(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto it = names_.find(number);
  return it == names_.end() ? std::string() : it->second;
}

bool Groups::answers(const std::string& name) const {
  RawCallOptions options;
  options.timeout = std::chrono::seconds(5);
  options.label = "whether an agent lives";
  auto call = agent_->call(name, group_function, message_of(GroupMessage(Greet{})), std::move(options));
  call.wait();
  const auto reply = call.take();
  return reply.ok() || reply.status().code() == Code::deadline_exceeded;
}

Status Groups::dead_among(const std::vector<std::string>& names, const GroupSettings& settings) const {
  if (!settings.members_are_unique) return {};
  for (std::size_t rank = 0; rank < names.size(); ++rank) {
    const auto why = why_dead(names[rank]);
    if (why.empty()) continue;
    return {Code::connection_lost, formatted("group \"{}\" cannot be formed: rank {} (\"{}\") has died or left: {}",
                                             settings.label, rank, names[rank], why)};
  }
  return {};
}

void Groups::leave() {
  if (!agent_->usable_here().ok()) return;  // in a forked child the groups are the parent's
  std::vector<std::shared_ptr<RawGroup>> groups;
  {
    const std::lock_guard lock(mutex_);
    left_ = true;
    for (const auto& [id, group] : groups_) groups.push_back(group.lock());
    changed_.notify_all();
  }
  for (const auto& group : groups) {
    if (group) group->fail({Code::agent_closed, "the agent \"" + agent_->self().name + "\" was shut down"}, false);
  }
}

// ---- messages

void Groups::handle(Request request, Reply reply) {
  auto message = decode<GroupMessage>(request.arguments.payload);
  const auto on_host = [](const Buffer& buffer) { return buffer.device == Device(); };
  if (!message || !std::ranges::all_of(request.arguments.buffers, on_host)) {
    return reply.fail({Code::protocol_error, "a malformed message of a group"});
  }
  if (const auto* join = std::get_if<JoinGroup>(&*message)) return handle(request, *join, std::move(reply));
  if (const auto* ready = std::get_if<ReadyForGroup>(&*message)) return handle(request, *ready, std::move(reply));
  if (const auto* get = std::get_if<GetBoard>(&*message)) return handle(request, *get, std::move(reply));
  if (const auto* greet = std::get_if<Greet>(&*message)) {
    if (greet->group == 0 && request.peer.name != agent_->self().name) {
      log_warning(
          formatted("\"{}\" was refused because it has the rank of this process, \"{}\", in a process group: "
                    "start each process with a rank of its own, and each job with a store of its own",
                    request.peer.name, agent_->self().name));
    }
    return reply.send({});
  }
  handle_of_member(std::move(request), *message, std::move(reply));
}

void Groups::handle(const Request& request, const ReadyForGroup& ready, Reply reply) {
  const std::lock_guard lock(mutex_);
  const auto it = forming_.find(ready.group);
  if (it == forming_.end()) return reply.fail({Code::cancelled, "the formation of the group has ended"});
  const auto& names = it->second->names;
  if (ready.rank == 0 || ready.rank >= names.size() || names[ready.rank] != request.peer.name) {
    return reply.fail({Code::protocol_error, "a member of a group is ready with a wrong rank"});
  }
  if (it->second->no_board.empty()) it->second->no_board = ready.no_board;
  if (it->second->no_memory.empty()) it->second->no_memory = ready.no_memory;
  it->second->ready.emplace(ready.rank, std::move(reply));
  changed_.notify_all();
}

void Groups::handle(const Request& request, const GetBoard& get, Reply reply) {
  const std::lock_guard lock(mutex_);
  const auto it = forming_.find(get.group);
  if (it == forming_.end() || std::ranges::find(it->second->names, request.peer.name) == it->second->names.end()) {
    return reply.fail({Code::cancelled, "the formation of the group has ended"});
  }
  Message out;
  out.buffers.push_back(it->second->board);
  out.sharing.push_back(Sharing::shared);
  reply.send(std::move(out));
}

void Groups::handle_of_member(Request request, const GroupMessage& message, Reply reply) {
  const auto id = std::visit(
      [](const auto& each) -> std::uint64_t {
        if constexpr (requires { each.group; }) return each.group;
        return 0;
      },
      message);
  const auto group = find(id);
  const auto from = group ? group->rank_of(request.peer.name) : std::nullopt;
  if (!from) return reply.fail({Code::not_found, "no such group, or its member has left it"});
  if (std::holds_alternative<GetProgress>(message)) {
    Message progress;
    progress.payload = encode(Progress{group->exchange().steps()});
    return reply.send(std::move(progress));
  }
  if (const auto* posted = std::get_if<Posted>(&message)) {
    if (posted->from != *from) return reply.fail({Code::protocol_error, "a message of a group has a wrong rank"});
    auto& buffers = request.arguments.buffers;
    auto kept = group->mailbox().deliver(*posted, buffers.empty() ? Buffer{} : std::move(buffers[0]));
    if (!kept.ok()) return reply.fail(std::move(kept));
  } else if (const auto* fetch = std::get_if<FetchData>(&message)) {
    return group->mailbox().serve(*from, *fetch, std::move(reply));
  } else if (const auto* failed = std::get_if<GroupFailed>(&message)) {
    const auto code = failed->code > 0 && failed->code < code_count ? static_cast<Code>(failed->code) : Code::internal;
    if (failed->after == 0) {
      group->rank_failed(*from, {code, failed->text});
    } else {
      group->rank_left(*from, failed->after - 1, {code, failed->text});
    }
  } else if (const auto* refused = std::get_if<RefuseData>(&message)) {
    group->mailbox().refuse(*from, *refused);
  } else if (const auto* taken = std::get_if<TakenData>(&message)) {
    group->mailbox().taken(*from, *taken);
  } else if (const auto* map = std::get_if<MapRegion>(&message)) {
    if (request.arguments.buffers.size() != 1) return reply.fail({Code::protocol_error, "a region without its memory"});
    auto kept = group->exchange().map_region(*from, map->region, std::move(request.arguments.buffers[0]));
    if (!kept.ok()) return reply.fail(std::move(kept));
  } else if (std::holds_alternative<RunOperations>(message)) {
    if (*from == group->rank()) {
      const WaitInHandler place;  // operations wait for messages, whose handlers need one
      group->run_queue();
    }
  } else if (const auto* unmap = std::get_if<UnmapRegion>(&message)) {
    group->exchange().unmap_region(*from, unmap->region);
  }
  reply.send({});
}

void Groups::handle(const Request& request, const JoinGroup& join, Reply reply) {
  if (join.rank >= join.names.size() || join.names[join.rank] != request.peer.name) {
    return reply.fail({Code::protocol_error, "a join of a group has a wrong rank"});
  }
  if (!std::ranges::all_of(join.names, [](const auto& name) { return name.size() <= Record::most_name; })) {
    return reply.fail({Code::protocol_error, "a join of a group has a name that no agent may have"});
  }
  if (join.names[0] != agent_->self().name) {
    return reply.fail({Code::protocol_error, "a join of a group came to another agent than its rank 0"});
  }
  constexpr std::size_t most = 256;  // of one agent, which forms one group at a time on each of its threads
  reply.on_cancelled([weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->drop_ended_joins();
  });
  std::vector<Reply> ended;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  if (left_) return reply.fail({Code::agent_closed, "the agent was shut down"});
  take_ended_joins(ended);
  std::size_t of_this_agent = 0;
  for (const auto& [group, joins] : joining_) {
    for (const auto& [rank, waits] : joins) of_this_agent += group.second[rank] == request.peer.name ? 1U : 0U;
  }
  if (of_this_agent >= most) {
    return reply.fail(
        {Code::resource_exhausted, formatted("{} groups that \"{}\" has joined wait on \"{}\" for their other members",
                                             of_this_agent, request.peer.name, join.names[0])});
  }
  auto& waiting = joining_[{join.label, join.names}];
  // A member that joins again has given its earlier attempt up.
  waiting.erase(join.rank);
  waiting.emplace(join.rank, std::pair(join.member, std::move(reply)));
  take_ended_joins(ended);  // this one too, if it ended before it was there
  changed_.notify_all();
}

/// Takes the joins that their agents have given up, or whose agents have gone. Under mutex_.
void Groups::take_ended_joins(std::vector<Reply>& ended) {
  for (auto group = joining_.begin(); group != joining_.end();) {
    for (auto join_of = group->second.begin(); join_of != group->second.end();) {
      auto& waits = join_of->second.second;
      const bool has_ended = waits.cancelled();
      if (has_ended) ended.push_back(std::move(waits));
      join_of = has_ended ? group->second.erase(join_of) : std::next(join_of);
    }
    group = group->second.empty() ? joining_.erase(group) : std::next(group);
  }
}

/// A join holds a reply, and so the connections of its link.
void Groups::drop_ended_joins() {
  std::vector<Reply> ended;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  take_ended_joins(ended);
}

}  // namespace tensorferry::collectives
