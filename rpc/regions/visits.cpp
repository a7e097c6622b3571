#include "rpc/regions/visits.h"

#include "base/record.h"
#include "base/text.h"
#include "rpc/regions/messages.h"

namespace tensorferry::regions {
namespace {

constexpr std::chrono::seconds leave_patience{1};
constexpr std::size_t most_visits_of_a_peer = 64;

}  // namespace

std::shared_ptr<Visitors> Visitors::serve(RawAgent& agent) {
  auto out = std::make_shared<Visitors>();
  agent.serve(std::string(attend_function), [weak = std::weak_ptr(out)](Request request, Reply reply) {
    const auto self = weak.lock();
    const auto message = decode<Attend>(request.arguments.payload);
    if (!message) return reply.fail({Code::protocol_error, "malformed message of a visit"});
    if (!self) return reply.fail({Code::agent_closed, "the agent has left"});
    if (!message->leaves) return self->attend(request.peer, message->visit, std::move(reply));
    self->end({request.peer.incarnation, message->visit});
    reply.send({});
  });
  return out;
}

Visitors::~Visitors() { close({Code::agent_closed, "the agent has left"}); }

void Visitors::on_end(std::function<void(VisitId)> ended) {
  const std::lock_guard lock(mutex_);
  told_.push_back(std::move(ended));
}

Status Visitors::note(VisitId visit) {
  sweep();
  const std::lock_guard lock(mutex_);
  if (!closed_.ok()) return closed_;
  if (visits_.contains(visit)) return {};
  const auto begin = visits_.lower_bound({visit.incarnation, 0});
  std::size_t of_the_peer = 0;
  for (auto at = begin; at != visits_.end() && at->first.incarnation == visit.incarnation; ++at) ++of_the_peer;
  if (of_the_peer >= most_visits_of_a_peer) {
    return {Code::resource_exhausted, formatted("the peer has {} visits to this agent already", of_the_peer)};
  }
  visits_[visit].since = Clock().now();
  return {};
}

void Visitors::attend(const PeerInfo& peer, std::uint64_t number, Reply reply) {
  const VisitId id{peer.incarnation, number};
  if (auto noted = note(id); !noted.ok()) return reply.fail(noted);
  auto kept = std::make_shared<Reply>(std::move(reply));
  {
    const std::lock_guard lock(mutex_);
    const auto found = visits_.find(id);
    if (found == visits_.end()) return kept->fail({Code::agent_closed, "the agent has left"});
    if (found->second.attending) {
      return kept->fail({Code::protocol_error, "a visit of that number has begun already"});
    }
    found->second.attending = kept;
  }
  kept->on_cancelled([weak = weak_from_this(), id] {
    if (const auto self = weak.lock()) self->end(id);
  });
}

void Visitors::end(VisitId visit) {
  std::vector<std::function<void(VisitId)>> told;
  Visit ended;
  {
    const std::lock_guard lock(mutex_);
    const auto found = visits_.find(visit);
    if (found == visits_.end()) return;
    ended = std::move(found->second);
    visits_.erase(found);
    told = told_;
  }
  for (const auto& each : told) each(visit);
  if (ended.attending) ended.attending->fail({Code::connection_lost, "the visit has ended"});
}

void Visitors::set_patience(Milliseconds patience) {
  const std::lock_guard lock(mutex_);
  patience_ = patience;
}

void Visitors::sweep() {
  std::vector<VisitId> late;
  {
    const std::lock_guard lock(mutex_);
    const auto until = Clock().now() - patience_;
    for (const auto& [id, visit] : visits_) {
      if (!visit.attending && visit.since < until) late.push_back(id);
    }
  }
  for (const auto& id : late) end(id);
}

void Visitors::close(const Status& why) {
  std::map<VisitId, Visit> visits;
  std::vector<std::function<void(VisitId)>> told;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_.ok()) return;
    closed_ = why;
    visits.swap(visits_);
    told = told_;
  }
  for (auto& [id, visit] : visits) {
    for (const auto& each : told) each(id);
    if (visit.attending) visit.attending->fail(why);
  }
}

std::size_t Visitors::size() const {
  const std::lock_guard lock(mutex_);
  return visits_.size();
}

bool Visitors::has(VisitId visit) const {
  const std::lock_guard lock(mutex_);
  return visits_.contains(visit);
}

Status Visit::why() const {
  const std::lock_guard lock(mutex_);
  return why_;
}

void Visit::on_end(std::function<void()> told) {
  {
    const std::lock_guard lock(mutex_);
    if (why_.ok()) return told_.push_back(std::move(told));
  }
  told();
}

void Visit::end(const Status& why) {
  std::vector<std::function<void()>> told;
  {
    const std::lock_guard lock(mutex_);
    if (!why_.ok()) return;
    why_ = why;
    told.swap(told_);
  }
  ended_.store(true, std::memory_order_release);
  for (const auto& each : told) each();
}

std::shared_ptr<Visit> Visits::visit(const std::string& owner) {
  std::shared_ptr<Visit> out;
  {
    const std::lock_guard lock(mutex_);
    auto& known = visits_[owner];
    if (known && !known->ended()) return known;
    known = out = std::make_shared<Visit>(owner, ++last_number_);
    if (closed_) {
      visits_.erase(owner);
      out->end({Code::agent_closed, "the agent has left"});
      return out;
    }
  }
  Message message;
  message.payload = encode(Attend{out->number(), false});
  RawCallOptions options;
  options.timeout = Milliseconds(0);
  auto call = agent_->call(owner, attend_function, std::move(message), std::move(options));
  {
    const std::lock_guard lock(out->mutex_);
    out->attending_ = call;
  }
  call.on_done([weak = std::weak_ptr(out)](const Result<Received>& reply) {
    const auto visit = weak.lock();
    if (!visit) return;
    const auto why = reply.ok() ? Status(Code::protocol_error, "it answered a call that stays open") : reply.status();
    const auto code = why.code() == Code::cancelled ? Code::agent_closed : why.code();
    visit->end({code, formatted("\"{}\" has gone: {}", visit->owner(), why.what())});
  });
  return out;
}

void Visits::close() {
  std::map<std::string, std::shared_ptr<Visit>, std::less<>> visits;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    visits.swap(visits_);
  }
  for (auto& [owner, visit] : visits) {
    Call attending;
    {
      const std::lock_guard lock(visit->mutex_);
      attending = visit->attending_;
    }
    visit->end({Code::agent_closed, "the agent has left"});
    if (attending && !attending.done()) leave(*visit, std::move(attending));
  }
}

// The owner answers the call that attends. If it does not answer, that call is cancelled.
void Visits::leave(const Visit& visit, Call attending) {
  Message message;
  message.payload = encode(Attend{visit.number(), true});
  RawCallOptions options;
  options.timeout = leave_patience;
  auto leaving = agent_->call(visit.owner(), attend_function, std::move(message), std::move(options));
  leaving.on_done([attending = std::move(attending)](const Result<Received>& left) mutable {
    if (!left.ok()) attending.cancel();
  });
}

}  // namespace tensorferry::regions
