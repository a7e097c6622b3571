/// What two ends of a tensorpipe channel say to each other, and what a ticket holds: docs/protocol.md, "Through
/// TensorPipe", is normative. Knows nothing of TensorPipe itself.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "channels/bytes.h"
#include "channels/channel.h"

namespace tensorferry::tp {

inline constexpr std::uint8_t version = 1;  // of all this

/// 128 random bits, not to be guessed.
using Secret = std::array<std::uint64_t, 2>;

/// What a peer must know: the descriptor.
struct Endpoint {
  Secret agent{};  // drawn by each agent: a link to oneself has one end
  DeviceType type = DeviceType::cpu;
};
Bytes encode(const Endpoint& endpoint);
/// nullopt: nonsense, or of another version.
std::optional<Endpoint> endpoint_of(ByteView bytes);

/// The first message of each end. The end with the greater secret listens, the other one dials.
struct Hello {
  Secret secret{};   // told to the other end of this link alone
  std::string host;  // ends that name the same one meet at a loopback address
};
/// Where the end that listens does so: an IP address and a port.
struct Listening {
  std::string address;
};
/// The receiver pulls.
struct Request {
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
};
using Control = std::variant<Hello, Listening, Request>;

Bytes encode(const Control& control);
/// nullopt: nonsense.
std::optional<Control> control_of(ByteView bytes);

/// A ticket names an offer; 0 is the empty buffer, for which nothing travels.
Bytes opaque_of(std::uint64_t offer, std::uint64_t bytes);
/// nullopt: nonsense, or of another size than the ticket says.
std::optional<std::uint64_t> offer_of(const Ticket& ticket);

/// The metadata of a pipe's messages: a secret by which an end proves itself, or the offer whose bytes come.
std::string text_of(const Secret& secret);
std::string metadata_of(std::uint64_t offer);
std::optional<std::uint64_t> offer_of(std::string_view metadata);

/// Whether `address` is "127.0.0.1:80" or "[::1]:80", a port and no name: all that is ever dialled.
bool is_address(std::string_view address);

}  // namespace tensorferry::tp
