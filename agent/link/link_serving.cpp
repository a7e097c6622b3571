// The callee's side of a link: takes requests, dispatches them to handlers in order, and sends replies.
#include <exception>
#include <new>
#include <utility>

#include "agent/buffers/placement.h"
#include "agent/calls/thrown_replies.h"
#include "agent/link/link.h"
#include "agent/or_end_link.h"
#include "base/log.h"
#include "base/out_of_memory.h"
#include "channels/completion.h"

namespace tensorferry {

class Reply::State final {
 public:
  State(std::shared_ptr<Link> to, ReplyRoute by, std::shared_ptr<IncomingRequest> of)
      : link(std::move(to)), route(std::move(by)), incoming(std::move(of)) {}

  std::shared_ptr<Link> link;
  ReplyRoute route;
  std::shared_ptr<IncomingRequest> incoming;

  /// Returns whether this is a forked child's copy, which does nothing: the parent answers.
  [[nodiscard]] bool inherited() const noexcept { return link->inherited(); }
};

Reply::Reply(std::unique_ptr<State> state) : state_(std::move(state)) {}
Reply::Reply(Reply&&) noexcept = default;
Reply& Reply::operator=(Reply&& other) noexcept {
  if (this != &other) {
    const Reply dropped(std::move(*this));
    state_ = std::move(other.state_);
  }
  return *this;
}

Reply::~Reply() {
  if (!state_ || ThrownReplies::keep(*this)) return;
  const bool no_memory = std::uncaught_exceptions() != 0;  // apart from handlers, only std::bad_alloc is thrown here
  fail(no_memory ? out_of_memory::status() : Status(Code::internal, "the handler ended without a reply"));
}

void Reply::send(Message message) {
  const bool late = cancelled();
  const auto state = std::move(state_);
  if (!state || state->inherited()) return;
  const bool expired = state->incoming->deadline && *state->incoming->deadline <= state->link->now();
  or_end_link(*state->link, [&] {
    state->link->record_answer(*state->incoming);
    if (late) state->link->answered_late(*state->incoming);
    if (late)
      state->link->refuse(state->route,
                          {expired ? Code::deadline_exceeded : Code::cancelled, "the reply was too late"});
    else
      state->link->answer(state->route, std::move(message));
  });
  state->link->end_incoming(state->route.call, *state->incoming);
}

void Reply::fail(Status status) {
  const bool late = state_ && state_->incoming->stage == wire::CallStatus::Stage::running && cancelled();
  const auto state = std::move(state_);
  if (!state || state->inherited()) return;
  or_end_link(*state->link, [&] {
    state->link->record_answer(*state->incoming);
    if (late) state->link->answered_late(*state->incoming);
    state->link->refuse(state->route, status);
  });
  state->link->end_incoming(state->route.call, *state->incoming);
}

void Reply::tell(std::uint32_t number) {
  if (!state_) return;
  state_->route.tell_number = number;
  state_->incoming->function = number;
}

/// Returns whether the caller has given up by `now`.
static bool given_up(const IncomingRequest& incoming, const ReplyRoute& route, Clock::time_point now) {
  if (incoming.cancelled || (incoming.deadline && *incoming.deadline <= now)) return true;
  return route.ring && route.ring->abandoned(route.slot);
}

bool Reply::cancelled() const {
  if (!state_ || state_->inherited()) return true;  // a forked child must not use the parent's ring
  return given_up(*state_->incoming, state_->route, state_->link->now());
}

bool Reply::begin() {
  if (!state_ || state_->inherited()) return false;
  const auto now = state_->link->now();
  if (given_up(*state_->incoming, state_->route, now)) return false;
  state_->link->begin(*state_->incoming, now);
  return true;
}

void Reply::on_cancelled(UniqueFunction<void()> told) {
  if (!state_) return told();
  state_->link->incoming_calls().on_cancelled(*state_->incoming, std::move(told));
  // The pool may read a cancel frame from the stream before it takes the request out of the ring. The slot then says
  // that the caller has given up.
  if (state_->route.ring && state_->route.ring->abandoned(state_->route.slot))
    state_->link->incoming_calls().cancel(*state_->incoming);
}

void Reply::outlive_link() {
  if (state_) state_->incoming->outlives_link = true;
}

std::optional<Clock::time_point> Reply::deadline() const { return state_ ? state_->incoming->deadline : std::nullopt; }

/// Begins the record of a request for the trace.
std::shared_ptr<CallRecord> Link::record_of(const wire::Frame& frame, const std::string& function,
                                            const ReplyRoute& route) const {
  auto record = std::make_shared<CallRecord>();
  record->served = true;
  record->function = shown_name(function);
  record->peer = peer().name;
  record->flow = CallTrace::flow_of(incarnation(), engine_->identity.self.incarnation, frame.header.call);
  record->transport = route.ring ? "ring" : route.stream->local() ? "unix" : "tcp";
  record->bytes = frame.payload.size();
  for (const auto& buffer : frame.buffers) record->bytes += buffer.net_bytes();
  return record;
}

namespace {

/// Counts a reply's buffers until the peer has taken all of them.
struct ReplyPin {
  ReplyPin(std::shared_ptr<Link> of, std::size_t size) : link(std::move(of)), bytes(size) {
    link->untaken_replies().add(bytes);
  }
  ~ReplyPin() { link->untaken_replies().remove(bytes); }
  ReplyPin(const ReplyPin&) = delete;
  ReplyPin& operator=(const ReplyPin&) = delete;

  std::shared_ptr<Link> link;
  std::size_t bytes;
};

/// Returns the function that a request names, by number or, if that is 0, by name; null: none of that name is known
/// yet.
Result<std::shared_ptr<const RawFunction>> function_of(const Functions& functions, std::uint32_t number,
                                                       const std::string& name) {
  if (number == 0 && name.empty()) return Status(Code::protocol_error, "a request names no function");
  auto found = number != 0 ? functions.find(number) : functions.find(name);
  if (number == 0 || found) return found;
  return Status(Code::protocol_error,
                formatted("a request names function number {}, which was never assigned", number));
}

}  // namespace

Status Link::on_request(const wire::Frame& frame, ReplyRoute route) {
  const auto& header = frame.header;
  std::string name(text_of(frame.function_name));
  auto known = function_of(engine_->functions, header.function, name);
  if (!known.ok()) return known.status();
  auto function = *std::move(known);
  auto* stream = route.ring ? nullptr : route.stream.get();
  constexpr std::size_t usual_name = 256;  // bytes; the bound on queued calls covers them
  const auto kept = frame.payload.size() + (name.size() > usual_name ? name.size() : 0);
  const auto bytes = wire::message_bytes(kept, frame.buffers);
  const auto now = engine_->clock.now();
  const auto deadline =
      header.remaining_ms != 0 ? std::optional(now + Milliseconds(header.remaining_ms)) : std::nullopt;
  auto begun = incoming_calls_.begin(header.call, deadline, header.order, bytes);
  if (!begun) return refuse_request(stream, frame, route, begun.status());
  auto incoming = std::move(*begun);
  incoming->received = now.time_since_epoch().count();
  if (function) incoming->function = function->number;
  if (closed()) incoming_calls_.cancel(*incoming);  // close() may have cancelled the requests before this one was added
  ++engine_->counters.serving;
  std::shared_ptr<Reply> reply;
  try {
    if (header.function == 0 && function) route.tell_number = function->number;
    if (!frame.placement.empty()) route.placement = placement_of(frame.placement);
    if (engine_->trace.on()) incoming->traced = record_of(frame, function ? function->name : name, route);
    reply = std::make_shared<Reply>(std::make_unique<Reply::State>(shared_from_this(), std::move(route), incoming));
  } catch (const std::bad_alloc&) {  // nobody will answer it: the link ends
    end_incoming(header.call, *incoming);
    throw;
  }
  channels_.receive(
      stream, frame, {},
      [self = shared_from_this(), function = std::move(function), name = std::move(name), reply, incoming](
          Status status, Received received) mutable {
        if (!status.ok()) return reply->fail(std::move(status));
        incoming->stage = wire::CallStatus::Stage::queued;
        if (const auto& engine = *self->engine_;
            engine.counters.serving > static_cast<std::size_t>(engine.options.max_threads))
          incoming->busy_at_arrival = engine.pool->load().busy;
        if (incoming->traced) incoming->traced->reach(CallRecord::queued, self->engine_->clock.now());
        if (!incoming->order_ticket) {
          return self->dispatch(std::move(function), std::move(name), std::move(received), std::move(incoming),
                                std::move(*reply));
        }
        self->incoming_calls_.when_in_order(
            *incoming, [self, function, name, received = std::move(received), incoming, reply](const Status&) mutable {
              self->dispatch(std::move(function), std::move(name), std::move(received), std::move(incoming),
                             std::move(*reply));
            });
      },
      [self = shared_from_this(), incoming](std::size_t all) {
        const auto status = self->incoming_calls_.count(*incoming, all);
        return status.ok() ? status : self->busy(status);
      });
  return {};
}

/// Answers a request that was not taken in. A protocol error is returned, and closes the link.
Status Link::refuse_request(FrameStream* stream, const wire::Frame& frame, const ReplyRoute& route, const Status& why) {
  if (why.code() == Code::protocol_error) return why;
  channels_.discard(stream, frame);
  refuse(route, busy(why));
  return {};
}

/// Cancels a request whose caller has given up. Callbacks of the handler's program run as a job of their own: the
/// thread that reads may wait for a reply, with locks that they take.
void Link::cancel_incoming(std::uint64_t call) {
  auto told = incoming_calls_.mark_cancelled(call);
  if (told.empty()) return;
  engine_->pool->submit([held = std::move(told)]() mutable {
    for (auto& each : held) each();
  });
}

/// Says why a request cannot be taken in now.
Status Link::busy(const Status& why) const {
  return {why.code(), "\"" + engine_->identity.self.name + "\" is busy: " + std::string(why.what())};
}

void Link::dispatch(std::shared_ptr<const RawFunction> function, std::string name, Received arguments,
                    std::shared_ptr<IncomingRequest> incoming, Reply reply) {
  const bool executor = !function || function->options.executor;  // a name that is not known yet may need the executor
  const auto deadline = incoming->deadline;
  auto job = [self = shared_from_this(), function = std::move(function), name = std::move(name),
              arguments = std::move(arguments), incoming = std::move(incoming), reply = std::move(reply)]() mutable {
    self->incoming_calls_.start(*incoming);
    self->engine_->run_handler(std::move(function), name, self->peer(), std::move(arguments), std::move(reply));
  };
  engine_->pool->submit_handler(std::move(job), executor, this, deadline);
}

/// Answers a status frame: how far the request has come here.
void Link::tell_status(const std::shared_ptr<FrameStream>& stream, std::uint64_t call) {
  constexpr std::size_t most_unwritten = 1 << 20;  // a peer that asks and does not read gets no answers
  if (stream->unwritten() > most_unwritten) return;
  auto status = incoming_calls_.status(call, engine_->clock.now());
  const auto load = engine_->pool->load();
  status.busy = load.busy;
  status.handlers = load.most;
  status.waiting = load.waiting;
  wire::Header header;
  header.kind = wire::Kind::status;
  header.call = call;
  transmit(stream, wire::assemble(header, {}, {}, encode(status)), {}, true, {});
}

void Link::begin(IncomingRequest& incoming, Clock::time_point now) {
  incoming.began = now.time_since_epoch().count();
  if (auto& counters = engine_->counters; counters.timed.load(std::memory_order_relaxed))
    counters.queue_time.add(now - Clock::time_point(Clock::duration(incoming.received)));
  incoming.stage = wire::CallStatus::Stage::running;
}

void Link::record_answer(const IncomingRequest& incoming) {
  const auto& record = incoming.traced;
  if (!record) return;
  record->stages[CallRecord::received] = incoming.received.load();
  record->stages[CallRecord::started] = incoming.began.load();
  record->reach(CallRecord::replied, engine_->clock.now());
  engine_->trace.add(record);
}

void Link::answered_late(const IncomingRequest& incoming) {
  if (closed()) return;  // the caller did not give up: the link ended
  const auto function = incoming.function != 0 ? engine_->functions.find(incoming.function) : nullptr;
  engine_->counters.late_answers.add(peer().name, function ? std::string(shown_name(function->name)) : "?");
}

void Link::end_incoming(std::uint64_t call, IncomingRequest& incoming) {
  incoming_calls_.end(call, incoming);
  auto& counters = engine_->counters;
  --counters.serving;
  ++counters.calls_served;
  ++counters_.calls_served;
  if (counters.timed.load(std::memory_order_relaxed))
    counters.serve_time.add(engine_->clock.now() - Clock::time_point(Clock::duration(incoming.received)));
}

/// Lets no further handler of the peer's requests start, or ends that. Pauses may overlap.
void Link::pause_handlers(bool pause) {
  if (pause)
    engine_->pool->pause(this);
  else
    engine_->pool->resume(this);
}

/// Lets no further handler of the peer's requests start, because it does not read its replies. Its requests are still
/// read, for the sake of the replies and control frames among them; those beyond the bounds are refused.
void Link::hold_requests() {
  {
    const std::lock_guard lock(rings_.mutex);
    if (requests_held_.exchange(true)) return;
    pause_handlers(true);
    if (rings_.in) rings_.in->hold(true);
  }
  activate();
  if (closed()) resume_requests();
}

void Link::resume_requests() {
  {
    const std::lock_guard lock(rings_.mutex);
    if (!requests_held_.exchange(false)) return;
    pause_handlers(false);
    if (rings_.in) rings_.in->hold(false);
  }
  engine_->pool->doorbell().ring();
}

namespace {

wire::Header reply_to(const ReplyRoute& route, Bytes& extensions) {
  wire::Header header;
  header.kind = wire::Kind::reply;
  header.call = route.call;
  if (route.tell_number != 0) {
    Writer writer(extensions);
    wire::put_extension(writer, wire::extension::function_number, std::as_bytes(std::span(&route.tell_number, 1)));
  }
  return header;
}

}  // namespace

void Link::answer(const ReplyRoute& route, Message message) {
  if (closed() || route.stream->closed()) return;
  if (const auto known = channels_.probing(message, {}, route.placement)) {
    return channels_.when_probed(*known, [self = shared_from_this(), route, held = std::move(message)]() mutable {
      self->answer(route, std::move(held));
    });
  }
  Bytes extensions;
  const auto header = reply_to(route, extensions);
  const auto bytes = message.bytes();
  // Buffers of so few bytes are copied into the frame.
  auto held = bytes > inline_bytes ? std::make_shared<ReplyPin>(shared_from_this(), bytes) : nullptr;
  const Connections::FrameFirst frame_first(connections_);
  auto built = channels_.build(header, std::move(extensions), std::move(message), {}, route.placement, held);
  held.reset();
  if (!built) return refuse(route, built.status());
  send_answer(route, std::move(*built), frame_first.holds_bulk());
}

void Link::refuse(const ReplyRoute& route, const Status& status) {
  if (closed() || route.stream->closed()) return;
  Bytes extensions;
  auto header = reply_to(route, extensions);
  header.flags = wire::flag::error;
  send_answer(route, {wire::assemble(header, extensions, {}, wire::encode_status(status)), {}, -1}, false);
}

void Link::send_answer(const ReplyRoute& route, ChannelSet::Built built, bool at_once) {
  if (route.ring) {
    const bool fits = built.trailing.empty() && built.frame.size() <= CallRing::most_reply;
    // If the caller has given up, the frame goes by socket all the same: it may hold tickets, which must end.
    if (fits && route.ring->answer(route.slot, built.frame)) return;
    if (!fits) route.ring->answer_by_socket(route.slot);
  }
  // Replies of consecutive handlers share a system call: the last one flushes, and so does the tick.
  transmit(route.stream, std::move(built.frame), std::move(built.trailing), at_once || engine_->pool->caught_up(), {});
}

}  // namespace tensorferry
