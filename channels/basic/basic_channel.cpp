#include "channels/basic/basic_channel.h"

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "base/mutex.h"
#include "base/record.h"
#include "base/text.h"
#include "channels/completion.h"
#include "channels/empty_buffer.h"
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
using BasicTicket = std::variant<EmptyBuffer, Appended, InBulk>;

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
      return Ticket{.bytes = 0, .opaque = encode(EmptyBuffer{})};
    }
    if (buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    if (message.appends() && (buffer.bytes < BasicDriver::bulk_from || message.leads())) {
      message.append(buffer, std::move(released));
      return Ticket{.bytes = buffer.bytes, .opaque = encode(Appended{})};
    }
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
    const auto* bulk = parsed ? std::get_if<InBulk>(&*parsed) : nullptr;  // appended bytes go only with their message
    if (bulk != nullptr && end().ok()) wire_.control(encode(Dropped{bulk->sequence, ticket.bytes}), {});
  }

  void control(ByteView message, Descriptors) override {
    const auto dropped = decode<Dropped>(message);
    if (!dropped || !end().ok()) return;
    if (dropping_->fetch_add(1) >= most_dropped_at_once) {
      dropping_->fetch_sub(1);
      return;
    }
    wire_.receive_bulk(dropped->sequence, nowhere(dropped->bytes),
                       [dropping = dropping_](Status) { dropping->fetch_sub(1); });
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

  void receive(const BasicTicket& parsed, Buffer destination, Completion landed) {
    if (std::holds_alternative<EmptyBuffer>(parsed)) return complete(std::move(landed), {});
    if (const auto* bulk = std::get_if<InBulk>(&parsed))
      return wire_.receive_bulk(bulk->sequence, std::move(destination), std::move(landed));
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
  std::shared_ptr<std::atomic<int>> dropping_ = std::make_shared<std::atomic<int>>(0);
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
