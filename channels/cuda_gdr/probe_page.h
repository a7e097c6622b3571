/// GPU memory by which two ends test that network cards read and write it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "channels/cuda/api.h"
#include "channels/rdma/registrations.h"

namespace tensorferry::cuda_gdr {

/// Memory of one GPU, which is registered with the cards that its probes use. It begins with a nonce that peers read;
/// behind it lands what this end reads of its peers' pages. Thread-safe.
class ProbePage final {
 public:
  /// Allocates the page and writes the nonce. Takes milliseconds. ResourceExhausted if the GPU has no memory left.
  static Result<std::shared_ptr<ProbePage>> make(int device, std::shared_ptr<rdma::Registrations> registrations);
  ~ProbePage();
  ProbePage(const ProbePage&) = delete;
  ProbePage& operator=(const ProbePage&) = delete;

  [[nodiscard]] std::uint64_t nonce() const noexcept { return nonce_; }
  [[nodiscard]] std::uint64_t address() const noexcept { return begin_; }
  /// Returns the page's registration, which is on `cards` at least. May take milliseconds. Fails as
  /// register_gpu_memory() says, or with ResourceExhausted if no more memory may be registered.
  Result<std::shared_ptr<rdma::Registration>> registration(const std::vector<std::size_t>& cards);
  /// Returns the place for one more word to land.
  Buffer take_landing();
  /// Returns the word that has landed there, after the card's writes were flushed. Blocks for some microseconds.
  [[nodiscard]] Result<std::uint64_t> landed(const Buffer& landing) const;

 private:
  ProbePage(int device, std::shared_ptr<rdma::Registrations> registrations)
      : device_(device), registrations_(std::move(registrations)) {}
  static constexpr std::size_t bytes = std::size_t{2} << 20;  // the driver's granularity
  static constexpr std::size_t line = 64;

  const int device_;
  const std::shared_ptr<rdma::Registrations> registrations_;
  std::uint64_t nonce_ = 0;
  CUdeviceptr begin_ = 0;
  bool mapped_ = false;
  std::atomic<std::size_t> landings_{0};
  Mutex mutex_;
  std::shared_ptr<rdma::Registration> registration_;  // under mutex_; dropped before the memory is freed
};

}  // namespace tensorferry::cuda_gdr
