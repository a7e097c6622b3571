#include "channels/ibv/ibv_channel.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"
#include "channels/bundle.h"
#include "channels/completion.h"
#include "channels/copy.h"
#include "channels/ibv/card_transfers.h"
#include "channels/ibv/fetch.h"
#include "channels/ibv/messages.h"
#include "channels/offers.h"
#include "channels/rdma/local_cards.h"
#include "channels/rdma/peer_connection.h"
#include "channels/rdma/shared_connection.h"
#include "channels/resends.h"
#include "channels/reserve.h"
#include "channels/wire_use.h"

namespace tensorferry {

namespace {

using ibv::CardFetch;
using ibv::IbvTicket;
using ibv::KeyedSource;
using rdma::Access;
using rdma::LocalCards;
using rdma::PeerConnection;
using rdma::Registration;

constexpr std::size_t staged_piece = std::size_t{1} << 20;         // of a pull whose memory cannot be registered
constexpr std::size_t least_staged_piece = std::size_t{64} << 10;  // if no more is free

/// What outlives the channel, because the card's completions refer to it.
struct IbvEnd final {
  explicit IbvEnd(Wire& w) : wire(w), peer(w.peer()) {}

  /// Returns Ok until the channel is closed, and the status of that from then on.
  Status ended() {
    const std::lock_guard lock(mutex);
    return end;
  }

  /// Asks the sender for the buffer as bulk data: the card could not read it.
  void ask_again(std::uint64_t offer, const Status& why, Buffer memory, Completion landed, Completion consumed) {
    auto status = ended();
    if (status.ok()) {
      log_info(formatted("peer={} channel=ibv bytes={}: the buffer comes as bulk data, because {}", peer, memory.bytes,
                         why.what()));
      const bool asked = wire.with(
          [&](Wire& to) { resends.ask(to, offer, std::move(memory), std::move(landed), std::move(consumed)); });
      if (asked) return;
      status = Status(Code::connection_lost, formatted("the link to {} has ended", peer));
    }
    memory = {};
    complete(std::move(landed), std::move(consumed), status);
  }

  WireUse wire;
  const std::string peer;
  const std::shared_ptr<Offers> offers = std::make_shared<Offers>();
  Resends resends{offers};
  std::shared_ptr<PeerConnection> connection;

  Mutex mutex;
  Status end;
};

}  // namespace

/// State that all channels of a driver share.
struct IbvDriver::State {
  State(ibv::IbvOptions o, std::shared_ptr<rdma::SharedCards> c) : options(std::move(o)), cards(std::move(c)) {
    if (cards == nullptr) cards = std::make_shared<rdma::SharedCards>(options.rdma, options.staging_bytes);
  }

  const ibv::IbvOptions options;
  Copier copier;
  std::shared_ptr<rdma::SharedCards> cards;
};

namespace {

/// The parts of the driver's state that a channel uses.
struct DriverParts {
  const ibv::IbvOptions& options;
  Copier& copier;
  rdma::SharedCards& cards;
};

class IbvChannel final : public Channel {
 public:
  IbvChannel(Wire& wire, DriverParts parts)
      : parts_(parts),
        end_(std::make_shared<IbvEnd>(wire)),
        shared_connection_(rdma::SharedConnection::of(wire, parts.cards)) {
    end_->connection = shared_connection_->connection();
    transfers_ = std::make_shared<ibv::CardTransfers>(end_->connection);
    shared_connection_->join(std::shared_ptr<WireUse>(end_, &end_->wire));
  }
  ~IbvChannel() override {
    if (born_in_ != forks()) return;
    IbvChannel::close({});
    end_->wire.end();
  }

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) override {
    if (sharing == Sharing::shared) return Refusal{"ibv copies bytes and cannot share them"};
    if (buffer.device.type != DeviceType::cpu)
      return Refusal{formatted("ibv carries CPU memory, not {}", text_of(buffer.device))};
    if (buffer.bytes > 0 && buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    if (!end_->ended().ok()) return Refusal{formatted("the link to {} has ended", end_->peer)};
    const auto ports = end_->connection->ports();
    if (ports == nullptr) return Refusal{end_->connection->why_down(), true};
    if (buffer.bytes == 0) {
      complete(std::move(released), {});
      return Ticket{.bytes = 0, .opaque = encode(EmptyBuffer{})};
    }
    if (buffer.bytes < parts_.options.least_bytes && !message.last_resort())
      return Refusal{formatted("below {} bytes other channels are faster", parts_.options.least_bytes), true};

    const Buffer* const part = &buffer;
    auto choice = choose(*ports, buffer.bytes);
    auto& registrations = *choice.local->registrations;
    if (auto kept = registrations.find(buffer.data, buffer.bytes, Access::offered, choice.cards))
      return offer_where_it_is(buffer, choice, std::move(kept), std::move(released));
    const bool will_be_kept = rdma::Registrations::keeps(buffer.data, buffer.bytes, Access::offered);
    if (will_be_kept || buffer.bytes <= parts_.options.copied_bytes) {
      auto copied = offer_copy(std::span(&part, 1), buffer.bytes, choice, message, released);
      if (std::holds_alternative<Ticket>(copied)) {
        if (will_be_kept) register_later(buffer, choice);
        return copied;
      }
    }
    auto made = registrations.make(buffer.data, buffer.bytes, Access::offered, choice.cards);
    if (!made.ok() && choice.cards.size() > 1) {  // one card may take what several together may not
      choice = choose_one(*ports);
      made = registrations.make(buffer.data, buffer.bytes, Access::offered, choice.cards);
    }
    if (made.ok()) return offer_where_it_is(buffer, choice, std::move(*made), std::move(released));
    auto copied = offer_copy(std::span(&part, 1), buffer.bytes, choice, message, released);
    if (auto* refusal = std::get_if<Refusal>(&copied))
      refusal->reason = formatted("{}; and {}", made.status().what(), refusal->reason);
    return copied;
  }

  Offer offer_bundle(std::span<const Buffer* const> parts, Outgoing& message, Completion released) override {
    if (!end_->ended().ok()) return Refusal{formatted("the link to {} has ended", end_->peer)};
    const auto ports = end_->connection->ports();
    if (ports == nullptr) return Refusal{end_->connection->why_down(), true};
    const auto bytes = Bundle::bytes(parts);
    if (bytes < parts_.options.least_bytes && !message.last_resort())
      return Refusal{formatted("below {} bytes other channels are faster", parts_.options.least_bytes), true};
    return offer_copy(parts, bytes, choose(*ports, bytes), message, released);
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto finish = [&](const Status& status) { complete(std::move(landed), std::move(consumed), status); };
    if (auto status = end_->ended(); !status.ok()) return finish(status);
    const auto opaque = decode<IbvTicket>(ticket.opaque);
    const auto* source = opaque ? std::get_if<KeyedSource>(&*opaque) : nullptr;
    const bool is_empty = opaque && std::holds_alternative<EmptyBuffer>(*opaque);
    if (!opaque || is_empty != (ticket.bytes == 0) ||
        (source != nullptr && source->address + ticket.bytes < source->address)) {
      return finish({Code::protocol_error, formatted("{} sent a ticket that ibv cannot read", end_->peer)});
    }
    auto memory = reserve(sink, ticket.bytes, {}, end_->peer);
    if (!memory.ok()) return finish(memory.status());
    if (is_empty) return finish({});

    const auto lanes = end_->connection->lanes();
    const auto local = end_->connection->cards();
    auto ways = lanes != nullptr ? CardFetch::ways_to(*source, *lanes, *local) : std::vector<CardFetch::Way>();
    CardFetch::choose(ways, ticket.bytes, local != nullptr ? local->options.stripe_bytes : 0);
    if (ways.empty())
      return end_->ask_again(source->offer, {Code::channel_unavailable, "no queue pair reaches it now"},
                             std::move(*memory), std::move(landed), std::move(consumed));
    read(*local, std::move(ways), *source, std::move(*memory), std::move(landed), std::move(consumed));
  }

  void withdraw(const Ticket& ticket) override {
    const auto opaque = decode<IbvTicket>(ticket.opaque);
    const auto* source = opaque ? std::get_if<KeyedSource>(&*opaque) : nullptr;
    if (source != nullptr) end_->offers->end(source->offer);
  }

  void progress() override {
    if (born_in_ == forks()) end_->connection->poll();
  }
  [[nodiscard]] bool progresses() const override { return born_in_ == forks() && end_->connection->awaits(); }

  std::shared_ptr<OneSided> one_sided() override { return transfers_; }

  void control(ByteView message, Descriptors) override {
    auto parsed = decode<ibv::Control>(message);
    if (!parsed || !end_->ended().ok()) return;
    std::visit([&](auto& each) { on(each); }, *parsed);
  }

  [[nodiscard]] std::string describe() const override { return shared_connection_->describe(); }

  void close(Status status) noexcept override {
    if (born_in_ != forks()) return;  // a forked child: the parent owns the channel, and its locks may stay held
    {
      const std::lock_guard lock(end_->mutex);
      if (!end_->end.ok()) return;
      end_->end = status.ok() ? Status(Code::connection_lost, "the link has ended") : std::move(status);
      status = end_->end;
    }
    end_->connection->close();  // before a source is released: the peer reads nothing any more
    end_->offers->close(std::move(status));
  }

 private:
  /// The ports through which one buffer may be read.
  struct Choice {
    std::shared_ptr<LocalCards> local;
    std::vector<std::size_t> ports;
    std::vector<std::size_t> cards;
  };

  /// Chooses all ports for a large buffer, and otherwise one.
  Choice choose(const std::vector<std::size_t>& ports, std::size_t bytes) {
    Choice choice{end_->connection->cards(), ports, {}};
    if (bytes <= choice.local->options.stripe_bytes) return choose_one(ports);
    choice.cards = choice.local->cards_of(choice.ports);
    return choice;
  }
  /// Chooses a port, in turns.
  Choice choose_one(const std::vector<std::size_t>& ports) {
    Choice choice{end_->connection->cards(), {ports[turn_.fetch_add(1, std::memory_order_relaxed) % ports.size()]}, {}};
    choice.cards = choice.local->cards_of(choice.ports);
    return choice;
  }

  /// Returns where the peer reads the memory; the offer's number is still missing.
  static KeyedSource source_of(const std::byte* data, const Registration& registration, const Choice& choice) {
    KeyedSource source{0, reinterpret_cast<std::uintptr_t>(data), {}};
    for (const auto port : choice.ports) {
      source.keys.push_back(
          {static_cast<std::uint8_t>(port), registration.keys(choice.local->ports[port].card).remote});
    }
    return source;
  }
  static Ticket ticket_of(std::uint64_t bytes, const IbvTicket& opaque) {
    return {.bytes = bytes, .opaque = encode(opaque), .acknowledge = true};
  }

  /// Offers registered memory.
  Offer offer_where_it_is(const Buffer& buffer, const Choice& choice, std::shared_ptr<Registration> registration,
                          Completion released) {
    auto source = source_of(buffer.data, *registration, choice);  // before close() may release it
    // Deregisters first: when the source is released, the peer must not reach it any more.
    auto release = [registration = std::move(registration), released = std::move(released)](Status status) mutable {
      registration.reset();
      complete(std::move(released), std::move(status));
    };
    const auto number = end_->offers->add(buffer, std::move(release));
    if (!number) return Refusal{formatted("the link to {} has ended", end_->peer)};
    source.offer = *number;
    return ticket_of(buffer.bytes, std::move(source));
  }

  /// Offers a copy in the staging memory, and completes `released`. On a refusal it leaves `released` alone.
  Offer offer_copy(std::span<const Buffer* const> parts, std::size_t bytes, const Choice& choice, Outgoing& message,
                   Completion& released) {
    auto piece = choice.local->staging->take(bytes, choice.cards);
    if (!piece.ok()) return Refusal{std::string(piece.status().what()), true};
    std::uint64_t end = 0;
    for (const auto* part : parts) {
      const auto at = Bundle::next_part(end);
      if (!message.copy_later(parts_.copier, piece->data + at, ByteView(part->data, part->bytes), piece->owner))
        parts_.copier.copy(piece->data + at, part->data, part->bytes);
      end = at + part->bytes;
    }
    const auto number = end_->offers->add({Device{}, piece->data, bytes, nullptr, piece->owner}, {});
    if (!number) return Refusal{formatted("the link to {} has ended", end_->peer)};
    complete(std::move(released), {});
    auto source = source_of(piece->data, *piece->registration, choice);
    source.offer = *number;
    return ticket_of(bytes, std::move(source));
  }

  /// Registers memory for later buffers.
  void register_later(const Buffer& buffer, const Choice& choice) {
    parts_.cards.registering().submit([buffer, choice] {
      (void)choice.local->registrations->make(buffer.data, buffer.bytes, Access::offered, choice.cards);
    });
  }

  void read(LocalCards& local, std::vector<CardFetch::Way> ways, const KeyedSource& source, Buffer memory,
            Completion landed, Completion consumed) {
    auto* const data = memory.data;
    const auto bytes = memory.bytes;
    const auto fetch = std::make_shared<CardFetch>(
        std::move(memory), source,
        [end = end_, offer = source.offer, landed = std::move(landed), consumed = std::move(consumed)](
            const Status& status, Buffer kept) mutable {
          if (!status.ok())
            return end->ask_again(offer, status, std::move(kept), std::move(landed), std::move(consumed));
          kept = {};
          complete(std::move(landed), std::move(consumed), {});
        });
    std::vector<std::size_t> cards;
    for (const auto& way : ways) {
      if (std::find(cards.begin(), cards.end(), way.card) == cards.end()) cards.push_back(way.card);
    }
    if (auto kept = local.registrations->find(data, bytes, Access::lands, cards))
      return fetch->start(std::move(ways), std::move(kept));
    if (bytes <= parts_.options.copied_bytes && !rdma::Registrations::keeps(data, bytes, Access::lands)) {
      auto piece = local.staging->take(bytes, cards);
      if (piece.ok()) return fetch->start_staged(std::move(ways.front()), std::move(*piece), bytes);
    }
    // The kernel takes a while to pin many pages, and this may be a thread that reads messages.
    parts_.cards.registering().submit(
        [fetch, ways = std::move(ways), cards = std::move(cards), local = end_->connection->cards()]() mutable {
          const auto& into = fetch->memory();
          auto made = local->registrations->make(into.data, into.bytes, Access::lands, cards);
          if (!made.ok() && ways.size() > 1) {  // one card may take what several together may not
            ways.resize(1);
            cards = {ways.front().card};
            made = local->registrations->make(into.data, into.bytes, Access::lands, cards);
          }
          if (made.ok()) return fetch->start(std::move(ways), std::move(*made));
          for (auto part = std::min(staged_piece, into.bytes);; part = std::min(least_staged_piece, into.bytes)) {
            auto piece = local->staging->take(part, cards);
            if (piece.ok()) return fetch->start_staged(std::move(ways.front()), std::move(*piece), part);
            if (part <= least_staged_piece)
              return;  // the fetch ends with an error, so that the bytes come as bulk data
          }
        });
  }

  void on(rdma::ConnectPorts& message) { end_->connection->on(std::move(message)); }
  void on(rdma::PortsConnected& message) { end_->connection->on(std::move(message)); }
  void on(const rdma::PortLost& message) { end_->connection->on(message); }
  void on(const Resend& resend) {
    end_->wire.with([&](Wire& to) { end_->resends.answer(to, resend); });
  }

  const DriverParts parts_;
  const std::uint32_t born_in_ = forks();
  const std::shared_ptr<IbvEnd> end_;
  const std::shared_ptr<rdma::SharedConnection> shared_connection_;
  std::shared_ptr<OneSided> transfers_;
  std::atomic<std::size_t> turn_{0};
};

}  // namespace

IbvDriver::IbvDriver(ibv::IbvOptions options, std::shared_ptr<rdma::SharedCards> cards)
    : state_(std::make_unique<State>(std::move(options), std::move(cards))) {}
IbvDriver::~IbvDriver() = default;

std::variant<Bytes, Refusal> IbvDriver::descriptor(Device device) {
  if (device.type != DeviceType::cpu) return Refusal{formatted("ibv carries CPU memory, not {}", text_of(device))};
  const auto ports = state_->cards->usable_ports();
  if (const auto* refusal = std::get_if<Refusal>(&ports)) return *refusal;
  return rdma::descriptor_of(std::get<std::vector<rdma::CardPort>>(ports));
}

std::optional<Refusal> IbvDriver::reaches(ByteView mine, ByteView theirs) { return rdma::reaches(mine, theirs); }

std::unique_ptr<Channel> IbvDriver::open(Wire& wire, DevicePair) {
  return std::make_unique<IbvChannel>(wire, DriverParts{state_->options, state_->copier, *state_->cards});
}

}  // namespace tensorferry
