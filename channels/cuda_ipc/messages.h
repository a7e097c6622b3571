/// What two ends of a cuda_ipc channel say to each other, and what a ticket holds: docs/protocol.md, "Reading the
/// sender's GPU memory", is normative.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <variant>

#include "channels/bytes.h"

namespace tensorferry::cuda_ipc {

inline constexpr std::uint8_t version = 2;  // of all this

/// Mapped memory lies in windows of so many bytes of the sender's address space, which the receiver reserves as a
/// whole: what is contiguous there is contiguous here.
inline constexpr int window_bits = 38;
inline constexpr std::uint64_t window_bytes = std::uint64_t{1} << window_bits;

/// The page of stream words for what this end sends comes along.
struct Words {};
/// Device memory of the GPU with that UUID, which begins with the nonce, comes along: copy it for real.
struct Probe {
  std::uint64_t nonce = 0;
  std::uint64_t bytes = 0;
  std::array<std::byte, 16> gpu{};
};
/// It was, or could not be: it can go.
struct Probed {};
/// A cudaMalloc allocation, under a number that counts up.
struct Handle {
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
  std::array<std::byte, 64> handle{};
};
/// A mapped chunk of physical memory, whose descriptor comes along; it lies at `offset` of `window`.
struct Chunk {
  std::uint64_t id = 0;
  std::uint64_t window = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};
/// Whether a handle or chunk could be mapped.
struct Opened {
  std::uint64_t id = 0;
  bool ok = false;
};
/// It goes: unmap it.
struct Gone {
  std::uint64_t id = 0;
};
using Control = std::variant<Words, Probe, Probed, Handle, Chunk, Opened, Gone>;

Bytes encode(const Control& control);
/// nullopt: nonsense.
std::optional<Control> control_of(ByteView bytes);

/// A ticket. Offer 0 is the empty buffer.
struct Place {
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
  bool chunked = false;  // `base` is a window, else a handle's id
  std::uint64_t base = 0;
  std::uint64_t offset = 0;
  std::uint32_t value = 0;  // what the word must reach first; 0 with no word: the bytes are there
  std::uint32_t word = none;
  static constexpr std::uint32_t none = ~std::uint32_t{0};
};
Bytes encode(const Place& place);
std::optional<Place> place_of(ByteView bytes);

}  // namespace tensorferry::cuda_ipc
