/// The control messages and the ticket of the cuda_ipc channel. docs/protocol.md, "Reading the sender's GPU memory", is
/// normative.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <variant>

#include "base/bytes.h"

namespace tensorferry::cuda_ipc {

inline constexpr std::uint8_t version = 2;  // of the messages and the ticket

/// The size of a window of the sender's address space. The receiver reserves a whole window for the chunks in it, so
/// chunks that are contiguous at the sender are contiguous at the receiver.
inline constexpr int window_bits = 38;
inline constexpr std::uint64_t window_bytes = std::uint64_t{1} << window_bits;

/// Passes the descriptor of the page of stream words for the buffers that this end sends.
struct Words {};
/// Passes the descriptor of device memory that begins with the nonce, on the GPU with that UUID. The receiver copies
/// the memory's first half.
struct Probe {
  std::uint64_t nonce = 0;
  std::uint64_t bytes = 0;
  std::array<std::byte, 16> gpu{};
};
/// Says that the probe has succeeded or failed: its memory is no longer needed.
struct Probed {};
/// Exports a cudaMalloc allocation. Ids count up.
struct Handle {
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
  std::array<std::byte, 64> handle{};
};
/// Exports a chunk of physical memory and passes its descriptor. The sender has mapped it at `offset` of `window`.
struct Chunk {
  std::uint64_t id = 0;
  std::uint64_t window = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
/// Says whether the receiver could map a handle or chunk.
struct Opened {
  std::uint64_t id = 0;
  bool ok = false;
};
/// Withdraws a handle or chunk: the receiver unmaps it.
struct Gone {
  std::uint64_t id = 0;
};
using Control = std::variant<Words, Probe, Probed, Handle, Chunk, Opened, Gone>;

Bytes encode(const Control& control);
/// Parses a control message; returns nullopt if it is malformed.
std::optional<Control> control_of(ByteView bytes);

/// The content of a ticket. Offer 0 is the empty buffer.
struct CudaIpcTicket {
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
  bool chunked = false;  // whether `base` is a window's number, else it is a handle's id
  std::uint64_t base = 0;
  std::uint64_t offset = 0;
  std::uint32_t value = 0;    // the value that the word must reach before the bytes are valid; 0 without a word
  std::uint32_t word = none;  // `none`: the bytes are valid already
  static constexpr std::uint32_t none = ~std::uint32_t{0};
};
Bytes encode(const CudaIpcTicket& parsed);
/// Parses a ticket; returns nullopt if it is malformed.
std::optional<CudaIpcTicket> parse_ticket(ByteView bytes);

}  // namespace tensorferry::cuda_ipc
