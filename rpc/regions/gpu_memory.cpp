#include "rpc/regions/gpu_memory.h"

#include <cstring>
#include <future>
#include <utility>
#include <variant>

#include "base/text.h"
#include "channels/cuda/allocation.h"
#include "channels/cuda/device.h"
#include "channels/cuda/event_poller.h"
#include "channels/cuda/peer_memory.h"

namespace tensorferry::regions {
namespace {

using cuda::api;

/// A stream of its own, so that copies for peers wait for no work of the program.
class CopyStream final {
 public:
  CopyStream() { made_ = api()->stream_create(&stream_, CU_STREAM_NON_BLOCKING); }
  ~CopyStream() {
    if (made_ == CUDA_SUCCESS) api()->stream_destroy(stream_);
  }
  CopyStream(const CopyStream&) = delete;
  CopyStream& operator=(const CopyStream&) = delete;
  [[nodiscard]] CUresult made() const { return made_; }
  [[nodiscard]] CUstream get() const { return stream_; }

 private:
  CUstream stream_ = nullptr;
  CUresult made_;
};

/// Waits for the work of a stream. The driver's own wait would keep a core.
Status wait_for(int device, const CopyStream& stream) {
  const auto ended = std::make_shared<std::promise<Status>>();
  auto status = ended->get_future();
  cuda::EventPoller::of_this_process().when_done(cuda::Watch::closely, device, stream.get(),
                                                 [ended](Status of) { ended->set_value(std::move(of)); });
  return status.get();
}

Status copy_each(const Buffer& gpu, const std::vector<HostCopy>& copies, bool to_gpu) {
  if (copies.empty()) return {};
  const cuda::DeviceGuard here(gpu.device.index);
  if (!here.status().ok()) return here.status();
  const CopyStream stream;
  auto result = stream.made();
  for (auto each = copies.begin(); each != copies.end() && result == CUDA_SUCCESS; ++each) {
    const auto on_gpu = cuda::address_of(gpu.data) + each->offset;
    const auto on_host = cuda::address_of(each->host);
    result = api()->memcpy_async(to_gpu ? on_gpu : on_host, to_gpu ? on_host : on_gpu, each->bytes, stream.get());
  }
  auto waited = stream.made() == CUDA_SUCCESS ? wait_for(gpu.device.index, stream) : Status();
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "copying a region on a GPU");
  return waited;
}

class Locked final : public LockedWords {
 public:
  static Result<std::shared_ptr<LockedWords>> lock(const Buffer& page, int device) {
    const cuda::DeviceGuard here(device);  // page-locked memory belongs to all contexts, but the call needs one
    if (!here.status().ok()) return here.status();
    const auto locked =
        api()->host_register(page.data, page.bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (locked != CUDA_SUCCESS) return cuda::status_of(locked, "page-locking the words of a peer's regions");
    return std::shared_ptr<LockedWords>(new Locked(page, device));
  }
  ~Locked() override {
    // The driver waits for all kernels of the process, which the program's thread must not.
    cuda::background().submit([page = page_, device = device_] {
      const cuda::DeviceGuard here(device);
      if (here.status().ok()) api()->host_unregister(page.data);
    });
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  Result<std::byte*> address_on(int device) override {
    const cuda::DeviceGuard here(device);
    if (!here.status().ok()) return here.status();
    CUdeviceptr address = 0;
    const auto found = api()->host_get_device_pointer(&address, page_.data, 0);
    if (found != CUDA_SUCCESS) return cuda::status_of(found, "finding a GPU's address of page-locked memory");
    return reinterpret_cast<std::byte*>(address);  // NOLINT(performance-no-int-to-ptr)
  }

 private:
  Locked(const Buffer& page, int device) : page_(page), device_(device) {}
  const Buffer page_;
  const int device_;
};

}  // namespace

Result<std::shared_ptr<LockedWords>> lock_words(const Buffer& page, int device) {
  if (api() == nullptr) return Status(Code::channel_unavailable, cuda::why_missing());
  return Locked::lock(page, device);
}

Status check_memory(const Buffer& memory) {
  if (memory.device == Device{}) return {};
  const auto refused = [&](std::string_view why) {
    return Status(Code::invalid_argument, formatted("a region of memory on {}: {}", text_of(memory.device), why));
  };
  if (memory.device.type != DeviceType::cuda) return refused("regions are in memory of the host or of a GPU");
  if (api() == nullptr) return refused(cuda::why_missing());
  const cuda::DeviceGuard here(memory.device.index);
  if (!here.status().ok()) return refused(here.status().what());
  if (memory.bytes == 0) return {};
  const auto found = cuda::allocation_at(cuda::address_of(memory.data));
  const auto* const refusal = std::get_if<Refusal>(&found);
  return refusal == nullptr ? Status() : refused(refusal->reason);
}

GpuPlace place_of(const Buffer& memory) {
  GpuPlace place;
  const cuda::DeviceGuard here(memory.device.index);
  if (!here.status().ok() || memory.bytes == 0) return place;
  const auto found = cuda::allocation_at(cuda::address_of(memory.data));
  const auto* const allocation = std::get_if<cuda::GpuAllocation>(&found);
  if (allocation == nullptr || !allocation->handle || allocation->chunk) return place;
  const auto offset = cuda::address_of(memory.data) - allocation->base;
  if (allocation->bytes - offset < memory.bytes) return place;
  const auto offer = cuda::offer_of(allocation->base, memory.device.index);
  if (!offer.ok()) return place;
  place.handle.assign(offer->handle.reserved, sizeof offer->handle.reserved);
  place.address = allocation->base;
  place.bytes = allocation->bytes;
  place.offset = offset;
  place.index = memory.device.index;
  place.process = offer->process;
  return place;
}

std::optional<std::uint8_t> gpu_in_use() {
  const auto device = cuda::device_in_use();
  return device ? std::optional(static_cast<std::uint8_t>(*device)) : std::nullopt;
}

Result<Buffer> map_gpu_memory(const GpuPlace& place, std::uint64_t bytes, int device) {
  cuda::BufferOffer offer;
  if (place.handle.size() != sizeof offer.handle.reserved || place.offset > place.bytes ||
      bytes > place.bytes - place.offset) {
    return Status(Code::channel_unavailable, "the owner's GPU driver exports no handle of the region's memory");
  }
  std::memcpy(offer.handle.reserved, place.handle.data(), place.handle.size());
  offer.address = place.address;
  offer.process = place.process;
  offer.device = place.index;
  const cuda::DeviceGuard here(device);
  if (!here.status().ok()) return here.status();
  auto memory = cuda::PeerMemory::open(offer, device, place.bytes);
  if (!memory.ok()) return memory.status();
  auto* const begin = reinterpret_cast<std::byte*>((*memory)->address());  // NOLINT(performance-no-int-to-ptr)
  const Device on{DeviceType::cuda, static_cast<std::uint8_t>(device)};
  return Buffer{on, begin + place.offset, static_cast<std::size_t>(bytes), nullptr, *std::move(memory)};
}

Status copy_runs(const Buffer& gpu, std::uint64_t run_bytes, const std::vector<std::uint64_t>& offsets, std::byte* host,
                 bool to_gpu) {
  if (run_bytes == 0) return {};
  std::vector<HostCopy> copies;
  copies.reserve(offsets.size());
  for (const auto offset : offsets) {
    copies.push_back({offset, host, run_bytes});
    host += run_bytes;
  }
  return copy_each(gpu, copies, to_gpu);
}

Status copy_to_host(const Buffer& gpu, const std::vector<HostCopy>& copies) { return copy_each(gpu, copies, false); }

}  // namespace tensorferry::regions
