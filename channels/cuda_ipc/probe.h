/// Whether a GPU here can copy from a peer's GPU memory, found out by doing it; and how fast.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "channels/cuda_ipc/imports.h"

namespace tensorferry::cuda_ipc {

inline constexpr std::uint64_t probe_bytes = std::uint64_t{16} << 20;

/// Device memory that a peer may map by descriptor, holding a nonce in its first half. Takes milliseconds, as all here.
class ProbeMemory final {
 public:
  static Result<std::shared_ptr<ProbeMemory>> make(int device, std::uint64_t nonce);
  ~ProbeMemory();
  ProbeMemory(const ProbeMemory&) = delete;
  ProbeMemory& operator=(const ProbeMemory&) = delete;

  /// The second half, into which this end copies the first half of the peer's.
  [[nodiscard]] CUdeviceptr copies() const { return begin_ + probe_bytes / 2; }
  /// For the peer, once.
  FileDescriptor take_descriptor() { return std::move(descriptor_); }

 private:
  explicit ProbeMemory(int device) : device_(device) {}
  const int device_;
  CUdeviceptr begin_ = 0;
  std::size_t bytes_ = 0;  // reserved
  bool mapped_ = false;
  FileDescriptor descriptor_;
};

/// Maps a peer's, copies it into `mine` and compares. The GB/s of that; or why it cannot be.
Result<double> probe(FileDescriptor memory, std::uint64_t nonce, int device, const ProbeMemory& mine);

}  // namespace tensorferry::cuda_ipc
