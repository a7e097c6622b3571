/// The peer's device memory that a cuda_ipc channel has mapped.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "channels/buffer.h"
#include "channels/channel.h"
#include "channels/cuda/device.h"
#include "channels/cuda_ipc/messages.h"

namespace tensorferry::cuda_ipc {

/// A reserved range of `window_bytes` addresses, in which chunks are mapped. The last owner frees the range.
class Window final {
 public:
  /// Returns null if the driver reserves no addresses. Call inside DeviceGuard(device).
  static std::shared_ptr<Window> reserve(int device);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  [[nodiscard]] CUdeviceptr begin() const { return begin_; }
  [[nodiscard]] int device() const { return device_; }

 private:
  Window(CUdeviceptr begin, int device) : begin_(begin), device_(device) {}
  const CUdeviceptr begin_;
  const int device_;
};

/// A peer's memory, mapped into this process. When the last owner drops it, the background thread unmaps it.
class Mapping final {
 public:
  /// Maps cudaMalloc's memory by its handle. Takes milliseconds. ProtocolError: the handle's memory is smaller than the
  /// peer says.
  static Result<std::shared_ptr<Mapping>> open(const AllocationHandle& handle, int device);
  /// Maps a chunk at its offset in the window. Takes milliseconds.
  static Result<std::shared_ptr<Mapping>> map(FileDescriptor memory, std::shared_ptr<Window> window,
                                              std::uint64_t offset, std::uint64_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  [[nodiscard]] CUdeviceptr begin() const { return begin_; }
  [[nodiscard]] std::uint64_t bytes() const { return bytes_; }

 private:
  Mapping(CUdeviceptr begin, std::uint64_t bytes, int device, std::shared_ptr<Window> window)
      : begin_(begin), bytes_(bytes), device_(device), window_(std::move(window)) {}
  const CUdeviceptr begin_;
  const std::uint64_t bytes_;
  const int device_;
  const std::shared_ptr<Window> window_;  // null if mapped by handle
};

/// All memory that one peer has exported to this end of a channel. Thread-safe; runs callbacks with no lock held.
class Imports final : public std::enable_shared_from_this<Imports> {
 public:
  explicit Imports(int device) : device_(device) {}

  /// Maps an exported allocation on the background thread, then runs `opened` there. If the peer's message is invalid
  /// or exceeds a limit, `opened(false)` runs at once on the caller's thread.
  using Resolved = UniqueFunction<void(bool ok)>;
  void add(const AllocationHandle& handle, Resolved opened);
  void add(const Chunk& chunk, FileDescriptor memory, Resolved opened);
  /// Drops an import. The memory stays mapped until the sources that hold it are dropped.
  void remove(const AllocationFreed& gone);
  /// Drops all imports, and fails the waiting and all later calls of find().
  void clear();

  struct ImportedMemory {
    CUdeviceptr address = 0;
    std::vector<std::shared_ptr<Mapping>> mappings;  // the reader holds these while it reads
  };
  /// Runs `found` with the address of the place's bytes: at once on the caller's thread if its memory is mapped, else
  /// on the thread that maps it. Errors:
  /// - ProtocolError: the peer never exported this memory.
  /// - ChannelUnavailable: the memory could not be mapped.
  /// - ConnectionLost: clear() was called; for calls that wait then, `found` runs on the thread that calls clear().
  void find(const CudaIpcTicket& ticket, UniqueFunction<void(Result<ImportedMemory>)> found);

 private:
  struct Import {
    std::uint64_t window = 0, offset = 0, bytes = 0;
    bool chunk = false;
    std::shared_ptr<Mapping> mapping;  // null until it is mapped, and if that has failed
    bool failed = false;
  };
  struct Waiting {
    CudaIpcTicket ticket;
    UniqueFunction<void(Result<ImportedMemory>)> found;
  };
  /// Returns the source of `ticket`, or nullopt while its memory is being mapped. Call with the lock held.
  std::optional<Result<ImportedMemory>> lookup(const CudaIpcTicket& ticket);
  /// Returns the window that stands for the sender's window `number`; reserves it at first use. Background thread only.
  Result<std::shared_ptr<Window>> window_of(std::uint64_t number);
  /// Adds an import that is not mapped yet. Returns false after clear(), for a used id, and if there are too many.
  bool enter(std::uint64_t id, const Import& import);
  /// Records the outcome of a mapping, runs `opened`, then the `found` callbacks that waited for it.
  void resolve(std::uint64_t id, Result<std::shared_ptr<Mapping>> mapped, Resolved opened);

  static constexpr std::size_t most_windows = 64, most_imports = std::size_t{1} << 16;  // per peer

  const int device_;
  Mutex mutex_;
  bool cleared_ = false;
  std::map<std::uint64_t, Import> imports_;                                  // by id
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t> chunks_;  // (window, offset) to id
  std::map<std::uint64_t, std::shared_ptr<Window>> windows_;
  std::vector<Waiting> waiting_;
};

}  // namespace tensorferry::cuda_ipc
