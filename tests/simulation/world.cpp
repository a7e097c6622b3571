#include "tests/simulation/world.h"

#include <charconv>
#include <thread>

#include "base/text.h"
#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"
#include "rpc/core/envelope.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"

namespace tensorferry::testing {
namespace {

using Kind = CallRecord::Kind;
using std::chrono::seconds;

constexpr seconds longest_call{20};

/// Counts itself while it exists.
struct ObjectValue {
  explicit ObjectValue(std::atomic<int>& live) : count(live) { ++count; }
  ~ObjectValue() { --count; }
  ObjectValue(const ObjectValue&) = delete;
  ObjectValue& operator=(const ObjectValue&) = delete;
  std::atomic<int>& count;
};

std::size_t number_in(ByteView payload) {
  const auto text = text_of(payload);
  std::size_t number = 0;
  std::from_chars(text.data(), text.data() + text.size(), number);
  return number;
}

}  // namespace

// ---- An agent

SimulatedAgent::SimulatedAgent(World& world, std::size_t index, bool warm) : world_(world), index_(index) {
  agent = join(world.store(), std::string(1, static_cast<char>('a' + index)), {"tcp", "basic"},
               [](RawAgentOptions& options) { options.max_threads = 64; });
  network_ = std::make_shared<AgentNetwork>(agent);
  References::Options options;
  options.retry = Milliseconds(5);
  options.most_retry = Milliseconds(50);
  options.ask_after = Milliseconds(40);
  if (warm) options.give_up = Milliseconds(100);
  references = References::make(id(), network_, options);
  serve_references(*agent, references);
  agent->on_peer_lost([this](const PeerInfo& peer, const Status& why) {
    ++world_.deaths;
    world_.problem(formatted("\"{}\" took \"{}\" for dead: {}", agent->self().name, peer.name, why.text()));
    references->peer_lost({peer.name, peer.incarnation}, why);
  });
  agent->serve("run", [this](Request request, Reply reply) {
    const auto call = number_in(request.arguments.payload);
    world_.ran(call);
    if (call % 5 == 0) std::this_thread::sleep_for(Milliseconds(call % 7));
    reply.send({std::move(request.arguments.payload), std::move(request.arguments.buffers), {}, {}});
  });
  agent->serve("linger", [this](const Request& request, Reply reply) {
    world_.ran(number_in(request.arguments.payload));
    (void)eventually([&] { return reply.cancelled(); }, Milliseconds(500));
    reply.send({});
  });
  agent->serve("make", [this](const Request& request, Reply reply) { make(request, std::move(reply)); });
  agent->serve("keep", [this](const Request& request, Reply reply) { keep(request, std::move(reply)); });
}

SimulatedAgent::~SimulatedAgent() {
  references->close();
  agent->leave();
}

void SimulatedAgent::make(const Request& request, Reply reply) {
  Decoder in(request.arguments.payload, request.arguments.buffers);
  const auto head = read_request(in);
  const AgentId creator{request.peer.name, request.peer.incarnation};
  if (references->comes_again(creator, *head.creation)) return reply.send({});
  const auto admitted = references->create(creator, *head.creation);
  if (!admitted.ok()) return reply.fail(admitted);
  references->fulfil(head.creation->object, Outcome{std::make_shared<ObjectValue>(world_.live_objects), false});
  reply.send({});
}

void SimulatedAgent::keep(const Request& request, Reply reply) {
  Decoder in(request.arguments.payload, request.arguments.buffers);
  read_request(in);
  if (in.next() != Tag::reference) return reply.fail({Code::invalid_argument, "keep(reference)"});
  const auto record = in.reference();
  auto received = references->receive(record, {request.peer.name, request.peer.incarnation});
  if (received.ok()) {
    world_.hold(index_, std::move(*received));
    return reply.send({});
  }
  // Cancelled: the sender has taken the reference back, because its call has failed there.
  if (received.status().code() != Code::cancelled && !world_.may_be_gone(record.object))
    world_.problem(formatted("a reference was refused: {}", received.status().text()));
  reply.fail(received.status());
}

// ---- Calls

World::World(std::uint64_t seed, std::size_t agents, bool warm)
    : relay_(seed), store_(std::make_shared<RelayedStore>(relay_)) {
  for (std::size_t i = 0; i < agents; ++i) agents_.push_back(std::make_unique<SimulatedAgent>(*this, i, warm));
}

World::~World() {
  held_.clear();
  agents_.clear();
}

void World::problem(std::string text) {
  const std::lock_guard lock(mutex_);
  problems_.push_back(std::move(text));
}

std::vector<std::string> World::problems() {
  const std::lock_guard lock(mutex_);
  return problems_;
}

void World::call(Kind kind, std::size_t from, std::size_t to, std::size_t bytes, std::uint32_t order) {
  const auto record = std::make_shared<CallRecord>();
  record->kind = kind;
  record->route = formatted("{} -> {}", at(from).id().name, at(to).id().name);
  record->order = kind == Kind::ordered ? order : 0;
  std::size_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = calls_.size();
    calls_.push_back(record);
  }
  const bool lingers = kind == Kind::cancelled || kind == Kind::expiring;
  auto options = within(kind == Kind::expiring ? Milliseconds(60) : Milliseconds(longest_call));
  options.order = record->order;
  options.idempotent = kind == Kind::idempotent;
  auto message = message_of(std::to_string(number));
  if (bytes != 0) message.buffers = {patterned(bytes, static_cast<unsigned>(number))};
  const auto sent = message.buffers;
  auto call =
      at(from).agent->call(at(to).id().name, lingers ? "linger" : "run", std::move(message), std::move(options));
  if (kind == Kind::cancelled) {
    const std::lock_guard lock(mutex_);
    to_cancel_.push_back(call);
  }
  call.on_done([record, sent, number, lingers](const Result<Received>& reply) {
    record->status = reply.status();
    if (reply.ok() && !lingers) {
      const bool same = text_of(reply->payload) == std::to_string(number) && reply->buffers.size() == sent.size() &&
                        (sent.empty() || same_bytes(reply->buffers[0], sent[0]));
      if (!same) record->status = {Code::internal, "other bytes came back"};
    }
    ++record->ends;
  });
}

void World::cancel_calls() {
  std::vector<Call> calls;
  {
    const std::lock_guard lock(mutex_);
    calls.swap(to_cancel_);
  }
  for (auto& call : calls) call.cancel();
}

void World::ran(std::size_t number) {
  const std::lock_guard lock(mutex_);
  auto& call = *calls_.at(number);
  ++call.runs;
  if (call.order == 0) return;
  auto& last = last_started_[{call.route, call.order}];
  if (number < last) {
    problems_.push_back(
        formatted("{}: ordered call {} (key {}) ran after call {}", call.route, number, call.order, last));
  }
  last = number;
}

void World::check_calls(bool warm) {
  const auto ended = [&] {
    const std::lock_guard lock(mutex_);
    for (const auto& call : calls_) {
      if (call->ends == 0) return false;
    }
    return true;
  };
  if (!eventually(ended, 2 * longest_call)) problem("a call has not ended");
  const std::lock_guard lock(mutex_);
  for (std::size_t number = 0; number < calls_.size(); ++number) {
    const auto& call = *calls_[number];
    const auto code = call.status.code();
    bool allowed = code == Code::ok || code == Code::connection_lost;
    if (call.kind == Kind::idempotent && warm) allowed = code == Code::ok;
    if (call.kind == Kind::cancelled) allowed = allowed || code == Code::cancelled;
    if (call.kind == Kind::expiring) allowed = allowed || code == Code::deadline_exceeded;
    const bool lingers = call.kind == Kind::cancelled || call.kind == Kind::expiring;
    const bool once = call.runs <= 1 || call.kind == Kind::idempotent;
    const bool ran_well = once && (code != Code::ok || lingers || call.runs >= 1);
    if (call.ends == 1 && allowed && ran_well) continue;
    problems_.push_back(formatted("{}: call {} of kind {} ended {} times, ran {} times: {}", call.route, number,
                                  static_cast<int>(call.kind), call.ends.load(), call.runs.load(), call.status.text()));
  }
}

// ---- References

void World::hold(std::size_t agent, std::shared_ptr<Reference> reference) {
  const std::lock_guard lock(mutex_);
  held_.push_back({agent, std::move(reference)});
}

bool World::may_be_gone(const RRefId& object) {
  const std::lock_guard lock(mutex_);
  const auto record = objects_.find(object);
  return record == objects_.end() || record->second->creation == ObjectRecord::Creation::failed;
}

std::optional<HeldReference> World::pick(std::size_t which) {
  const std::lock_guard lock(mutex_);
  if (held_.empty()) return std::nullopt;
  return held_[which % held_.size()];
}

void World::create(std::size_t from, std::size_t to, bool idempotent) {
  auto& creator = at(from);
  auto reference = creator.references->begin_creation(at(to).id());
  const auto record = std::make_shared<ObjectRecord>();
  record->owner = to;
  {
    const std::lock_guard lock(mutex_);
    objects_[reference->object()] = record;
    held_.push_back({from, reference});
  }
  Encoder out;
  begin_request(out, 0, reference->ids());
  begin_keywords(out, 0);
  auto options = within(longest_call);
  options.idempotent = idempotent;
  ++under_way_;
  auto call = creator.agent->call(at(to).id().name, "make", out.take(), std::move(options));
  call.on_done(
      [this, here = creator.references, reference = std::move(reference), record](const Result<Received>& reply) {
        record->creation = reply.ok() ? ObjectRecord::Creation::done : ObjectRecord::Creation::failed;
        here->end_creation(*reference, reply.status());
        --under_way_;
      });
}

void World::pass(std::size_t which, std::size_t to) {
  const auto held = pick(which);
  if (!held || held->agent == to) return;
  auto& sender = at(held->agent);
  auto transfer = std::make_shared<ReferenceTransfer>(sender.references->pass_to(at(to).id()));
  const auto record = transfer->add(*held->reference);
  if (!record.ok()) {
    if (!may_be_gone(held->reference->object())) problem("a reference cannot be passed on: " + record.status().text());
    return;
  }
  Encoder out;
  begin_request(out, 1);
  out.reference(*record);
  begin_keywords(out, 0);
  transfer->sent();
  ++under_way_;
  auto call = sender.agent->call(at(to).id().name, "keep", out.take(), within(longest_call));
  call.on_done([this, transfer](const Result<Received>& reply) {
    transfer->ended(reply.status());
    --under_way_;
  });
}

void World::drop(std::size_t which) {
  HeldReference dropped;  // after the mutex is released
  const std::lock_guard lock(mutex_);
  if (held_.empty()) return;
  auto& last = held_[which % held_.size()];
  std::swap(last, held_.back());
  dropped = std::move(held_.back());
  held_.pop_back();
}

void World::probe(std::size_t which) {
  const auto held = pick(which);
  if (!held || may_be_gone(held->reference->object())) return;
  if (!held->reference->confirmed()) return;
  const auto object = held->reference->object();
  std::size_t owner = 0;
  {
    const std::lock_guard lock(mutex_);
    owner = objects_.at(object)->owner;
  }
  at(owner).references->fetch(object, Clock().now() + longest_call, [this, held](const Result<Outcome>& outcome) {
    if (outcome.ok() || may_be_gone(held->reference->object())) return;
    problem("an object is gone although \"" + at(held->agent).id().name + "\" holds it: " + outcome.status().text());
  });
}

void World::check_references() {
  const auto settled = [&] {
    for (const auto& agent : agents_) {
      if (!agent->references->settled()) return false;
    }
    return under_way_ == 0;
  };
  if (!eventually(settled, longest_call)) problem("the reference tables do not settle");
  std::size_t handles = 0;
  {
    const std::lock_guard lock(mutex_);
    handles = held_.size();
  }
  for (std::size_t i = 0; i < handles; ++i) {
    const auto held = pick(i);
    if (may_be_gone(held->reference->object())) continue;
    if (const auto status = held->reference->status(); !status.ok()) {
      problem("\"" + at(held->agent).id().name + "\" has lost a reference: " + status.text());
    } else if (!held->reference->confirmed()) {
      problem("\"" + at(held->agent).id().name + "\" has a reference that its owner never confirmed");
    }
    probe(i);
  }
  {
    std::vector<HeldReference> dropped;
    const std::lock_guard lock(mutex_);
    dropped.swap(held_);
  }
  const auto freed = [&] {
    for (const auto& agent : agents_) {
      if (!(agent->references->counts() == References::Counts())) return false;
    }
    return live_objects == 0 && settled();
  };
  if (!eventually(freed, longest_call)) {
    for (const auto& agent : agents_) {
      const auto counts = agent->references->counts();
      problem(formatted("not freed: \"{}\" has {} objects, {} forks, {} passing; {} values live", agent->id().name,
                        counts.objects, counts.forks, counts.passing, live_objects.load()));
    }
  }
}

void World::finish(bool warm) {
  relay_.calm();
  cancel_calls();
  check_calls(warm);
  check_references();
}

}  // namespace tensorferry::testing
