#include "channels/cuda_gdr/gdr_end.h"

#include <algorithm>
#include <variant>

#include "base/background.h"
#include "base/log.h"
#include "base/text.h"
#include "channels/completion.h"
#include "channels/cuda/copy_timer.h"
#include "channels/cuda/device.h"
#include "channels/cuda/event_poller.h"

namespace tensorferry::cuda_gdr {

using cuda::DeviceGuard;
using cuda_basic::Transfer;
using ibv::CardFetch;
using ibv::KeyedSource;
using rdma::Registration;

namespace {

std::vector<std::size_t> ports_of(const std::vector<CardFetch::Way>& ways) {
  std::vector<std::size_t> ports;
  for (const auto& way : ways) ports.push_back(way.port);
  return ports;
}

constexpr std::chrono::seconds last_retry{64};
constexpr int most_failures = 3;  // of probes: each may break the connection for all of its channels

}  // namespace

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
    if (status.ok() && probing.state == Probing::State::failed) told = probing.failure;
    if (status.ok() && (probing.state == Probing::State::untried || probing.state == Probing::State::running))
      told.reset();
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
      probing.page = *made;
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
    if (probing.state != Probing::State::untried || !connected.ok() || !probing.asked || probing.page == nullptr)
      return;
    probing.state = Probing::State::running;
    source = {0, probing.asked->address, probing.asked->keys};
    nonce = probing.asked->nonce;
    mine = probing.page;
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
      probing.failure = status;
    }
    using State = Probing::State;
    probing.state = status.ok() ? State::passed : ++probing.failures < most_failures ? State::untried : State::failed;
    if (probing.state == Probing::State::untried) again = first_retry * probing.failures;
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

}  // namespace tensorferry::cuda_gdr
