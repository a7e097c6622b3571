#include "channels/cuda/device.h"

#include <array>
#include <bitset>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

#include "base/environment.h"
#include "base/mutex.h"
#include "base/text.h"

namespace tensorferry::cuda {
namespace {

constexpr std::size_t most_devices = 256;  // the range of Device::index

/// The state of one device of this process, under the driver's index.
struct State {
  Mutex mutex;
  CUcontext context = nullptr;  // never released: torch's tensors may outlive every channel
  Status failed;
  std::vector<CUevent> events;      // the pool of unused events
  std::bitset<most_devices> peers;  // devices to which peer access was requested
};

State& state_of(int device) {
  static auto& states = *new std::array<State, most_devices>();
  return states.at(static_cast<std::size_t>(device));
}

Result<CUcontext> context_of(int device) {
  if (api() == nullptr) return Status(Code::channel_unavailable, why_missing());
  if (device < 0 || device >= devices())
    return Status(Code::channel_unavailable, formatted("this process has no cuda:{}", device));
  auto& state = state_of(device);
  const std::lock_guard lock(state.mutex);
  if (state.context != nullptr) return state.context;
  CUdevice handle = 0;
  auto result = api()->device_get(&handle, device);
  if (result == CUDA_SUCCESS) result = api()->primary_ctx_retain(&state.context, handle);
  if (result != CUDA_SUCCESS) {
    state.context = nullptr;
    return status_of(result, "making a context");
  }
  return state.context;
}

}  // namespace

DeviceGuard::DeviceGuard(int device) {
  const auto context = context_of(device);
  if (!context.ok()) {
    status_ = context.status();
    return;
  }
  status_ = status_of(api()->ctx_push_current(*context), "making a context current");
}

DeviceGuard::~DeviceGuard() {
  if (!status_.ok()) return;
  CUcontext popped = nullptr;
  api()->ctx_pop_current(&popped);
}

GpuEvent GpuEvent::record(int device, Stream stream) {
  GpuEvent event;
  event.device_ = device;
  auto& state = state_of(device);
  {
    const std::lock_guard lock(state.mutex);
    if (!state.events.empty()) {
      event.event_ = state.events.back();
      state.events.pop_back();
    }
  }
  if (event.event_ == nullptr && api()->event_create(&event.event_, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) return {};
  if (api()->event_record(event.event_, static_cast<CUstream>(stream)) != CUDA_SUCCESS) return {};
  return event;
}

GpuEvent& GpuEvent::operator=(GpuEvent&& other) noexcept {
  std::swap(event_, other.event_);
  std::swap(device_, other.device_);
  return *this;
}

GpuEvent::~GpuEvent() {
  if (event_ == nullptr) return;
  auto& state = state_of(device_);
  const std::lock_guard lock(state.mutex);
  state.events.push_back(event_);
}

std::optional<Status> GpuEvent::done() const {
  const auto result = api()->event_query(event_);
  if (result == CUDA_ERROR_NOT_READY) return std::nullopt;
  return status_of(result, "the device's work");
}

Order order_of(Stream stream) {
  auto* const handle = static_cast<CUstream>(stream);
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const auto asked = api()->stream_is_capturing(handle, &capture);
  if (asked == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || capture != CU_STREAM_CAPTURE_STATUS_NONE) return Order::capturing;
  return api()->stream_query(handle) == CUDA_SUCCESS ? Order::idle : Order::busy;
}

std::variant<GpuEvent, Refusal> ready_of(const Buffer& buffer) {
  const DeviceGuard here(buffer.device.index);
  if (!here.status().ok()) return Refusal{std::string(here.status().what())};
  switch (order_of(buffer.stream)) {
    case Order::idle:
      return GpuEvent();
    case Order::capturing:
      return Refusal{"a CUDA graph is being captured on the buffer's stream"};
    case Order::busy:
      break;
  }
  auto event = GpuEvent::record(buffer.device.index, buffer.stream);
  if (!event) return Refusal{"the CUDA driver records no event"};
  return event;
}

Status refusal_of_capture(int device, Stream stream) {
  const DeviceGuard here(device);
  if (!here.status().ok()) return here.status();
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  const auto asked = api()->stream_is_capturing(static_cast<CUstream>(stream), &capture);
  if (asked != CUDA_ERROR_STREAM_CAPTURE_IMPLICIT && capture == CU_STREAM_CAPTURE_STATUS_NONE) return {};
  return {Code::channel_unavailable, "a CUDA graph is being captured on the buffer's stream"};
}

std::optional<Refusal> refusal_of(std::string_view channel, const Buffer& buffer) {
  if (buffer.device.type != DeviceType::cuda)
    return Refusal{formatted("{} carries GPU memory, not {}", channel, text_of(buffer.device))};
  if (buffer.bytes > 0 && buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
  return std::nullopt;
}

void allow_peer(int device, int other) {
  if (device == other || other < 0 || other >= devices()) return;
  auto& state = state_of(device);
  {
    const std::lock_guard lock(state.mutex);
    if (state.peers.test(static_cast<std::size_t>(other))) return;
    state.peers.set(static_cast<std::size_t>(other));
  }
  const auto context = context_of(other);
  if (context.ok()) api()->ctx_enable_peer_access(*context, 0);  // copies work even if this fails
}

CUresult copy_between(CUdeviceptr to, int to_device, CUdeviceptr from, int from_device, std::size_t bytes,
                      CUstream stream) {
  if (to_device == from_device) return api()->memcpy_async(to, from, bytes, stream);
  const auto to_context = context_of(to_device), from_context = context_of(from_device);
  if (!to_context.ok() || !from_context.ok()) return CUDA_ERROR_INVALID_CONTEXT;
  allow_peer(to_device, from_device);
  return api()->memcpy_peer_async(to, *to_context, from, *from_context, bytes, stream);
}

bool few_queues() {
  constexpr int usual = 8;
  const std::string text(environment::value_of("CUDA_DEVICE_MAX_CONNECTIONS"));
  const int queues = std::atoi(text.c_str());
  return queues > 0 && queues < usual;
}

std::optional<int> device_in_use() {
  for (int device = 0; api() != nullptr && device < devices(); ++device) {
    CUdevice handle = 0;
    unsigned flags = 0;
    int active = 0;
    if (api()->device_get(&handle, device) != CUDA_SUCCESS) continue;
    if (api()->primary_ctx_get_state(handle, &flags, &active) == CUDA_SUCCESS && active != 0) return device;
  }
  return std::nullopt;
}

std::string without_access_to(int device) {
  std::string barred;
  CUdevice here = 0;
  if (api() == nullptr || api()->device_get(&here, device) != CUDA_SUCCESS) return barred;
  for (int other = 0; other < devices(); ++other) {
    CUdevice there = 0;
    int can = 0;
    if (other == device || api()->device_get(&there, other) != CUDA_SUCCESS) continue;
    if (api()->device_can_access_peer(&can, here, there) != CUDA_SUCCESS || can != 0) continue;
    barred += uuid_of(other).value_or("");
  }
  return barred;
}

std::optional<std::string> uuid_of(int device) {
  CUdevice handle = 0;
  CUuuid uuid{};
  if (api() == nullptr || api()->device_get(&handle, device) != CUDA_SUCCESS) return std::nullopt;
  if (api()->device_get_uuid(&uuid, handle) != CUDA_SUCCESS) return std::nullopt;
  return std::string(uuid.bytes, sizeof uuid.bytes);
}

std::optional<int> device_of(std::string_view uuid) {
  for (int device = 0; device < devices(); ++device) {
    if (uuid_of(device) == uuid) return device;
  }
  return std::nullopt;
}

std::string_view link_between(int device, std::optional<int> other) {
  if (!other) return "an unknown link";
  if (device == *other) return "the same GPU";
  // NVLink has native atomics between GPUs, PCIe has none.
  int atomics = 0;
  CUdevice here = 0, there = 0;
  api()->device_get(&here, device);
  api()->device_get(&there, *other);
  const auto attribute = CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
  const auto asked = api()->device_get_p2p_attribute(&atomics, attribute, here, there);
  return asked == CUDA_SUCCESS && atomics != 0 ? "NVLink" : "PCIe";
}

std::string_view link_to_host(int device) {
  const auto attribute = CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES;
  int shared = 0;
  CUdevice handle = 0;
  const auto asked = api()->device_get(&handle, device) == CUDA_SUCCESS &&
                     api()->device_get_attribute(&shared, attribute, handle) == CUDA_SUCCESS;
  return asked && shared != 0 ? "NVLink-C2C" : "PCIe";
}

}  // namespace tensorferry::cuda
