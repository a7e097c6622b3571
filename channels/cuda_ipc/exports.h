/// What a cuda_ipc channel's peer may map of this process's device memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <variant>

#include "channels/channel.h"
#include "channels/cuda/api.h"
#include "channels/cuda_ipc/messages.h"
#include "channels/wire_use.h"

namespace tensorferry::cuda_ipc {

/// Allocations are told to the peer when the first buffer in them is offered, and taken back when their memory is
/// forgotten, or another allocation is found at their address: each is known by the number that the driver gives to
/// physical memory, so that an address which is used again is never taken for what was there before. Thread-safe.
class Exports final {
 public:
  /// `within_process`: the peer may be this very process, which cannot open cudaMalloc's handles.
  Exports(std::shared_ptr<WireUse> wire, bool within_process)
      : wire_(std::move(wire)), within_process_(within_process) {}

  /// Where the peer finds `bytes` bytes at `data`, without offer and word; and the message that must have come first,
  /// 0 where the peer has said that it has mapped them. Inside OnDevice.
  struct Found {
    Place place;
    ControlId after = 0;
  };
  /// `waits`: the ticket may come before the peer has mapped the memory; else that is a passing refusal.
  std::variant<Found, Refusal> find(const std::byte* data, std::size_t bytes, bool waits);

  void opened(const Opened& message);
  void forget(const std::byte* base, std::size_t bytes);

 private:
  struct Export {
    std::uint64_t id = 0;
    std::uint64_t bytes = 0;
    std::uint64_t memory = 0;  // the driver's number
    bool chunk = false;
    ControlId told_in = 0;
    enum { told, mapped, failed } state = told;
  };
  struct Allocation;  // what the driver says of an address

  /// The export that holds `address`; makes it where there is none.
  std::variant<const Export*, Refusal> export_at(CUdeviceptr address, CUdeviceptr& base);
  std::variant<Export, Refusal> make(const Allocation& allocation);
  std::variant<Export, Refusal> make_handle(const Allocation& allocation);
  std::variant<Export, Refusal> make_chunk(const Allocation& allocation);
  void take_back(const Export& gone);

  const std::shared_ptr<WireUse> wire_;
  const bool within_process_;
  std::mutex mutex_;
  std::map<CUdeviceptr, Export> exports_;  // by base
  std::uint64_t next_ = 1;
};

}  // namespace tensorferry::cuda_ipc
