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
#include "channels/channel.h"
#include "channels/cuda/api.h"
#include "channels/cuda_ipc/messages.h"
#include "channels/wire_use.h"

namespace tensorferry::cuda_ipc {

/// Exports an allocation when the first buffer in it is offered. Withdraws the export when the memory is invalidated
/// (invalidate()), or when another allocation is found at its address. The driver's id of the physical memory
/// identifies an allocation, so a reused address is never mistaken for the memory that was there before. Thread-safe.
class Exports final {
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
  /// Withdraws the exports that overlap `bytes` bytes at `base`.
  void invalidate(const std::byte* base, std::size_t bytes);

 private:
  struct Export {
    std::uint64_t id = 0;
    std::uint64_t bytes = 0;
    std::uint64_t memory = 0;  // the driver's id of the physical memory
    bool chunk = false;
    ControlId told_in = 0;  // the control message that announced it
    std::size_t uses = 0;   // open offers in it, if the allocator reports no frees
    enum { told, mapped, failed } state = told;
  };
  struct Allocation;  // the driver's description of an allocation

  /// Returns the export that holds `address`, and its base; makes the export if there is none.
  std::variant<Export*, Refusal> export_at(CUdeviceptr address, CUdeviceptr& base);
  std::variant<Export, Refusal> make(const Allocation& allocation);
  std::variant<Export, Refusal> make_handle(const Allocation& allocation);
  std::variant<Export, Refusal> make_chunk(const Allocation& allocation);
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
