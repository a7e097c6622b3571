/// Fuzzes the records of the `ibv` channel, and both ends of a channel on a host without cards; either end may be
/// hostile. The input makes up tickets, control messages and descriptors. Each completion must run once, the two ends
/// must decide alike whether they reach each other, and each record must survive encoding and decoding. So must the
/// records of `cuda_gdr`, which add to those of `ibv`.
///
/// Connected queue pairs need cards: tests/channels/ibv_hostile_test.cpp is hostile to those.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "channels/completion.h"
#include "channels/cuda_gdr/messages.h"
#include "channels/ibv/ibv_channel.h"
#include "channels/ibv/messages.h"
#include "channels/rdma/local_cards.h"
#include "tests/fuzz/channel_end.h"

namespace tensorferry::ibv {
namespace {

using fuzzing::must;
constexpr std::size_t most_bytes = std::size_t{64} << 10;
constexpr std::size_t most_steps = 50;

/// Keeps what is received until the end.
class FuzzWire final : public Wire {
 public:
  ControlId control(Bytes message, Descriptors) override {
    must(decode<Control>(message).has_value());
    return ++controls_;
  }
  void read(Buffer, Completion) override { std::abort(); }
  void send_bulk(std::uint64_t, Buffer, Completion) override { std::abort(); }  // nothing is offered
  void receive_bulk(std::uint64_t, Buffer, Completion landed) override { pending_.push_back(std::move(landed)); }
  void ready(Status probed) override { must(!probed.ok()); }
  [[nodiscard]] std::string_view peer() const override { return "peer"; }

  void end() {
    for (auto& landed : std::exchange(pending_, {})) complete(std::move(landed), Status(Code::connection_lost, "end"));
  }

 private:
  ControlId controls_ = 0;
  std::vector<Completion> pending_;
};

void fuzz(Driver& driver, Reader& in) {
  fuzzing::Promises promises;
  FuzzWire wire;
  const auto end = driver.open(wire, {});
  std::vector<Ticket> honest;
  fuzzing::FuzzSink sink(most_bytes, false);
  for (std::size_t step = 0; step < most_steps && !in.empty(); ++step) {
    const auto choice = in.get<std::uint8_t>();
    switch (choice % 6) {
      case 0:
        fuzzing::offer_from(in, *end, {false, (choice & 0x20) != 0}, Sharing::by_value, most_bytes, promises, honest);
        must(honest.empty());  // without a card nothing is offered
        break;
      case 1:
      case 2:
        end->pull(fuzzing::ticket_from<IbvTicket>(in, honest), sink, promises.make(), promises.make());
        break;
      case 3:
        end->withdraw(fuzzing::ticket_from<IbvTicket>(in, honest));
        break;
      case 4:
        end->control(fuzzing::message_from<Control>(in, (choice & 0x40) != 0), {});
        break;
      default:
        if (in.get<std::uint8_t>() % 8 == 0) end->close(Status(Code::connection_lost, "by the input"));
        break;
    }
  }
  end->close(Status(Code::connection_lost, "at the end"));
  wire.end();
}

/// Whichever ports two ends have, both pair them alike.
void fuzz_pairing(ByteView one, ByteView other) {
  const auto ours = decode<rdma::PortList>(one), theirs = decode<rdma::PortList>(other);
  if (!ours || !theirs) return;
  for (const auto& [mine, peer] : rdma::pair_ports(ours->ports, theirs->ports)) {
    must(rdma::can_reach(ours->ports.at(mine), theirs->ports.at(peer)));
    must(rdma::can_reach(theirs->ports.at(peer), ours->ports.at(mine)));
  }
}

}  // namespace
}  // namespace tensorferry::ibv

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  ::setenv("TENSORFERRY_LIBIBVERBS", "/dev/null", 1);  // the same on every machine: no card
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  static IbvDriver driver;
  Reader in(std::as_bytes(std::span(data, size)));
  const auto mine = in.sized(), theirs = in.sized();
  fuzzing::fuzz_records<rdma::PortList, cuda_gdr::Control, cuda_gdr::CudaGdrTicket>(mine);
  const bool here = driver.reaches(mine, theirs).has_value(), there = driver.reaches(theirs, mine).has_value();
  fuzzing::must(here == there);
  ibv::fuzz_pairing(mine, theirs);
  ibv::fuzz(driver, in);
  return 0;
}
