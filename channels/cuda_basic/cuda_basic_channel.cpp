#include "channels/cuda_basic/cuda_basic_channel.h"

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "channels/completion.h"
#include "channels/cuda/watcher.h"
#include "channels/cuda_basic/flow.h"
#include "channels/cuda_basic/messages.h"
#include "channels/fork.h"
#include "channels/offers.h"
#include "channels/reserve.h"
#include "channels/text.h"

namespace tensorferry {

namespace {

using cuda_basic::Direction;
using cuda_basic::Flow;
using cuda_basic::Ring;

/// The ring that this end sends by, as soon as the peer may be told of it.
struct Made {
  std::mutex mutex;
  std::shared_ptr<Ring> ring;
};

Result<std::shared_ptr<Ring>> ring_over(Result<SharedMemory> memory, Device device) {
  if (!memory.ok()) return memory.status();
  if (device.type == DeviceType::cpu) return std::make_shared<Ring>(Ring{cuda::Pinned::unlocked(std::move(*memory))});
  auto pinned = cuda::Pinned::lock(std::move(*memory), device.index);
  if (!pinned.ok()) return pinned.status();
  return std::make_shared<Ring>(Ring{std::move(*pinned)});
}

class CudaBasicChannel final : public Channel {
 public:
  CudaBasicChannel(Wire& wire, DevicePair pair) : wire_(wire), pair_(pair) {}

  ~CudaBasicChannel() override {
    CudaBasicChannel::close({});
    use_->end();
  }

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing&, Completion released) override {
    if (buffer.device != pair_.local)
      return Refusal{formatted("the channel carries {}, not {}", text_of(pair_.local), text_of(buffer.device))};
    if (sharing == Sharing::shared) return Refusal{"cuda_basic copies bytes and cannot share them"};
    if (buffer.bytes > 0 && buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    if (!end().ok()) return Refusal{formatted("the link to {} has ended", wire_.peer())};
    if (buffer.bytes == 0) {
      complete(std::move(released), {});
      return Ticket{.bytes = 0, .opaque = encode(cuda_basic::Opaque{})};
    }
    cuda::Event ready;
    if (pair_.local.type == DeviceType::cuda) {
      auto known = cuda::ready_of(buffer);
      if (auto* refusal = std::get_if<Refusal>(&known)) return std::move(*refusal);
      ready = std::move(std::get<cuda::Event>(known));
    }
    const bool ring = ring_ready_.load();
    if (!ring) make_ring();
    const auto number = offers_->add(buffer, std::move(released));
    if (!number) return Refusal{formatted("the link to {} has ended", wire_.peer())};
    if (ready) {
      const std::lock_guard lock(mutex_);
      ready_.emplace(*number, std::move(ready));
    }
    const cuda_basic::Opaque opaque{*number, buffer.bytes, ring};
    return Ticket{.bytes = buffer.bytes, .opaque = encode(opaque), .acknowledge = true};
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto finish = [&](const Status& status) {
      complete(std::move(landed), status);
      complete(std::move(consumed), status);
    };
    if (auto status = end(); !status.ok()) return finish(status);
    const auto opaque = cuda_basic::opaque_of(ticket.opaque);
    if (!opaque || opaque->bytes != ticket.bytes || (opaque->offer == 0) != (ticket.bytes == 0) ||
        (opaque->ring && !their_ring_.load())) {
      return finish({Code::protocol_error, formatted("{} sent a ticket that cuda_basic cannot read", wire_.peer())});
    }
    auto memory = reserve(sink, ticket.bytes, pair_.local, wire_.peer());
    if (!memory.ok()) return finish(memory.status());
    if (ticket.bytes == 0) return finish({});
    const cuda_basic::Request request{opaque->offer, opaque->bytes, opaque->ring};
    in_->carry({.memory = std::move(*memory),
                .ready = {},
                .ring = opaque->ring,
                .ask = [this, request] { wire_.control(encode(cuda_basic::Control(request)), {}); },
                .landed = std::move(landed),
                .done = std::move(consumed)});
  }

  void discard(const Ticket&) override {}  // the acknowledgement ends the offer
  void acknowledged(const Ticket& ticket) override { end_offer(ticket); }
  void withdraw(const Ticket& ticket) override { end_offer(ticket); }

  void settle() override { cuda::Watcher::of_this_process().look_now(); }

  void control(ByteView message, Descriptors descriptors) override {
    const auto parsed = cuda_basic::control_of(message);
    if (!parsed || !end().ok()) return;
    if (const auto* request = std::get_if<cuda_basic::Request>(&*parsed)) return send(*request);
    if (std::holds_alternative<cuda_basic::Staging>(*parsed)) return map_ring(std::move(descriptors));
    if (std::get<cuda_basic::Mapped>(*parsed).ok) {
      const std::lock_guard lock(made_->mutex);
      if (!made_->ring) return;  // a peer that makes rings up
      out_->use(made_->ring);
      made_->ring->memory.memory().seclude();
      ring_ready_.store(true);
    }
  }

  void close(Status status) noexcept override {
    if (born_in_ != forks()) return;  // the parent's, and its locks may be held for ever
    {
      const std::lock_guard lock(mutex_);
      if (!end_.ok()) return;
      end_ = status.ok() ? Status(Code::connection_lost, "the link has ended") : std::move(status);
      status = end_;
      ready_.clear();
    }
    in_->close(status);
    out_->close(status);
    offers_->close(std::move(status));
  }

 private:
  /// The peer pulls.
  void send(const cuda_basic::Request& request) {
    if (request.ring && !ring_ready_.load()) return;
    auto source = offers_->begin_copy(request.offer, request.bytes);
    if (!source.ok()) return;  // a peer that makes offers up waits for ever
    cuda::Event ready;
    {
      const std::lock_guard lock(mutex_);
      if (const auto it = ready_.find(request.offer); it != ready_.end()) {
        ready = std::move(it->second);
        ready_.erase(it);
      }
    }
    out_->carry({.memory = std::move(source->buffer),
                 .ready = std::move(ready),
                 .ring = request.ring,
                 .ask = {},
                 .landed = {},
                 .done = [offers = offers_, offer = request.offer](const Status&) { offers->end_copy(offer); }});
  }

  /// Once; the peer says when it has mapped it.
  void make_ring() {
    if (!wire_.may_share_memory() || making_.exchange(true)) return;
    cuda::background().submit([use = use_, made = made_, device = pair_.local] {
      auto ring = ring_over(SharedMemory::create(Ring::bytes), device);
      if (!ring.ok()) return;
      auto descriptor = (*ring)->memory.memory().share();
      if (!descriptor.ok()) return;
      {
        const std::lock_guard lock(made->mutex);
        made->ring = std::move(*ring);
      }
      Descriptors descriptors;
      descriptors.push_back(std::move(*descriptor));
      use->with([&](Wire& wire) {
        wire.control(encode(cuda_basic::Control(cuda_basic::Staging{})), std::move(descriptors));
      });
    });
  }

  void map_ring(Descriptors descriptors) {
    if (descriptors.size() != 1 || !wire_.may_share_memory() || mapping_.exchange(true))
      return;  // the link passes none: bulk data it is
    auto received = std::make_shared<FileDescriptor>(std::move(descriptors.front()));
    cuda::background().submit([this, use = use_, in = in_, received, device = pair_.local] {
      auto ring = ring_over(SharedMemory::map(std::move(*received), Ring::bytes), device);
      if (ring.ok()) in->use(*ring);
      use->with([&](Wire& wire) {
        their_ring_.store(ring.ok());
        wire.control(encode(cuda_basic::Control(cuda_basic::Mapped{ring.ok()})), {});
      });
    });
  }

  void end_offer(const Ticket& ticket) {
    const auto opaque = cuda_basic::opaque_of(ticket.opaque);
    if (!opaque || opaque->offer == 0) return;
    {
      const std::lock_guard lock(mutex_);
      ready_.erase(opaque->offer);
    }
    offers_->end(opaque->offer);
  }

  /// Ok until close().
  Status end() {
    const std::lock_guard lock(mutex_);
    return end_;
  }

  Wire& wire_;
  const DevicePair pair_;
  const std::uint32_t born_in_ = forks();
  const std::shared_ptr<WireUse> use_ = std::make_shared<WireUse>(wire_);
  const std::shared_ptr<Flow> out_ = std::make_shared<Flow>(Direction::out, use_, pair_.local);
  const std::shared_ptr<Flow> in_ = std::make_shared<Flow>(Direction::in, use_, pair_.local);
  const std::shared_ptr<Offers> offers_ = std::make_shared<Offers>();
  const std::shared_ptr<Made> made_ = std::make_shared<Made>();
  std::atomic<bool> making_{false}, mapping_{false};
  std::atomic<bool> ring_ready_{false};  // the peer has mapped ours
  std::atomic<bool> their_ring_{false};  // we have mapped the peer's

  std::mutex mutex_;
  Status end_;
  std::map<std::uint64_t, cuda::Event> ready_;  // by offer: from when on its bytes are there
};

}  // namespace

std::variant<Bytes, Refusal> CudaBasicDriver::descriptor(Device device) {
  if (device.type != DeviceType::cuda && device.type != DeviceType::cpu)
    return Refusal{formatted("cuda_basic carries GPU memory and the CPU's, not {}", text_of(device))};
  if (device.type == DeviceType::cuda && cuda::api() == nullptr) return Refusal{cuda::why_missing()};
  Bytes bytes;
  Writer out(bytes);
  out.put(cuda_basic::version);
  out.put(device.type);
  return bytes;
}

std::optional<Refusal> CudaBasicDriver::reaches(ByteView mine, ByteView theirs) {
  const auto type_of = [](ByteView bytes) -> std::optional<DeviceType> {
    Reader in(bytes);
    const auto version = in.get<std::uint8_t>();
    const auto type = in.get<std::uint8_t>();
    if (in.failed() || !in.empty() || version != cuda_basic::version) return std::nullopt;
    return static_cast<DeviceType>(type);
  };
  const auto ours = type_of(mine), others = type_of(theirs);
  if (!ours || !others) return Refusal{"its descriptor cannot be read, or is of another version"};
  if (*ours == DeviceType::cpu && *others == DeviceType::cpu) return Refusal{"no GPU memory is at either end"};
  return std::nullopt;
}

std::unique_ptr<Channel> CudaBasicDriver::open(Wire& wire, DevicePair pair) {
  auto channel = std::make_unique<CudaBasicChannel>(wire, pair);
  wire.ready({});
  return channel;
}

}  // namespace tensorferry
