#include "agent/calls/ring_calls.h"

#include <array>
#include <new>
#include <utility>

#include "agent/pool/pool.h"
#include "base/out_of_memory.h"
#include "base/text.h"
#include "channels/copy.h"

namespace tensorferry {
namespace {

Status too_long() { return {Code::protocol_error, "a reply in shared memory is longer than its slot"}; }

}  // namespace

void RingCalls::open(std::shared_ptr<OutgoingRing> ring) {
  ring_ = std::move(ring);
  open_.store(true, std::memory_order_release);
}

bool RingCalls::send(const std::shared_ptr<Call::State>& call, ByteView frame) {
  if (!is_open() || call->options.order != 0) return false;
  const auto slot = ring_->memory->reserve();
  if (!slot) return false;
  call->place.slot = *slot;
  {
    const std::lock_guard lock(mutex_);
    if (calls_.size() <= slot->index) calls_.resize(slot->index + 1);  // low indices come first
    calls_[slot->index] = call;
  }
  call->place.in_ring.store(true, std::memory_order_seq_cst);
  if (ring_->send(*slot, frame)) {
    if (call->done()) give_up_slot(*call);  // the thread that ended the call may not have seen `in_ring`
    return true;
  }
  call->place.in_ring.store(false, std::memory_order_release);
  ring_->memory->unreserve(*slot);
  return false;
}

void RingCalls::on_done(SlotId slot) {
  std::shared_ptr<Call::State> call;
  {
    const std::lock_guard lock(mutex_);
    if (slot.index < calls_.size()) call = calls_[slot.index].lock();
  }
  if (call && call->place.slot.generation == slot.generation) take(call);
}

void RingCalls::poll(Call::State& call) {
  const auto state = ring_->memory->state(call.place.slot);
  if (state == CallRing::State::full || state == CallRing::State::by_socket) take(call.shared_from_this());
}

void RingCalls::expect_reply(Call::State& call) {
  if (!ring_->memory->watch(call.place.slot)) poll(call);
}

void RingCalls::take(const std::shared_ptr<Call::State>& call) {
  const auto status = read_or_say_why(call);
  if (status.ok()) return;
  owner_.fail(call, owner_.end_link(status));
}

/// Takes the reply out of the call's slot, unless another thread has taken it, and handles it. If the reply comes by
/// socket, frees the slot. An error: the slot holds no valid reply, and the caller
/// of this function must end the call.
Status RingCalls::read(const std::shared_ptr<Call::State>& call) {
  const auto state = ring_->memory->state(call->place.slot);
  if (state == CallRing::State::by_socket) {
    call->place.in_ring.store(false, std::memory_order_release);
    ring_->memory->take_by_socket(call->place.slot);
    return {};
  }
  ring_->spin.met(ring_->memory->cpu_of(call->place.slot));
  bool valid = true;
  const auto bytes = ring_->memory->take(call->place.slot, valid);
  if (!valid) return too_long();
  return bytes ? handle(*call, *bytes) : Status();
}

/// read(), with an error if it has no memory: the reply may be lost then, so the link ends.
Status RingCalls::read_or_say_why(const std::shared_ptr<Call::State>& call) noexcept {
  try {
    return read(call);
  } catch (const std::bad_alloc&) {
    out_of_memory::release_reserve();
    return out_of_memory::status();
  }
}

/// Handles a reply that was taken out of the call's slot.
Status RingCalls::handle(const Call::State& call, ByteView reply) {
  if (reply.size() < wire::Header::size)
    return {Code::protocol_error, "a reply in shared memory is shorter than a header"};
  const auto header = wire::Header::decode(reply.first(wire::Header::size));
  if (!header) return header.status();
  if (header->kind != wire::Kind::reply || header->trailing != 0 || header->call != call.place.id)
    return {Code::protocol_error, "a frame in a reply's slot is not the reply to its call"};
  auto frame = wire::Frame::decode(*header, reply.subspan(wire::Header::size));
  if (!frame) return frame.status();
  if (!frame->releases.empty()) owner_.acknowledged(frame->releases);
  return owner_.on_reply(nullptr, *frame);
}

void RingCalls::take_all() {
  if (!is_open()) return;
  for (const auto& call : owner_.all()) {
    if (!call->place.in_ring.load(std::memory_order_acquire) || !answered(*call)) continue;
    if (const auto status = read_or_say_why(call); !status.ok()) owner_.fail(call, status);
  }
}

bool RingCalls::taken(const Call::State& call) const {
  if (!call.place.in_ring.load(std::memory_order_acquire) || !ring_->memory->taken(call.place.slot)) return false;
  return call.place.in_ring.load(std::memory_order_acquire);  // false now: the reply comes by socket
}

void RingCalls::call_ended(const Call::State& call) {
  if (call.place.in_ring.load(std::memory_order_acquire)) give_up_slot(call);
}

/// Gives up the slot of a call that has ended. If the reply has come already, handles it as a late one: the callee
/// holds the buffers that it names until this side has read or refused them.
void RingCalls::give_up_slot(const Call::State& call) {
  // The callee must not take the call for cancelled: what it creates is asked for again over the next link.
  if (call.idempotence.may_come_again && owner_.link_closed()) return;
  bool valid = true;
  const auto reply = ring_->memory->abandon(call.place.slot, valid);
  if (owner_.link_closed()) return;  // the buffers' channels have ended
  const auto status = !valid ? too_long() : reply ? handle(call, *reply) : Status();
  if (!status.ok()) (void)owner_.end_link(status);
}

/// Returns whether the callee has answered the call's slot, or another call has the slot by now.
bool RingCalls::answered(const Call::State& call) const {
  const auto state = ring_->memory->state(call.place.slot);
  return state != CallRing::State::pending && state != CallRing::State::watched && state != CallRing::State::sleeping;
}

/// Takes the reply on the thread that waits for it.
void RingCalls::take_as_waiter(Call::State& call) {
  if (!call.done()) {
    take(call.shared_from_this());
  } else {
    give_up_slot(call);  // call_ended() gives the slot up only if it sees `in_ring`
  }
  call.place.in_ring.store(false, std::memory_order_release);  // a wait for the buffers is as for a call by socket
}

bool RingCalls::spin_wait(Call::State& call, std::chrono::nanoseconds at_least) {
  if (!call.place.in_ring.load(std::memory_order_acquire)) return call.done();
  call.wait.spun = true;
  const auto sources = pool_.sources();
  (void)ring_->spin.until([&] { return answered(call) || pool_.unattended(*sources); }, at_least);
  if (answered(call)) take_as_waiter(call);
  return call.done();
}

/// Returns whether the callee may copy this call's bytes, or as many of its own, by two threads: a waiter that spins
/// would keep the core of the second one.
static bool two_threads_may_copy_for(const Call::State& call) {
  return call.cost.device_time.count() == 0 && call.cost.bytes >= Copier::shares_from;
}

/// Estimates how long the callee copies, if its reply has as many bytes as the call.
static std::chrono::nanoseconds reply_copy_of(const Call::State& call) {
  constexpr std::size_t bytes_a_ns = 8;  // out of another core's cache
  return std::chrono::nanoseconds(call.cost.device_time.count() == 0 ? call.cost.bytes / bytes_a_ns : 0);
}

bool RingCalls::wait(Call::State& call, std::optional<Clock::time_point> until,
                     const std::function<bool()>& interrupted) {
  const auto on_device = std::min(call.cost.device_time, Spin::most_for_devices());
  const bool spins = !call.wait.spun && !two_threads_may_copy_for(call);
  const auto has_answer = [&] { return answered(call); };
  const bool found = spins ? ring_->spin.until(has_answer, on_device, reply_copy_of(call)) : has_answer();
  if (!found) {
    const auto over = [&] { return answered(call) || call.done(); };
    OversubscribedWait::Member waiting(ring_->oversubscribed);
    std::optional<WaitInHandler> place;
    if (!waiting.until(over)) place.emplace();
    bool slept = false;
    while (!over()) {
      bool stopped = until && clock_.now() >= *until;
      if (!stopped) {
        // The tick enforces the call's own deadline, because a timed sleep costs 2 us.
        slept = true;
        stopped = !ring_->memory->sleep(call.place.slot, until, clock_) && interrupted && interrupted();
      }
      if (!stopped) continue;
      if (slept) ring_->memory->stop_sleeping(call.place.slot);
      expect_reply(call);  // the next tick may be far off
      return false;
    }
  }
  take_as_waiter(call);
  return true;
}

std::string RingCalls::state_text(const Call::State& call) const {
  if (!call.place.in_ring) return {};
  constexpr std::array states{"free",     "pending",   "a thread sleeps", "watched by the pool",
                              "answered", "by socket", "given up",        "answered late"};
  const auto state = static_cast<std::size_t>(ring_->memory->state(call.place.slot));
  return formatted("in slot {}: {}", call.place.slot.index, states[state % states.size()]);
}

}  // namespace tensorferry
