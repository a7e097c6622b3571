#include "channels/cuda_basic/carried_chunks.h"

#include <mutex>
#include <optional>
#include <variant>

#include "base/text.h"
#include "channels/completion.h"

namespace tensorferry::cuda_basic {
namespace {

Status link_gone() { return {Code::connection_lost, "the link has ended"}; }

/// A chunk is a message of its own, without a frame behind which bytes could follow.
struct ChunkMessage final : Outgoing {
  [[nodiscard]] bool appends() const override { return false; }
  void append(Buffer, Completion written) override {
    complete(std::move(written), {Code::cancelled, "no bytes follow a chunk's message"});
  }
  [[nodiscard]] bool last_resort() const override { return true; }  // so a buffer's short last chunk goes by it too
};

/// Gives a chunk its place, which is known already.
struct ChunkSink final : Sink {
  explicit ChunkSink(const Buffer& place) : into(place) {}
  std::optional<Buffer> reserve(std::size_t bytes) override {
    return bytes == into.bytes ? std::optional(into) : std::nullopt;
  }
  bool adopt(Buffer) override { return false; }
  [[nodiscard]] bool adopts() const override { return false; }

  const Buffer into;
};

}  // namespace

std::string CarriedChunks::carrier() const {
  std::string name;
  wire_->with([&](Wire& wire) { name = wire.carrier().name; });
  return name;
}

void CarriedChunks::send(std::uint64_t number, const Buffer& bytes, const End& sent) {
  Status closed;
  {
    const std::lock_guard lock(mutex_);
    closed = closed_;
    if (closed.ok()) sent_[number].end = sent;
  }
  if (!closed.ok()) return sent(closed);
  if (!wire_->with([&](Wire& wire) { tell(wire, number, bytes); })) released(number, link_gone());
}

/// Offers the chunk to the carrier, or sends it as bulk data, and tells the peer.
void CarriedChunks::tell(Wire& wire, std::uint64_t number, const Buffer& bytes) {
  const auto over = [self = shared_from_this(), number](const Status& status) { self->released(number, status); };
  auto by = wire.carrier();
  Ticket ticket;
  if (by.channel != nullptr) {
    ChunkMessage message;
    auto offer = by.channel->offer(bytes, Sharing::by_value, message, over);
    if (auto* taken = std::get_if<Ticket>(&offer))
      ticket = std::move(*taken);
    else
      by = {};
  }
  const ChunkOffer chunk{number, std::string(by.name), ticket.opaque};
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = sent_.find(number); it != sent_.end()) {
      it->second.carrier = by.channel;
      it->second.ticket = std::move(ticket);
      it->second.told = true;
    }
  }
  if (by.channel == nullptr)
    wire.send_bulk(number, bytes, over);
  else
    wire.carried(by.name, bytes.bytes, 0);
  wire.control(encode(chunk), {});
}

void CarriedChunks::on(const ChunkRead& read) {
  Channel* carrier = nullptr;
  Ticket ticket;
  {
    const std::lock_guard lock(mutex_);
    const auto it = sent_.find(read.number);
    if (it == sent_.end() || !it->second.told || it->second.read) return;
    it->second.read = true;
    carrier = it->second.carrier;
    ticket = std::move(it->second.ticket);
  }
  if (carrier != nullptr) carrier->acknowledged(ticket);
  end_if_over(read.number, {});
}

void CarriedChunks::released(std::uint64_t number, const Status& status) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto it = sent_.find(number); it != sent_.end()) it->second.released = true;
  }
  end_if_over(number, status);
}

/// Ends a chunk that nothing reads any more, if its receiver has answered or will not.
void CarriedChunks::end_if_over(std::uint64_t number, const Status& status) {
  End end;
  Status outcome = status;
  {
    const std::lock_guard lock(mutex_);
    const auto it = sent_.find(number);
    if (it == sent_.end() || !it->second.released) return;
    if (!it->second.read && status.ok() && closed_.ok()) return;
    if (!it->second.read && status.ok()) outcome = closed_;
    end = std::move(it->second.end);
    sent_.erase(it);
  }
  end(outcome);
}

void CarriedChunks::receive(std::uint64_t number, const Buffer& into, const End& received) {
  Status closed;
  std::optional<ChunkOffer> chunk;
  {
    const std::lock_guard lock(mutex_);
    closed = closed_;
    if (auto node = told_.extract(number))
      chunk = std::move(node.mapped());
    else if (closed.ok())
      awaited_.emplace(number, Awaited{into, received});
  }
  if (chunk) return fetch(*chunk, into, received);
  if (!closed.ok()) received(closed);
}

bool CarriedChunks::is_offered(std::uint64_t number) const {
  const std::lock_guard lock(mutex_);
  return told_.contains(number);
}

Status CarriedChunks::on(ChunkOffer chunk) {
  Awaited awaited;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_.ok()) return {};
    auto node = awaited_.extract(chunk.number);
    if (node.empty()) {
      if (told_.size() == most) return {Code::protocol_error, "too many chunks are offered at a time"};
      const auto number = chunk.number;
      if (!told_.try_emplace(number, std::move(chunk)).second)
        return {Code::protocol_error, "a chunk is offered twice"};
      return {};
    }
    awaited = std::move(node.mapped());
  }
  fetch(chunk, awaited.into, awaited.received);
  return {};
}

void CarriedChunks::fetch(const ChunkOffer& chunk, const Buffer& into, const End& received) {
  const auto number = chunk.number;
  const auto landed = [received](const Status& status) { received(status); };
  const auto consumed = [self = shared_from_this(), number](const Status&) { self->answer(number); };
  const bool there = wire_->with([&](Wire& wire) {
    if (chunk.carrier.empty()) {
      return wire.receive_bulk(number, into, [landed, consumed](const Status& status) {
        consumed(status);
        landed(status);
      });
    }
    const auto by = wire.carrier_named(chunk.carrier);
    if (by.channel == nullptr) {
      return landed({Code::protocol_error,
                     formatted("{} sends by \"{}\", which carries nothing to this end", wire.peer(), chunk.carrier)});
    }
    const Ticket ticket{.bytes = into.bytes, .opaque = chunk.ticket, .acknowledge = true};
    if (into.data == nullptr) {
      by.channel->discard(ticket);
      consumed({});
      return landed({});
    }
    wire.carried(by.name, 0, into.bytes);
    const auto sink = std::make_shared<ChunkSink>(into);
    by.channel->pull(
        ticket, *sink, [sink, landed](const Status& status) { landed(status); }, consumed);
  });
  if (!there) landed(link_gone());
}

void CarriedChunks::answer(std::uint64_t number) {
  wire_->with([&](Wire& wire) { wire.control(encode(ChunkRead{number}), {}); });
}

void CarriedChunks::close(const Status& status) {
  std::map<std::uint64_t, Awaited> awaited;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_.ok()) return;
    closed_ = status;
    told_.clear();
    awaited.swap(awaited_);
  }
  for (const auto& [number, each] : awaited) each.received(status);
  // No chunk is added any more. The list of them would need memory.
  for (auto next = next_sent(0); next; next = next_sent(*next + 1)) end_if_over(*next, {});
}

/// Returns the number of the first chunk from `least` on that was sent and is not over.
std::optional<std::uint64_t> CarriedChunks::next_sent(std::uint64_t least) {
  const std::lock_guard lock(mutex_);
  const auto it = sent_.lower_bound(least);
  return it != sent_.end() ? std::optional(it->first) : std::nullopt;
}

}  // namespace tensorferry::cuda_basic
