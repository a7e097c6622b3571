/// Scopes, events and queries for work on a CUDA device from any thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "channels/buffer.h"
#include "channels/channel.h"
#include "channels/cuda/api.h"

namespace tensorferry::cuda {

/// Sets this thread's capture mode to relaxed for a scope. Otherwise, while another thread captures a CUDA graph, the
/// driver may reject calls of this thread, such as allocations and event queries. The calls that this project makes
/// inside the scope do not touch that capture. The destructor restores the thread's mode.
class CaptureModeGuard final {
 public:
  CaptureModeGuard() { exchange(); }
  ~CaptureModeGuard() { exchange(); }
  CaptureModeGuard(const CaptureModeGuard&) = delete;
  CaptureModeGuard& operator=(const CaptureModeGuard&) = delete;

 private:
  void exchange() {
    if (api() != nullptr) api()->exchange_capture_mode(&mode_);
  }
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

/// Makes a device's primary context (the one that torch and the CUDA runtime use) current on this thread for a scope,
/// in relaxed capture mode (CaptureModeGuard). The destructor restores the thread's context and mode.
class DeviceGuard {
 public:
  /// Creates the primary context if this process has not used the device yet, which takes a while.
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  /// Returns whether the context is current. If it is not Ok, the caller must not use the device.
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  const CaptureModeGuard outside_;
  Status status_;
};

/// Returns the address in the type that the driver's functions take.
inline CUdeviceptr address_of(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

/// A CUDA event that marks a point in a stream's order. Movable. The destructor returns the event to a pool of its
/// device. An event is recorded only on streams of its device; streams of any device may wait for it.
class GpuEvent {
 public:
  GpuEvent() noexcept = default;
  /// Records an event behind all work that `stream` of `device` has been given so far. Returns an empty Event if the
  /// driver fails. Call inside DeviceGuard(device).
  static GpuEvent record(int device, Stream stream);
  GpuEvent(GpuEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)), device_(other.device_) {}
  GpuEvent& operator=(GpuEvent&& other) noexcept;
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;
  ~GpuEvent();

  explicit operator bool() const noexcept { return event_ != nullptr; }
  [[nodiscard]] CUevent get() const noexcept { return event_; }
  /// Returns nullopt while the recorded work is still running. An error is an error of the whole context: for example,
  /// a kernel of the program has failed.
  [[nodiscard]] std::optional<Status> done() const;

 private:
  CUevent event_ = nullptr;
  int device_ = 0;
};

/// The state of a stream, which decides what a reader of its bytes must wait for.
enum class Order : std::uint8_t {
  idle,       // all work of the stream is done: the reader waits for nothing
  busy,       // the reader must wait for the stream's work so far
  capturing,  // a CUDA graph is being captured on the stream: the bytes do not exist yet
};
/// Returns the state of a stream. Call inside DeviceGuard. The legacy default stream is busy while a blocking stream of
/// its device is busy, and capturing while a blocking stream is being captured.
Order order_of(Stream stream);

/// Returns an event after which the buffer's bytes are valid; an empty Event if they are valid already. Refuses if a
/// CUDA graph is being captured on the buffer's stream, or if the driver fails. Makes the device current itself.
std::variant<GpuEvent, Refusal> ready_of(const Buffer& buffer);

/// Returns Ok if a copy may be enqueued on `stream`; ChannelUnavailable if a CUDA graph is being captured on it. The
/// copy would become a part of the graph: it would not run now, and each replay would read memory that is long freed.
Status refusal_of_capture(int device, Stream stream);

/// Returns the refusal for a buffer that the GPU-only channels (cuda_xth, cuda_ipc) never carry: it is on another type
/// of device, or it has a size but no address. Streams are checked by ready_of() and order_of().
std::optional<Refusal> refusal_of(std::string_view channel, const Buffer& buffer);

/// Enables peer access, so that `device` reads the memory of `other` directly. If the two GPUs have no peer access, the
/// driver copies through the host. Asks the driver once per pair. Call inside DeviceGuard(device).
void allow_peer(int device, int other);

/// Enqueues a copy between two devices of this process, on a stream of `to_device`. Works for all memory, also if the
/// one device has no access to the other's: peer access covers neither memory of the virtual memory API nor pools. Call
/// inside DeviceGuard(to_device).
CUresult copy_between(CUdeviceptr to, int to_device, CUdeviceptr from, int from_device, std::size_t bytes,
                      CUstream stream);

/// Returns whether the environment gives this process fewer hardware queues than the driver's usual 8
/// (CUDA_DEVICE_MAX_CONNECTIONS). Then streams are more likely to share one, and work that waits holds up all streams
/// of its queue.
bool few_queues();

/// Returns the first GPU that this process has used, so that it has a primary context there. nullopt: none.
std::optional<int> device_in_use();

/// Returns the UUIDs of the GPUs that this process sees and to which `device` has no peer access, one after another.
std::string without_access_to(int device);

/// Returns the GPU's UUID, which is the same in all processes and containers of a host, although their indices may
/// differ. nullopt: there is no such device.
std::optional<std::string> uuid_of(int device);
/// Returns this process's index of the GPU with that UUID. nullopt: this process does not see the GPU.
std::optional<int> device_of(std::string_view uuid);

/// Returns the name of the link between two devices: "the same GPU", "NVLink" or "PCIe"; "an unknown link" if `other`
/// is nullopt, because this process does not see that GPU.
std::string_view link_between(int device, std::optional<int> other);
/// Returns the name of the link between a device and the CPU's memory: "NVLink-C2C" if the device uses the CPU's page
/// tables, else "PCIe".
std::string_view link_to_host(int device);

}  // namespace tensorferry::cuda
