/// The callers' memory that the ranks of a group map of one another, so that operations read inputs in place.
#pragma once

#include <cuda.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "channels/allocations.h"
#include "channels/cuda/peer_memory.h"
#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives::cuda {

/// Where the inputs of one operation lie that are read in place.
struct LentInputs {
  std::vector<std::byte*> at;  // by rank, at this rank's address; null: that rank's input goes through its buffer
  std::vector<std::shared_ptr<void>> keep;  // until this rank's device has ended the operation
  bool all_in_place = false;                // every rank lends its input, and its result goes there too

  [[nodiscard]] bool any() const {
    for (const auto* each : at) {
      if (each != nullptr) return true;
    }
    return false;
  }
};

/// The allocations that this rank lends to the other ranks, and those that it has borrowed of them. A rank lends an
/// allocation at the first operation that reads an input in it. All ranks map it then, or none, so all decide alike.
///
/// A rank that reads another one's memory in an operation meets it once more before the operation ends there. So the
/// owner may write or free the input in the order of its stream, as if it had been copied.
///
/// When an allocation goes (Allocations), the owner tells the others, which unmap it once their devices
/// have ended the operations that read it. An allocation that a captured operation reads stays mapped until the group
/// ends.
///
/// Threads: agree() on the thread that runs operations; the rest on any.
class LentMemory final : public AllocationUser {
 public:
  static std::shared_ptr<LentMemory> make(std::shared_ptr<RawGroup> group);

  /// Ordinary inputs of so many bytes and more are lent; symmetric memory always is.
  void lend_from(std::size_t bytes) { from_ = bytes; }

  /// Agrees with the other ranks on `called`, as RawGroup::agree_on(), and finds out whose inputs are read in place.
  /// `own` is this rank's input; empty: it lends none. `in_place`: it is the output too. The others read `bytes` bytes
  /// of an input. `captured`: a CUDA graph gets the operation. Errors are those of RawGroup.
  Result<LentInputs> agree(const Fingerprint& called, int device, std::span<const std::byte> own, bool in_place,
                           std::size_t bytes, bool captured, const WaitLimits& limits);

  /// Returns the number of other ranks' allocations that this one has mapped, as it changes.
  [[nodiscard]] std::shared_ptr<const std::atomic<std::size_t>> count() const { return mapped_; }

  void gone(std::uint64_t generation) noexcept override;

  /// The others may still begin an operation that reads memory when the owner tells them that it goes. So they keep it
  /// for so long afterwards.
  static constexpr std::chrono::milliseconds kept_for{500};
  /// The bit that the numbers of lent allocations have among the regions of a group.
  static constexpr std::uint64_t region_bit = std::uint64_t{1} << 63U;

 private:
  /// What a rank says of its input: the number of its allocation from 1, and where in it the input begins. 0: not lent.
  struct Place {
    std::uint32_t number = 0;
    std::uint32_t in_place = 0;  // 1: the input is the output too
    std::uint64_t offset = 0;
  };
  struct Own {
    std::uint32_t number = 0;
    CUdeviceptr base = 0;
    std::uint64_t bytes = 0;
  };
  struct Borrowed {
    std::weak_ptr<tensorferry::cuda::PeerMemory> memory;  // null too if a rank could not map it, or if it is gone
    std::uint64_t bytes = 0;
  };
  explicit LentMemory(std::shared_ptr<RawGroup> group);
  Place place_of(int device, std::span<const std::byte> own);
  Status introduce(const Fingerprint& called, int device, const std::vector<Place>& places, const WaitLimits& limits);

  const std::shared_ptr<RawGroup> group_;
  std::size_t from_;
  std::vector<std::map<std::uint32_t, Borrowed>> borrowed_;  // by rank and number; used by agree(). Own: those told
  const std::shared_ptr<std::atomic<std::size_t>> mapped_ = std::make_shared<std::atomic<std::size_t>>(0);
  std::vector<std::shared_ptr<void>> captured_;  // what graphs read
  std::mutex mutex_;                             // guards the next two
  std::map<std::uint64_t, Own> own_;             // by generation
  std::uint32_t last_ = 0;
};

}  // namespace tensorferry::collectives::cuda
