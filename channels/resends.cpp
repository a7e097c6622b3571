#include "channels/resends.h"

#include <utility>

#include "channels/completion.h"

namespace tensorferry {

void Resends::ask(Wire& wire, std::uint64_t offer, Buffer memory, Completion landed, Completion consumed) {
  const std::uint64_t bytes = memory.bytes;
  const auto sequence = asked_.fetch_add(1, std::memory_order_relaxed) + 1;
  wire.receive_bulk(sequence, std::move(memory),
                    [landed = std::move(landed), consumed = std::move(consumed)](const Status& status) mutable {
                      complete(std::move(landed), std::move(consumed), status);
                    });
  wire.control(encode(Resend{sequence, offer, bytes}), {});
}

void Resends::answer(Wire& wire, const Resend& resend) {
  const auto source = offers_->begin_copy(resend.offer, resend.bytes);
  if (!source.ok()) return;
  Buffer buffer;  // without an owner: the offer keeps the source until end_copy
  buffer.data = source->buffer.data;
  buffer.bytes = resend.bytes;
  wire.send_bulk(resend.sequence, std::move(buffer),
                 [offers = offers_, offer = resend.offer](const Status&) { offers->end_copy(offer); });
}

}  // namespace tensorferry
