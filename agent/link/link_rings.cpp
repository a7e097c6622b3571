// Calls through shared memory: the negotiation of a link's rings, and the requests in the incoming one.
#include <unistd.h>

#include <array>
#include <utility>

#include "agent/handshake/auth.h"
#include "agent/link/link.h"
#include "agent/or_end_link.h"
#include "base/log.h"
#include "base/out_of_memory.h"

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

bool Link::needs_executor(std::uint32_t number) const {
  const auto function = engine_->functions.find(number);
  return !function || function->options.executor;  // a name that is not known yet may need the executor
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
  auto stream = connections_.call_stream();
  std::shared_ptr<IncomingRing> ring;
  {
    const std::lock_guard lock(rings_.mutex);
    ring = rings_.in;
  }
  if (!stream || !ring) return {Code::connection_lost, "the link has ended"};
  return on_request(*frame, {std::move(stream), header->call, 0, std::move(ring), slot});
}

// ---- Negotiation

/// This side makes calls: offers the peer a ring for them, now or when the connection is up.
void Link::want_ring() {
  if (rings_.wanted.exchange(true)) return;
  if (const auto stream = outgoing()) offer_ring(stream);
}

/// Offers the peer a ring for this side's calls, once. Frames go by socket until the peer accepts.
void Link::offer_ring(const std::shared_ptr<FrameStream>& stream) {
  {
    const std::lock_guard lock(rings_.mutex);
    if (std::exchange(rings_.begun, true)) return;
  }
  if (!stream->local()) return no_ring_because("no unix socket connects this agent to the peer");
  if (!engine_->options.shared_memory) return no_ring_because("shared memory is switched off by this agent's options");
  const auto& bell = engine_->pool->doorbell();
  if (!bell.shareable()) return no_ring_because("this process cannot share memory");
  if (!rings_.peer_maps) return no_ring_because("the peer shares no memory, because of its options or its system");
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
    const std::lock_guard lock(rings_.mutex);
    rings_.reason = "the peer has not mapped the memory yet";
    rings_.offered = std::move(*ring);
    rings_.nonce = nonce;
  }
  transmit(stream, ring_frame(offered, nonce, {}, 2), {}, true, std::move(descriptors));
}

Status Link::on_ring(FrameStream& stream, ByteView payload, Descriptors descriptors) {
  Reader in(payload);
  const auto operation = in.get<std::uint8_t>();
  const auto nonce = in.get<std::uint64_t>();
  if (in.failed()) return {Code::protocol_error, "malformed frame: the ring frame is truncated"};
  const auto calls = connections_.call_stream();
  // At RLIMIT_NOFILE the system drops descriptors, and the frame comes without any.
  constexpr std::string_view dropped = "no descriptor came: this process, or the peer's, may have no more (ulimit -n)";
  if (operation == offered) {
    bool again = false;
    {
      const std::lock_guard lock(rings_.mutex);
      again = std::exchange(rings_.was_offered, true);
    }
    if ((!descriptors.empty() && descriptors.size() != 2) || again || !stream.local())
      return {Code::protocol_error, "a ring frame arrived out of order"};
    if (descriptors.empty()) {
      transmit(calls, ring_frame(declined, nonce, dropped, 0), {}, true, {});
      return {};
    }
    return on_ring_offered(calls, nonce, std::move(descriptors));
  }
  std::shared_ptr<CallRing> ring;
  {
    const std::lock_guard lock(rings_.mutex);
    if (rings_.nonce == nonce) ring = rings_.offered;
  }
  if (!ring) return {Code::protocol_error, "a ring frame answers an offer that was not made"};
  if (operation == declined) {
    no_ring_because("the peer: " + std::string(text_of(in.rest())));
    withdraw_ring();
    return {};
  }
  if (operation != accepted || descriptors.size() > 1)
    return {Code::protocol_error, "a ring frame arrived out of order"};
  if (descriptors.empty()) {
    no_ring_because(std::string(dropped));
    withdraw_ring();
    return {};
  }
  auto bell = Doorbell::map(std::move(descriptors[0]));
  if (!bell) return bell.status();
  ring->close_descriptor();
  {
    const std::lock_guard lock(rings_.mutex);
    if (closed()) return {Code::connection_lost, "the link has ended"};
    calls_.ring().open(std::make_shared<OutgoingRing>(weak_from_this(), std::move(ring), std::move(*bell)));
  }
  add_to_pool(calls_.ring().ring());
  withdraw_ring();
  note("calls go by shared memory");
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
    transmit(stream, ring_frame(declined, nonce, why, 0), {}, true, {});
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
    const std::lock_guard lock(rings_.mutex);
    if (closed()) return {};
    rings_.in = source;
    if (requests_held_) source->hold(true);
  }
  add_to_pool(source);
  Descriptors back;
  back.push_back(std::move(*mine));
  transmit(stream, ring_frame(accepted, nonce, {}, 1), {}, true, std::move(back));
  return {};
}

void Link::no_ring_because(std::string reason) {
  {
    const std::lock_guard lock(rings_.mutex);
    rings_.reason = std::move(reason);
  }
  connections_.notice_change();
}

/// Drops the offered ring after the peer has answered the offer.
void Link::withdraw_ring() {
  {
    const std::lock_guard lock(rings_.mutex);
    rings_.offered.reset();
  }
  connections_.notice_change();
}

bool Link::ring_settled() {
  if (calls_.ring().is_open()) return true;
  const std::lock_guard lock(rings_.mutex);
  return !rings_.reason.empty() && !rings_.offered;
}

std::string Link::transport(std::string& why_no_ring) {
  if (calls_.ring().is_open()) return "ring";
  const std::lock_guard lock(rings_.mutex);
  why_no_ring = rings_.reason;
  return local() ? "unix" : "tcp";
}

bool Link::ended_by_peer() {
  auto ended = CallRing::Ended::no;
  if (calls_.ring().is_open()) {
    ended = calls_.ring().ring()->memory->ended();
  } else if (const auto stream = rings_.wanted ? nullptr : connections_.call_stream();
             stream && stream->port().ended()) {
    // No thread may have noticed yet, and this side's first call needs a link to the peer's next incarnation.
    ended = CallRing::Ended::otherwise;
  }
  if (ended == CallRing::Ended::no) return false;
  if (ended == CallRing::Ended::left) leaving_ = true;
  close_after_peer({Code::connection_lost, "the peer closed the connection"});
  return true;
}

/// Called when the link has ended: removes its rings from the pool, tells the peer, and wakes the threads that sleep on
/// slots.
void Link::drop_rings() {
  std::shared_ptr<IncomingRing> in;
  bool out = false;
  {
    const std::lock_guard lock(rings_.mutex);
    in = rings_.in;
    out = calls_.ring().is_open();
  }
  if (in) {
    in->end(engine_->leaving ? CallRing::Ended::left : CallRing::Ended::otherwise);
    engine_->pool->remove(in.get());
  }
  if (!out) return;
  engine_->pool->remove(calls_.ring().ring().get());
  calls_.ring().ring()->memory->wake_all();
}

}  // namespace tensorferry
