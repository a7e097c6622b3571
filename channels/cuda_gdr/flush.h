/// Makes the bytes that a network card has written to GPU memory visible to the GPU.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "channels/ibv/fetch.h"
#include "channels/rdma/local_cards.h"
#include "channels/rdma/loopback.h"
#include "channels/rdma/registrations.h"

namespace tensorferry::cuda_gdr {

/// A card's completion says that it has sent the bytes on their way, not that the GPU's streams see them. How they come
/// to see them depends on the GPU's attributes:
/// - the GPU orders the writes of other devices itself (WRITES_ORDERING): nothing is done;
/// - the driver flushes them (FLUSH_WRITES_OPTIONS): cuFlushGPUDirectRDMAWrites;
/// - neither: each card that has written reads one byte of the memory back (rdma::Loopback).
///
/// Thread-safe. Held by a shared_ptr. The driver's cards outlive it.
class Flush final : public std::enable_shared_from_this<Flush> {
 public:
  Flush(rdma::LocalCards& cards, int device);

  /// Flushes what `ways` have written to `memory`, which is registered with their cards and readable for peers. `done`
  /// runs when the bytes are visible to all streams of the GPU, or with the error: inside the call, or on the thread of
  /// completions.
  void after(const Buffer& memory, const std::vector<ibv::CardFetch::Way>& ways, const rdma::Registration& registration,
             Completion done);

 private:
  enum class Means : std::uint8_t { none, driver, loopback };
  Result<std::shared_ptr<rdma::Loopback>> loopback(std::size_t port);

  rdma::LocalCards& cards_;
  const int device_;
  Means means_ = Means::none;
  Mutex mutex_;
  std::map<std::size_t, std::shared_ptr<rdma::Loopback>> loopbacks_;  // by port; under mutex_
};

}  // namespace tensorferry::cuda_gdr
