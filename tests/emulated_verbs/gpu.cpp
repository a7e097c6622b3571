#include "tests/emulated_verbs/gpu.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <type_traits>

namespace tensorferry::emulated_verbs {
namespace {

// The driver's functions and constants, as in cuda.h, which the build of this library does not need.
using DevicePointer = unsigned long long;
constexpr int memory_type = 2, buffer_id = 7, device_ordinal = 9;  // CU_POINTER_ATTRIBUTE_...
constexpr unsigned device_memory = 2;                              // CU_MEMORYTYPE_DEVICE
constexpr unsigned non_blocking = 1;                               // CU_STREAM_NON_BLOCKING
constexpr int not_ready = 600;                                     // CUDA_ERROR_NOT_READY
constexpr int version_asked = 12000;

struct Cuda {
  int (*pointer_attributes)(unsigned, const int*, void**, DevicePointer) = nullptr;
  int (*retain)(void**, int) = nullptr;
  int (*push)(void*) = nullptr;
  int (*pop)(void**) = nullptr;
  int (*create_stream)(void**, unsigned) = nullptr;
  int (*query)(void*) = nullptr;
  int (*copy)(DevicePointer, DevicePointer, std::size_t, void*) = nullptr;
  // Of tests/emulated_gpu alone; a GPU's driver has neither.
  bool (*card_write)(DevicePointer, const void*, std::size_t) = nullptr;
  void (*card_reads)() = nullptr;
  bool found = false;
};

Cuda load() {
  Cuda cuda;
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return cuda;
  const auto get = reinterpret_cast<int (*)(const char*, void**, int, unsigned long long, void*)>(
      ::dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) return cuda;
  cuda.found = true;
  const auto one = [&](auto& function, const char* name) {
    void* address = nullptr;
    if (get(name, &address, version_asked, 0, nullptr) != 0 || address == nullptr) cuda.found = false;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  one(cuda.pointer_attributes, "cuPointerGetAttributes");
  one(cuda.retain, "cuDevicePrimaryCtxRetain");
  one(cuda.push, "cuCtxPushCurrent");
  one(cuda.pop, "cuCtxPopCurrent");
  one(cuda.create_stream, "cuStreamCreate");
  one(cuda.query, "cuStreamQuery");
  one(cuda.copy, "cuMemcpyAsync");
  cuda.card_write = reinterpret_cast<decltype(cuda.card_write)>(::dlsym(library, "emulatedCardWrite"));
  cuda.card_reads = reinterpret_cast<decltype(cuda.card_reads)>(::dlsym(library, "emulatedCardReads"));
  return cuda;
}

/// The driver, once the process has loaded it; null before.
const Cuda* cuda() {
  static std::mutex mutex;
  static Cuda loaded;
  const std::lock_guard lock(mutex);
  if (!loaded.found) loaded = load();
  return loaded.found ? &loaded : nullptr;
}

/// A context of a device, and a stream that waits for no other stream. Both live until the process ends.
struct Lane {
  void* context = nullptr;
  void* stream = nullptr;
};

Lane lane_of(const Cuda& driver, int device) {
  static std::mutex mutex;
  static std::map<int, Lane> lanes;
  const std::lock_guard lock(mutex);
  auto& lane = lanes[device];
  if (lane.stream == nullptr && driver.retain(&lane.context, device) == 0 && driver.push(lane.context) == 0) {
    if (driver.create_stream(&lane.stream, non_blocking) != 0) lane.stream = nullptr;
    void* popped = nullptr;
    driver.pop(&popped);
  }
  return lane;
}

bool copy(int device, const void* to, const void* from, std::size_t bytes) {
  const Cuda* const driver = cuda();
  if (driver == nullptr) return false;
  const auto lane = lane_of(*driver, device);
  if (lane.stream == nullptr || driver->push(lane.context) != 0) return false;
  int result =
      driver->copy(reinterpret_cast<DevicePointer>(to), reinterpret_cast<DevicePointer>(from), bytes, lane.stream);
  while (result == 0 && (result = driver->query(lane.stream)) == not_ready) {
    result = 0;
    std::this_thread::yield();
  }
  void* popped = nullptr;
  driver->pop(&popped);
  return result == 0;
}

constexpr unsigned page_bits = 21;  // the driver maps pages of 2 MiB
std::uint64_t page_of(std::uintptr_t address) { return address >> page_bits; }

/// The device and the number of an allocation.
struct Owner {
  int device = -1;
  std::uint64_t number = 0;
};

std::optional<Owner> owner_of(std::uintptr_t address) {
  const Cuda* const driver = cuda();
  if (driver == nullptr) return std::nullopt;
  unsigned type = 0;
  Owner owner;
  const int names[] = {memory_type, buffer_id, device_ordinal};
  void* values[] = {&type, &owner.number, &owner.device};
  if (driver->pointer_attributes(3, names, values, address) != 0 || type != device_memory) return std::nullopt;
  return owner;
}

bool is_off(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && std::string_view(value) == "0";
}

}  // namespace

Gpu::Allocation Gpu::find(const void* data, std::size_t bytes) {
  const auto start = reinterpret_cast<std::uintptr_t>(data);
  Allocation found;
  found.first_page_ = page_of(start);
  for (auto page = page_of(start); page <= page_of(start + bytes - 1); ++page) {
    const auto owner = owner_of(std::max<std::uintptr_t>(start, page << page_bits));
    if (!owner) return {};
    found.numbers_.push_back(owner->number);
    found.device_ = owner->device;
  }
  return owner_of(start + bytes - 1) ? found : Allocation();  // the range may leave its allocation
}

bool Gpu::peer_memory() { return !is_off("EMULATED_VERBS_PEERMEM"); }
bool Gpu::dma_buf() { return !is_off("EMULATED_VERBS_DMABUF"); }

bool Gpu::Allocation::is_current(const std::byte* data, std::size_t bytes) const {
  const auto start = reinterpret_cast<std::uintptr_t>(data);
  for (const auto address : {start, start + bytes - 1}) {
    const auto owner = owner_of(address);
    if (!owner || owner->device != device_ || owner->number != numbers_.at(page_of(address) - first_page_))
      return false;
  }
  return true;
}

bool Gpu::Allocation::read(std::byte* to, const std::byte* from, std::size_t bytes) const {
  const auto* const driver = cuda();
  if (driver != nullptr && driver->card_reads != nullptr) driver->card_reads();
  return is_current(from, bytes) && copy(device_, to, from, bytes);
}

bool Gpu::Allocation::write(std::byte* to, const std::byte* from, std::size_t bytes) const {
  if (!is_current(to, bytes)) return false;
  const auto* const driver = cuda();
  if (driver != nullptr && driver->card_write != nullptr)
    return driver->card_write(reinterpret_cast<DevicePointer>(to), from, bytes);
  return copy(device_, to, from, bytes);
}

}  // namespace tensorferry::emulated_verbs
