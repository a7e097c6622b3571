/// Fuzzes `basic` and `xth` with tickets, control messages and descriptors of a hostile peer, mixed with honest
/// tickets, in any order. The channel must stay within its memory, and each completion must run once.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "channels/basic/basic_channel.h"
#include "channels/xth/directory.h"
#include "channels/xth/xth_channel.h"
#include "tests/fuzz/channel_end.h"

namespace tensorferry {
namespace {

constexpr std::size_t most_bytes = std::size_t{1} << 20;

/// A wire that completes reads at once or when the link ends; the input chooses.
class FuzzWire final : public Wire {
 public:
  ControlId control(Bytes, Descriptors) override { return ++controls_; }
  void read(Buffer destination, Completion landed) override { take(std::move(destination), std::move(landed)); }
  void send_bulk(std::uint64_t, Buffer, Completion written) override { complete(std::move(written), {}); }
  void receive_bulk(std::uint64_t, Buffer destination, Completion landed) override {
    take(std::move(destination), std::move(landed));
  }
  void ready(Status) override {}
  [[nodiscard]] std::string_view peer() const override { return "peer"; }

  void end() {
    for (auto& landed : std::exchange(pending_, {})) complete(std::move(landed), Status(Code::connection_lost, "end"));
  }
  bool completes_at_once = true;

 private:
  void take(Buffer destination, Completion landed) {
    if (!completes_at_once) return pending_.push_back(std::move(landed));
    if (destination.data != nullptr) std::memset(destination.data, 1, destination.bytes);
    complete(std::move(landed), {});
  }
  ControlId controls_ = 0;
  std::vector<Completion> pending_;
};

void fuzz(Driver& driver, Reader& in) {
  fuzzing::Promises promises;
  FuzzWire a_wire, b_wire;
  auto a = driver.open(a_wire, {});
  auto b = driver.open(b_wire, {});
  std::vector<Ticket> honest;
  fuzzing::FuzzSink sink(most_bytes, true);
  for (int step = 0; step < 200 && !in.empty(); ++step) {
    const auto choice = in.get<std::uint8_t>();
    auto& channel = choice & 0x80 ? *a : *b;
    a_wire.completes_at_once = b_wire.completes_at_once = (choice & 0x40) != 0;
    switch (choice % 8) {
      case 0:
        fuzzing::offer_from(in, channel, {(choice & 0x20) != 0, true},
                            choice & 0x10 ? Sharing::shared : Sharing::by_value, most_bytes, promises, honest);
        break;
      case 1:
      case 2:
        channel.pull(fuzzing::ticket_from<xth::XthTicket>(in, honest), sink, promises.make(), promises.make());
        break;
      case 3:
        channel.discard(fuzzing::ticket_from<xth::XthTicket>(in, honest));
        break;
      case 4:
        channel.acknowledged(fuzzing::ticket_from<xth::XthTicket>(in, honest));
        break;
      case 5:
        channel.withdraw(fuzzing::ticket_from<xth::XthTicket>(in, honest));
        break;
      case 6:
        channel.control(in.sized(), {});
        break;
      default:
        if (in.get<std::uint8_t>() % 8 == 0) channel.close(Status(Code::connection_lost, "by the input"));
        break;
    }
  }
  for (auto* channel : {a.get(), b.get()}) channel->close(Status(Code::connection_lost, "at the end"));
  a_wire.end();
  b_wire.end();
}

}  // namespace
}  // namespace tensorferry

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  Reader in(std::as_bytes(std::span(data, size)));
  BasicDriver basic;
  XthDriver xth;
  Driver& driver = in.get<std::uint8_t>() % 2 == 0 ? static_cast<Driver&>(basic) : xth;
  const auto mine = std::get<Bytes>(driver.descriptor({}));
  (void)driver.reaches(mine, in.sized());
  fuzz(driver, in);
  return 0;
}
