/// What a cuda_ipc channel has mapped of its peer's device memory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "channels/buffer.h"
#include "channels/channel.h"
#include "channels/cuda/device.h"
#include "channels/cuda_ipc/messages.h"

namespace tensorferry::cuda_ipc {

/// A reserved range of addresses, in which chunks are mapped.
class Window final {
 public:
  /// Null where the driver gives no addresses. Inside OnDevice(device).
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

/// Memory of a peer's in this process's addresses. The last holder to let go has it unmapped, in the background.
class Mapping final {
 public:
  /// A handle of cudaMalloc's memory. Takes milliseconds, as the others.
  static Result<std::shared_ptr<Mapping>> open(const Handle& handle, int device);
  /// A chunk, at its place in the window.
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
  const std::shared_ptr<Window> window_;  // null: a handle
};

/// Thread-safe.
class Imports final : public std::enable_shared_from_this<Imports> {
 public:
  explicit Imports(int device) : device_(device) {}

  /// Maps what the peer tells of, in the background; `opened` runs when that is settled.
  using Settled = UniqueFunction<void(bool ok)>;
  void add(const Handle& handle, Settled opened);
  void add(const Chunk& chunk, FileDescriptor memory, Settled opened);
  void remove(const Gone& gone);
  /// Lets go of everything.
  void clear();

  struct Source {
    CUdeviceptr address = 0;
    std::vector<std::shared_ptr<Mapping>> mappings;  // to be held while it is read
  };
  /// Runs `found` with the place's bytes: now, or when what it lies in has been mapped. Errors: ProtocolError: the peer
  /// never told of it; ChannelUnavailable: it could not be mapped; ConnectionLost after clear().
  void find(const Place& place, UniqueFunction<void(Result<Source>)> found);

 private:
  struct Import {
    std::uint64_t window = 0, offset = 0, bytes = 0;
    bool chunk = false;
    std::shared_ptr<Mapping> mapping;  // null: not yet, or `failed`
    bool failed = false;
  };
  struct Waiting {
    Place place;
    UniqueFunction<void(Result<Source>)> found;
  };
  /// nullopt: not yet. Inside the lock.
  std::optional<Result<Source>> look(const Place& place);
  Result<std::shared_ptr<Window>> window_of(std::uint64_t number);
  bool enter(std::uint64_t id, const Import& import);
  void settle(std::uint64_t id, Result<std::shared_ptr<Mapping>> mapped, Settled opened);

  static constexpr std::size_t most_windows = 64, most_imports = std::size_t{1} << 16;  // of one peer

  const int device_;
  std::mutex mutex_;
  bool cleared_ = false;
  std::map<std::uint64_t, Import> imports_;                                  // by id
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint64_t> chunks_;  // (window, offset): id
  std::map<std::uint64_t, std::shared_ptr<Window>> windows_;
  std::vector<Waiting> waiting_;
};

}  // namespace tensorferry::cuda_ipc
