/// Working on a device from any thread: contexts, events, and what a stream is about to do.
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

/// Lets a scope make calls that a CUDA graph which another thread is capturing would forbid; none of ours touches that
/// capture. Leaves the thread as it was.
class OutsideGraphs final {
 public:
  OutsideGraphs() { exchange(); }
  ~OutsideGraphs() { exchange(); }
  OutsideGraphs(const OutsideGraphs&) = delete;
  OutsideGraphs& operator=(const OutsideGraphs&) = delete;

 private:
  void exchange() {
    if (api() != nullptr) api()->exchange_capture_mode(&mode_);
  }
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

/// Makes a device's primary context (the one that torch and the runtime use) current for a scope, which is outside
/// graphs as well. Leaves the thread as it was.
class OnDevice {
 public:
  /// The context is made, which takes a while, where this process has not used the device yet.
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  /// Not ok: no context, and nothing may be done with the device.
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  const OutsideGraphs outside_;
  Status status_;
};

/// The address as the driver's functions take it.
inline CUdeviceptr address_of(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

/// A point in a stream's order. Movable; drops back into a pool. Events of one device are used on its streams, and may
/// be waited for on any.
class Event {
 public:
  Event() noexcept = default;
  /// What `stream` of `device` has been given so far. Empty where recording fails.
  static Event record(int device, Stream stream);
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)), device_(other.device_) {}
  Event& operator=(Event&& other) noexcept;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event();

  explicit operator bool() const noexcept { return event_ != nullptr; }
  [[nodiscard]] CUevent get() const noexcept { return event_; }
  /// nullopt: not yet. An error is the context's own: a kernel of somebody's has failed.
  [[nodiscard]] std::optional<Status> done() const;

 private:
  CUevent event_ = nullptr;
  int device_ = 0;
};

/// What stands between a source and its reader.
enum class Order : std::uint8_t {
  idle,       // nothing: all that the stream was given is done
  busy,       // the stream's work so far
  capturing,  // a CUDA graph is being captured on it: the bytes do not exist yet
};
/// Inside OnDevice. The legacy default stream is as busy as the blocking streams that it waits for; one of those that
/// is being captured makes it capturing.
Order order_of(Stream stream);

/// When a buffer's bytes are there: once the event is done, or now, where it is empty. A Refusal while a graph is being
/// captured on its stream, and where the driver fails.
std::variant<Event, Refusal> ready_of(const Buffer& buffer);

/// What every cuda channel refuses: another type of device, a device that is not here, a size without an address, a
/// capturing stream.
std::optional<Refusal> refusal_of(std::string_view channel, const Buffer& buffer);

/// Lets `device` read the memory of `other` directly where the two can; else the driver copies by way of the host.
/// Inside OnDevice(device). Asked once a pair.
void allow_peer(int device, int other);

/// Names a GPU on all processes and containers of a host, whatever number they give it; nullopt: no such device.
std::optional<std::string> uuid_of(int device);
/// The number that this process gives to that GPU; nullopt: it does not see it.
std::optional<int> device_of(std::string_view uuid);

/// What joins two devices of this process: "the same GPU", "NVLink", "PCIe"; "an unknown link" where it does not see
/// the other one.
std::string_view link_between(int device, std::optional<int> other);
/// What joins a device of this process to the CPU's memory: "PCIe", or "NVLink-C2C" where it follows the CPU's page
/// tables.
std::string_view link_to_host(int device);

}  // namespace tensorferry::cuda
