#include "channels/cuda_basic/cuda_basic_channel.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <utility>

#include "base/fork.h"
#include "base/mutex.h"
#include "base/text.h"
#include "channels/completion.h"
#include "channels/cuda/copy_timer.h"
#include "channels/cuda/event_poller.h"
#include "channels/cuda_basic/bulk_flow.h"
#include "channels/cuda_basic/busy_transfers.h"
#include "channels/cuda_basic/carried_chunks.h"
#include "channels/cuda_basic/detour.h"
#include "channels/cuda_basic/later_tickets.h"
#include "channels/cuda_basic/messages.h"
#include "channels/cuda_basic/ring_flow.h"
#include "channels/reserve.h"

namespace tensorferry {

namespace {

using cuda_basic::Announced;
using cuda_basic::BulkFlow;
using cuda_basic::BusyTransfers;
using cuda_basic::CarriedChunks;
using cuda_basic::CudaBasicTicket;
using cuda_basic::Detour;
using cuda_basic::Direction;
using cuda_basic::Flow;
using cuda_basic::FlowKind;
using cuda_basic::LaterTickets;
using cuda_basic::Ring;
using cuda_basic::RingFlow;
using cuda_basic::Transfer;

/// The ring through which this end will send.
struct Made {
  Mutex mutex;
  std::shared_ptr<Ring> ring;       // set before the peer receives its descriptor, until the peer has answered
  std::atomic<bool> making{false};  // from the first step until the ring has been given back
};

// Bounds the busy buffers that are offered at a time: well within the bound of the receiver, where announcements may
// lag behind tickets.
constexpr std::size_t most_busy = LaterTickets::most / 2;
constexpr std::chrono::seconds before_another_try{10};  // to make a ring, after one that could not be made or mapped

Result<std::shared_ptr<Ring>> ring_over(Result<SharedMemory> memory, Device device) {
  if (!memory.ok()) return memory.status();
  if (device.type == DeviceType::cpu) return std::make_shared<Ring>(Ring{cuda::Pinned::unlocked(std::move(*memory))});
  auto pinned = cuda::Pinned::lock(std::move(*memory), device.index);
  if (!pinned.ok()) return pinned.status();
  return std::make_shared<Ring>(Ring{std::move(*pinned)});
}

/// The two flows of one direction.
struct Flows {
  std::shared_ptr<RingFlow> ring;
  std::shared_ptr<BulkFlow> bulk;
  std::shared_ptr<CarriedChunks> carried;  // by which `bulk` sends transfers that are carried

  /// Returns the flow of the kind `ring`, `bulk` or `carried`.
  [[nodiscard]] Flow& by(FlowKind kind) const {
    if (kind == FlowKind::ring) return *ring;
    return *bulk;
  }
  /// Sends a buffer, whose memory is not busy: by ring if there is one, else by a carrier if there is one. Returns the
  /// kind, and the number of the first chunk; 0 if the flow is closed, and the transfer has failed.
  [[nodiscard]] CudaBasicTicket send(Transfer transfer) const {
    if (const auto first = ring->send_by_ring(transfer)) return {FlowKind::ring, *first};
    transfer.carried = transfer.memory.bytes >= CarriedChunks::least_bytes && !carried->carrier().empty();
    const auto kind = transfer.carried ? FlowKind::carried : FlowKind::bulk;
    return {kind, bulk->send(std::move(transfer))};
  }
};

/// Returns a transfer that drops the bytes of a buffer.
Transfer dropped(std::uint64_t bytes, Completion done = {}) {
  Transfer transfer;
  transfer.memory.bytes = bytes;
  transfer.done = std::move(done);
  return transfer;
}

class CudaBasicChannel final : public Channel {
 public:
  CudaBasicChannel(Wire& wire, DevicePair pair, cuda_basic::CudaBasicOptions options)
      : wire_(wire), pair_(pair), options_(options) {}

  ~CudaBasicChannel() override {
    CudaBasicChannel::close({});
    use_->end();
  }

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) override {
    if (buffer.device != pair_.local)
      return Refusal{formatted("the channel carries {}, not {}", text_of(pair_.local), text_of(buffer.device))};
    if (sharing == Sharing::shared) return Refusal{"cuda_basic copies bytes and cannot share them"};
    if (buffer.bytes > 0 && buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    if (!end().ok()) return Refusal{formatted("the link to {} has ended", wire_.peer())};
    if (buffer.bytes == 0) {
      complete(std::move(released), {});
      return Ticket{.bytes = 0, .opaque = encode(CudaBasicTicket{})};
    }
    auto ready = ready_of(buffer);
    if (auto* refusal = std::get_if<Refusal>(&ready)) return std::move(*refusal);
    Transfer transfer{buffer, std::move(std::get<cuda::GpuEvent>(ready)), {}, std::move(released)};
    if (transfer.ready) return offer_busy(std::move(transfer), message);
    const auto sent = out_.send(std::move(transfer));
    if (sent.kind != FlowKind::ring && !message.for_now()) make_ring();
    return Ticket{.bytes = buffer.bytes, .opaque = encode(sent)};
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto finish = [&](const Status& status) { complete(std::move(landed), std::move(consumed), status); };
    if (auto status = end(); !status.ok()) return finish(status);
    const auto parsed = parse_ticket(ticket);
    if (!parsed)
      return finish({Code::protocol_error, formatted("{} sent a ticket that cuda_basic cannot read", wire_.peer())});
    auto memory = reserve(sink, ticket.bytes, pair_.local, wire_.peer());
    if (ticket.bytes == 0) return finish(memory.status());
    auto ready = memory.ok() ? ready_of(*memory) : std::variant<cuda::GpuEvent, Refusal>(cuda::GpuEvent());
    auto status = memory.status();
    if (auto* refusal = std::get_if<Refusal>(&ready)) status = {Code::channel_unavailable, refusal->reason};
    if (!status.ok()) {
      // The bytes arrive anyway, so they must be dropped.
      receive(*parsed, dropped(ticket.bytes, std::move(consumed)));
      return complete(std::move(landed), std::move(status));
    }
    receive(*parsed,
            {std::move(*memory), std::move(std::get<cuda::GpuEvent>(ready)), std::move(landed), std::move(consumed)});
  }

  void discard(const Ticket& ticket) override {
    if (const auto parsed = parse_ticket(ticket); parsed && parsed->kind != FlowKind::nowhere && end().ok())
      receive(*parsed, dropped(ticket.bytes));
  }
  void acknowledged(const Ticket&) override {}  // `released` runs when the source has been read
  void withdraw(const Ticket& ticket) override {
    const auto parsed = decode<CudaBasicTicket>(ticket.opaque);
    if (!parsed || parsed->kind == FlowKind::nowhere || !end().ok()) return;
    if (auto busy = parsed->kind == FlowKind::later ? busy_->take(parsed->first) : std::nullopt)
      return busy->finish({});  // nothing of it was sent
    wire_.control(encode(cuda_basic::Withdrawn{parsed->kind, parsed->first, ticket.bytes}), {});
  }

  [[nodiscard]] std::string describe() const override {
    auto link = pair_.local.type == DeviceType::cuda
                    ? formatted("{} by way of the host", cuda::link_to_host(pair_.local.index))
                    : std::string("by way of the host");
    const auto carrier = made_->making.load() ? std::string() : carried_->carrier();  // a ring goes first
    if (!carrier.empty()) link += " over " + carrier;
    return cuda::described(link, out_.ring->speed());
  }

  void progress() override { cuda::EventPoller::of_this_process().poll_now(); }

  void control(ByteView message, Descriptors descriptors) override {
    const auto parsed = decode<cuda_basic::Control>(message);
    if (parsed && end().ok()) std::visit([&](const auto& each) { on(each, std::move(descriptors)); }, *parsed);
  }

  void close(Status status) noexcept override {
    if (born_in_ != forks()) return;  // in a forked child: threads of the parent may have held the locks
    {
      const std::lock_guard lock(mutex_);
      if (!end_.ok()) return;
      end_ = status.ok() ? Status(Code::connection_lost, "the link has ended") : std::move(status);
      status = end_;
    }
    busy_->close(status);
    later_.close(status);
    detour_->close(status);
    for (const auto* flows : {&in_, &out_}) {
      for (const auto kind : {FlowKind::ring, FlowKind::bulk}) flows->by(kind).close(status);
    }
    carried_->close(status);
  }

 private:
  /// Returns the event after which the buffer's bytes may be read, or its memory written; empty on the CPU.
  [[nodiscard]] std::variant<cuda::GpuEvent, Refusal> ready_of(const Buffer& buffer) const {
    if (pair_.local.type == DeviceType::cpu) return cuda::GpuEvent();
    return cuda::ready_of(buffer);
  }

  /// Parses a ticket; returns nullopt if it is malformed.
  [[nodiscard]] std::optional<CudaBasicTicket> parse_ticket(const Ticket& ticket) const {
    const auto parsed = decode<CudaBasicTicket>(ticket.opaque);
    if (!parsed || (parsed->kind == FlowKind::nowhere) != (ticket.bytes == 0)) return std::nullopt;
    return parsed;
  }

  /// Offers a buffer whose memory the GPU still uses. Its chunks have no numbers before it is ready, because all chunks
  /// behind them would wait.
  Offer offer_busy(Transfer transfer, Outgoing& message) {
    if (busy_->size() >= most_busy) return Refusal{formatted("{} buffers wait for their streams", most_busy)};
    const auto bytes = transfer.memory.bytes;
    auto announce = [use = use_, out = out_](std::uint64_t id, Transfer ready, const Status& status) {
      Announced announced{.id = id};
      if (status.ok()) {
        const auto sent = out.send(std::move(ready));
        announced = {id, sent.kind, sent.first};
      } else {
        ready.finish(status);
      }
      use->with([&](Wire& wire) {
        wire.control(encode(announced), {});
        if (!status.ok()) wire.ready(status);
      });
    };
    const auto id = busy_->add(transfer, std::move(announce));
    if (!id.ok()) return Refusal{formatted("the link to {} has ended", wire_.peer())};
    if (!message.for_now()) make_ring();
    return Ticket{.bytes = bytes, .opaque = encode(CudaBasicTicket{FlowKind::later, *id})};
  }

  void receive(const CudaBasicTicket& ticket, Transfer transfer) {
    if (ticket.kind != FlowKind::later) return receive(ticket.kind, ticket.first, std::move(transfer));
    const auto announced = later_.add(ticket.first, transfer);
    if (!announced.ok()) return transfer.finish(announced.status());
    if (const auto& way = *announced) receive(way->kind, way->first, std::move(transfer));
  }

  void receive(FlowKind kind, std::uint64_t first, Transfer transfer) {
    if (first == 0) return transfer.finish(sender_broken());
    if (kind == FlowKind::ring && their_ring_.load() != TheirRing::mapped)
      return transfer.finish({Code::protocol_error, formatted("{} sends by a ring that is not there", wire_.peer())});
    transfer.carried = kind == FlowKind::carried;
    in_.by(kind).receive(first, std::move(transfer));
  }

  [[nodiscard]] Status sender_broken() const {
    return {Code::channel_unavailable, formatted("{} can copy no more to or from its GPU", wire_.peer())};
  }

  void on(const cuda_basic::Staging&, Descriptors descriptors) { map_ring(std::move(descriptors)); }

  void on(const cuda_basic::Mapped& mapped, const Descriptors&) {
    std::shared_ptr<Ring> ring;
    {
      const std::lock_guard lock(made_->mutex);
      ring = std::exchange(made_->ring, nullptr);
    }
    if (!ring) return;  // the peer has mapped a ring that does not exist
    if (!mapped.ok) return try_again_later(made_);
    ring->memory.memory().close_descriptor();
    out_.ring->use(std::move(ring));
    give_back_when_idle(use_, out_.ring, made_, options_.ring_idle);
  }

  void on(const cuda_basic::Unstaged&, const Descriptors&) {
    auto expected = TheirRing::mapped;
    if (!their_ring_.compare_exchange_strong(expected, TheirRing::taken)) return;
    const auto ring = in_.ring->retire();
    if (!ring) {
      in_.ring->close({Code::protocol_error, formatted("{} gave back a ring that was in use", wire_.peer())});
      return;
    }
    their_ring_.store(TheirRing::none);
  }

  void on(const cuda_basic::Withdrawn& withdrawn, const Descriptors&) {
    receive({withdrawn.kind, withdrawn.first}, dropped(withdrawn.bytes));
  }

  void on(const cuda_basic::Broken& broken, const Descriptors&) { in_.by(broken.kind).close(sender_broken()); }

  void on(const cuda_basic::ChunkOffer& chunk, const Descriptors&) {
    const auto status = carried_->on(chunk);
    if (status.ok()) return in_.bulk->offered();
    stop_receiving(status);
    carried_->close(status);
  }

  void on(const cuda_basic::ChunkRead& read, const Descriptors&) { carried_->on(read); }

  void on(const Announced& announced, const Descriptors&) {
    auto transfer = later_.announce(announced);
    if (!transfer.ok()) return stop_receiving(transfer.status());
    if (*transfer) receive(announced.kind, announced.first, std::move(**transfer));
  }

  /// The peer broke the protocol by a control message: fails its buffers with that error, which ends the link.
  void stop_receiving(const Status& status) {
    later_.close(status);
    for (const auto kind : {FlowKind::ring, FlowKind::bulk}) in_.by(kind).close(status);
  }

  /// Returns the `broken` completion of a sending flow: tells the peer, and reports that the pair can carry no more.
  static Completion tells_of_the_end_of(FlowKind kind, std::shared_ptr<WireUse> use) {
    return [kind, use = std::move(use)](const Status& status) {
      use->with([&](Wire& wire) {
        wire.control(encode(cuda_basic::Broken{kind}), {});
        wire.ready(status);
      });
    };
  }

  /// Makes the ring in the background and passes it to the peer, which answers with Mapped. Does nothing while there is
  /// one, or one is being made.
  void make_ring() {
    if (!wire_.may_share_memory() || !wire_.passes_descriptors() || made_->making.exchange(true)) return;
    cuda::background().submit([use = use_, made = made_, out = out_.ring, device = pair_.local] {
      auto ring = ring_over(SharedMemory::create(Ring::bytes), device);
      auto descriptor = ring.ok() ? (*ring)->memory.memory().share() : Result<FileDescriptor>(ring.status());
      if (!descriptor.ok()) return try_again_later(made);
      (*ring)->begin_at(out->next());
      {
        const std::lock_guard lock(made->mutex);
        made->ring = std::move(*ring);
      }
      Descriptors descriptors;
      descriptors.push_back(std::move(*descriptor));
      use->with([&](Wire& wire) { wire.control(encode(cuda_basic::Staging{}), std::move(descriptors)); });
    });
  }

  static void try_again_later(std::shared_ptr<Made> made) {
    cuda::background().submit([made = std::move(made)] { made->making.store(false); },
                              std::chrono::steady_clock::now() + before_another_try);
  }

  /// Drops the ring, and tells the peer, when it has carried nothing for a while.
  static void give_back_when_idle(const std::shared_ptr<WireUse>& use, const std::weak_ptr<RingFlow>& out,
                                  const std::shared_ptr<Made>& made, std::chrono::milliseconds idle) {
    const auto job = [use, out, made, idle] {
      const auto flow = out.lock();
      if (!flow) return;
      if (flow->used_within(idle) || !flow->retire()) return give_back_when_idle(use, out, made, idle);
      use->with([](Wire& wire) { wire.control(encode(cuda_basic::Unstaged{}), {}); });
      made->making.store(false);
    };
    cuda::background().submit(job, std::chrono::steady_clock::now() + idle);
  }

  void map_ring(Descriptors descriptors) {
    if (descriptors.size() != 1 || !wire_.may_share_memory() || !take_their_ring())
      return;  // without a ring the peer goes on sending bulk data
    auto received = std::make_shared<FileDescriptor>(std::move(descriptors.front()));
    cuda::background().submit([this, use = use_, in = in_.ring, received, device = pair_.local] {
      auto ring = ring_over(SharedMemory::map(std::move(*received), Ring::bytes), device);
      if (ring.ok()) in->use(*ring);
      use->with([&](Wire& wire) {
        their_ring_.store(ring.ok() ? TheirRing::mapped : TheirRing::none);
        wire.control(encode(cuda_basic::Mapped{ring.ok()}), {});
      });
    });
  }

  /// False: this end has the peer's ring, or takes it.
  bool take_their_ring() {
    auto expected = TheirRing::none;
    return their_ring_.compare_exchange_strong(expected, TheirRing::taken);
  }

  /// Returns Ok until close(), then the error.
  Status end() {
    const std::lock_guard lock(mutex_);
    return end_;
  }

  Wire& wire_;
  const DevicePair pair_;
  const cuda_basic::CudaBasicOptions options_;
  const std::uint32_t born_in_ = forks();
  const std::shared_ptr<WireUse> use_ = std::make_shared<WireUse>(wire_);
  const std::shared_ptr<Detour> detour_ = std::make_shared<Detour>(pair_.local);
  const std::shared_ptr<CarriedChunks> carried_ = std::make_shared<CarriedChunks>(use_);
  const Flows in_{std::make_shared<RingFlow>(Direction::in, pair_.local, Completion(), detour_),
                  std::make_shared<BulkFlow>(Direction::in, use_, carried_, pair_.local, Completion(), detour_),
                  carried_};
  const Flows out_{std::make_shared<RingFlow>(Direction::out, pair_.local, tells_of_the_end_of(FlowKind::ring, use_)),
                   std::make_shared<BulkFlow>(Direction::out, use_, carried_, pair_.local,
                                              tells_of_the_end_of(FlowKind::bulk, use_)),
                   carried_};
  const std::shared_ptr<BusyTransfers> busy_ = std::make_shared<BusyTransfers>();  // offered
  LaterTickets later_;                                                             // received
  const std::shared_ptr<Made> made_ = std::make_shared<Made>();
  /// The peer's ring: `taken` while this end maps it or gives it back.
  enum class TheirRing : std::uint8_t { none, taken, mapped };
  std::atomic<TheirRing> their_ring_{TheirRing::none};

  Mutex mutex_;
  Status end_;
};

}  // namespace

std::variant<Bytes, Refusal> CudaBasicDriver::descriptor(Device device) {
  if (device.type != DeviceType::cuda && device.type != DeviceType::cpu)
    return Refusal{formatted("cuda_basic carries GPU memory and CPU memory, not {}", text_of(device))};
  if (device.type == DeviceType::cuda && cuda::api() == nullptr) return Refusal{cuda::why_missing()};
  return encode(cuda_basic::CudaBasicDescriptor{device.type});
}

std::optional<Refusal> CudaBasicDriver::reaches(ByteView mine, ByteView theirs) {
  const auto ours = decode<cuda_basic::CudaBasicDescriptor>(mine),
             others = decode<cuda_basic::CudaBasicDescriptor>(theirs);
  if (!ours || !others) return Refusal{"its descriptor cannot be read, or is of another version"};
  if (ours->type == DeviceType::cpu && others->type == DeviceType::cpu)
    return Refusal{"no GPU memory is at either end"};
  return std::nullopt;
}

std::unique_ptr<Channel> CudaBasicDriver::open(Wire& wire, DevicePair pair) {
  auto channel = std::make_unique<CudaBasicChannel>(wire, pair, options_);
  wire.ready({});
  return channel;
}

}  // namespace tensorferry
