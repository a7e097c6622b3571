/// The device memory of this process that a cuda_ipc channel has exported to its peer.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "base/mutex.h"
#include "channels/allocations.h"
#include "channels/channel.h"
#include "channels/cuda/allocation.h"
#include "channels/cuda_ipc/messages.h"
#include "channels/wire_use.h"

namespace tensorferry::cuda_ipc {

/// Exports an allocation when the first buffer in it is offered, under the generation that Allocations gives it, so a
/// reused address is never mistaken for the memory that was there before. Withdraws the export when the allocation
/// ends. Thread-safe. Held by a shared_ptr, which Allocations::tell() gets.
class Exports final : public AllocationUser {
 public:
  /// `within_process`: the peer may be this process, which cannot open handles of its own cudaMalloc memory.
  Exports(std::shared_ptr<WireUse> wire, bool within_process)
      : wire_(std::move(wire)), within_process_(within_process) {}

  struct Found {
    CudaIpcTicket ticket;  // without the offer and the word
    /// The control message that the peer must have received before the ticket; 0 if the peer has mapped everything.
    ControlId after = 0;
    /// The exports that release() must be told of; empty if they are kept until their memory is invalidated.
    std::vector<std::uint64_t> uses = {};
  };
  /// Returns the place at which the peer finds `bytes` bytes at `data`, and exports the memory if it is new. Refuses
  /// memory that cannot be exported, that the peer could not map, or that lies across two allocations (other than
  /// adjacent chunks of one window). `waits`: the ticket may arrive before the peer has mapped the memory; if false,
  /// that is a passing refusal. Call inside DeviceGuard.
  std::variant<Found, Refusal> find(const std::byte* data, std::size_t bytes, bool waits);

  /// Ends the uses of exports of find(). Memory of an allocator that reports no frees is exported for one use at a
  /// time: the last use withdraws the export, so that the peer never keeps memory that the allocator has freed.
  void release(const std::vector<std::uint64_t>& uses);

  /// Records whether the peer could map an export.
  void opened(const Opened& message);
  /// Withdraws the export of an allocation that has ended.
  void gone(std::uint64_t generation) noexcept override;

 private:
  struct Export {
    std::uint64_t id = 0;
    std::uint64_t bytes = 0;
    std::uint64_t generation = 0;  // of the allocation
    bool chunk = false;
    ControlId told_in = 0;  // the control message that announced it
    std::size_t uses = 0;   // open offers in it, if the allocator reports no frees
    enum { told, mapped, failed } state = told;
  };
  /// The part of a buffer that lies in one allocation.
  struct Piece {
    cuda::GpuAllocation allocation;
    std::uint64_t generation = 0;
  };

  static std::variant<std::vector<Piece>, Refusal> pieces_of(CUdeviceptr begin, std::size_t bytes);
  /// Returns the export of an allocation; makes it if there is none.
  std::variant<Export*, Refusal> export_of(const Piece& piece);
  std::variant<Export, Refusal> make(const cuda::GpuAllocation& allocation);
  std::variant<Export, Refusal> make_handle(const cuda::GpuAllocation& allocation);
  std::variant<Export, Refusal> make_chunk(const cuda::GpuAllocation& allocation);
  void end_uses(const std::vector<std::uint64_t>& uses);
  /// Tells the peer to unmap an export.
  void take_back(const Export& gone);

  const std::shared_ptr<WireUse> wire_;
  const bool within_process_;
  Mutex mutex_;
  std::map<CUdeviceptr, Export> exports_;  // by base
  std::uint64_t next_ = 1;
};

}  // namespace tensorferry::cuda_ipc
