// Fuzzes both ends of a `spool` channel: either may be hostile. The input makes up tickets and control messages, or
// changes those of the other end on their way. No read may leave its memory, and each completion must run once.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include "spool_channel.h"

using namespace tensorferry;

namespace {

constexpr std::uint64_t most_bytes = std::uint64_t{64} << 10;

/// Returns memory of exactly `bytes` bytes, so that a sanitizer sees an access beyond them.
Buffer memory_of(std::uint64_t bytes) {
  std::shared_ptr<std::byte[]> memory(new std::byte[bytes]);
  std::memset(memory.get(), 2, bytes);
  return {Device{}, memory.get(), bytes, nullptr, memory};
}

class FuzzSink final : public Sink {
 public:
  std::optional<Buffer> reserve(std::size_t bytes) override {
    if (bytes > most_bytes) return std::nullopt;
    return memory_of(bytes);
  }
  bool adopt(Buffer) override { std::abort(); }
};

/// Keeps an end's control messages until the input delivers them. `spool` uses no other function of the wire.
class FuzzWire final : public Wire {
 public:
  ControlId control(Bytes message, Descriptors) override { return mail.push_back(std::move(message)), ++controls_; }
  void read(Buffer, Completion) override { std::abort(); }
  void send_bulk(std::uint64_t, Buffer, Completion) override { std::abort(); }
  void receive_bulk(std::uint64_t, Buffer, Completion) override { std::abort(); }
  void ready(Status) override {}
  [[nodiscard]] std::string_view peer() const override { return "peer"; }
  std::deque<Bytes> mail;

 private:
  ControlId controls_ = 0;
};

class FuzzOutgoing final : public Outgoing {
 public:
  [[nodiscard]] bool appends() const override { return true; }
  void append(Buffer, Completion) override { std::abort(); }
  [[nodiscard]] bool last_resort() const override { return true; }
};

/// Returns an honest ticket, unchanged or with one byte changed, or one that the input makes up.
Ticket ticket_from(Reader& in, const std::vector<Ticket>& honest) {
  Ticket ticket;
  const auto way = in.get<std::uint8_t>();
  if (honest.empty() || way % 4 == 0) {
    ticket.bytes = in.varint();
    const auto opaque = in.sized();
    ticket.opaque.assign(opaque.begin(), opaque.end());
    return ticket;
  }
  ticket = honest[in.get<std::uint8_t>() % honest.size()];
  if (way % 4 == 1) ticket.opaque[in.get<std::uint8_t>() % ticket.opaque.size()] ^= std::byte{in.get<std::uint8_t>()};
  return ticket;
}

void fuzz(Driver& driver, Reader& in) {
  std::array<FuzzWire, 2> wires;
  const std::array<std::unique_ptr<Channel>, 2> ends{driver.open(wires[0], {}), driver.open(wires[1], {})};
  std::vector<Ticket> honest;
  std::deque<int> runs;  // of each completion
  const auto completion = [&runs] { return [&count = runs.emplace_back(0)](const Status&) { ++count; }; };
  FuzzSink sink;
  FuzzOutgoing message;
  for (int step = 0; step < 100 && !in.empty(); ++step) {
    const auto choice = in.get<std::uint8_t>();
    const std::size_t side = choice >> 7;
    auto& channel = *ends[side];
    switch (choice % 8) {
      case 0: {
        const auto offer =
            channel.offer(memory_of(in.varint() % (most_bytes + 1)), Sharing::by_value, message, completion());
        if (const auto* ticket = std::get_if<Ticket>(&offer)) {
          honest.push_back(*ticket);
        } else {
          runs.pop_back();  // a refusal drops the completion without running it
        }
        break;
      }
      case 1:
      case 2: {
        auto landed = completion();
        channel.pull(ticket_from(in, honest), sink, std::move(landed), completion());
        break;
      }
      case 3: {  // the agent calls both with tickets of this end alone, but the channel cannot rely on their order
        if (honest.empty()) break;
        const auto& ticket = honest[in.get<std::uint8_t>() % honest.size()];
        (choice & 0x40) != 0 ? channel.withdraw(ticket) : channel.acknowledged(ticket);
        break;
      }
      case 4:
        channel.discard(ticket_from(in, honest));
        break;
      case 5: {  // delivers the other end's next message, unchanged or with one byte changed
        auto& mail = wires[1 - side].mail;
        if (mail.empty()) break;
        auto next = std::move(mail.front());
        mail.pop_front();
        if ((choice & 0x40) != 0) next[in.get<std::uint8_t>() % next.size()] ^= std::byte{in.get<std::uint8_t>()};
        channel.control(next, {});
        break;
      }
      case 6:
        channel.control(in.sized(), {});
        break;
      default:
        if (in.get<std::uint8_t>() % 8 == 0) channel.close({Code::connection_lost, "by the input"});
        break;
    }
  }
  for (const auto& end : ends) end->close({Code::connection_lost, "at the end"});
  for (const int count : runs) {
    if (count != 1) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  Reader in(std::as_bytes(std::span(data, size)));
  SpoolDriver driver("/tmp", 2 * most_bytes);
  const auto mine = std::get<Bytes>(driver.descriptor({}));
  (void)driver.reaches(mine, in.sized());
  fuzz(driver, in);
  return 0;
}
