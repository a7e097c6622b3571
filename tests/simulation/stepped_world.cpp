#include "tests/simulation/stepped_world.h"

#include <algorithm>
#include <array>
#include <utility>

#include "agent/rendezvous/memory_store.h"
#include "base/text.h"
#include "tests/agent/agents.h"
#include "tests/simulation/scarce_memory.h"

namespace tensorferry::testing {
namespace {

constexpr Milliseconds longest_call{60'000}, shortest_call{200};
constexpr std::size_t bytes_in_flight = 8 << 20;
constexpr int work_of_a_run = 40;
constexpr std::size_t many_buffers = 3000, few_bytes = 16;  // so many records travel in a buffer of their own
constexpr std::size_t bulk_bytes = 300 << 10;               // go by a connection of their own
constexpr auto after_end = std::byte{0xEE};                 // no byte of a call's memory is anything else after its end

/// A store that waits for no key, because nothing else could go on meanwhile.
class StepStore final : public Store {
 public:
  Status set(std::string_view key, ByteView value) override { return store_.set(key, value); }
  Result<Bytes> get(std::string_view key, Milliseconds) override { return store_.get(key, Milliseconds(0)); }
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override { return store_.add(key, amount); }
  Status erase(std::string_view key) override { return store_.erase(key); }
  [[nodiscard]] bool loopback() const override { return true; }

 private:
  MemoryStore store_;
};

std::string name_of_agent(std::size_t number) { return "agent" + std::to_string(number); }

}  // namespace

SteppedWorld::SteppedWorld(std::uint64_t seed, SteppedFaults faults)
    : faults_(faults), random_(seed), store_(std::make_shared<StepStore>()), memory_state_(seed) {
  ScarceMemory::begin();
  const auto count = 2 + below(2);
  agents_.resize(count);
  for (std::size_t i = 0; i < count; ++i) make_agent(i);
}

SteppedWorld::~SteppedWorld() { leave(); }

void SteppedWorld::note(std::uint64_t what) { digest_ = (digest_ ^ what) * 1099511628211ULL; }

void SteppedWorld::make_agent(std::size_t number) {
  auto& agent = agents_[number].agent;
  agent = join(store_, name_of_agent(number), {"tcp", "basic"}, [&](RawAgentOptions& options) {
    options.surroundings = {time_->clock(), network_.join(number), false, random_() | 1U};
    options.heartbeat = heartbeat;
    options.peer_timeout = peer_timeout;
    options.max_bytes_in_flight = bytes_in_flight;
  });
  agent->on_peer_lost([this, number](const PeerInfo&, const Status&) { ++agents_[number].lost; });
  agent->serve("run", [this, number](Request request, Reply reply) { serve(number, request, std::move(reply)); });
}

void SteppedWorld::serve(std::size_t number, const Request& request, Reply reply) {
  std::optional<PlentyOfMemory> plenty(std::in_place);
  const auto which = std::strtoull(std::string(text_of(request.arguments.payload)).c_str(), nullptr, 10);
  auto& call = calls_.at(which);
  note(which);
  ++call.runs;
  if (call.order != 0) {
    auto& last = last_started_[{call.from, call.to}][call.order];
    if (which < last)
      problems_.push_back(formatted("ordered call {} (key {}) ran after call {}", which, call.order, last));
    last = which;
  }
  unanswered_.emplace_back(number, std::move(reply));
  if (!call.answered.value_or(below(2) != 0)) return;  // it is answered later
  auto answered = std::move(unanswered_.back().second);
  unanswered_.pop_back();
  Message answer{request.arguments.payload, request.arguments.buffers, {}, {}};
  if (!call.wanted.empty()) {
    answer.buffers.clear();
    for (const auto bytes : call.wanted) answer.buffers.push_back(patterned(bytes, static_cast<unsigned>(which)));
  }
  plenty.reset();
  answered.send(std::move(answer));
}

bool SteppedWorld::answer_one() {
  std::vector<std::size_t> alive;
  for (std::size_t i = 0; i < unanswered_.size(); ++i) {
    if (!agents_[unanswered_[i].first].dead) alive.push_back(i);
  }
  if (alive.empty()) return false;
  const auto which = alive[below(alive.size())];
  auto reply = std::move(unanswered_[which].second);
  unanswered_.erase(unanswered_.begin() + static_cast<std::ptrdiff_t>(which));
  reply.send(message_of("late"));
  return true;
}

void SteppedWorld::make_call() {
  const auto from = below(agents_.size());
  const auto to = (from + 1 + below(agents_.size() - 1)) % agents_.size();
  const auto kind = static_cast<Kind>(below(5));
  const auto bytes = below(3) != 0 ? 0 : std::size_t{1} << below(13);
  const auto buffers = below(4) != 0 ? 0 : below(50) == 0 ? many_buffers : 1 + below(3);
  const auto wanted = buffers == many_buffers ? few_bytes : below(12) == 0 ? bulk_bytes : std::size_t{1} << below(14);
  const bool lands_at_caller = below(2) != 0;
  if (agents_[from].dead) return;
  // A caller would block for more credit, and no other agent could go on.
  std::size_t under_way = 0;
  for (const auto& each : calls_) under_way += each.ends == 0 && each.from == from ? 1 : 0;
  const auto number = calls_.size();
  auto& made = calls_.emplace_back();
  made.kind = kind;
  made.from = from;
  made.to = to;
  made.order = kind == Kind::ordered ? static_cast<std::uint32_t>(1 + below(2)) : 0;
  auto options = within(kind == Kind::expiring ? shortest_call : longest_call);
  options.order = made.order;
  options.idempotent = kind == Kind::idempotent;
  made.wanted.assign(buffers, wanted);
  if (lands_at_caller) {
    for (const auto each : made.wanted) made.into.push_back(patterned(each, 0));
  }
  options.into = made.into;
  start(number, std::move(options), under_way == 0 ? bytes : 0);
}

template <class Job>
bool SteppedWorld::limited(const Job& job) {
  std::optional<ScarceMemory> scarce;
  if (faults_.memory != 0) scarce.emplace(memory_state_, faults_.memory, faults_.until_released);
  const auto before = ScarceMemory::failures();
  bool had_enough = true;
  try {
    job();
  } catch (const std::bad_alloc&) {
    had_enough = false;
  }
  failed_allocations_ += ScarceMemory::failures() - before;
  return had_enough;
}

bool SteppedWorld::step() {
  ++steps_;
  const auto choice = below(agents_.size() + 2);
  note(choice);
  if (choice < agents_.size()) return work_at(choice);
  if (const auto ready = network_.ready(); ready != 0) {
    const auto which = below(ready);
    network_.progress(which, std::size_t{1} << below(13));
    return true;
  }
  return false;
}

void SteppedWorld::start(std::size_t number, RawCallOptions options, std::size_t bytes) {
  auto& made = calls_.at(number);
  made.deadline = time_->now() + options.timeout;
  auto message = message_of(std::to_string(number));
  if (bytes != 0) message.buffers = {patterned(bytes, static_cast<unsigned>(number))};
  if (!limited([&] {
        made.call =
            agents_[made.from].agent->call(name_of_agent(made.to), "run", std::move(message), std::move(options));
      })) {
    end(number, Status(Code::resource_exhausted, "the caller got std::bad_alloc"));
    return;
  }
  made.call.on_done([this, number](const Result<Received>& reply) { end(number, reply); });
}

void SteppedWorld::end(std::size_t number, const Result<Received>& reply) {
  const PlentyOfMemory plenty;
  auto& ended = calls_.at(number);
  ++ended.ends;
  ended.status = reply.status();
  ended.is_true = is_true(ended);
  ++outcomes_[reply.status().code()];
  note(number * 64 + static_cast<std::uint64_t>(reply.status().code()));
  if (reply.ok() && text_of(reply->payload) != "late") check_reply(number, *reply);
  for (const auto& each : ended.into) std::fill_n(each.data, each.bytes, after_end);
}

void SteppedWorld::check_reply(std::size_t number, const Received& reply) {
  const auto& call = calls_.at(number);
  if (call.wanted.empty()) return;
  bool good = reply.buffers.size() == call.wanted.size();
  for (std::size_t i = 0; good && i < call.wanted.size(); ++i) {
    const auto& came = reply.buffers[i];
    const auto sent = patterned(call.wanted[i], static_cast<unsigned>(number));
    good = came.bytes == sent.bytes && std::equal(sent.data, sent.data + sent.bytes, came.data) &&
           (call.into.empty() || came.data == call.into[i].data);
  }
  if (!good) problems_.push_back(formatted("the reply to call {} has other buffers than its handler sent", number));
}

std::size_t SteppedWorld::call(std::size_t from, std::size_t to, bool answered) {
  const auto number = calls_.size();
  auto& made = calls_.emplace_back();
  made.from = from;
  made.to = to;
  made.answered = answered;
  start(number, within(longest_call), 0);
  return number;
}

void SteppedWorld::pass(Clock::duration time) {
  const auto until = time_->now() + time;
  for (exhaust(); time_->now() < until; exhaust())
    advance(std::min<Clock::duration>(until - time_->now(), Milliseconds(50)));
}

void SteppedWorld::freeze(std::size_t number) {
  agents_.at(number).dead = agents_.at(number).silent = true;
  network_.kill(number, true);
}

void SteppedWorld::break_something() {
  const auto what = below(8);
  if (faults_.ends && what < 4 && network_.connections() != 0) {
    const auto which = below(network_.connections());
    const bool lossy = below(2) == 0;
    return network_.end(which, lossy, static_cast<SteppedNetwork::SeenBy>(below(4)));
  }
  if (faults_.partitions && what < 7) {
    const auto a = below(agents_.size()), b = (a + 1 + below(agents_.size() - 1)) % agents_.size();
    return network_.part(a, b, below(2) == 0);
  }
  if (faults_.deaths && what == 7 && below(4) == 0) {
    const auto which = below(agents_.size());
    const bool silent = below(2) == 0;
    if (agents_[which].dead || std::count_if(agents_.begin(), agents_.end(), [](auto& each) { return !each.dead; }) < 3)
      return;
    agents_[which].dead = true;
    agents_[which].silent = silent;
    network_.kill(which, silent);
  }
}

bool SteppedWorld::work_at(std::size_t agent) {
  if (agents_[agent].dead) return false;
  return work(agent, below(2) == 0 ? RawAgent::Work::pool : RawAgent::Work::reactor);
}

bool SteppedWorld::work(std::size_t agent, RawAgent::Work on) {
  bool worked = true;
  if (!limited([&] { worked = agents_[agent].agent->step(on); }))
    problems_.push_back(formatted("agent{}'s thread would have ended the process, without memory", agent));
  return worked;
}

void SteppedWorld::exhaust() {
  for (int idle = 0; idle < 2;) {
    bool any = false;
    for (int i = 0; i < 16; ++i) any = step() || any;
    if (any) {
      idle = 0;
      continue;
    }
    // The random choices may have missed something: look at everything once.
    for (std::size_t i = 0; i < agents_.size(); ++i) {
      if (agents_[i].dead) continue;
      any = work(i, RawAgent::Work::pool) || any;
      any = work(i, RawAgent::Work::reactor) || any;
      (void)work(i, RawAgent::Work::tick);
    }
    any = network_.ready() != 0 || any;
    idle = any ? 0 : idle + 1;
  }
}

void SteppedWorld::advance(Clock::duration by) {
  note(static_cast<std::uint64_t>(by.count()));
  time_->advance(by);
  for (std::size_t i = 0; i < agents_.size(); ++i) {
    if (!agents_[i].dead) (void)work(i, RawAgent::Work::tick);
  }
}

void SteppedWorld::advance_to_what_is_due() {
  auto next = time_->now() + std::chrono::seconds(1);
  if (const auto alarms = time_->waiting(); !alarms.empty()) next = std::min(next, alarms.front());
  for (const auto& each : calls_) {
    if (each.ends == 0 && each.deadline > time_->now()) next = std::min(next, each.deadline);
  }
  advance(std::max<Clock::duration>(next - time_->now(), Milliseconds(1)));
}

std::vector<std::string> SteppedWorld::run() {
  if (below(3) != 0) meet();
  for (int i = 0; i < work_of_a_run; ++i) {
    switch (below(6)) {
      case 0:
      case 1:
      case 2:
        make_call();
        break;
      case 3:
        (void)answer_one();
        break;
      case 4:
        break_something();
        break;
      default:
        if (!calls_.empty()) {
          auto& one = calls_[below(calls_.size())];
          if (one.kind == Kind::cancelled && one.call && !agents_[one.from].dead) one.call.cancel();
        }
    }
    for (auto some = below(120); some > 0; --some) (void)step();
    if (below(3) == 0) advance(Milliseconds(1 + below(300)));
    if (below(40) == 0) advance_to_what_is_due();
  }
  settle();
  if (faults_.memory != 0) check_that_all_works_again();
  check_calls();
  check_links();
  leave();
  return std::move(problems_);
}

void SteppedWorld::settle() {
  network_.heal();
  const auto until = time_->now() + 3 * longest_call;
  const auto open = [&] {
    return std::any_of(calls_.begin(), calls_.end(),
                       [&](const Made& each) { return each.ends == 0 && !agents_[each.from].dead; });
  };
  for (exhaust(); open() && time_->now() < until; exhaust()) {
    if (!answer_one()) advance_to_what_is_due();
  }
  while (answer_one()) exhaust();
  // Acknowledgements and heartbeats go on for a moment.
  for (int i = 0; i < 4; ++i) {
    advance(Milliseconds(500));
    exhaust();
  }
}

/// Gives every agent a session with each other one.
void SteppedWorld::meet() {
  for (std::size_t from = 0; from < agents_.size(); ++from) {
    for (std::size_t to = 0; to < agents_.size(); ++to) {
      if (from != to) (void)call(from, to, true);
    }
  }
  pass(heartbeat);
  met_ = true;
}

/// Returns whether a call that its caller saw end may have ended so.
bool SteppedWorld::is_allowed(const Made& call) const {
  const bool broken = faults_.ends || faults_.partitions || faults_.deaths || failed_allocations_ != 0;
  const bool may_be_apart = faults_.partitions || faults_.deaths;
  switch (call.status.code()) {
    case Code::ok:
      return call.runs >= 1;
    case Code::connection_lost:
      // While its session goes on, an idempotent call is sent again.
      return call.kind == Kind::idempotent ? may_be_apart || !met_ || failed_allocations_ != 0 : broken;
    case Code::deadline_exceeded:
      return broken || call.kind == Kind::expiring;
    case Code::cancelled:
      return call.kind == Kind::cancelled;
    case Code::resource_exhausted:
    case Code::internal:  // its handler could not be started, and was dropped later
      return failed_allocations_ != 0;
    default:
      return false;
  }
}

/// Returns whether the reason that a lost call gives has happened to its peer, and is no mere consequence of it.
bool SteppedWorld::is_true(const Made& call) const {
  if (call.status.code() != Code::connection_lost || faults_.memory != 0) return true;
  const auto text = call.status.text();
  const auto says = [&](std::string_view what) { return text.find(what) != std::string::npos; };
  const auto& peer = agents_[call.to];
  if (!says(name_of_agent(call.to)) || says("it left the job") || says("was restarted")) return false;
  if (says("its process has ended")) return peer.dead && !peer.silent;
  if (peer.dead && !peer.silent && !faults_.ends && !faults_.partitions) return says("the peer closed the connection");
  if (says("it sent nothing for") || says("it could not be reached for")) {
    return peer.silent || faults_.ends || faults_.partitions;  // a half-open connection is silent too
  }
  return faults_.ends || faults_.partitions || peer.dead;
}

/// Only an idempotent call is sent again, so another one runs once at most.
bool SteppedWorld::runs_well(const Made& call) { return call.runs <= 1 || call.kind == Kind::idempotent; }

/// With memory again, and with connections that all hold, each living agent reaches each other one.
void SteppedWorld::check_that_all_works_again() {
  const auto faults = std::exchange(faults_, {});
  pass(peer_timeout);
  const auto first = calls_.size();
  for (std::size_t from = 0; from < agents_.size(); ++from) {
    for (std::size_t to = 0; to < agents_.size(); ++to) {
      if (from != to && !agents_[from].dead && !agents_[to].dead) (void)call(from, to, true);
    }
  }
  pass(peer_timeout);
  for (auto number = first; number < calls_.size(); ++number) {
    const auto& made = calls_[number];
    if (made.ends != 1 || !made.status.ok())
      problems_.push_back(formatted("there is memory again, but {} does not reach {}: {}", made.from, made.to,
                                    made.ends == 0 ? "the call goes on" : made.status.text()));
  }
  faults_ = faults;
}

void SteppedWorld::check_calls() {
  for (std::size_t number = 0; number < calls_.size(); ++number) {
    const auto& call = calls_[number];
    const bool untouched = std::all_of(call.into.begin(), call.into.end(), [](const Buffer& each) {
      return std::all_of(each.data, each.data + each.bytes, [](std::byte b) { return b == after_end; });
    });
    if (call.ends != 0 && !untouched)
      problems_.push_back(formatted("something wrote into the memory of call {} after its end", number));
    if (agents_[call.from].dead || (call.ends == 1 && runs_well(call) && is_allowed(call) && call.is_true)) continue;
    problems_.push_back(formatted("call {} of kind {} from {} to {} ended {} times, ran {} times: {}", number,
                                  static_cast<int>(call.kind), call.from, call.to, call.ends, call.runs,
                                  call.status.text()));
  }
}

void SteppedWorld::check_links() {
  for (std::size_t from = 0; from < agents_.size(); ++from) {
    if (agents_[from].dead) continue;
    const auto [pending, serving] = agents_[from].agent->in_flight();
    if (pending != 0 || serving != 0)
      problems_.push_back(formatted("agent{} counts {} calls and {} requests in flight", from, pending, serving));
    for (std::size_t to = 0; to < agents_.size(); ++to) {
      const auto state = agents_[from].agent->link_state(name_of_agent(to));
      if (to != from && !state.starts_with("no link") && state.find(" 0 bytes of credit taken") == std::string::npos)
        problems_.push_back(formatted("agent{} has lost credit: {}", from, state));
    }
  }
}

void SteppedWorld::leave() {
  unanswered_.clear();
  for (auto& each : agents_) {
    if (each.agent) each.agent->leave();
  }
  for (auto& each : agents_) each.agent.reset();
  for (auto& each : calls_) each.call = Call();
  if (const auto open = network_.open_ends(); open != 0)
    problems_.push_back(formatted("{} connections are open after all agents have left", open));
}

}  // namespace tensorferry::testing
