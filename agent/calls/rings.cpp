#include "agent/calls/rings.h"

#include <optional>
#include <utility>

#include "agent/or_end_link.h"

namespace tensorferry {

// ---- The caller's side

bool OutgoingRing::send(SlotId slot, ByteView frame) {
  if (!memory->push(slot, frame)) return false;
  callee_->ring();
  return true;
}

bool OutgoingRing::serve_one() {
  const auto link = link_.lock();
  bool any = false;
  // Bounded, because a peer that breaks the protocol may list slots without end.
  for (std::uint32_t i = 0; i < CallRing::slots && link && !link->closed() && memory->any_done(); ++i) {
    std::optional<SlotId> slot;
    {
      const std::unique_lock lock(collect_mutex_, std::try_to_lock);
      if (!lock) return any;
      slot = memory->next_done();
    }
    or_end_link(*link, [&] {
      if (slot) link->on_ring_reply(*slot);
    });
    any = true;
  }
  return any;
}

// ---- The callee's side

bool IncomingRing::needs_executor() {
  const auto number = calls_->peek_function();
  const auto link = number ? link_.lock() : nullptr;
  return link && link->needs_executor(*number);
}

bool IncomingRing::serve_one() {
  thread_local const auto buffer = std::make_unique<std::array<std::byte, CallRing::most_request>>();
  bool valid = true;
  const auto request = calls_->pop(*buffer, valid);
  if (!request && valid) return false;
  const auto link = link_.lock();
  if (!link) return true;
  if (request) peer_cpu_.store(request->cpu, std::memory_order_relaxed);
  or_end_link(*link, [&] {
    auto status = request ? link->on_ring_request(ByteView(*buffer).first(request->bytes), request->slot)
                          : Status(Code::protocol_error, "the shared memory of the ring has invalid contents");
    if (!status.ok()) link->fail(status);
  });
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

}  // namespace tensorferry
