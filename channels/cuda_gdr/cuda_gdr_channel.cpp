#include "channels/cuda_gdr/cuda_gdr_channel.h"

#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/background.h"
#include "base/fork.h"
#include "base/text.h"
#include "channels/completion.h"
#include "channels/cuda/event_poller.h"
#include "channels/cuda_gdr/gdr_end.h"
#include "channels/cuda_gdr/gpu_cards.h"
#include "channels/cuda_gdr/gpu_memory.h"
#include "channels/cuda_gdr/gpu_reach.h"
#include "channels/cuda_gdr/messages.h"
#include "channels/reserve.h"

namespace tensorferry {

namespace {

using cuda::DeviceGuard;
using cuda::EventPoller;
using cuda_gdr::BusySource;
using cuda_gdr::CudaGdrTicket;
using cuda_gdr::GdrEnd;
using cuda_gdr::GpuCards;
using cuda_gdr::GpuProbe;
using cuda_gdr::ProbePage;
using cuda_gdr::Pull;
using cuda_gdr::SourceReady;
using cuda_gdr::SourceWithdrawn;
using ibv::KeyedSource;
using rdma::LocalCards;
using rdma::Registration;

class CudaGdrChannel final : public Channel {
 public:
  CudaGdrChannel(Wire& wire, DevicePair pair, GpuCards& cards)
      : pair_(pair),
        end_(std::make_shared<GdrEnd>(wire, pair.local.index, cards)),
        transfers_(std::make_shared<ibv::CardTransfers>(end_->shared->connection(),
                                                        std::make_shared<cuda_gdr::GpuReach>(end_))),
        turn_(pair.local.index) {
    end_->shared->join(std::shared_ptr<WireUse>(end_, &end_->wire), [weak = std::weak_ptr(end_)](const Status& status) {
      if (const auto end = weak.lock()) end->changed(status);
    });
  }
  ~CudaGdrChannel() override {
    if (born_in_ != forks()) return;
    CudaGdrChannel::close({});
    end_->wire.end();
  }

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) override {
    if (auto refusal = cuda::refusal_of("cuda_gdr", buffer)) return std::move(*refusal);
    if (sharing == Sharing::shared) return Refusal{"cuda_gdr copies bytes and cannot share them"};
    const auto over = [&] { return Refusal{formatted("the link to {} has ended", end_->peer)}; };
    if (!end_->ended().ok()) return over();
    const auto ports = end_->shared->connection()->ports();
    if (ports == nullptr) return Refusal{end_->shared->connection()->why_down(), true};
    if (buffer.bytes == 0) {
      complete(std::move(released), {});
      return Ticket{.bytes = 0, .opaque = encode(CudaGdrTicket(EmptyBuffer{}))};
    }
    const auto local = end_->shared->connection()->cards();
    const auto chosen = choose(*local, *ports, buffer.bytes);
    const DeviceGuard here(pair_.local.index);
    if (!here.status().ok()) return Refusal{std::string(here.status().what())};
    auto ready = cuda::ready_of(buffer);
    if (auto* refusal = std::get_if<Refusal>(&ready)) return std::move(*refusal);
    auto found = end_->cards.registration(
        *local, buffer, local->cards_of(chosen),
        message.last_resort() ? GpuCards::Unregistered::register_now : GpuCards::Unregistered::register_later);
    if (auto* refusal = std::get_if<Refusal>(&found)) return std::move(*refusal);
    auto registration = std::get<std::shared_ptr<Registration>>(std::move(found));

    BusySource source;
    source.address = reinterpret_cast<std::uintptr_t>(buffer.data);
    for (const auto port : chosen)
      source.keys.push_back({static_cast<std::uint8_t>(port), registration->keys(local->ports[port].card).remote});
    // Deregisters first: when the source is released, the peer must not reach it any more.
    const auto number = end_->offers->add(
        buffer, [registration = std::move(registration), released = std::move(released)](Status status) mutable {
          registration.reset();
          complete(std::move(released), std::move(status));
        });
    if (!number) return over();
    source.offer = *number;
    auto& event = std::get<cuda::GpuEvent>(ready);
    if (!event) {
      return Ticket{.bytes = buffer.bytes,
                    .opaque = encode(CudaGdrTicket(static_cast<const KeyedSource&>(source))),
                    .acknowledge = true};
    }
    {
      const std::lock_guard lock(end_->mutex);
      end_->unreached.insert(*number);
    }
    EventPoller::of_this_process().when_done(
        cuda::Watch::closely, std::move(event),
        [end = end_, offer = *number](const Status& status) { end->source_reached(offer, status); });
    return Ticket{.bytes = buffer.bytes, .opaque = encode(CudaGdrTicket(source)), .acknowledge = true};
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto finish = [&](const Status& status) { complete(std::move(landed), std::move(consumed), status); };
    if (auto status = end_->ended(); !status.ok()) return finish(status);
    const auto parsed = decode<CudaGdrTicket>(ticket.opaque);
    const auto* const source = parsed ? source_of(*parsed) : nullptr;
    if (!parsed || (source == nullptr) != (ticket.bytes == 0) ||
        (source != nullptr && source->address + ticket.bytes < source->address)) {
      return finish({Code::protocol_error, formatted("{} sent a ticket that cuda_gdr cannot read", end_->peer)});
    }
    auto memory = reserve(sink, ticket.bytes, pair_.local, end_->peer);
    if (source == nullptr) return finish(memory.status());
    auto ready = memory.ok() ? cuda::ready_of(*memory) : std::variant<cuda::GpuEvent, Refusal>(cuda::GpuEvent());
    auto status = memory.status();
    if (const auto* refusal = std::get_if<Refusal>(&ready)) status = {Code::channel_unavailable, refusal->reason};
    if (!status.ok()) {
      discard(ticket);
      return finish(status);
    }
    receive(*parsed,
            {*source,
             {std::move(*memory), std::move(std::get<cuda::GpuEvent>(ready)), std::move(landed), std::move(consumed)}});
  }

  void discard(const Ticket& ticket) override {
    const auto parsed = decode<CudaGdrTicket>(ticket.opaque);
    if (parsed && std::holds_alternative<BusySource>(*parsed) && end_->ended().ok())
      receive(*parsed, {*source_of(*parsed), {}});
  }

  void withdraw(const Ticket& ticket) override {
    const auto parsed = decode<CudaGdrTicket>(ticket.opaque);
    const auto* const source = parsed ? source_of(*parsed) : nullptr;
    if (source == nullptr) return;
    bool announced = std::holds_alternative<BusySource>(*parsed);
    {
      const std::lock_guard lock(end_->mutex);
      if (end_->unreached.erase(source->offer) != 0) announced = false;
    }
    if (announced) end_->wire.with([&](Wire& to) { to.control(encode(SourceWithdrawn{source->offer}), {}); });
    end_->offers->end(source->offer);
  }
  void acknowledged(const Ticket& ticket) override {
    const auto parsed = decode<CudaGdrTicket>(ticket.opaque);
    // A busy source is announced all the same: the receiver, which has failed its pull early, waits for that.
    if (const auto* const source = parsed ? source_of(*parsed) : nullptr) end_->offers->end(source->offer);
  }

  void progress() override {
    EventPoller::of_this_process().poll_now();
    end_->shared->connection()->poll();
  }
  [[nodiscard]] bool progresses() const override { return end_->shared->connection()->awaits(); }

  std::shared_ptr<OneSided> one_sided() override { return transfers_; }

  void control(ByteView message, Descriptors) override {
    auto parsed = decode<cuda_gdr::Control>(message);
    if (!parsed || !end_->ended().ok()) return;
    std::visit([&](auto& each) { on(each); }, *parsed);
  }

  [[nodiscard]] std::string describe() const override { return end_->shared->describe(); }

  void close(Status status) noexcept override {
    if (born_in_ != forks()) return;  // a forked child: the parent owns the channel, and its locks may stay held
    std::shared_ptr<ProbePage> page;  // dropped with no lock held
    {
      const std::lock_guard lock(end_->mutex);
      if (!end_->end.ok()) return;
      end_->end = status.ok() ? Status(Code::connection_lost, "the link has ended") : std::move(status);
      status = end_->end;
      end_->unreached.clear();
      page = std::move(end_->probing.page);
    }
    end_->shared->connection()->close();  // before a source is released: the peer reads nothing any more
    end_->later.close(status);
    end_->busy->close(status);
    end_->offers->close(std::move(status));
  }

 private:
  static const KeyedSource* source_of(const CudaGdrTicket& ticket) {
    if (const auto* source = std::get_if<KeyedSource>(&ticket)) return source;
    return std::get_if<BusySource>(&ticket);
  }

  /// Chooses the ports through which a buffer may be read: the GPU's nearest for a large one, otherwise one of them.
  std::vector<std::size_t> choose(const LocalCards& local, const std::vector<std::size_t>& ports, std::size_t bytes) {
    auto near = end_->cards.near(pair_.local.index, local, ports);
    if (bytes > local.options.stripe_bytes) return near;
    return {near[turn_.fetch_add(1, std::memory_order_relaxed) % near.size()]};
  }

  void receive(const CudaGdrTicket& ticket, Pull pull) {
    if (!std::holds_alternative<BusySource>(ticket)) return end_->start(std::move(pull));
    const auto announced = end_->later.add(pull.source.offer, pull);
    if (!announced.ok()) return pull.finish(announced.status());
    if (*announced) start(std::move(pull), **announced);
  }

  void start(Pull pull, const SourceReady& ready) {
    if (ready.ok) return end_->start(std::move(pull));
    pull.finish({Code::channel_unavailable, formatted("{}'s GPU has failed before the buffer was there", end_->peer)});
  }

  void on(rdma::ConnectPorts& message) { end_->shared->connection()->on(std::move(message)); }
  void on(rdma::PortsConnected& message) { end_->shared->connection()->on(std::move(message)); }
  void on(const rdma::PortLost& message) { end_->shared->connection()->on(message); }
  void on(const Resend& resend) { end_->send_again(resend); }
  void on(const SourceReady& ready) {
    auto pull = end_->later.announce(ready);
    if (!pull.ok()) return end_->later.close(pull.status());
    if (*pull) start(std::move(**pull), ready);
  }
  void on(const SourceWithdrawn& withdrawn) { end_->later.forget(withdrawn.id); }
  void on(GpuProbe& probe) {
    {
      const std::lock_guard lock(end_->mutex);
      end_->probing.asked = std::move(probe);
    }
    end_->cards.cards().registering().submit([weak = std::weak_ptr(end_)] {
      const auto end = weak.lock();
      if (end != nullptr) end->wire.with([&](Wire&) { end->probe(); });
    });
  }

  const std::uint32_t born_in_ = forks();
  const DevicePair pair_;
  const std::shared_ptr<GdrEnd> end_;
  const std::shared_ptr<OneSided> transfers_;
  std::atomic<std::size_t> turn_;
};

}  // namespace

struct CudaGdrDriver::State {
  std::shared_ptr<rdma::SharedCards> cards;
  std::shared_ptr<GpuCards> gpus;
};

CudaGdrDriver::CudaGdrDriver(cuda_gdr::CudaGdrOptions options, std::shared_ptr<rdma::SharedCards> cards)
    : state_(std::make_unique<State>()) {
  state_->cards = cards != nullptr ? std::move(cards) : std::make_shared<rdma::SharedCards>(std::move(options.rdma));
  state_->gpus = std::make_shared<GpuCards>(state_->cards, std::move(options.sysfs));
}
CudaGdrDriver::~CudaGdrDriver() = default;

std::variant<Bytes, Refusal> CudaGdrDriver::descriptor(Device device) {
  if (device.type != DeviceType::cuda)
    return Refusal{formatted("cuda_gdr carries GPU memory, not {}", text_of(device))};
  if (auto refusal = cuda_gdr::refusal_of_gpu(device.index)) return std::move(*refusal);
  const auto ports = state_->cards->usable_ports();
  if (const auto* refusal = std::get_if<Refusal>(&ports)) return *refusal;
  return rdma::descriptor_of(std::get<std::vector<rdma::CardPort>>(ports));
}

std::optional<Refusal> CudaGdrDriver::reaches(ByteView mine, ByteView theirs) { return rdma::reaches(mine, theirs); }

std::unique_ptr<Channel> CudaGdrDriver::open(Wire& wire, DevicePair pair) {
  return std::make_unique<CudaGdrChannel>(wire, pair, *state_->gpus);
}

}  // namespace tensorferry
