#include "channels/basic/basic_channel.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "base/mutex.h"
#include "base/record.h"
#include "base/text.h"
#include "channels/completion.h"
#include "channels/empty_buffer.h"
#include "channels/joined_ends.h"
#include "channels/reserve.h"

namespace tensorferry {

namespace {

struct Appended {  // the bytes follow the frame
  static constexpr std::uint8_t tag = 1;
};
struct InBulk {  // the bytes go on the bulk connection
  static constexpr std::uint8_t tag = 2;
  std::uint64_t sequence = 0;
  static constexpr std::tuple fields{varint(&InBulk::sequence)};
};
/// The bytes go on the bulk connections in pieces, which have `piece` bytes each, and the last one what is left. Their
/// sequences count up from `first`, so the ticket says where each belongs, and the pieces do not.
struct InPieces {
  static constexpr std::uint8_t tag = 3;
  std::uint64_t first = 0;
  std::uint64_t piece = 0;
  static constexpr std::tuple fields{varint(&InPieces::first), varint(&InPieces::piece)};

  /// Returns how many pieces a buffer has; 0: none that a sender makes.
  [[nodiscard]] std::uint64_t count(std::uint64_t bytes) const {
    if (piece < BasicDriver::piece_bytes || bytes <= piece) return 0;  // smaller ones would cost more than they carry
    const auto pieces = (bytes - 1) / piece + 1;
    const auto most = std::min<std::uint64_t>(BasicDriver::most_pieces, ~std::uint64_t{0} - first);
    return pieces <= most ? pieces : 0;
  }
};
using BasicTicket = std::variant<EmptyBuffer, Appended, InBulk, InPieces>;

/// The only control message: bulk data of a withdrawn ticket, which the receiver reads and drops.
struct Dropped {
  std::uint64_t sequence = 0;
  std::uint64_t bytes = 0;
  static constexpr std::tuple fields{varint(&Dropped::sequence), varint(&Dropped::bytes)};
  [[nodiscard]] bool valid() const { return bytes != 0; }
};

std::optional<BasicTicket> parse(const Ticket& ticket) {
  auto parsed = decode<BasicTicket>(ticket.opaque);
  if (parsed && std::holds_alternative<EmptyBuffer>(*parsed) != (ticket.bytes == 0)) parsed.reset();
  const auto* pieces = parsed ? std::get_if<InPieces>(&*parsed) : nullptr;
  if (pieces != nullptr && pieces->count(ticket.bytes) == 0) parsed.reset();
  return parsed;
}

/// Calls `with(sequence, part of the buffer)` for each piece. A buffer without memory has parts without memory.
template <class With>
void for_each_piece(const InPieces& pieces, const Buffer& buffer, const With& with) {
  auto part = buffer;
  auto sequence = pieces.first;
  for (std::uint64_t left = buffer.bytes; left != 0; left -= part.bytes) {
    part.bytes = std::min(pieces.piece, left);
    with(sequence++, part);
    if (part.data != nullptr) part.data += part.bytes;
  }
}

/// Returns a function that makes a completion for each of `count` works; the last one completes `all`.
auto joining(std::uint64_t count, Completion all) {
  struct Joined {
    Joined(std::uint64_t works, Completion completion) : ends(works), all(std::move(completion)) {}
    JoinedEnds ends;
    Completion all;
  };
  return [joined = std::make_shared<Joined>(count, std::move(all))]() -> Completion {
    return [joined](const Status& status) {
      if (auto end = joined->ends.one_ended(status)) complete(std::move(joined->all), std::move(*end));
    };
  };
}

/// Returns a destination for which the wire reads the bytes and drops them.
Buffer nowhere(std::uint64_t bytes) {
  Buffer buffer;
  buffer.bytes = bytes;
  return buffer;
}

class BasicChannel final : public Channel {
 public:
  explicit BasicChannel(Wire& wire) : wire_(wire) {}

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) override {
    if (closed_.load(std::memory_order_acquire)) return Refusal{formatted("the link to {} has ended", wire_.peer())};
    if (sharing == Sharing::shared) return Refusal{"basic copies bytes and cannot share them"};
    if (buffer.device.type != DeviceType::cpu)
      return Refusal{formatted("basic carries CPU memory, not {}", text_of(buffer.device))};
    if (buffer.bytes == 0) {
      complete(std::move(released), {});
      return Ticket{.bytes = 0, .opaque = encode(EmptyBuffer{})};
    }
    if (buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    if (message.appends() && (buffer.bytes < BasicDriver::bulk_from || message.leads())) {
      message.append(buffer, std::move(released));
      return Ticket{.bytes = buffer.bytes, .opaque = encode(Appended{})};
    }
    if (buffer.bytes >= BasicDriver::pieces_from && wire_.splits_bulk())
      return offer_in_pieces(buffer, std::move(released));
    const auto sequence = next_sequence_.fetch_add(1, std::memory_order_relaxed);
    wire_.send_bulk(sequence, buffer, std::move(released));
    return Ticket{.bytes = buffer.bytes, .opaque = encode(InBulk{sequence})};
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    if (auto ended = end(); !ended.ok()) return complete(std::move(landed), std::move(consumed), ended);
    const auto parsed = parse(ticket);
    if (!parsed) {
      return complete(std::move(landed), std::move(consumed),
                      Status(Code::protocol_error, formatted("{} sent a ticket that basic cannot read", wire_.peer())));
    }
    auto destination = reserve(sink, ticket.bytes, {}, wire_.peer());
    if (!destination.ok()) {
      // The bytes come anyway: reads and drops them, so that the stream stays in step.
      receive(*parsed, nowhere(ticket.bytes), std::move(consumed));
      return complete(std::move(landed), destination.status());
    }
    receive(*parsed, std::move(*destination),
            [landed = std::move(landed), consumed = std::move(consumed)](const Status& status) mutable {
              complete(std::move(landed), std::move(consumed), status);
            });
  }

  void discard(const Ticket& ticket) override {
    const auto parsed = parse(ticket);
    if (parsed && end().ok()) receive(*parsed, nowhere(ticket.bytes), [](Status) {});
  }

  void acknowledged(const Ticket&) override {}  // `released` ran, or will run, when the bytes are written

  void withdraw(const Ticket& ticket) override {
    const auto parsed = parse(ticket);
    if (!parsed || !end().ok()) return;
    const auto drop = [this](std::uint64_t sequence, const Buffer& part) {
      wire_.control(encode(Dropped{sequence, part.bytes}), {});
    };
    // Appended bytes go only with their message.
    if (const auto* bulk = std::get_if<InBulk>(&*parsed)) drop(bulk->sequence, nowhere(ticket.bytes));
    if (const auto* pieces = std::get_if<InPieces>(&*parsed)) for_each_piece(*pieces, nowhere(ticket.bytes), drop);
  }

  void control(ByteView message, Descriptors) override {
    const auto dropped = decode<Dropped>(message);
    // A peer may withdraw what it never sent. The wire bounds what it keeps of that, and ends the link beyond.
    if (dropped && end().ok()) wire_.receive_bulk(dropped->sequence, nowhere(dropped->bytes), [](Status) {});
  }

  void close(Status status) noexcept override {
    std::lock_guard lock(mutex_);
    if (closed_.load(std::memory_order_relaxed)) return;
    end_ = std::move(status);
    closed_.store(true, std::memory_order_release);
  }

 private:
  Ticket offer_in_pieces(const Buffer& buffer, Completion released) {
    constexpr std::uint64_t unit = std::uint64_t{1} << 20;
    const auto least = (buffer.bytes - 1) / BasicDriver::most_pieces + 1;
    InPieces pieces{0, std::max<std::uint64_t>(BasicDriver::piece_bytes, (least + unit - 1) / unit * unit)};
    const auto count = pieces.count(buffer.bytes);
    pieces.first = next_sequence_.fetch_add(count, std::memory_order_relaxed);
    const auto written = joining(count, std::move(released));
    for_each_piece(pieces, buffer,
                   [&](std::uint64_t sequence, Buffer part) { wire_.send_bulk(sequence, std::move(part), written()); });
    return {.bytes = buffer.bytes, .opaque = encode(pieces)};
  }

  void receive(const BasicTicket& parsed, Buffer destination, Completion landed) {
    if (std::holds_alternative<EmptyBuffer>(parsed)) return complete(std::move(landed), {});
    if (const auto* bulk = std::get_if<InBulk>(&parsed))
      return wire_.receive_bulk(bulk->sequence, std::move(destination), std::move(landed));
    if (const auto* pieces = std::get_if<InPieces>(&parsed)) {
      const auto one_landed = joining(pieces->count(destination.bytes), std::move(landed));
      return for_each_piece(*pieces, destination, [&](std::uint64_t sequence, Buffer part) {
        wire_.receive_bulk(sequence, std::move(part), one_landed());
      });
    }
    wire_.read(std::move(destination), std::move(landed));
  }

  /// Returns Ok until close(), then the reason why the link has ended.
  Status end() {
    if (!closed_.load(std::memory_order_acquire)) return {};
    std::lock_guard lock(mutex_);
    return end_.ok() ? Status(Code::connection_lost, "the link has ended") : end_;
  }

  Wire& wire_;
  std::atomic<std::uint64_t> next_sequence_{1};
  std::atomic<bool> closed_{false};
  Mutex mutex_;
  Status end_;
};

}  // namespace

std::variant<Bytes, Refusal> BasicDriver::descriptor(Device device) {
  if (device.type != DeviceType::cpu) return Refusal{formatted("basic carries CPU memory, not {}", text_of(device))};
  return Bytes{};
}

std::optional<Refusal> BasicDriver::reaches(ByteView, ByteView) { return std::nullopt; }  // every link carries bytes

std::unique_ptr<Channel> BasicDriver::open(Wire& wire, DevicePair) {
  auto channel = std::make_unique<BasicChannel>(wire);
  wire.ready({});
  return channel;
}

}  // namespace tensorferry
