/// The descriptor, control messages and tickets of the cma channel. docs/protocol.md, "Reading the sender's memory", is
/// normative.
#pragma once

#include <cstdint>
#include <string_view>
#include <variant>

#include "base/record.h"
#include "channels/cma/process.h"
#include "channels/empty_buffer.h"
#include "channels/resends.h"

namespace tensorferry::cma {

/// The channel's descriptor. Its tag is the version of these records.
struct CmaDescriptor {
  static constexpr std::uint8_t tag = 1;
  std::uint32_t uid = 0;
  std::uint64_t pid_namespace = 0;
  std::uint64_t user_namespace = 0;
  Identity process;
  std::string_view boot_id;
  static constexpr std::tuple fields{&CmaDescriptor::uid, &CmaDescriptor::pid_namespace, &CmaDescriptor::user_namespace,
                                     &CmaDescriptor::process, &CmaDescriptor::boot_id};
};

/// Control messages.
struct Challenge {
  static constexpr std::uint8_t tag = 1;
  std::uint64_t random = 0;
  static constexpr std::tuple fields{&Challenge::random};
};
/// Says that the complement of the challenge stands at `address` in the memory of `process`, while the channel is open.
struct WordAddress {
  static constexpr std::uint8_t tag = 2;
  Identity process;
  std::uint64_t address = 0;
  static constexpr std::tuple fields{&WordAddress::process, &WordAddress::address};
};
using Control = std::variant<Challenge, WordAddress, Resend>;

/// A ticket: an empty buffer, or the place of the buffer in the sender's memory.
struct SourceAddress {
  static constexpr std::uint8_t tag = 1;
  std::uint64_t offer = 0;
  std::uint64_t address = 0;
  static constexpr std::tuple fields{varint(&SourceAddress::offer), &SourceAddress::address};
};
using CmaTicket = std::variant<EmptyBuffer, SourceAddress>;

}  // namespace tensorferry::cma
