#include "channels/cuda_gdr/cuda_gdr_channel.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/background.h"
#include "base/fork.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "channels/completion.h"
#include "channels/cuda/copy_timer.h"
#include "channels/cuda/event_poller.h"
#include "channels/cuda_basic/busy_transfers.h"
#include "channels/cuda_gdr/gpu_cards.h"
#include "channels/cuda_gdr/gpu_memory.h"
#include "channels/cuda_gdr/messages.h"
#include "channels/host_memory.h"
#include "channels/ibv/fetch.h"
#include "channels/later_tickets.h"
#include "channels/offers.h"
#include "channels/rdma/shared_connection.h"
#include "channels/reserve.h"
#include "channels/wire_use.h"

namespace tensorferry {

namespace {

using cuda::DeviceGuard;
using cuda::EventPoller;
using cuda_basic::BusyTransfers;
using cuda_basic::Transfer;
using cuda_gdr::BusySource;
using cuda_gdr::CudaGdrTicket;
using cuda_gdr::GpuCards;
using cuda_gdr::GpuProbe;
using cuda_gdr::ProbePage;
using cuda_gdr::SourceReady;
using cuda_gdr::SourceWithdrawn;
using ibv::CardFetch;
using ibv::KeyedSource;
using rdma::LocalCards;
using rdma::Registration;

constexpr std::chrono::seconds first_retry{1}, last_retry{64};  // of a probe

/// One pull, until the card reads.
struct Pull {
  KeyedSource source;
  Transfer transfer;  // into this end's memory; null data: the buffer is dropped

  void finish(const Status& status) { transfer.finish(status); }
};

/// One read by a card. `registration` and `flush` are set when it begins.
struct GpuRead {
  std::shared_ptr<LocalCards> local;
  std::vector<CardFetch::Way> ways;
  std::shared_ptr<Registration> registration;
  std::shared_ptr<cuda_gdr::Flush> flush;
  Status why{Code::agent_closed, "the agent was closed before it began"};  // why it could not begin
};

/// What outlives the channel, because the work of cards and GPUs refers to it.
struct GdrEnd final : std::enable_shared_from_this<GdrEnd> {
  GdrEnd(Wire& w, int d, GpuCards& c)
      : wire(w), peer(w.peer()), device(d), cards(c), shared(rdma::SharedConnection::of(w, c.cards())) {}

  Status ended() {
    const std::lock_guard lock(mutex);
    return end;
  }

  // --- as the sender
  void source_reached(std::uint64_t offer, const Status& status);
  void send_again(const Resend& resend);

  // --- as the receiver
  void start(Pull pull);
  void read(Pull pull);
  bool begin(GpuRead& reading, const std::shared_ptr<CardFetch>& fetch, GpuCards::Unregistered unregistered);
  void ask_again(std::uint64_t offer, const Status& why, Transfer transfer);
  /// Returns the lanes for a ticket's keys that are nearest to the GPU.
  std::vector<CardFetch::Way> ways_to(const KeyedSource& source, std::uint64_t bytes);

  // --- the probe
  void changed(const Status& status);
  void offer_probe_at(std::chrono::steady_clock::time_point at, std::chrono::seconds retry = first_retry);
  void offer_probe(std::chrono::seconds retry);
  void probe();
  void probed(Status status);

  WireUse wire;
  const std::string peer;
  const int device;
  GpuCards& cards;  // for uses of `wire` alone, because the driver outlives the channel, and not this
  const std::shared_ptr<rdma::SharedConnection> shared;
  const std::shared_ptr<Offers> offers = std::make_shared<Offers>();
  Resends resends{offers};
  const std::shared_ptr<BusyTransfers> busy = std::make_shared<BusyTransfers>();  // pulls into busy memory
  LaterTickets<Pull, SourceReady> later;
  HostMemory host_memory{{.idle_bytes = 0, .floor_bytes = 0}};

  Mutex mutex;  // guards the members below
  Status end;
  std::set<std::uint64_t> unreached;  // offers whose streams have not reached them
  Status connected{Code::channel_unavailable, "its probe is under way"};
  std::optional<GpuProbe> asked;  // the peer's
  std::shared_ptr<ProbePage> page;
  enum class Probe : std::uint8_t { untried, running, passed, failed } state = Probe::untried;
  int failures = 0;
  Status probe_failure;
};

std::vector<std::size_t> ports_of(const std::vector<CardFetch::Way>& ways) {
  std::vector<std::size_t> ports;
  for (const auto& way : ways) ports.push_back(way.port);
  return ports;
}

constexpr int most_failures = 3;  // of probes: each may break the connection for all of its channels

// ---- The sender

void GdrEnd::source_reached(std::uint64_t offer, const Status& status) {
  wire.with([&](Wire& to) {
    {
      const std::lock_guard lock(mutex);
      if (unreached.erase(offer) == 0) return;  // withdrawn, or closed
      // Under the lock, so that no SourceWithdrawn of this offer comes before it.
      to.control(encode(SourceReady{offer, status.ok()}), {});
    }
    if (!status.ok()) to.ready(status);
  });
}

/// Sends a source as bulk data: its bytes, and one that is 1 if they could be copied from the GPU.
void GdrEnd::send_again(const Resend& resend) {
  if (resend.bytes < 2) return;
  const auto bytes = resend.bytes - 1;
  const auto source = offers->begin_copy(resend.offer, bytes);
  if (!source.ok()) return;
  cuda::background().submit([self = shared_from_this(), resend, bytes, from = source->buffer] {
    auto host = self->host_memory.allocate(resend.bytes, Device{});
    const auto over = [offers = self->offers, offer = resend.offer](const Status&) { offers->end_copy(offer); };
    if (host.data == nullptr) return over({});
    const DeviceGuard here(self->device);
    auto status = here.status();
    if (status.ok()) {
      cuda::CopyTimer copies;
      copies.copy(cuda::address_of(host.data), cuda::address_of(from.data), bytes);
      status = copies.wait("copying a buffer from the GPU");
    }
    host.data[bytes] = std::byte(status.ok() ? 1 : 0);
    host.bytes = resend.bytes;
    const bool sent = self->wire.with([&](Wire& to) { to.send_bulk(resend.sequence, std::move(host), over); });
    if (!sent) over({});
  });
}

// ---- The receiver

void GdrEnd::start(Pull pull) {
  if (pull.transfer.memory.data == nullptr) return pull.finish({});  // discarded
  if (!pull.transfer.ready) return read(std::move(pull));
  const auto kept = busy->add(pull.transfer, [self = shared_from_this(), source = pull.source](
                                                 std::uint64_t, Transfer free, const Status& passed) mutable {
    if (!passed.ok()) return free.finish(passed);
    self->read({std::move(source), std::move(free)});
  });
  if (!kept.ok()) pull.finish(kept.status());
}

std::vector<CardFetch::Way> GdrEnd::ways_to(const KeyedSource& source, std::uint64_t bytes) {
  const auto lanes = shared->connection()->lanes();
  const auto local = shared->connection()->cards();
  if (lanes == nullptr || local == nullptr) return {};
  auto ways = CardFetch::ways_to(source, *lanes, *local);
  const auto near = cards.near(device, *local, ports_of(ways));
  std::erase_if(ways, [&](const auto& way) { return std::find(near.begin(), near.end(), way.port) == near.end(); });
  CardFetch::choose(ways, bytes, local->options.stripe_bytes);
  return ways;
}

void GdrEnd::read(Pull pull) {
  const bool there = wire.with([&](Wire&) {
    const auto reading = std::make_shared<GpuRead>();
    reading->local = shared->connection()->cards();
    reading->ways = ways_to(pull.source, pull.transfer.memory.bytes);
    if (reading->ways.empty()) {
      return ask_again(pull.source.offer, {Code::channel_unavailable, "no queue pair reaches it now"},
                       std::move(pull.transfer));
    }
    auto into = pull.transfer.memory;
    auto fetch = std::make_shared<CardFetch>(
        std::move(into), pull.source,
        [self = shared_from_this(), reading, offer = pull.source.offer, transfer = std::move(pull.transfer)](
            const Status& status, const Buffer& memory) mutable {
          if (reading->flush == nullptr) return self->ask_again(offer, reading->why, std::move(transfer));
          // After an error too: what the card has written before must not come over what is written there next.
          reading->flush->after(
              memory, reading->ways, *reading->registration,
              [self, reading, offer, status, transfer = std::move(transfer)](const Status& flushed) mutable {
                if (!status.ok()) return self->ask_again(offer, status, std::move(transfer));
                transfer.finish(flushed);
              });
        });
    // The driver may take a while to map memory for a card, and this may be a thread that reads messages.
    if (begin(*reading, fetch, GpuCards::Unregistered::refuse)) return;
    cards.cards().registering().submit([self = shared_from_this(), reading, fetch = std::move(fetch)] {
      self->wire.with([&](Wire&) {
        (void)self->begin(*reading, fetch, GpuCards::Unregistered::register_now);
      });  // else it ends with an error
    });
  });
  if (!there) pull.finish(ended());
}

/// Begins to read into registered memory. If it cannot, says why, and the fetch ends with an error when it is dropped.
/// Inside a use of the wire.
bool GdrEnd::begin(GpuRead& reading, const std::shared_ptr<CardFetch>& fetch, GpuCards::Unregistered unregistered) {
  const DeviceGuard here(device);
  if (!here.status().ok()) {
    reading.why = here.status();
    return false;
  }
  auto found = cards.registration(*reading.local, fetch->memory(), reading.local->cards_of(ports_of(reading.ways)),
                                  unregistered);
  if (const auto* refusal = std::get_if<Refusal>(&found)) {
    reading.why = {Code::channel_unavailable, refusal->reason};
    return false;
  }
  reading.registration = std::get<std::shared_ptr<Registration>>(found);
  reading.flush = cards.flush(*reading.local, device);
  fetch->start(reading.ways, reading.registration);
  return true;
}

/// Asks the sender for the buffer as bulk data, because the card could not read it.
void GdrEnd::ask_again(std::uint64_t offer, const Status& why, Transfer transfer) {
  const auto bytes = transfer.memory.bytes;
  auto status = ended();
  if (!status.ok()) return transfer.finish(status);
  auto host = host_memory.allocate(bytes + 1, Device{});
  host.bytes = bytes + 1;
  if (host.data == nullptr) {
    return transfer.finish(
        {Code::resource_exhausted,
         formatted("no host memory for a buffer of {} bytes from {}, which cuda_gdr could not read: {}", bytes, peer,
                   why.what())});
  }
  log_info(formatted("peer={} channel=cuda_gdr bytes={}: the buffer comes as bulk data, because {}", peer, bytes,
                     why.what()));
  auto landed = [self = shared_from_this(), host, memory = transfer.memory,
                 then = std::move(transfer.landed)](const Status& arrived) mutable {
    if (!arrived.ok()) return complete(std::move(then), arrived);
    if (host.data[memory.bytes] != std::byte(1)) {
      return complete(std::move(then),
                      {Code::channel_unavailable, formatted("{} could not copy a buffer from its GPU", self->peer)});
    }
    cuda::background().submit([device = self->device, host, memory, then = std::move(then)]() mutable {
      Status copied;
      {
        const DeviceGuard here(device);
        copied = here.status();
        if (copied.ok()) {
          cuda::CopyTimer copies;
          copies.copy(cuda::address_of(memory.data), cuda::address_of(host.data), memory.bytes);
          copied = copies.wait("copying a buffer to the GPU");
        }
      }
      memory = {};
      complete(std::move(then), std::move(copied));
    });
  };
  const bool sent =
      wire.with([&](Wire& to) { resends.ask(to, offer, host, std::move(landed), std::move(transfer.done)); });
  if (sent) return;
  status = Status(Code::connection_lost, formatted("the link to {} has ended", peer));
  transfer.finish(status);
}

// ---- The probe

void GdrEnd::changed(const Status& status) {
  std::optional<Status> told = status;
  {
    const std::lock_guard lock(mutex);
    connected = status;
    if (status.ok() && state == Probe::failed) told = probe_failure;
    if (status.ok() && (state == Probe::untried || state == Probe::running)) told.reset();
  }
  wire.with([&](Wire& to) {
    if (told) return to.ready(*told);
    offer_probe_at(std::chrono::steady_clock::time_point::min());
  });
}

/// Shows the peer this GPU's page. On the thread that registers. If the GPU has no memory for it, tries again later.
void GdrEnd::offer_probe(std::chrono::seconds retry) {
  wire.with([&](Wire& to) {
    const auto ports = shared->connection()->ports();
    if (ports == nullptr) return;  // changed() begins again
    const auto local = shared->connection()->cards();
    const auto near = cards.near(device, *local, *ports);
    auto made = cards.probe_page(*local, device);
    auto registered =
        made.ok() ? (*made)->registration(local->cards_of(near)) : Result<std::shared_ptr<Registration>>(made.status());
    if (!registered.ok()) {
      to.ready(registered.status());
      if (registered.status().code() != Code::resource_exhausted) return;
      return offer_probe_at(std::chrono::steady_clock::now() + retry, std::min(2 * retry, last_retry));
    }
    GpuProbe shown{(*made)->nonce(), (*made)->address(), {}};
    for (const auto port : near) {
      shown.keys.push_back({static_cast<std::uint8_t>(port), (*registered)->keys(local->ports[port].card).remote});
    }
    {
      const std::lock_guard lock(mutex);
      page = *made;
    }
    to.control(encode(shown), {});
    probe();
  });
}

/// Reads the peer's page, if this is the time for it. Inside a use of the wire.
void GdrEnd::probe() {
  KeyedSource source;
  std::uint64_t nonce = 0;
  std::shared_ptr<ProbePage> mine;
  {
    const std::lock_guard lock(mutex);
    if (state != Probe::untried || !connected.ok() || !asked || page == nullptr) return;
    state = Probe::running;
    source = {0, asked->address, asked->keys};
    nonce = asked->nonce;
    mine = page;
  }
  const auto reading = std::make_shared<GpuRead>();
  reading->local = shared->connection()->cards();
  reading->ways = ways_to(source, sizeof nonce);
  if (reading->ways.empty()) return probed({Code::channel_unavailable, "no queue pair reaches the peer's GPU"});
  auto registered = mine->registration(reading->local->cards_of(ports_of(reading->ways)));
  if (!registered.ok()) return probed(registered.status());
  reading->registration = *registered;
  reading->flush = cards.flush(*reading->local, device);
  const auto fetch = std::make_shared<CardFetch>(
      mine->take_landing(), source,
      [self = shared_from_this(), reading, mine, nonce](const Status& status, Buffer landing) {
        if (!status.ok()) return self->probed(status);
        reading->flush->after(
            landing, reading->ways, *reading->registration,
            [self, reading, mine, nonce, landing](const Status& flushed) {
              if (!flushed.ok()) return self->probed(flushed);
              self->wire.with([&](Wire&) {
                self->cards.cards().registering().submit([self, mine, nonce, landing] {
                  const auto word = mine->landed(landing);
                  if (!word.ok()) return self->probed(word.status());
                  if (*word == nonce) return self->probed({});
                  self->probed(
                      {Code::channel_unavailable,
                       "the bytes that a network card read from the peer's GPU are not those that the peer wrote"});
                });
              });
            });
      });
  fetch->start(reading->ways, *registered);
}

void GdrEnd::probed(Status status) {
  std::chrono::seconds again{};
  {
    const std::lock_guard lock(mutex);
    if (!end.ok()) return;
    if (!status.ok()) {
      status = Status(Code::channel_unavailable,
                      formatted("a network card does not read {}'s GPU memory: {}", peer, status.what()));
      probe_failure = status;
    }
    state = status.ok() ? Probe::passed : ++failures < most_failures ? Probe::untried : Probe::failed;
    if (state == Probe::untried) again = first_retry * failures;
    if (status.ok() && !connected.ok()) return;  // changed() says so when it is connected again
  }
  wire.with([&](Wire& to) {
    to.ready(std::move(status));
    if (again.count() > 0) offer_probe_at(std::chrono::steady_clock::now() + again);
  });
}

/// Inside a use of the wire.
void GdrEnd::offer_probe_at(std::chrono::steady_clock::time_point at, std::chrono::seconds retry) {
  cards.cards().registering().submit(
      [weak = weak_from_this(), retry] {
        if (const auto self = weak.lock()) self->offer_probe(retry);
      },
      at);
}

class CudaGdrChannel final : public Channel {
 public:
  CudaGdrChannel(Wire& wire, DevicePair pair, GpuCards& cards)
      : pair_(pair), end_(std::make_shared<GdrEnd>(wire, pair.local.index, cards)), turn_(pair.local.index) {
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
      page = std::move(end_->page);
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
      end_->asked = std::move(probe);
    }
    end_->cards.cards().registering().submit([weak = std::weak_ptr(end_)] {
      const auto end = weak.lock();
      if (end != nullptr) end->wire.with([&](Wire&) { end->probe(); });
    });
  }

  const std::uint32_t born_in_ = forks();
  const DevicePair pair_;
  const std::shared_ptr<GdrEnd> end_;
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
