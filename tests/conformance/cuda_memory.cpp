#include "tests/conformance/cuda_memory.h"

#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <chrono>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "channels/cuda/device.h"

namespace tensorferry::conformance {
namespace {

using cuda::api;
using cuda::DeviceGuard;

void expect(CUresult result) {
  if (result != CUDA_SUCCESS) throw std::runtime_error("CUDA: " + cuda::name_of(result));
}

constexpr std::size_t slab_bytes = std::size_t{64} << 20;
constexpr std::size_t chunk_bytes = std::size_t{20} << 20;  // as torch's expandable segments use for large blocks
constexpr std::size_t most_bytes = std::size_t{8} << 30;

/// Hands out blocks of slabs and takes them back. The owners of its buffers keep it alive.
class Pool {
 public:
  Pool(int device, CudaKind kind) : device_(device), kind_(kind) {
    const DeviceGuard here(device_);
    if (!here.status().ok()) throw std::runtime_error(here.status().text());
    expect(api()->stream_create(&stream_, CU_STREAM_NON_BLOCKING));
  }
  ~Pool() {
    const DeviceGuard here(device_);
    wait();
    for (const auto& [begin, bytes] : slabs_) {
      if (kind_ == CudaKind::malloc) {
        api()->mem_free(begin);
        continue;
      }
      for (std::size_t at = 0; at < bytes; at += chunk_bytes) api()->mem_unmap(begin + at, chunk_bytes);
      api()->mem_address_free(begin, bytes);
    }
    api()->stream_destroy(stream_);
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  [[nodiscard]] CUstream stream() const { return stream_; }
  [[nodiscard]] int device() const { return device_; }

  std::byte* take(std::size_t bytes) {
    const auto size = std::bit_ceil(std::max<std::size_t>(bytes, 512));
    const DeviceGuard here(device_);
    const std::lock_guard lock(mutex_);
    auto& free = free_[size];
    CUdeviceptr at = 0;
    if (!free.empty()) {
      at = free.back();
      free.pop_back();
    } else {
      if (left_ < size) new_slab(size);
      at = next_;
      next_ += size;
      left_ -= size;
    }
    return reinterpret_cast<std::byte*>(at);
  }
  void give_back(std::byte* data, std::size_t bytes) {
    const auto size = std::bit_ceil(std::max<std::size_t>(bytes, 512));
    const DeviceGuard here(device_);
    api()->memset_async(cuda::address_of(data), 0xdd, bytes, stream_);
    const std::lock_guard lock(mutex_);
    free_[size].push_back(cuda::address_of(data));
  }
  void wait() {
    const DeviceGuard here(device_);
    while (api()->stream_query(stream_) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
  }

 private:
  void new_slab(std::size_t least) {
    auto bytes = std::max(slab_bytes, least);
    CUdeviceptr begin = 0;
    if (kind_ == CudaKind::malloc) {
      expect(api()->mem_alloc(&begin, bytes));
    } else {
      bytes = (bytes + chunk_bytes - 1) / chunk_bytes * chunk_bytes;
      expect(api()->mem_address_reserve(&begin, bytes, 0, 0, 0));
      for (std::size_t at = 0; at < bytes; at += chunk_bytes) map_chunk(begin + at);
    }
    slabs_.emplace_back(begin, bytes);
    next_ = begin;
    left_ = bytes;
  }
  void map_chunk(CUdeviceptr at) const {
    CUmemAllocationProp wanted{};
    wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    wanted.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device_};
    wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle handle = 0;
    expect(api()->mem_create(&handle, chunk_bytes, &wanted, 0));
    expect(api()->mem_map(at, chunk_bytes, 0, handle, 0));
    expect(api()->mem_release(handle));
    const CUmemAccessDesc access{wanted.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    expect(api()->mem_set_access(at, chunk_bytes, &access, 1));
  }

  const int device_;
  const CudaKind kind_;
  CUstream stream_ = nullptr;
  std::mutex mutex_;
  std::vector<std::pair<CUdeviceptr, std::size_t>> slabs_;
  CUdeviceptr next_ = 0;
  std::size_t left_ = 0;
  std::map<std::size_t, std::vector<CUdeviceptr>> free_;
};

class CudaMemory final : public DeviceMemory {
 public:
  CudaMemory(int device, CudaKind kind) : pool_(std::make_shared<Pool>(device, kind)) {}

  Buffer allocate(std::size_t bytes) override {
    Buffer buffer{{DeviceType::cuda, static_cast<std::uint8_t>(pool_->device())}, nullptr, bytes, pool_->stream(), {}};
    if (bytes > most_bytes) return {};
    buffer.data = pool_->take(bytes);
    buffer.owner = Owner(buffer.data, [pool = pool_, bytes](std::byte* data) { pool->give_back(data, bytes); });
    return buffer;
  }

  void fill(const Buffer& buffer, std::uint32_t seed) override {
    std::vector<std::byte> bytes(buffer.bytes);
    write_pattern(bytes, seed);
    const DeviceGuard here(pool_->device());
    if (!bytes.empty())
      expect(api()->memcpy_async(cuda::address_of(buffer.data), cuda::address_of(bytes.data()), bytes.size(),
                                 pool_->stream()));
    pool_->wait();  // `bytes` is destroyed on return
  }

  bool holds(const Buffer& buffer, std::uint32_t seed) override {
    std::vector<std::byte> bytes(buffer.bytes);
    const DeviceGuard here(pool_->device());
    if (!bytes.empty())
      expect(api()->memcpy_async(cuda::address_of(bytes.data()), cuda::address_of(buffer.data), bytes.size(),
                                 static_cast<CUstream>(buffer.stream)));
    pool_->wait();
    return has_pattern(bytes, seed);
  }

 private:
  const std::shared_ptr<Pool> pool_;
};

}  // namespace

std::unique_ptr<DeviceMemory> cuda_memory(int device, CudaKind kind) {
  return std::make_unique<CudaMemory>(device, kind);
}

std::unique_ptr<DeviceMemory> memory_of(Device device) {
  return device.type == DeviceType::cpu ? cpu_memory() : cuda_memory(device.index);
}

std::size_t free_bytes() {
  const cuda::DeviceGuard here(0);
  std::size_t free = 0, total = 0;
  driver_function<decltype(&::cuMemGetInfo)>("cuMemGetInfo_v2")(&free, &total);
  return free;
}

std::string why_no_cuda(int devices) {
  static const int seen = [] {
    const auto child = ::fork();
    if (child == 0) ::_exit(std::min(cuda::devices(), 100));
    int status = 0;
    ::waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
  }();
  if (seen >= devices) return "";
  return "this machine has " + std::to_string(seen) + " GPUs, and the test needs " + std::to_string(devices);
}

}  // namespace tensorferry::conformance
