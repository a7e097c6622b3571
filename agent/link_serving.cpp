// The callee's side of a link: takes requests, dispatches them to handlers in order, and sends replies.
#include <utility>

#include "agent/link.h"
#include "agent/placement.h"
#include "base/log.h"
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
  [[nodiscard]] bool inherited() const noexcept { return link->engine().inherited(); }
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
  if (state_) fail({Code::internal, "the handler ended without a reply"});
}

void Reply::send(Message message) {
  const bool late = cancelled();
  const auto state = std::move(state_);
  if (!state || state->inherited()) return;
  const bool expired = state->incoming->deadline && *state->incoming->deadline <= Clock::now();
  if (late)
    state->link->refuse(state->route, {expired ? Code::deadline_exceeded : Code::cancelled, "the reply was too late"});
  else
    state->link->answer(state->route, std::move(message));
  state->link->end_incoming(state->route.call, *state->incoming);
}

void Reply::fail(Status status) {
  const auto state = std::move(state_);
  if (!state || state->inherited()) return;
  state->link->refuse(state->route, status);
  state->link->end_incoming(state->route.call, *state->incoming);
}

void Reply::tell(std::uint32_t number) {
  if (state_) state_->route.tell_number = number;
}

bool Reply::cancelled() const {
  if (!state_ || state_->inherited()) return true;  // a forked child must not use the parent's ring
  const auto& incoming = *state_->incoming;
  if (incoming.cancelled || (incoming.deadline && *incoming.deadline <= Clock::now())) return true;
  return state_->route.ring && state_->route.ring->abandoned(state_->route.slot);
}

void Reply::on_cancelled(UniqueFunction<void()> told) {
  if (!state_) return told();
  state_->link->on_cancelled(state_->incoming, std::move(told));
  // The pool may read a cancel frame from the stream before it takes the request out of the ring. The slot then says
  // that the caller has given up.
  if (state_->route.ring && state_->route.ring->abandoned(state_->route.slot))
    state_->link->cancel_incoming(*state_->incoming);
}

std::optional<Clock::time_point> Reply::deadline() const { return state_ ? state_->incoming->deadline : std::nullopt; }

Status Link::on_request(const wire::Frame& frame, ReplyRoute route) {
  const auto& header = frame.header;
  std::shared_ptr<const RawFunction> function;
  std::string name(text_of(frame.function_name));
  if (header.function != 0) {
    function = engine_->functions.find(header.function);
    if (!function)
      return {Code::protocol_error,
              "a request names function number " + std::to_string(header.function) + ", which was never assigned"};
  } else if (name.empty()) {
    return {Code::protocol_error, "a request names no function"};
  } else {
    function = engine_->functions.find(name);
  }
  auto incoming = std::make_shared<IncomingRequest>();
  if (header.remaining_ms != 0) incoming->deadline = Clock::now() + Milliseconds(header.remaining_ms);
  incoming->order = header.order;
  if (header.order != 0) incoming->order_ticket = std::make_shared<OrderTicket>();
  {
    const std::lock_guard lock(incoming_calls_mutex_);
    if (!incoming_calls_.emplace(header.call, incoming).second)
      return {Code::protocol_error, "a request has the id of another request that is still open"};
    if (closed()) incoming->cancelled = true;  // close() may have cancelled the requests before this one was added
    if (incoming->order_ticket) ordered_[header.order].push_back(incoming->order_ticket);
  }
  ++engine_->serving;
  if (header.function == 0 && function) route.tell_number = function->number;
  if (!frame.placement.empty()) route.placement = placement_of(frame.placement);
  auto* stream = route.ring ? nullptr : route.stream.get();
  auto reply = std::make_shared<Reply>(std::make_unique<Reply::State>(shared_from_this(), std::move(route), incoming));
  channels_.receive(stream, frame, {},
                    [self = shared_from_this(), function = std::move(function), name = std::move(name), reply,
                     incoming](Status status, Received received) mutable {
                      if (!status.ok()) return reply->fail(std::move(status));
                      if (!incoming->order_ticket)
                        return self->dispatch(std::move(function), std::move(name), std::move(received),
                                              std::move(*reply));
                      self->start_in_order(incoming->order, *incoming->order_ticket,
                                           [self, function, name, received = std::move(received), reply]() mutable {
                                             self->dispatch(std::move(function), std::move(name), std::move(received),
                                                            std::move(*reply));
                                           });
                    });
  return {};
}

void Link::dispatch(std::shared_ptr<const RawFunction> function, std::string name, Received arguments, Reply reply) {
  auto& pool = *engine_->pool;
  if (pool.saturated()) {
    return reply.fail({Code::resource_exhausted, "all " + std::to_string(engine_->options.max_threads) +
                                                     " handlers of \"" + engine_->self.name +
                                                     "\" are busy, and as many calls wait. Raise max_threads there"});
  }
  const bool executor = !function || function->options.executor;  // a name that is not known yet may need the executor
  auto job = [self = shared_from_this(), function = std::move(function), name = std::move(name),
              arguments = std::move(arguments), reply = std::move(reply)]() mutable {
    self->engine_->run_handler(std::move(function), name, self, std::move(arguments), std::move(reply));
  };
  pool.submit_handler(std::move(job), executor);
}

/// Runs `start` now, or when all earlier requests of its order key have been answered.
void Link::start_in_order(std::uint32_t order, OrderTicket& order_ticket, UniqueFunction<void()> start) {
  {
    const std::lock_guard lock(incoming_calls_mutex_);
    if (ordered_[order].front().get() != &order_ticket) {
      order_ticket.start = std::move(start);
      return;
    }
  }
  start();
}

void Link::end_order_ticket(std::uint32_t order, const OrderTicket& order_ticket) {
  UniqueFunction<void()> next;
  {
    const std::lock_guard lock(incoming_calls_mutex_);
    auto& queue = ordered_[order];
    const bool was_first = queue.front().get() == &order_ticket;
    std::erase_if(queue, [&](const auto& other) { return other.get() == &order_ticket; });
    if (queue.empty())
      ordered_.erase(order);
    else if (was_first)
      next = std::move(queue.front()->start);
  }
  // The next request may be refused at once, and so may the one after it. complete() avoids a stack frame for each.
  if (next) complete([start = std::move(next)](const Status&) { start(); }, {});
}

void Link::on_cancel(std::uint64_t call) {
  std::shared_ptr<IncomingRequest> incoming;
  {
    const std::lock_guard lock(incoming_calls_mutex_);
    if (const auto it = incoming_calls_.find(call); it != incoming_calls_.end()) incoming = it->second;
  }
  if (incoming) cancel_incoming(*incoming);
}

void Link::cancel_incoming(IncomingRequest& incoming) {
  UniqueFunction<void()> on_cancelled;
  {
    const std::lock_guard lock(incoming_calls_mutex_);
    incoming.cancelled = true;
    on_cancelled = std::move(incoming.on_cancelled);
  }
  if (on_cancelled) on_cancelled();
}

void Link::on_cancelled(const std::shared_ptr<IncomingRequest>& incoming, UniqueFunction<void()> told) {
  {
    const std::lock_guard lock(incoming_calls_mutex_);
    if (!incoming->cancelled) {
      std::swap(incoming->on_cancelled, told);
      return;
    }
  }
  told();
}

void Link::end_incoming(std::uint64_t call, const IncomingRequest& incoming) {
  {
    const std::lock_guard lock(incoming_calls_mutex_);
    incoming_calls_.erase(call);
  }
  --engine_->serving;
  ++engine_->calls_served;
  if (incoming.order_ticket) end_order_ticket(incoming.order, *incoming.order_ticket);
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
  auto built = channels_.build(header, std::move(extensions), std::move(message), {}, route.placement, nullptr);
  if (!built) return refuse(route, built.status());
  send_answer(route, std::move(*built));
}

void Link::refuse(const ReplyRoute& route, const Status& status) {
  if (closed() || route.stream->closed()) return;
  Bytes extensions;
  auto header = reply_to(route, extensions);
  header.flags = wire::flag::error;
  send_answer(route, {wire::assemble(header, extensions, {}, wire::encode_status(status)), {}});
}

void Link::send_answer(const ReplyRoute& route, ChannelSet::Built built) {
  if (route.ring) {
    const bool fits = built.trailing.empty() && built.frame.size() <= CallRing::most_reply;
    // If the caller has given up, the frame goes by socket all the same: it may hold tickets, which must end.
    if (fits && route.ring->answer(route.slot, built.frame)) return;
    if (!fits) route.ring->answer_by_socket(route.slot);
  }
  // Replies of consecutive handlers share a system call: the last one flushes, and so does the tick.
  transmit(route.stream, std::move(built.frame), std::move(built.trailing), engine_->pool->caught_up());
}

}  // namespace tensorferry
