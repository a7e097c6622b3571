/// Messages between the two ends of a tensorpipe channel, and the contents of a ticket. docs/protocol.md, "Through
/// TensorPipe", is normative. Knows nothing of TensorPipe itself.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "base/bytes.h"
#include "channels/channel.h"

namespace tensorferry::tp {

inline constexpr std::uint8_t version = 1;  // of the descriptor and of all messages

/// 128 random bits that cannot be guessed.
using Secret = std::array<std::uint64_t, 2>;

/// The channel's descriptor.
struct Endpoint {
  Secret agent{};  // drawn by each agent; an agent has no pipe to itself
  DeviceType type = DeviceType::cpu;
};
Bytes encode(const Endpoint& endpoint);
/// Returns nullopt if the bytes are malformed or of another version.
std::optional<Endpoint> endpoint_of(ByteView bytes);

/// The first message of each end. The end with the greater secret listens, and the other one dials.
struct Hello {
  Secret secret{};   // told only to the other end of this link
  std::string host;  // ends with the same host meet at a loopback address
};
/// The address at which the listening end listens: an IP address and a port.
struct Listening {
  std::string address;
};
/// Asks the sender to write the bytes of an offer, because the receiver pulls it.
struct Request {
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
};
using Control = std::variant<Hello, Listening, Request>;

Bytes encode(const Control& control);
/// Returns nullopt if the bytes are malformed.
std::optional<Control> control_of(ByteView bytes);

/// Returns the opaque bytes of a ticket for an offer. Offer 0 is the empty buffer, for which no bytes travel.
Bytes opaque_of(std::uint64_t offer, std::uint64_t bytes);
/// Returns the offer that a ticket names; nullopt if the ticket is malformed, or if its two sizes differ.
std::optional<std::uint64_t> offer_of(const Ticket& ticket);

/// The metadata of a pipe's messages: the secret by which an end proves itself, or the number of the offer whose bytes
/// follow.
std::string text_of(const Secret& secret);
std::string metadata_of(std::uint64_t offer);
std::optional<std::uint64_t> offer_of(std::string_view metadata);

/// Returns whether `address` is an IP address and a port, such as "127.0.0.1:80" or "[::1]:80". The channel dials no
/// other address, and no host name.
bool is_address(std::string_view address);

}  // namespace tensorferry::tp
