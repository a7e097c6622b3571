#include "channels/cuda_xth/cuda_xth_channel.h"

#include <map>
#include <mutex>
#include <utility>

#include "base/mutex.h"
#include "base/text.h"
#include "channels/completion.h"
#include "channels/cuda/copy_timer.h"
#include "channels/cuda/event_poller.h"
#include "channels/reserve.h"
#include "channels/xth/directory.h"

namespace tensorferry {
namespace {

/// The owner of an offered source: keeps the caller's owner, and the event after which the bytes are valid.
struct HeldSource {
  Owner owner;
  cuda::GpuEvent ready;  // empty: the bytes are valid already
};

/// The measured GB/s from one device of the process to another: of the first copy of `least` bytes or more.
class Speeds {
 public:
  static Speeds& of_this_process() {
    static auto& speeds = *new Speeds();
    return speeds;
  }
  /// Returns whether the caller should time this copy: true once for each pair of devices.
  bool wants(int from, int to, std::size_t bytes) {
    if (bytes < least) return false;
    const std::lock_guard lock(mutex_);
    return found_.try_emplace({from, to}).second;
  }
  void set(int from, int to, double speed) {
    const std::lock_guard lock(mutex_);
    found_[{from, to}] = speed;
  }
  /// Returns 0 if there is no measurement yet.
  double get(int from, int to) {
    const std::lock_guard lock(mutex_);
    const auto it = found_.find({from, to});
    return it == found_.end() ? 0 : it->second;
  }

 private:
  static constexpr std::size_t least = std::size_t{8} << 20;
  Mutex mutex_;
  std::map<std::pair<int, int>, double> found_;
};

class CudaXthChannel final : public Channel {
 public:
  CudaXthChannel(Wire& wire, DevicePair pair) : wire_(wire), pair_(pair), end_("cuda_xth", pair, wire) {}

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing&, Completion released) override {
    if (auto refusal = cuda::refusal_of("cuda_xth", buffer)) return std::move(*refusal);
    if (sharing == Sharing::shared) return Refusal{"cuda_xth copies bytes and cannot share them"};
    auto source = std::make_shared<HeldSource>(HeldSource{buffer.owner, {}});
    if (buffer.bytes > 0) {
      auto ready = cuda::ready_of(buffer);
      if (auto* refusal = std::get_if<Refusal>(&ready)) return std::move(*refusal);
      source->ready = std::move(std::get<cuda::GpuEvent>(ready));
    }
    auto offered = buffer;
    offered.stream = source->ready ? static_cast<Stream>(source->ready.get()) : nullptr;  // pull() waits for this event
    offered.owner = std::move(source);
    return end_.offer(std::move(offered), std::move(released));
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    auto status = copy(ticket, sink, consumed);
    complete(std::move(landed), status);
    if (consumed) complete(std::move(consumed), std::move(status));
  }

  void withdraw(const Ticket& ticket) override { end_.withdraw(ticket); }
  [[nodiscard]] std::string describe() const override {
    const auto from = pair_.local.index, to = pair_.remote.index;  // within one process both ends use the same indices
    return cuda::described(cuda::link_between(from, to), Speeds::of_this_process().get(from, to));
  }

  void progress() override { cuda::EventPoller::of_this_process().poll_now(); }

  void close(Status status) noexcept override { end_.close(std::move(status)); }

 private:
  /// Enqueues the copy. If that succeeds for a buffer that is not empty, takes `consumed` and runs it when the copy is
  /// done; else leaves it to the caller.
  Status copy(const Ticket& ticket, Sink& sink, Completion& consumed) {
    const auto source = end_.begin_copy(ticket);
    if (!source.ok()) return source.status();
    const auto destination = reserve(sink, ticket.bytes, pair_.local, wire_.peer());
    const cuda::DeviceGuard here(pair_.local.index);
    std::shared_ptr<cuda::Stopwatch> watch;
    auto status = destination.ok() ? here.status() : destination.status();
    if (status.ok() && ticket.bytes > 0) status = enqueue(source->buffer, *destination, watch);
    const auto done = [offers = source->offers, number = source->number] { offers->end_copy(number); };
    if (!status.ok() || ticket.bytes == 0) {
      done();
      return status;
    }
    cuda::EventPoller::of_this_process().when_done(
        cuda::Watch::loosely, pair_.local.index, destination->stream,
        [done, pair = pair_, bytes = ticket.bytes, watch = std::move(watch), memory = destination->owner,
         consumed = std::move(consumed)](Status copied) mutable {
          done();
          if (watch) {
            const cuda::DeviceGuard device(pair.local.index);
            const auto speed = cuda::gigabytes_per_second(bytes, watch->milliseconds());
            Speeds::of_this_process().set(pair.remote.index, pair.local.index, speed);
            watch.reset();
          }
          complete(std::move(consumed), std::move(copied));
        });
    consumed = {};
    return status;
  }

  /// Enqueues the wait for the source and the copy. Sets `watch` if the copy is timed.
  [[nodiscard]] Status enqueue(const Buffer& from, const Buffer& to, std::shared_ptr<cuda::Stopwatch>& watch) const {
    if (auto capturing = cuda::refusal_of_capture(pair_.local.index, to.stream); !capturing.ok()) return capturing;
    auto* const stream = static_cast<CUstream>(to.stream);
    auto result = CUDA_SUCCESS;
    if (from.stream != nullptr) result = cuda::api()->stream_wait_event(stream, static_cast<CUevent>(from.stream), 0);
    if (Speeds::of_this_process().wants(pair_.remote.index, pair_.local.index, from.bytes))
      watch = std::make_shared<cuda::Stopwatch>(stream);
    if (result == CUDA_SUCCESS) {
      result = cuda::copy_between(cuda::address_of(to.data), pair_.local.index, cuda::address_of(from.data),
                                  from.device.index, from.bytes, stream);
    }
    if (watch) watch->stop(stream);
    return cuda::status_of(result, "cuda_xth's copy");
  }

  Wire& wire_;
  const DevicePair pair_;
  xth::LocalEnd end_;
};

}  // namespace

std::variant<Bytes, Refusal> CudaXthDriver::descriptor(Device device) {
  if (device.type != DeviceType::cuda)
    return Refusal{formatted("cuda_xth carries GPU memory, not {}", text_of(device))};
  if (cuda::api() == nullptr) return Refusal{cuda::why_missing()};
  return xth::descriptor();
}

std::optional<Refusal> CudaXthDriver::reaches(ByteView mine, ByteView theirs) { return xth::reaches(mine, theirs); }

std::unique_ptr<Channel> CudaXthDriver::open(Wire& wire, DevicePair pair) {
  auto channel = std::make_unique<CudaXthChannel>(wire, pair);
  wire.ready({});
  return channel;
}

}  // namespace tensorferry
