#include "channels/basic/basic_channel.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "base/text.h"
#include "channels/completion.h"

namespace tensorferry {

namespace {

/// First byte of a ticket.
enum class SentBy : std::uint8_t {
  nothing = 0,   // the buffer is empty
  appended = 1,  // the bytes follow the frame
  bulk = 2,      // + varint: the sequence of the bytes on the bulk connection
};

struct BasicTicket {
  SentBy by;
  std::uint64_t sequence;
};

Ticket ticket_of(std::size_t bytes, BasicTicket parsed) {
  Ticket ticket{.bytes = bytes, .opaque = {}};
  Writer out(ticket.opaque);
  out.put(parsed.by);
  if (parsed.by == SentBy::bulk) out.varint(parsed.sequence);
  return ticket;
}

std::optional<BasicTicket> parse(const Ticket& ticket) {
  Reader in(ticket.opaque);
  const auto by = in.get<std::uint8_t>();
  if (in.failed() || by > static_cast<std::uint8_t>(SentBy::bulk)) return std::nullopt;
  BasicTicket parsed{static_cast<SentBy>(by), 0};
  if (parsed.by == SentBy::bulk) parsed.sequence = in.varint();
  if (in.failed() || !in.empty() || (parsed.by == SentBy::nothing) != (ticket.bytes == 0)) return std::nullopt;
  return parsed;
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
      return ticket_of(0, {SentBy::nothing, 0});
    }
    if (buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    if (message.appends() && (buffer.bytes < BasicDriver::bulk_from || message.leads())) {
      message.append(buffer, std::move(released));
      return ticket_of(buffer.bytes, {SentBy::appended, 0});
    }
    const auto sequence = next_sequence_.fetch_add(1, std::memory_order_relaxed);
    wire_.send_bulk(sequence, buffer, std::move(released));
    return ticket_of(buffer.bytes, {SentBy::bulk, sequence});
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    if (auto ended = end(); !ended.ok()) return fail(std::move(landed), std::move(consumed), ended);
    const auto parsed = parse(ticket);
    if (!parsed) {
      return fail(std::move(landed), std::move(consumed),
                  Status(Code::protocol_error, formatted("{} sent a ticket that basic cannot read", wire_.peer())));
    }
    auto destination = sink.reserve(ticket.bytes);
    if (!destination || destination->bytes < ticket.bytes) {
      // The bytes come anyway: reads and drops them, so that the stream stays in step.
      receive(*parsed, nowhere(ticket.bytes), std::move(consumed));
      return complete(std::move(landed),
                      Status(Code::resource_exhausted,
                             formatted("no memory for a buffer of {} bytes from {}", ticket.bytes, wire_.peer())));
    }
    destination->bytes = ticket.bytes;
    receive(*parsed, std::move(*destination),
            [landed = std::move(landed), consumed = std::move(consumed)](Status status) mutable {
              complete(std::move(landed), status);
              complete(std::move(consumed), std::move(status));
            });
  }

  void discard(const Ticket& ticket) override {
    const auto parsed = parse(ticket);
    if (parsed && end().ok()) receive(*parsed, nowhere(ticket.bytes), [](Status) {});
  }

  void acknowledged(const Ticket&) override {}  // `released` ran, or will run, when the bytes are written

  void withdraw(const Ticket& ticket) override {
    const auto parsed = parse(ticket);
    if (!parsed || parsed->by != SentBy::bulk || !end().ok()) return;  // appended bytes go only with their message
    Bytes dropped;
    Writer out(dropped);
    out.varint(parsed->sequence);
    out.varint(ticket.bytes);
    wire_.control(std::move(dropped), {});
  }

  /// Handles the channel's only control message, of a withdrawn ticket: reads and drops the bulk data of this sequence
  /// and size.
  void control(ByteView message, Descriptors) override {
    Reader in(message);
    const auto sequence = in.varint();
    const auto bytes = in.varint();
    if (in.failed() || !in.empty() || bytes == 0 || !end().ok()) return;
    if (dropping_->fetch_add(1) >= most_dropped_at_once) {
      dropping_->fetch_sub(1);
      return;
    }
    wire_.receive_bulk(sequence, nowhere(bytes), [dropping = dropping_](Status) { dropping->fetch_sub(1); });
  }

  void close(Status status) noexcept override {
    std::lock_guard lock(mutex_);
    if (closed_.load(std::memory_order_relaxed)) return;
    end_ = std::move(status);
    closed_.store(true, std::memory_order_release);
  }

 private:
  /// Bounds the memory that a peer can take here by withdrawing buffers that it never sent.
  static constexpr int most_dropped_at_once = 1 << 16;

  void receive(BasicTicket parsed, Buffer destination, Completion landed) {
    switch (parsed.by) {
      case SentBy::nothing:
        return complete(std::move(landed), {});
      case SentBy::appended:
        return wire_.read(std::move(destination), std::move(landed));
      case SentBy::bulk:
        return wire_.receive_bulk(parsed.sequence, std::move(destination), std::move(landed));
    }
  }

  static void fail(Completion landed, Completion consumed, const Status& status) {
    complete(std::move(landed), status);
    complete(std::move(consumed), status);
  }

  /// Returns Ok until close(), then the reason why the link has ended.
  Status end() {
    if (!closed_.load(std::memory_order_acquire)) return {};
    std::lock_guard lock(mutex_);
    return end_.ok() ? Status(Code::connection_lost, "the link has ended") : end_;
  }

  Wire& wire_;
  std::atomic<std::uint64_t> next_sequence_{1};
  std::shared_ptr<std::atomic<int>> dropping_ = std::make_shared<std::atomic<int>>(0);
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
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
