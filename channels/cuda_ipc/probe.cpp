#include "channels/cuda_ipc/probe.h"

#include <array>
#include <chrono>
#include <thread>
#include <utility>

namespace tensorferry::cuda_ipc {
namespace {

using cuda::api;
using cuda::OnDevice;

CUmemAllocationProp properties(int device) {
  CUmemAllocationProp wanted{};
  wanted.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  wanted.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  wanted.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return wanted;
}

/// A stream and device memory for as long as a probe takes.
class Bench {
 public:
  Bench() {
    if (status_ == CUDA_SUCCESS) status_ = api()->stream_create(&stream_, CU_STREAM_NON_BLOCKING);
  }
  ~Bench() {
    if (memory_ != 0) api()->mem_free(memory_);
    for (auto* event : events_) {
      if (event != nullptr) api()->event_destroy(event);
    }
    if (stream_ != nullptr) api()->stream_destroy(stream_);
  }
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  [[nodiscard]] CUstream stream() const { return stream_; }
  [[nodiscard]] CUresult status() const { return status_; }
  void then(CUresult result) {
    if (status_ == CUDA_SUCCESS) status_ = result;
  }
  CUdeviceptr allocate(std::size_t bytes) {
    if (status_ == CUDA_SUCCESS) status_ = api()->mem_alloc(&memory_, bytes);
    return memory_;
  }
  CUevent mark(std::size_t number) {
    if (status_ == CUDA_SUCCESS) status_ = api()->event_create(&events_.at(number), CU_EVENT_DEFAULT);
    if (status_ == CUDA_SUCCESS) status_ = api()->event_record(events_.at(number), stream_);
    return events_.at(number);
  }
  /// The background thread may wait; nobody waits for it.
  void wait() {
    while (status_ == CUDA_SUCCESS) {
      const auto result = api()->stream_query(stream_);
      if (result == CUDA_SUCCESS) return;
      if (result != CUDA_ERROR_NOT_READY) status_ = result;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  CUresult status_ = CUDA_SUCCESS;
  CUstream stream_ = nullptr;
  CUdeviceptr memory_ = 0;
  std::array<CUevent, 2> events_{};
};

}  // namespace

Result<std::shared_ptr<ProbeMemory>> ProbeMemory::make(int device, std::uint64_t nonce) {
  const OnDevice here(device);
  if (!here.status().ok()) return here.status();
  auto made = std::shared_ptr<ProbeMemory>(new ProbeMemory(device));
  const auto wanted = properties(device);
  CUmemGenericAllocationHandle handle = 0;
  auto result = api()->mem_create(&handle, probe_bytes, &wanted, 0);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "making memory that can be exported");
  int descriptor = -1;
  result = api()->mem_export(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  made->descriptor_ = FileDescriptor(descriptor);
  if (result == CUDA_SUCCESS) result = api()->mem_address_reserve(&made->begin_, probe_bytes, 0, 0, 0);
  if (result == CUDA_SUCCESS) made->bytes_ = probe_bytes;
  if (result == CUDA_SUCCESS) result = api()->mem_map(made->begin_, probe_bytes, 0, handle, 0);
  made->mapped_ = result == CUDA_SUCCESS;
  api()->mem_release(handle);
  CUmemAccessDesc access{wanted.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  if (result == CUDA_SUCCESS) result = api()->mem_set_access(made->begin_, probe_bytes, &access, 1);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "exporting memory");
  Bench bench;
  bench.then(api()->memcpy_async(made->begin_, cuda::address_of(&nonce), sizeof nonce, bench.stream()));
  bench.wait();
  if (bench.status() != CUDA_SUCCESS) return cuda::status_of(bench.status(), "writing what the peer is to read");
  return made;
}

ProbeMemory::~ProbeMemory() {
  const OnDevice here(device_);
  if (!here.status().ok()) return;
  if (mapped_) api()->mem_unmap(begin_, bytes_);
  if (bytes_ != 0) api()->mem_address_free(begin_, bytes_);
}

Result<double> probe(FileDescriptor memory, std::uint64_t nonce, int device) {
  const OnDevice here(device);
  if (!here.status().ok()) return here.status();
  auto window = Window::reserve(device);
  if (!window) return Status(Code::resource_exhausted, "the driver gives no addresses");
  const auto mapping = Mapping::map(std::move(memory), std::move(window), 0, probe_bytes);
  if (!mapping.ok()) return mapping.status();
  const auto theirs = (*mapping)->begin();
  Bench bench;
  const auto mine = bench.allocate(probe_bytes);
  std::uint64_t found = ~nonce;
  const auto copy = [&] { bench.then(api()->memcpy_async(mine, theirs, probe_bytes, bench.stream())); };
  copy();
  const auto begin = bench.mark(0);
  copy();
  const auto end = bench.mark(1);
  bench.then(api()->memcpy_async(cuda::address_of(&found), mine, sizeof found, bench.stream()));
  bench.wait();
  float milliseconds = 0;
  if (bench.status() == CUDA_SUCCESS) bench.then(api()->event_elapsed_time(&milliseconds, begin, end));
  if (bench.status() != CUDA_SUCCESS) return cuda::status_of(bench.status(), "copying from the peer's GPU");
  if (found != nonce)
    return Status(Code::channel_unavailable, "what was copied from the peer's GPU is not what it wrote");
  return static_cast<double>(probe_bytes) / 1e6 / static_cast<double>(milliseconds);
}

}  // namespace tensorferry::cuda_ipc
