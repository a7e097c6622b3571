/// Fuzzes both ends of a `shm` channel; either may be hostile. The input makes up tickets and control messages or
/// changes them on their way, and writes arbitrary values into the words that both ends have mapped. The channel must
/// stay within its memory, each completion must run once, and each record must survive encoding and decoding.
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "base/shared_memory.h"
#include "channels/region.h"
#include "channels/shm/layout.h"
#include "channels/shm/shm_channel.h"
#include "tests/fuzz/channel_end.h"

namespace tensorferry::shm {
namespace {

using fuzzing::must;
constexpr std::size_t most_bytes = std::size_t{200} << 10;
constexpr std::size_t most_steps = 100;
constexpr std::size_t most_memory = std::size_t{1} << 20;  // of a forged message

struct Mail {
  Bytes message;
  Descriptors descriptors;
};

/// Returns the size of the memory whose descriptor comes with a control message.
std::uint64_t memory_with(const Control& control) {
  if (const auto* segment = std::get_if<Segment>(&control)) return segment->geometry.bytes();
  if (const auto* handover = std::get_if<Handover>(&control)) return handover->bytes;
  return Ledger::bytes;
}

/// A wire that keeps the end's control messages until the input delivers them, and maps the memory that they carry.
class FuzzWire final : public Wire {
 public:
  ControlId control(Bytes message, Descriptors descriptors) override {
    const auto parsed = decode<Control>(message);
    must(parsed.has_value());
    for (const auto& descriptor : descriptors) {
      FileDescriptor copy(::fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0));
      auto memory = SharedMemory::map(std::move(copy), memory_with(*parsed));
      must(memory.ok());
      mapped.push_back(std::move(*memory));
    }
    mail.push_back({std::move(message), std::move(descriptors)});
    return ++controls_;
  }
  void read(Buffer, Completion) override { std::abort(); }
  void send_bulk(std::uint64_t, Buffer, Completion) override { std::abort(); }
  void receive_bulk(std::uint64_t, Buffer, Completion) override { std::abort(); }
  void ready(Status) override {}
  [[nodiscard]] std::string_view peer() const override { return "peer"; }

  std::deque<Mail> mail;
  std::vector<SharedMemory> mapped;

 private:
  ControlId controls_ = 0;
};

struct FuzzSink final : Sink {
  explicit FuzzSink(bool may_adopt) : adopts(may_adopt) {}
  std::optional<Buffer> reserve(std::size_t bytes) override {
    auto memory = fuzzing::memory_of(bytes, most_bytes);
    if (memory) buffer = *memory;
    return memory;
  }
  bool adopt(Buffer lent) override {
    if (adopts) buffer = std::move(lent);
    return adopts;
  }
  const bool adopts;
  Buffer buffer;
};

/// Returns a completion that counts its runs in `runs`, and aborts if it runs twice.
Completion counted(const std::shared_ptr<int>& runs) {
  return [runs](Status) { must(++*runs == 1); };
}

void change_a_byte(Reader& in, Bytes& bytes) {
  const auto at = in.get<std::uint8_t>();
  const auto with = in.get<std::uint8_t>();
  if (at < bytes.size()) bytes[at] ^= std::byte{with};
}

class Fuzz {
 public:
  explicit Fuzz(Reader& in) : in_(in) {}
  ~Fuzz() {
    for (auto* channel : {a_.get(), b_.get()}) channel->close(Status(Code::connection_lost, "end"));
  }

  void step() {
    switch (in_.get<std::uint8_t>() % 12) {
      case 0:
      case 1:
        return offer();
      case 2:
      case 3:
        return pull();
      case 4:
      case 5:
        return deliver(a_wire_, *b_, false);
      case 6:
        return deliver(b_wire_, *a_, false);
      case 7:
        return deliver(in_.get<std::uint8_t>() % 2 ? a_wire_ : b_wire_, in_.get<std::uint8_t>() % 2 ? *a_ : *b_, true);
      case 8:
        return write_words();
      case 9:
        if (!held_.empty()) held_.erase(held_.begin() + in_.get<std::uint8_t>() % static_cast<int>(held_.size()));
        return;
      case 10:
        return forge();
      default:
        return end_a_ticket();
    }
  }

 private:
  void offer() {
    fuzzing::FuzzOutgoing message(false, true);
    const auto bytes = in_.varint() % (most_bytes + 1);
    const bool shares = in_.get<std::uint8_t>() % 4 == 0;
    std::vector<std::byte> own(bytes, std::byte{2});
    auto lent = Regions::of_this_process().make(shares ? bytes : 0);
    const Buffer buffer = lent.ok() ? *lent : Buffer{Device{}, own.data(), bytes, nullptr, nullptr};
    auto runs = std::make_shared<int>(0);
    auto offer = a_->offer(buffer, shares ? Sharing::shared : Sharing::by_value, message, counted(runs));
    const auto* ticket = std::get_if<Ticket>(&offer);
    must(*runs == (ticket != nullptr ? 1 : 0));
    if (ticket == nullptr) return;
    tickets_.push_back(*ticket);
    if (lent.ok() && in_.get<std::uint8_t>() % 2) held_.push_back(*lent);
  }

  Ticket ticket() {
    Ticket ticket;
    const auto way = tickets_.empty() ? std::uint8_t{0} : in_.get<std::uint8_t>();
    if (way % 4 != 0) {
      ticket = tickets_[in_.get<std::uint8_t>() % tickets_.size()];
      if (in_.get<std::uint8_t>() % 2) change_a_byte(in_, ticket.opaque);
    } else {
      ticket.opaque = fuzzing::message_from<ShmTicket>(in_, way >= 0x80);
      ticket.bytes = in_.varint();
    }
    fuzzing::round_trip<ShmTicket>(ticket.opaque);
    return ticket;
  }

  void pull() {
    FuzzSink sink(in_.get<std::uint8_t>() % 4 != 0);
    auto landed = std::make_shared<int>(0), consumed = std::make_shared<int>(0);
    b_->pull(ticket(), sink, counted(landed), counted(consumed));
    must(*landed == 1 && *consumed == 1);
    if (sink.buffer.bytes == 0) return;
    sink.buffer.data[0] = std::byte{3};
    sink.buffer.data[sink.buffer.bytes - 1] = std::byte{4};
    held_.push_back(std::move(sink.buffer));
  }

  void deliver(FuzzWire& from, Channel& to, bool changed) {
    if (from.mail.empty()) return;
    auto mail = std::move(from.mail.front());
    from.mail.pop_front();
    if (changed) change_a_byte(in_, mail.message);
    fuzzing::round_trip<Control>(mail.message);
    to.control(mail.message, std::move(mail.descriptors));
  }

  /// Sends a control message that the input makes up, with the memory that belongs to it or without.
  void forge() {
    const auto choice = in_.get<std::uint8_t>();
    const bool from_a = choice % 2 == 0;
    const auto message = fuzzing::message_from<Control>(in_, choice >= 0x80);
    Descriptors descriptors;
    const auto control = decode<Control>(message);
    if (control && (choice & 0x40) != 0 && memory_with(*control) <= most_memory) {
      auto memory = SharedMemory::create(memory_with(*control));
      must(memory.ok());
      descriptors.push_back(*memory->share());
      (from_a ? a_wire_ : b_wire_).mapped.push_back(std::move(*memory));
    }
    (from_a ? b_ : a_)->control(message, std::move(descriptors));
  }

  void write_words() {
    auto& mapped = in_.get<std::uint8_t>() % 4 ? a_wire_.mapped : b_wire_.mapped;
    if (mapped.empty()) return;
    auto& memory = mapped[in_.get<std::uint8_t>() % mapped.size()];
    const auto words = memory.bytes() / sizeof(std::uint64_t);
    if (words == 0) return;                      // memory that came with a forged message
    const auto back = in_.get<std::uint16_t>();  // the words that matter: a segment's end, a ledger's beginning
    const auto at = memory.bytes() == Ledger::bytes ? back % words : words - 1 - back % words;
    word_at(memory, at * sizeof(std::uint64_t))
        .store(in_.get<std::uint8_t>() % 2 ? in_.varint() : in_.get<std::uint64_t>());
  }

  void end_a_ticket() {
    switch (in_.get<std::uint8_t>() % 8) {
      case 0:
        return (in_.get<std::uint8_t>() % 2 ? a_ : b_)->close(Status(Code::cancelled, "by the input"));
      case 1:
      case 2:
        return b_->discard(ticket());
      case 3:
        return a_->acknowledged(ticket());
      default:
        return a_->withdraw(ticket());
    }
  }

  Reader& in_;
  FuzzWire a_wire_, b_wire_;
  ShmDriver a_driver_, b_driver_;
  std::unique_ptr<Channel> a_ = a_driver_.open(a_wire_, {});
  std::unique_ptr<Channel> b_ = b_driver_.open(b_wire_, {});
  std::vector<Ticket> tickets_;
  std::vector<Buffer> held_;
};

}  // namespace
}  // namespace tensorferry::shm

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  Reader in(std::as_bytes(std::span(data, size)));
  static ShmDriver driver;
  static const auto mine = std::get<Bytes>(driver.descriptor({}));
  (void)driver.reaches(mine, in.sized());
  shm::Fuzz fuzz(in);
  for (std::size_t step = 0; step < shm::most_steps && !in.empty(); ++step) fuzz.step();
  return 0;
}
