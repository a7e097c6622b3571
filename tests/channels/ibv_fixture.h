/// Two ends of `ibv` in one process, on emulated cards or real ones, and the cards that a test may break.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "channels/ibv/ibv_channel.h"
#include "channels/ibv/messages.h"
#include "channels/pinned_bytes.h"
#include "tests/channels/card_link.h"
#include "tests/channels/cards_of_ends.h"

namespace tensorferry::conformance {

/// Returns why there are no cards; "": there are. Looks once, because GoogleTest asks for the traits again for each
/// case.
inline const std::string& missing() {
  static const std::string reason = [] {
    const auto descriptor = IbvDriver().descriptor({});
    const auto* refusal = std::get_if<Refusal>(&descriptor);
    return refusal != nullptr ? refusal->reason : std::string();
  }();
  return reason;
}

/// Returns the driver of end 0 or end 1, which perhaps has a card of its own (card_of_end).
inline std::unique_ptr<IbvDriver> driver_of_end(std::size_t end, ibv::IbvOptions options) {
  if (const auto card = rdma::card_of_end(end); !card.empty()) {
    if (!options.rdma) options.rdma.emplace();
    options.rdma->devices = card;
  }
  return std::make_unique<IbvDriver>(std::move(options));
}

inline constexpr std::size_t kilobyte = 1 << 10;
inline constexpr std::size_t megabyte = 1 << 20;

inline ibv::KeyedSource source_of(const Ticket& ticket) {
  return std::get<ibv::KeyedSource>(decode<ibv::IbvTicket>(ticket.opaque).value());
}

class Ibv : public CardLink {
 protected:
  void SetUp() override {
    if (const auto& reason = missing(); !reason.empty()) GTEST_SKIP() << reason;
    memory = cpu_memory();
    connect({});
  }
  void TearDown() override {
    disconnect();
    if (cards.registered_bytes != nullptr) {
      EXPECT_EQ(cards.registered_bytes(), 0U);
      EXPECT_EQ(cards.queue_pairs(), 0U);
    }
    EXPECT_EQ(pinned_bytes().load(), 0U);
  }
  void connect(const ibv::IbvOptions& options) {
    disconnect();
    one = driver_of_end(0, options);
    other = driver_of_end(1, options);
    pair = std::make_unique<WirePair>(*one, *other, DevicePair{}, *memory, *memory);
    wait_until_usable();
  }
  void disconnect() {
    pair.reset();
    one.reset();
    other.reset();
  }
  bool usable() { return a().wait_ready()->ok() && b().wait_ready()->ok(); }

  using CardLink::expect_carries;
  void expect_carries(std::size_t bytes, std::uint32_t seed) { expect_carries(memory->filled(bytes, seed), seed); }

  /// Returns the ticket of an offer that is withdrawn at once.
  Ticket offered(std::size_t bytes) {
    Letter letter(a());
    EXPECT_TRUE(letter.offer(memory->filled(bytes, 1))) << letter.refusal;
    return letter.tickets.empty() ? Ticket() : letter.tickets.front();
  }
  /// Returns whether both ends take offers at this moment.
  bool carries_now() {
    for (auto* end : {&a(), &b()}) {
      Letter letter(*end);
      if (!letter.offer(memory->filled(megabyte, 1))) return false;
    }
    return true;
  }
  /// Returns the ports that a large buffer is offered through; 0 if it is refused.
  std::size_t lanes_of(WireEnd& end) {
    Letter letter(end);
    return letter.offer(memory->filled(10 * megabyte, 1)) ? source_of(letter.tickets.front()).keys.size() : 0;
  }
  std::size_t lanes() { return std::min(lanes_of(a()), lanes_of(b())); }
  void fail_a_queue_pair() { EXPECT_EQ(cards.fail_queue_pairs(1), 1U); }
  static std::uint64_t address_of(const Buffer& buffer) { return reinterpret_cast<std::uintptr_t>(buffer.data); }

  std::unique_ptr<IbvDriver> one, other;
};

}  // namespace tensorferry::conformance
