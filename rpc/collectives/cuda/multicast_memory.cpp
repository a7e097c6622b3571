#include "rpc/collectives/cuda/multicast_memory.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "base/text.h"
#include "channels/cuda/device.h"
#include "channels/cuda/event_poller.h"
#include "rpc/collectives/cuda/descriptor_box.h"
#include "rpc/collectives/cuda/multicast_driver.h"
#include "rpc/collectives/cuda/reductions.h"
#include "rpc/collectives/gpu_topology.h"

namespace tensorferry::collectives::cuda {
namespace {

namespace driver = tensorferry::cuda;
using driver::api;

/// What a rank tells the others in each of the steps.
struct Report {
  FixedText<256> why;             // why it cannot go on
  std::uint64_t granularity = 0;  // of sizes and addresses; told at first
  DescriptorBox::Address box;     // told at first
};

CUmemAllocationProp properties_of_memory(int device) {
  CUmemAllocationProp out{};
  out.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  out.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;  // as a shareable object demands
  out.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  return out;
}

CUmulticastObjectProp properties_of_object(std::size_t ranks, std::size_t bytes) {
  CUmulticastObjectProp out{};
  out.numDevices = static_cast<unsigned>(ranks);
  out.size = bytes;
  out.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return out;
}

std::size_t rounded_up(std::size_t bytes, std::size_t unit) { return (bytes + unit - 1) / unit * unit; }

std::string text_of(CUresult result, const char* what) {
  return result == CUDA_SUCCESS ? std::string() : std::string(driver::status_of(result, what).what());
}

/// Writes the granularity that sizes and addresses must have here; returns why the driver does not tell it.
std::string find_granularity(int device, std::size_t ranks, std::uint64_t& out) {
  const auto& multicast = MulticastDriver::of_this_process();
  const auto object = properties_of_object(ranks, 2 * MulticastMemory::half_bytes);
  const auto memory = properties_of_memory(device);
  std::size_t of_object = 0, of_memory = 0;
  auto result = multicast.get_granularity(&of_object, &object, CU_MULTICAST_GRANULARITY_MINIMUM);
  if (result == CUDA_SUCCESS) {
    result = multicast.get_allocation_granularity(&of_memory, &memory, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  }
  out = std::max(of_object, of_memory);
  if (result == CUDA_SUCCESS && out == 0) result = CUDA_ERROR_NOT_SUPPORTED;
  return text_of(result, "asking for the granularity of multicast");
}

/// Returns why this rank cannot take part, before anything is made; fills in the rest of the report.
std::string prepare(int device, std::size_t ranks, Report& own, DescriptorBox& box) {
  if (auto why = MulticastDriver::why_not(device); !why.empty()) return why;
  // This one needs all that the compiler must know: an accumulation in float32 came to it last.
  const auto kernel =
      MulticastKernel::find(device, DType::bfloat16, Reduction::sum, ranks, MulticastKernel::Kind::two_shot);
  if (!kernel.ok()) return std::string(kernel.status().what());
  if (auto why = find_granularity(device, ranks, own.granularity); !why.empty()) return why;
  auto opened = DescriptorBox::open();
  if (!opened.ok()) return std::string(opened.status().what());
  box = *std::move(opened);
  own.box = box.address();
  return {};
}

}  // namespace

std::string MulticastMemory::create(std::size_t ranks, int& descriptor) {
  const auto properties = properties_of_object(ranks, bytes_);
  auto result = MulticastDriver::of_this_process().create(&object_, &properties);
  if (result != CUDA_SUCCESS) return text_of(result, "creating a multicast object");
  result = api()->mem_export(&descriptor, object_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  return text_of(result, "exporting the multicast object");
}

std::string MulticastMemory::import(int descriptor) {
  auto* const handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor));  // NOLINT
  const auto result = api()->mem_import(&object_, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  return text_of(result, "importing the multicast object");
}

std::string MulticastMemory::add_device() {
  CUdevice handle = 0;
  auto result = api()->device_get(&handle, device_);
  if (result == CUDA_SUCCESS) result = MulticastDriver::of_this_process().add_device(object_, handle);
  return text_of(result, "adding the GPU to the multicast object");
}

CUresult MulticastMemory::map(CUdeviceptr& at, CUmemGenericAllocationHandle handle) const {
  CUdeviceptr begin = 0;
  auto result = api()->mem_address_reserve(&begin, bytes_, granularity_, 0, 0);
  if (result != CUDA_SUCCESS) return result;
  result = api()->mem_map(begin, bytes_, 0, handle, 0);
  if (result == CUDA_SUCCESS) {
    CUmemAccessDesc access{};
    access.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device_};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    result = api()->mem_set_access(begin, bytes_, &access, 1);
    if (result != CUDA_SUCCESS) api()->mem_unmap(begin, bytes_);
  }
  if (result == CUDA_SUCCESS) {
    at = begin;
  } else {
    api()->mem_address_free(begin, bytes_);
  }
  return result;
}

std::string MulticastMemory::bind() {
  const auto properties = properties_of_memory(device_);
  auto result = api()->mem_create(&memory_, bytes_, &properties, 0);
  if (result != CUDA_SUCCESS) return text_of(result, "allocating memory for multicast");
  result = MulticastDriver::of_this_process().bind_memory(object_, 0, memory_, 0, bytes_, 0);
  if (result != CUDA_SUCCESS) return text_of(result, "binding memory to the multicast object");
  bound_ = true;
  result = map(own_, memory_);
  if (result != CUDA_SUCCESS) return text_of(result, "mapping the memory for multicast");
  return text_of(map(all_, object_), "mapping the multicast object");
}

Result<MulticastMemory::Made> MulticastMemory::make(RawGroup& group, const Fingerprint& called, int device,
                                                    const WaitLimits& limits) {
  constexpr std::chrono::seconds patience{5};  // the descriptor has been sent before it is waited for
  const auto ranks = group.size(), rank = group.rank();
  const driver::DeviceGuard here(device);
  std::vector<Report> all(ranks);
  Report own;
  Made out;
  // Tells the others how a step went here, and learns how it went there. Returns false if a rank cannot go on.
  const auto meet = [&](std::string why) -> Result<bool> {
    own.why = why;
    auto status = group.tell_each_other(called, std::as_bytes(std::span(&own, 1)),
                                        std::as_writable_bytes(std::span(all)), limits);
    if (!status.ok()) return status;
    for (std::size_t each = 0; each < ranks && out.why_not.empty(); ++each) {
      if (why = all[each].why.text(); !why.empty()) out.why_not = formatted("{}: {}", group.named(each), why);
    }
    return out.why_not.empty();
  };

  DescriptorBox box;
  auto goes_on = meet(here.status().ok() ? prepare(device, ranks, own, box) : std::string(here.status().what()));
  if (!goes_on.ok()) return goes_on.status();
  if (!*goes_on) return out;
  auto memory = std::unique_ptr<MulticastMemory>(new MulticastMemory(device));
  for (const auto& each : all) memory->granularity_ = std::max<std::size_t>(memory->granularity_, each.granularity);
  memory->bytes_ = rounded_up(2 * half_bytes, memory->granularity_);

  std::string why;
  if (rank == 0) {
    int descriptor = -1;
    why = memory->create(ranks, descriptor);
    const FileDescriptor object(descriptor);
    for (std::size_t to = 1; to < ranks && why.empty(); ++to) {
      if (auto sent = DescriptorBox::send(object.get(), all[to].box); !sent.ok()) why = std::string(sent.what());
    }
  }
  goes_on = meet(why);
  if (!goes_on.ok()) return goes_on.status();
  if (!*goes_on) return out;

  if (rank != 0) {
    auto taken = box.take(std::min(limits.until, std::chrono::steady_clock::now() + patience));
    why = taken.ok() ? memory->import(taken->get()) : std::string(taken.status().what());
  }
  if (why.empty()) why = memory->add_device();
  goes_on = meet(why);
  if (!goes_on.ok()) return goes_on.status();
  if (!*goes_on) return out;

  goes_on = meet(memory->bind());
  if (!goes_on.ok()) return goes_on.status();
  if (!*goes_on) return out;
  auto* const made = memory.get();
  out.memory = {made, [kept = std::shared_ptr<MulticastMemory>(std::move(memory))](MulticastMemory*) mutable {
                  driver::background().submit([kept = std::move(kept)] {});
                }};
  return out;
}

MulticastMemory::~MulticastMemory() {
  const driver::DeviceGuard here(device_);
  if (!here.status().ok()) return;
  for (const auto at : {all_, own_}) {
    if (at == 0) continue;
    api()->mem_unmap(at, bytes_);
    api()->mem_address_free(at, bytes_);
  }
  CUdevice handle = 0;
  if (bound_ && api()->device_get(&handle, device_) == CUDA_SUCCESS) {
    MulticastDriver::of_this_process().unbind(object_, handle, 0, bytes_);
  }
  if (memory_ != 0) api()->mem_release(memory_);
  if (object_ != 0) api()->mem_release(object_);
}

}  // namespace tensorferry::collectives::cuda
