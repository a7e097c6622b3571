/// The descriptor, control messages and ticket of the cuda_ipc channel. docs/protocol.md, "Reading the sender's GPU
/// memory", is normative.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <variant>

#include "base/record.h"
#include "channels/xth/directory.h"

namespace tensorferry::cuda_ipc {

/// The channel's descriptor. Its tag is the version of these records.
struct CudaIpcDescriptor {
  static constexpr std::uint8_t tag = 3;
  static constexpr std::size_t uuid_bytes = 16;
  std::string_view boot_id;
  std::string_view gpu;     // its UUID
  xth::Id process{};        // drawn by the process
  std::string_view barred;  // the UUIDs of the GPUs that this process sees and that have no peer access to this one
  static constexpr std::tuple fields{&CudaIpcDescriptor::boot_id, &CudaIpcDescriptor::gpu, &CudaIpcDescriptor::process,
                                     &CudaIpcDescriptor::barred};
  [[nodiscard]] bool valid() const { return barred.size() % uuid_bytes == 0; }
  /// Returns whether this process knows that its GPU and `other` have no access to each other's memory.
  [[nodiscard]] bool bars(std::string_view other) const {
    for (std::size_t at = 0; at < barred.size(); at += uuid_bytes) {
      if (barred.substr(at, uuid_bytes) == other) return true;
    }
    return false;
  }
};

/// The size of a window of the sender's address space. The receiver reserves a whole window for the chunks in it, so
/// chunks that are contiguous at the sender are contiguous at the receiver.
inline constexpr int window_bits = 38;
inline constexpr std::uint64_t window_bytes = std::uint64_t{1} << window_bits;

/// Passes the descriptor of the page of stream words for the buffers that this end sends.
struct Words {
  static constexpr std::uint8_t tag = 1;
};
/// Passes the descriptor of device memory that begins with the nonce, on the GPU with that UUID. The receiver copies
/// the memory's first half.
struct Probe {
  static constexpr std::uint8_t tag = 2;
  std::uint64_t nonce = 0;
  std::uint64_t bytes = 0;
  std::array<std::byte, 16> gpu{};
  static constexpr std::tuple fields{&Probe::nonce, varint(&Probe::bytes), &Probe::gpu};
};
/// Says that the probe has succeeded or failed: its memory is no longer needed.
struct MemoryProbed {
  static constexpr std::uint8_t tag = 3;
};
/// Exports a cudaMalloc allocation. Ids count up.
struct AllocationHandle {
  static constexpr std::uint8_t tag = 4;
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
  std::array<std::byte, 64> handle{};
  static constexpr std::tuple fields{varint(&AllocationHandle::id), varint(&AllocationHandle::bytes),
                                     &AllocationHandle::handle};
};
/// Exports a chunk of physical memory and passes its descriptor. The sender has mapped it at `offset` of `window`.
struct Chunk {
  static constexpr std::uint8_t tag = 5;
  std::uint64_t id = 0;
  std::uint64_t window = 0;
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  static constexpr std::tuple fields{varint(&Chunk::id), varint(&Chunk::window), varint(&Chunk::offset),
                                     varint(&Chunk::bytes)};
};
/// Says whether the receiver could map a handle or chunk.
struct Opened {
  static constexpr std::uint8_t tag = 6;
  std::uint64_t id = 0;
  bool ok = false;
  static constexpr std::tuple fields{varint(&Opened::id), &Opened::ok};
};
/// Withdraws a handle or chunk: the receiver unmaps it.
struct AllocationFreed {
  static constexpr std::uint8_t tag = 7;
  std::uint64_t id = 0;
  static constexpr std::tuple fields{varint(&AllocationFreed::id)};
};
using Control = std::variant<Words, Probe, MemoryProbed, AllocationHandle, Chunk, Opened, AllocationFreed>;

/// The content of a ticket. Offer 0 is the empty buffer.
struct CudaIpcTicket {
  static constexpr std::uint32_t none = ~std::uint32_t{0};
  std::uint64_t offer = 0;
  std::uint64_t bytes = 0;
  bool chunked = false;  // whether `base` is a window's number, else it is a handle's id
  std::uint64_t base = 0;
  std::uint64_t offset = 0;
  std::uint32_t value = 0;    // the value that the word must reach before the bytes are valid; 0 without a word
  std::uint32_t word = none;  // `none`: the bytes are valid already
  static constexpr std::tuple fields{
      varint(&CudaIpcTicket::offer), varint(&CudaIpcTicket::bytes),  &CudaIpcTicket::chunked,
      varint(&CudaIpcTicket::base),  varint(&CudaIpcTicket::offset), &CudaIpcTicket::value,
      &CudaIpcTicket::word};
  [[nodiscard]] bool valid() const { return offset + bytes >= offset; }
};

}  // namespace tensorferry::cuda_ipc
