// Calls through shared memory: the negotiation of a link's rings, and the requests and replies in them.
#include "agent/link_rings.h"

#include <poll.h>
#include <unistd.h>

#include <array>
#include <utility>

#include "agent/auth.h"
#include "agent/link.h"

namespace tensorferry {
namespace {

/// The operations of ring frames.
constexpr std::uint8_t offered = 1, accepted = 2, declined = 3;

Bytes ring_frame(std::uint8_t operation, std::uint64_t nonce, std::string_view reason, std::size_t descriptors) {
  Bytes payload;
  Writer writer(payload);
  writer.put(operation);
  writer.put(nonce);
  writer.raw(view_of(reason.substr(0, 1024)));
  wire::Header header;
  header.kind = wire::Kind::ring;
  header.descriptors = static_cast<std::uint8_t>(descriptors);
  return wire::assemble(header, {}, {}, payload);
}

}  // namespace

// ---- The callee's side

bool IncomingRing::needs_executor() {
  const auto number = calls_->peek_function();
  const auto link = number ? link_.lock() : nullptr;
  if (!link) return false;
  const auto function = link->engine().functions.find(*number);
  return !function || function->options.executor;  // a name that is not known yet may need the executor
}

bool IncomingRing::serve_one() {
  thread_local const auto buffer = std::make_unique<std::array<std::byte, CallRing::most_request>>();
  bool valid = true;
  const auto request = calls_->pop(*buffer, valid);
  if (!request && valid) return false;
  const auto link = link_.lock();
  if (!link) return true;
  if (request) peer_cpu_.store(request->cpu, std::memory_order_relaxed);
  auto status = request ? link->on_ring_request(ByteView(*buffer).first(request->bytes), request->slot)
                        : Status(Code::protocol_error, "the shared memory of the ring has invalid contents");
  if (!status.ok()) link->close(status);
  return true;
}

bool IncomingRing::answer(SlotId slot, ByteView frame) {
  const auto answered = calls_->answer(slot, frame);
  if (answered == CallRing::Answered::must_ring) caller_->ring();
  return answered != CallRing::Answered::too_late;
}

void IncomingRing::answer_by_socket(SlotId slot) {
  if (calls_->answer_by_socket(slot) == CallRing::Answered::must_ring) caller_->ring();
}

Status Link::on_ring_request(ByteView bytes, SlotId slot) {
  if (bytes.size() < wire::Header::size) return {Code::protocol_error, "malformed frame: shorter than a header"};
  const auto header = wire::Header::decode(bytes.first(wire::Header::size));
  if (!header) return header.status();
  if (header->kind != wire::Kind::request || header->trailing != 0 || header->descriptors != 0) {
    return {Code::protocol_error, "a frame in a ring is not a request, or has bytes or file descriptors behind it"};
  }
  auto frame = wire::Frame::decode(*header, bytes.subspan(wire::Header::size));
  if (!frame) return frame.status();
  if (!frame->releases.empty()) channels_.acknowledged(frame->releases);
  std::shared_ptr<FrameStream> stream;
  std::shared_ptr<IncomingRing> ring;
  {
    const std::lock_guard lock(connect_mutex_);
    stream = incoming_;
    ring = ring_in_;
  }
  if (!stream || !ring) return {Code::connection_lost, "the link has ended"};
  return on_request(*frame, {std::move(stream), header->call, 0, std::move(ring), slot});
}

// ---- The caller's side

bool OutgoingRing::send(SlotId slot, ByteView frame) {
  if (!calls->push(slot, frame)) return false;
  callee_->ring();
  return true;
}

bool OutgoingRing::serve_one() {
  const auto link = link_.lock();
  bool any = false;
  while (link && calls->any_done()) {
    std::optional<SlotId> slot;
    {
      const std::unique_lock lock(collect_mutex_, std::try_to_lock);
      if (!lock) return any;
      slot = calls->next_done();
    }
    if (slot) link->on_ring_done(*slot);
    any = true;
  }
  return any;
}

void Link::on_ring_done(SlotId slot) {
  std::shared_ptr<Call::State> call;
  {
    const std::lock_guard lock(ring_mutex_);
    call = ring_calls_[slot.index].lock();
  }
  if (call && call->slot.generation == slot.generation) take_ring_reply(call);
}

void Link::poll_ring(Call::State& call) {
  const auto state = ring_out_->calls->state(call.slot);
  if (state == CallRing::State::full || state == CallRing::State::by_socket) take_ring_reply(call.shared_from_this());
}

void Link::take_ring_reply(const std::shared_ptr<Call::State>& call) {
  const auto status = read_ring_reply(call);
  if (status.ok()) return;
  close(status);
  fail(call, this->status());
}

/// Takes the reply out of the call's slot, unless another thread has taken it, and handles it. If the reply comes by
/// socket, frees the slot and makes the pool read the stream. An error: the slot holds no valid reply, and the caller
/// of this function must end the call.
Status Link::read_ring_reply(const std::shared_ptr<Call::State>& call) {
  const auto state = ring_out_->calls->state(call->slot);
  if (state == CallRing::State::by_socket) {
    call->in_ring.store(false, std::memory_order_release);
    ring_out_->calls->take_by_socket(call->slot);
    expect_frames();
    return {};
  }
  ring_out_->spin.met(ring_out_->calls->cpu_of(call->slot));
  bool valid = true;
  const auto bytes = ring_out_->calls->take(call->slot, valid);
  if (!valid) return {Code::protocol_error, "a reply in shared memory is longer than its slot"};
  if (!bytes) return {};
  const ByteView view(*bytes);
  if (view.size() < wire::Header::size)
    return {Code::protocol_error, "a reply in shared memory is shorter than a header"};
  const auto header = wire::Header::decode(view.first(wire::Header::size));
  if (!header) return header.status();
  if (header->kind != wire::Kind::reply || header->trailing != 0 || header->call != call->id)
    return {Code::protocol_error, "a frame in a reply's slot is not the reply to its call"};
  auto frame = wire::Frame::decode(*header, view.subspan(wire::Header::size));
  if (!frame) return frame.status();
  if (!frame->releases.empty()) channels_.acknowledged(frame->releases);
  return on_reply(nullptr, *frame);
}

/// Takes the replies that have come into slots and that no thread has taken yet. Called while the link ends.
void Link::take_ring_replies() {
  if (!ring_ready_.load(std::memory_order_acquire)) return;
  for (const auto& call : pending_.all()) {
    if (!call->in_ring.load(std::memory_order_acquire) || !answered(*call)) continue;
    if (const auto status = read_ring_reply(call); !status.ok()) fail(call, status);
  }
}

/// Returns whether a thread has taken the call's reply out of its slot and is about to end the call.
bool Link::taken_out_of_ring(const Call::State& call) const {
  if (!call.in_ring.load(std::memory_order_acquire) || !ring_out_->calls->taken(call.slot)) return false;
  return call.in_ring.load(std::memory_order_acquire);  // false now: the reply comes by socket
}

/// Puts a request into the ring. False: it must go by socket.
bool Link::send_by_ring(const std::shared_ptr<Call::State>& call, ByteView frame) {
  if (!ring_ready_.load(std::memory_order_acquire) || call->options.order != 0) return false;
  const auto slot = ring_out_->calls->reserve();
  if (!slot) return false;
  call->slot = *slot;
  {
    const std::lock_guard lock(ring_mutex_);
    ring_calls_[slot->index] = call;
  }
  call->in_ring.store(true, std::memory_order_seq_cst);
  if (ring_out_->send(*slot, frame)) {
    if (call->done()) ring_out_->calls->abandon(*slot);  // the thread that ended the call may not have seen `in_ring`
    return true;
  }
  call->in_ring.store(false, std::memory_order_release);
  ring_out_->calls->unreserve(*slot);
  return false;
}

/// Returns whether the callee has answered the call's slot, or another call has the slot by now.
bool Link::answered(const Call::State& call) const {
  const auto state = ring_out_->calls->state(call.slot);
  return state != CallRing::State::pending && state != CallRing::State::watched && state != CallRing::State::sleeping;
}

/// Takes the reply on the thread that waits for it.
void Link::take_as_waiter(Call::State& call) {
  if (!call.done()) {
    const auto* outer = std::exchange(reading_, this);
    take_ring_reply(call.shared_from_this());
    reading_ = outer;
  } else {
    ring_out_->calls->abandon(call.slot);  // finish() abandons the slot only if it sees `in_ring`
  }
  call.in_ring.store(false, std::memory_order_release);  // wait() now waits for the buffers as for a call by socket
}

bool Link::spin_wait(Call::State& call, std::chrono::nanoseconds at_least) {
  if (!call.in_ring.load(std::memory_order_acquire)) return call.done();
  call.spun = true;
  const auto sources = engine_->pool->sources();
  (void)ring_out_->spin.until([&] { return answered(call) || engine_->pool->unattended(*sources); }, at_least);
  if (answered(call)) take_as_waiter(call);
  return call.done();
}

/// Waits until the call's slot has been answered and its reply taken. False: interrupted, or `until` has passed.
bool Link::wait_in_ring(Call::State& call, std::optional<Clock::time_point> until,
                        const std::function<bool()>& interrupted) {
  const auto copying = std::min(call.device_time, Spin::most_for_devices());
  const bool found = call.spun ? answered(call) : ring_out_->spin.until([&] { return answered(call); }, copying);
  if (!found) {
    const auto over = [&] { return answered(call) || call.done(); };
    OversubscribedWait::Member waiting(ring_out_->oversubscribed);
    if (!waiting.until(over)) engine_->pool->about_to_block();
    while (!over()) {
      if (until && Clock::now() >= *until) return false;
      // The tick enforces the call's own deadline, because a timed sleep costs 2 us.
      if (!ring_out_->calls->sleep(call.slot, until) && interrupted && interrupted()) return false;
    }
  }
  take_as_waiter(call);
  return true;
}

// ---- Negotiation

/// Offers a ring to the peer on a local connection that this side dialled. Frames go by socket until the peer accepts.
void Link::offer_ring(const std::shared_ptr<FrameStream>& stream, const wire::Hello& hello) {
  if (!stream->local()) return no_ring_because("no unix socket connects this agent to the peer");
  if (!engine_->options.shared_memory) return no_ring_because("shared memory is switched off by this agent's options");
  const auto& bell = engine_->pool->doorbell();
  if (!bell.shareable()) return no_ring_because("this process cannot share memory");
  if ((hello.features & wire::feature::ring) == 0)
    return no_ring_because("the peer shares no memory, because of its options or its system");
  if (key_needed(unix_peer_uid(stream->fd()), ::geteuid())) return no_ring_because("the peer is another user's");
  std::uint64_t nonce = 0;
  fill_random(std::as_writable_bytes(std::span(&nonce, 1)));
  auto ring = CallRing::create(nonce);
  if (!ring) return no_ring_because(std::string(ring.status().what()));
  Descriptors descriptors;
  std::array<Result<FileDescriptor>, 2> shared{(*ring)->share(), bell.share()};
  for (auto& descriptor : shared) {
    if (!descriptor) return no_ring_because(std::string(descriptor.status().what()));
    descriptors.push_back(std::move(*descriptor));
  }
  {
    const std::lock_guard lock(ring_mutex_);
    ring_reason_ = "the peer has not mapped the memory yet";
    ring_offered_ = std::move(*ring);
    ring_nonce_ = nonce;
  }
  transmit(stream, ring_frame(offered, nonce, {}, 2), {}, true, std::move(descriptors));
  expect_replies();
}

Status Link::on_ring(FrameStream& stream, ByteView payload, Descriptors descriptors) {
  Reader in(payload);
  const auto operation = in.get<std::uint8_t>();
  const auto nonce = in.get<std::uint64_t>();
  if (in.failed()) return {Code::protocol_error, "malformed frame: the ring frame is truncated"};
  std::shared_ptr<FrameStream> incoming;
  bool have = false;
  {
    const std::lock_guard lock(connect_mutex_);
    incoming = incoming_;
    have = ring_in_ != nullptr;
  }
  if (incoming.get() == &stream) {
    if (operation != offered || descriptors.size() != 2 || have || !stream.local())
      return {Code::protocol_error, "a ring frame arrived out of order"};
    return on_ring_offered(incoming, nonce, std::move(descriptors));
  }
  std::shared_ptr<CallRing> ring;
  {
    const std::lock_guard lock(ring_mutex_);
    if (ring_nonce_ == nonce) ring = ring_offered_;
  }
  if (!ring) return {Code::protocol_error, "a ring frame answers an offer that was not made"};
  if (operation == declined) {
    no_ring_because("the peer: " + std::string(text_of(in.rest())));
    withdraw_ring();
    return {};
  }
  if (operation != accepted || descriptors.size() != 1)
    return {Code::protocol_error, "a ring frame arrived out of order"};
  auto bell = Doorbell::map(std::move(descriptors[0]));
  if (!bell) return bell.status();
  ring->close_descriptor();
  {
    const std::lock_guard lock(connect_mutex_);
    if (closed()) return {Code::connection_lost, "the link has ended"};
    ring_calls_.resize(CallRing::slots);
    ring_out_ = std::make_shared<OutgoingRing>(weak_from_this(), std::move(ring), std::move(*bell));
    ring_ready_.store(true, std::memory_order_release);
  }
  add_to_pool(ring_out_);
  withdraw_ring();
  return {};
}

/// Adds a ring to the pool. If the link has ended, removes it again: close() may have removed the link's rings before
/// this one was added.
void Link::add_to_pool(const std::shared_ptr<RequestSource>& source) {
  engine_->pool->add(source);
  if (closed()) engine_->pool->remove(source.get());
}

Status Link::on_ring_offered(const std::shared_ptr<FrameStream>& stream, std::uint64_t nonce, Descriptors descriptors) {
  const auto decline = [&](std::string_view why) {
    transmit(stream, ring_frame(declined, nonce, why, 0), {}, true);
    return Status();
  };
  if (!engine_->options.shared_memory) return decline("its options forbid shared memory");
  if (key_needed(unix_peer_uid(stream->fd()), ::geteuid())) return decline("it does not map memory of another user");
  const auto& bell = engine_->pool->doorbell();
  if (!bell.shareable()) return decline("it cannot share memory");
  auto ring = CallRing::map(std::move(descriptors[0]), nonce);
  if (!ring) return decline(ring.status().what());
  auto callers_bell = Doorbell::map(std::move(descriptors[1]));
  if (!callers_bell) return decline(callers_bell.status().what());
  auto mine = bell.share();
  if (!mine) return decline(mine.status().what());
  auto source = std::make_shared<IncomingRing>(weak_from_this(), std::move(*ring), std::move(*callers_bell));
  {
    const std::lock_guard lock(connect_mutex_);
    if (closed()) return {};
    ring_in_ = source;
  }
  add_to_pool(source);
  Descriptors back;
  back.push_back(std::move(*mine));
  transmit(stream, ring_frame(accepted, nonce, {}, 1), {}, true, std::move(back));
  return {};
}

void Link::no_ring_because(std::string reason) {
  const std::lock_guard lock(ring_mutex_);
  ring_reason_ = std::move(reason);
}

/// Drops the offered ring after the peer has answered the offer.
void Link::withdraw_ring() {
  const std::lock_guard lock(ring_mutex_);
  ring_offered_.reset();
}

bool Link::ring_settled() {
  if (ring_ready_) return true;
  const std::lock_guard lock(ring_mutex_);
  return !ring_reason_.empty() && !ring_offered_;
}

std::string Link::transport(std::string& why_no_ring) {
  if (ring_ready_) return "ring";
  const std::lock_guard lock(ring_mutex_);
  why_no_ring = ring_reason_;
  return local() ? "unix" : "tcp";
}

std::shared_ptr<FrameStream> Link::only_incoming() const {
  const std::lock_guard lock(connect_mutex_);
  return outgoing_ || dialling_ ? nullptr : incoming_;
}

bool Link::ended_by_peer() {
  auto ended = CallRing::Ended::no;
  if (ring_ready_.load(std::memory_order_acquire)) {
    ended = ring_out_->calls->ended();
  } else if (const auto stream = only_incoming()) {
    // Only the peer has dialled. If its connection has ended, so has this link: the next call needs a link to the
    // peer's next incarnation.
    pollfd state{stream->fd(), POLLRDHUP, 0};
    if (::poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLHUP)) != 0) ended = CallRing::Ended::otherwise;
  }
  if (ended == CallRing::Ended::no) return false;
  if (ended == CallRing::Ended::left) leaving_ = true;
  close({Code::connection_lost, "the peer closed the connection"});
  return true;
}

/// Called when the link has ended: removes its rings from the pool, tells the peer, and wakes the threads that sleep on
/// slots.
void Link::drop_rings() {
  std::shared_ptr<IncomingRing> in;
  bool out = false;
  {
    const std::lock_guard lock(connect_mutex_);
    in = ring_in_;
    out = ring_ready_.load(std::memory_order_acquire);
  }
  if (in) {
    in->end(engine_->leaving ? CallRing::Ended::left : CallRing::Ended::otherwise);
    engine_->pool->remove(in.get());
  }
  if (!out) return;
  engine_->pool->remove(ring_out_.get());
  ring_out_->calls->wake_all();
}

}  // namespace tensorferry
