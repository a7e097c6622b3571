/// What the fuzzers of channels hand to a channel: completions, memory, messages, and tickets.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "base/status.h"
#include "channels/channel.h"
#include "channels/completion.h"
#include "tests/fuzz/record_input.h"

namespace tensorferry::fuzzing {

/// Makes completions that must run exactly once. Aborts if one runs twice; the destructor aborts if one has not run.
class Promises {
 public:
  ~Promises() {
    for (const auto& runs : runs_) must(*runs == 1);
  }
  Completion make() {
    auto runs = std::make_shared<int>(0);
    runs_.push_back(runs);
    return [runs](const Status&) { must(++*runs == 1); };
  }
  void forget_last() { runs_.pop_back(); }  // after a refused offer, which drops its completion without running it

 private:
  std::vector<std::shared_ptr<int>> runs_;
};

/// Returns memory of exactly `bytes` bytes, so that a sanitizer sees an access beyond them. Returns nullopt if `bytes`
/// exceeds `most`.
inline std::optional<Buffer> memory_of(std::size_t bytes, std::size_t most) {
  if (bytes > most) return std::nullopt;
  std::shared_ptr<std::byte[]> memory(new std::byte[bytes]);
  return Buffer{Device{}, memory.get(), bytes, nullptr, std::move(memory)};
}

/// A message of a channel's caller. The channel must append to it only if `appends`.
class FuzzOutgoing final : public Outgoing {
 public:
  FuzzOutgoing(bool appends, bool last_resort) : appends_(appends), last_resort_(last_resort) {}
  [[nodiscard]] bool appends() const override { return appends_; }
  void append(Buffer, Completion written) override {
    must(appends_);
    complete(std::move(written), {});
  }
  [[nodiscard]] bool last_resort() const override { return last_resort_; }

 private:
  const bool appends_, last_resort_;
};

/// Provides memory of exactly the size that it is asked for. The channel must lend memory only if `adopts`.
class FuzzSink final : public Sink {
 public:
  FuzzSink(std::size_t most, bool adopts) : most_(most), adopts_(adopts) {}
  std::optional<Buffer> reserve(std::size_t bytes) override { return memory_of(bytes, most_); }
  bool adopt(Buffer) override {
    must(adopts_);
    return true;
  }

 private:
  const std::size_t most_;
  const bool adopts_;
};

/// Offers a buffer of up to `most` bytes, all 2. Keeps the ticket in `tickets`.
inline void offer_from(Reader& in, Channel& channel, FuzzOutgoing message, Sharing sharing, std::size_t most,
                       Promises& promises, std::vector<Ticket>& tickets) {
  auto buffer = *memory_of(in.varint() % (most + 1), most);
  std::memset(buffer.data, 2, buffer.bytes);
  auto offer = channel.offer(buffer, sharing, message, promises.make());
  if (auto* ticket = std::get_if<Ticket>(&offer)) return tickets.push_back(std::move(*ticket));
  promises.forget_last();
}

/// Returns one of the honest tickets, unchanged or with one byte changed, or a ticket that the input makes up.
template <WireMessage Content>
Ticket ticket_from(Reader& in, const std::vector<Ticket>& honest) {
  Ticket ticket;
  const auto way = in.get<std::uint8_t>();
  if (honest.empty() || way % 4 == 0) {
    ticket.bytes = in.varint();
    ticket.opaque = message_from<Content>(in, way >= 0x80);
  } else {
    ticket = honest[in.get<std::uint8_t>() % honest.size()];
    if (way % 4 == 1 && !ticket.opaque.empty())
      ticket.opaque[in.get<std::uint8_t>() % ticket.opaque.size()] ^= std::byte{in.get<std::uint8_t>()};
  }
  round_trip<Content>(ticket.opaque);
  return ticket;
}

}  // namespace tensorferry::fuzzing
