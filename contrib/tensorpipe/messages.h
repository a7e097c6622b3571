/// The descriptor, control messages and ticket of the tensorpipe channel, and the metadata of its pipes: the channel's
/// wire protocol. Knows nothing of TensorPipe itself.
///
/// Two ends fit if version and device type are the same and they belong to two agents. The end with the smaller secret
/// (its first word counts first) dials a pipe; equal secrets end the pair. Each end's first message on the pipe has no
/// payload and no tensor; its metadata is the other end's secret, 16 bytes. The dialling end sends its message first.
/// The listening end answers a pipe that proves itself in this way, and closes other pipes. Every later message answers
/// a request: its metadata is the offer, and its one tensor has the bytes, for the receiver's device. A message without
/// a request ends the pipe.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "base/record.h"
#include "channels/channel.h"

namespace tensorferry::tp {

inline constexpr std::size_t longest_text = 256;  // of a host or an address

/// 128 random bits that cannot be guessed.
using Secret = std::array<std::uint64_t, 2>;

/// The channel's descriptor. Its tag is the version of these records.
struct Endpoint {
  static constexpr std::uint8_t tag = 1;
  DeviceType type = DeviceType::cpu;
  Secret agent{};  // drawn by each agent; an agent has no pipe to itself
  static constexpr std::tuple fields{any_value(&Endpoint::type), &Endpoint::agent};
};

/// The first message of each end. The end with the greater secret listens, and the other one dials.
struct PipeHello {
  static constexpr std::uint8_t tag = 1;
  Secret secret{};   // told only to the other end of this link
  std::string host;  // ends with the same host meet at a loopback address
  static constexpr std::tuple fields{&PipeHello::secret, at_most(&PipeHello::host, longest_text)};
};
/// The address at which the listening end listens: an IP address and a port.
struct Listening {
  static constexpr std::uint8_t tag = 2;
  std::string address;
  static constexpr std::tuple fields{at_most(&Listening::address, longest_text)};
};
/// Asks the sender to write the bytes of an offer, because the receiver pulls it.
struct PipeRequest {
  static constexpr std::uint8_t tag = 3;
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
  static constexpr std::tuple fields{varint(&PipeRequest::offer), varint(&PipeRequest::bytes)};
};
using Control = std::variant<PipeHello, Listening, PipeRequest>;

/// The content of a ticket. Offer 0 is the empty buffer, for which no bytes travel.
struct TensorpipeTicket {
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
  static constexpr std::tuple fields{varint(&TensorpipeTicket::offer), varint(&TensorpipeTicket::bytes)};
  [[nodiscard]] bool valid() const { return (offer == 0) == (bytes == 0); }
};
/// Returns the offer that a ticket names; nullopt if the ticket is malformed, or if its two sizes differ.
std::optional<std::uint64_t> offer_of(const Ticket& ticket);

/// The metadata of a pipe's messages: the number of the offer whose bytes follow. The first message has text_of() the
/// secret instead, by which an end proves itself.
struct Metadata {
  std::uint64_t offer = 0;
  static constexpr std::tuple fields{varint(&Metadata::offer)};
};
std::string text_of(const Secret& secret);

/// Returns whether `address` is an IP address and a port, such as "127.0.0.1:80" or "[::1]:80". The channel dials no
/// other address, and no host name.
bool is_address(std::string_view address);

}  // namespace tensorferry::tp
