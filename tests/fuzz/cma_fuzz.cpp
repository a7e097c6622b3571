/// Fuzzes both ends of a `cma` channel; either may be hostile. The input makes up tickets, control messages and
/// descriptors, or changes them on their way. A pull may read any address. Each completion must run once, the channel
/// must send only offered sources, and each record must survive encoding and decoding.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "channels/cma/cma_channel.h"
#include "channels/cma/messages.h"
#include "tests/fuzz/channel_end.h"

namespace tensorferry::cma {
namespace {

using fuzzing::must;
constexpr std::size_t most_bytes = std::size_t{64} << 10;
constexpr std::size_t most_steps = 100;

/// A wire that keeps the end's control messages until the input delivers them. Its bulk receives complete at the end.
class FuzzWire final : public Wire {
 public:
  ControlId control(Bytes message, Descriptors) override {
    must(decode<Control>(message).has_value());
    mail.push_back(std::move(message));
    return ++controls_;
  }
  void read(Buffer, Completion) override { std::abort(); }
  void send_bulk(std::uint64_t, Buffer buffer, Completion written) override {
    must(std::all_of(buffer.data, buffer.data + buffer.bytes, [](std::byte each) { return each == std::byte{2}; }));
    complete(std::move(written), {});
  }
  void receive_bulk(std::uint64_t, Buffer, Completion landed) override { pending_.push_back(std::move(landed)); }
  void ready(Status) override {}
  [[nodiscard]] std::string_view peer() const override { return "peer"; }

  void end() {
    for (auto& landed : std::exchange(pending_, {})) complete(std::move(landed), Status(Code::connection_lost, "end"));
  }
  std::deque<Bytes> mail;

 private:
  ControlId controls_ = 0;
  std::vector<Completion> pending_;
};

void fuzz(Driver& driver, Reader& in) {
  fuzzing::Promises promises;
  FuzzWire wires[2];
  std::unique_ptr<Channel> ends[2] = {driver.open(wires[0], {}), driver.open(wires[1], {})};
  std::vector<Ticket> honest;
  fuzzing::FuzzSink sink(most_bytes, false);
  for (std::size_t step = 0; step < most_steps && !in.empty(); ++step) {
    const auto choice = in.get<std::uint8_t>();
    const int side = choice >> 7;
    auto& channel = *ends[side];
    switch (choice % 8) {
      case 0:
        fuzzing::offer_from(in, channel, {false, (choice & 0x20) != 0},
                            (choice & 0x70) == 0x70 ? Sharing::shared : Sharing::by_value, most_bytes, promises,
                            honest);
        break;
      case 1:
      case 2:
        channel.pull(fuzzing::ticket_from<CmaTicket>(in, honest), sink, promises.make(), promises.make());
        break;
      case 3:
        channel.acknowledged(fuzzing::ticket_from<CmaTicket>(in, honest));
        break;
      case 4:
        channel.withdraw(fuzzing::ticket_from<CmaTicket>(in, honest));
        break;
      case 5: {  // delivers the other end's next message, unchanged or with one byte changed
        auto& mail = wires[1 - side].mail;
        if (mail.empty()) break;
        auto message = std::move(mail.front());
        mail.pop_front();
        if ((choice & 0x40) != 0) message[in.get<std::uint8_t>() % message.size()] ^= std::byte{in.get<std::uint8_t>()};
        channel.control(message, {});
        break;
      }
      case 6: {
        channel.control(fuzzing::message_from<Control>(in, (choice & 0x40) != 0), {});
        break;
      }
      default:
        if (in.get<std::uint8_t>() % 8 == 0) channel.close(Status(Code::connection_lost, "by the input"));
        break;
    }
  }
  for (auto& end : ends) end->close(Status(Code::connection_lost, "at the end"));
  for (auto& wire : wires) wire.end();
}

}  // namespace
}  // namespace tensorferry::cma

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  Reader in(std::as_bytes(std::span(data, size)));
  CmaDriver driver(cma::CmaOptions{.within_process = true});
  const auto mine = driver.descriptor({});
  const auto theirs = in.sized();
  fuzzing::fuzz_records<cma::CmaDescriptor>(theirs);
  if (const auto* bytes = std::get_if<Bytes>(&mine)) (void)driver.reaches(*bytes, theirs);
  cma::fuzz(driver, in);
  return 0;
}
