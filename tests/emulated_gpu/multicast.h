/// The multicast objects of the emulated driver, which has them if EMULATED_GPU_MULTICAST is 1. What an object joins is
/// written in shared memory of the host, so that processes share it by its descriptor.
///
/// EMULATED_GPU_MULTICAST_FAILS="bind 1" makes a step fail on a device: support, create, export, import, add, bind,
/// map. A call that would block in the real driver fails with CUDA_ERROR_NOT_READY. Addresses of objects have no memory
/// behind them: only the kernels of rpc/collectives/cuda/multicast_kernels.h get through.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tests/emulated_gpu/memory.h"
#include "tests/emulated_gpu/streams.h"

namespace emulated {

/// One process's view of an object. Devices have the driver's numbers. Thread-safe.
class Multicast final {
 public:
  /// What sizes, offsets and addresses must be multiples of.
  static constexpr std::size_t granularity = std::size_t{2} << 20;

  /// Creates an object that `devices` devices will join, each with up to `bytes` bytes. Null if the host has no memory.
  static PagesPtr create(unsigned int devices, std::size_t bytes, unsigned int handle_types);
  /// Returns the view of the object whose descriptor this is; null if it is none. Keeps no reference to the descriptor.
  static std::shared_ptr<Multicast> find(int descriptor);
  ~Multicast();
  Multicast(const Multicast&) = delete;
  Multicast& operator=(const Multicast&) = delete;

  [[nodiscard]] std::size_t bytes() const;
  [[nodiscard]] unsigned int handle_types() const;
  [[nodiscard]] bool has(int device) const;
  /// Returns whether all devices have been added. Before that, the real driver blocks in a bind and in a mapping.
  [[nodiscard]] bool complete() const;
  /// Adds a device. Returns false if the object has it already, or has all.
  bool add(int device);
  /// Binds all bytes of the memory, which is on a device of the object. Returns false if that device has bound some.
  bool bind(const PagesPtr& memory);
  bool unbind(int device);
  /// Returns the addresses at which this process has the memory of all devices, in their order. Empty if one has bound
  /// none, or if its process has ended.
  std::vector<std::byte*> replicas();

 private:
  struct State;
  struct Mapped {
    std::uint32_t bind = 0;  // the bind whose memory it is
    std::byte* at = nullptr;
    std::size_t bytes = 0;
  };
  explicit Multicast(State* state) : state_(state) {}
  static void unmap(Mapped& mapped);

  State* const state_;
  std::mutex mutex_;                           // guards the rest
  std::array<PagesPtr, most_devices> bound_;   // by this process
  std::array<Mapped, most_devices> mapped_{};  // of all processes
};

}  // namespace emulated
