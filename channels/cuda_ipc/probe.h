/// Tests by a real copy whether this process's GPU can read a peer's GPU memory, and measures the speed.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "channels/cuda_ipc/imports.h"

namespace tensorferry::cuda_ipc {

/// The size of a probe's memory. On a GPU that has not so much left, the smaller one, with which the speed is less
/// exact.
inline constexpr std::uint64_t probe_bytes = std::uint64_t{16} << 20, small_probe_bytes = std::uint64_t{4} << 20;

/// Device memory that a peer maps by descriptor. Its first half begins with a nonce. Everything in this file takes
/// milliseconds and runs on the background thread.
class ProbeMemory final {
 public:
  /// Allocates the memory and writes the nonce. ResourceExhausted: the GPU has no memory left.
  static Result<std::shared_ptr<ProbeMemory>> make(int device, std::uint64_t nonce);
  ~ProbeMemory();
  ProbeMemory(const ProbeMemory&) = delete;
  ProbeMemory& operator=(const ProbeMemory&) = delete;

  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }
  /// Returns the second half, into which this end copies the first half of the peer's memory, as much as there is room.
  [[nodiscard]] CUdeviceptr copies() const { return begin_ + bytes_ / 2; }
  /// Returns the descriptor for the peer. Call once.
  FileDescriptor take_descriptor() { return std::move(descriptor_); }

 private:
  explicit ProbeMemory(int device) : device_(device) {}
  static Result<std::shared_ptr<ProbeMemory>> make(int device, std::uint64_t nonce, std::uint64_t bytes);
  const int device_;
  CUdeviceptr begin_ = 0;
  std::size_t bytes_ = 0;  // of the reserved addresses
  bool mapped_ = false;
  FileDescriptor descriptor_;
};

/// Maps a peer's memory of `bytes` bytes, copies its first half into `mine` and compares the nonce. Returns the GB/s of
/// the copy, or the error that prevents copies.
Result<double> probe(FileDescriptor memory, std::uint64_t nonce, std::uint64_t bytes, int device,
                     const ProbeMemory& mine);

}  // namespace tensorferry::cuda_ipc
