#include "channels/shm/shm_channel.h"

#include <unistd.h>

#include <mutex>
#include <string>
#include <utility>

#include "base/fork.h"
#include "base/host.h"
#include "base/mutex.h"
#include "base/text.h"
#include "channels/bundle.h"
#include "channels/completion.h"
#include "channels/copy.h"
#include "channels/region.h"
#include "channels/reserve.h"
#include "channels/shm/handovers.h"
#include "channels/shm/mappings.h"

namespace tensorferry {

/// State that all channels of a driver share.
struct ShmDriver::State {
  explicit State(shm::Limits l) : limits(l) {}

  const shm::Limits limits;
  const std::shared_ptr<shm::Usage> usage = std::make_shared<shm::Usage>();
  Copier copier;
  Copier away{ReadBy::another_core};
  Background background;  // the last member, so destroyed first: its jobs use the others
};

namespace {

using shm::ShmTicket;

class ShmChannel final : public Channel {
 public:
  ShmChannel(Wire& wire, const shm::Limits& limits, std::shared_ptr<shm::Usage> usage, Copier& copier, Copier& away,
             Background& background)
      : wire_(wire), copier_(copier), away_(away) {
    auto ledger = SharedMemory::create(shm::Ledger::bytes);
    auto descriptor = ledger.ok() ? ledger->share() : Result<FileDescriptor>(ledger.status());
    if (!descriptor.ok()) {
      unusable_ = formatted("there is no shared memory: {}", descriptor.status().what());
      wire_.ready({descriptor.status().code(), unusable_});
      return;
    }
    ledger->close_descriptor();
    shm::word_at(*ledger, shm::Ledger::nonce_at).store(nonce_, std::memory_order_release);
    blocks_ = std::make_shared<shm::Blocks>(wire_, std::move(*ledger), limits, std::move(usage), background);
    Descriptors descriptors;
    descriptors.push_back(std::move(*descriptor));
    wire_.control(encode(shm::LedgerOffer{nonce_}), std::move(descriptors));
  }
  ~ShmChannel() override { ShmChannel::close({}); }

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) override {
    if (const auto status = end(); !status.ok()) return Refusal{formatted("the link to {} has ended", wire_.peer())};
    if (blocks_ == nullptr) return Refusal{unusable_};
    if (buffer.device.type != DeviceType::cpu)
      return Refusal{formatted("shm carries CPU memory, not {}", text_of(buffer.device))};
    if (buffer.bytes > 0 && buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    if (sharing == Sharing::shared) return hand_over(buffer, false, released);
    if (sharing == Sharing::frozen) {
      if (auto handed = hand_over(buffer, true, released); std::holds_alternative<Ticket>(handed)) return handed;
    }
    if (buffer.bytes == 0) {
      complete(std::move(released), {});
      return ticket_of(0, EmptyBuffer{}, 0);
    }
    auto taken = blocks_->take(buffer.bytes, message.last_resort());
    if (auto* refusal = std::get_if<Refusal>(&taken)) return std::move(*refusal);
    const auto& block = std::get<shm::Blocks::Block>(taken);
    copy(block, 0, buffer, message);
    complete(std::move(released), {});
    return ticket_of(buffer.bytes, block.lending, block.after);
  }

  Offer offer_bundle(std::span<const Buffer* const> parts, Outgoing& message, Completion released) override {
    if (!end().ok() || blocks_ == nullptr) return Refusal{"shm has not opened, or the link has ended"};
    const auto bytes = Bundle::bytes(parts);
    auto taken = blocks_->take(bytes, false);
    if (auto* refusal = std::get_if<Refusal>(&taken)) return std::move(*refusal);
    const auto& block = std::get<shm::Blocks::Block>(taken);
    std::uint64_t end = 0;
    for (const auto* part : parts) {
      const auto at = Bundle::next_part(end);
      copy(block, at, *part, message);
      end = at + part->bytes;
    }
    complete(std::move(released), {});
    return ticket_of(bytes, block.lending, block.after);
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto status = fetch(ticket, sink);
    complete(std::move(landed), std::move(consumed), status);
  }

  [[nodiscard]] bool copies_into(const Sink& sink) const override { return !sink.adopts(); }

  void discard(const Ticket& ticket) override {
    if (const auto parsed = decode<ShmTicket>(ticket.opaque); parsed && end().ok()) {
      if (const auto* lending = std::get_if<shm::Lending>(&*parsed)) (void)mappings_.claim(*lending, ticket.bytes);
      if (const auto* handed = std::get_if<shm::Handed>(&*parsed)) mappings_.skip(*handed);
    }
  }

  void acknowledged(const Ticket&) override {}  // `released` ran inside offer

  void withdraw(const Ticket& ticket) override {
    const auto parsed = decode<ShmTicket>(ticket.opaque);
    if (!parsed || blocks_ == nullptr) return;
    if (const auto* lending = std::get_if<shm::Lending>(&*parsed)) blocks_->put_back(*lending);
    if (const auto* handed = std::get_if<shm::Handed>(&*parsed)) handovers_->withdrawn(handed->region);
  }

  void control(ByteView message, Descriptors descriptors) override {
    auto parsed = decode<shm::Control>(message);
    if (!parsed || !end().ok()) return;
    auto descriptor = descriptors.empty() ? FileDescriptor() : std::move(descriptors.front());
    std::visit([&](auto& each) { on(each, std::move(descriptor)); }, *parsed);
  }

  void close(Status status) noexcept override {
    if (born_in_ != forks()) return;  // a forked child: the parent owns the channel, and its locks may stay held
    {
      const std::lock_guard lock(mutex_);
      if (!end_.ok()) return;
      end_ = status.ok() ? Status(Code::connection_lost, "the link has ended") : std::move(status);
    }
    if (blocks_) blocks_->close();
    handovers_->close();
    mappings_.close();
  }

 private:
  /// Copies now, or with the other buffers of the message. `released` may run at once: the message keeps its buffers.
  void copy(const shm::Blocks::Block& block, std::uint64_t at, const Buffer& from, Outgoing& message) {
    auto* const to = block.data + at;
    auto& copier = block.near ? copier_ : away_;
    if (!message.copy_later(copier, to, ByteView(from.data, from.bytes), block.keeps))
      copier.copy(to, from.data, from.bytes);
  }

  static Ticket ticket_of(std::size_t bytes, const ShmTicket& parsed, ControlId after) {
    return {.bytes = bytes, .opaque = encode(parsed), .after = after};
  }

  /// Offers a buffer that lies in a region. Completes `released` if it succeeds, and leaves it alone otherwise.
  Offer hand_over(const Buffer& buffer, bool frozen, Completion& released) {
    if (buffer.bytes == 0) return Refusal{"the buffer has no bytes to share"};
    const auto found = Regions::of_this_process().find(buffer.data, buffer.bytes);
    if (!found || found->region->memory().frozen() != frozen)
      return Refusal{"only memory that was made to be shared can be shared"};
    const auto told = handovers_->hand(found->region);
    if (const auto* refusal = std::get_if<Refusal>(&told)) return *refusal;
    complete(std::move(released), {});
    return ticket_of(buffer.bytes, shm::Handed{found->region->id(), found->offset}, std::get<ControlId>(told));
  }

  Status fetch(const Ticket& ticket, Sink& sink) {
    if (auto ended = end(); !ended.ok()) return ended;
    const auto parsed = decode<ShmTicket>(ticket.opaque);
    const bool nothing = parsed && std::holds_alternative<EmptyBuffer>(*parsed);
    if (!parsed || nothing != (ticket.bytes == 0)) {
      return {Code::protocol_error, formatted("{} sent a ticket that shm cannot read", wire_.peer())};
    }
    if (nothing) return reserve(sink, 0, {}, wire_.peer()).status();
    bool shared = false;
    auto claimed = std::holds_alternative<shm::Handed>(*parsed)
                       ? mappings_.claim(std::get<shm::Handed>(*parsed), ticket.bytes, shared)
                       : mappings_.claim(std::get<shm::Lending>(*parsed), ticket.bytes);
    if (!claimed.ok()) {
      return {claimed.status().code(), formatted("from {}: {}", wire_.peer(), claimed.status().what())};
    }
    if (sink.adopt(*claimed)) return {};
    if (shared) {
      return {Code::channel_unavailable,
              formatted("{} shares memory, and shared memory cannot land in memory that the caller provides",
                        wire_.peer())};
    }
    const auto mine = reserve(sink, ticket.bytes, {}, wire_.peer());
    if (mine.ok()) copier_.copy(mine->data, claimed->data, ticket.bytes);
    return mine.status();
  }

  void on(const shm::LedgerOffer& hello, FileDescriptor descriptor) {
    std::string failure;
    if (!descriptor) {
      failure =
          "no file descriptor came: the link has no unix socket, or a process has no more descriptors (ulimit -n)";
    } else if (const auto status = mappings_.map_ledger(std::move(descriptor), hello.nonce); !status.ok()) {
      failure = std::string(status.what());
    }
    wire_.control(encode(shm::LedgerProbed{std::move(failure)}), {});
  }
  void on(const shm::LedgerProbed& probed, FileDescriptor) {
    if (blocks_ == nullptr || std::exchange(probed_, true)) return;
    if (!probed.failure.empty()) return wire_.ready({Code::channel_unavailable, probed.failure});
    if (!blocks_->answered(nonce_))
      return wire_.ready({Code::channel_unavailable, "the peer did not find the memory of the probe"});
    wire_.ready({});
  }
  void on(const shm::Segment& segment, FileDescriptor descriptor) {
    report(segment.slot, mappings_.map(segment, std::move(descriptor)));
  }
  void on(const shm::Handover& handover, FileDescriptor descriptor) {
    const auto mapped = mappings_.map(handover, std::move(descriptor));
    if (!mapped.ok()) wire_.control(encode(shm::Missed{handover.region, std::string(mapped.what())}), {});
  }
  void on(const shm::RegionEnded& gone, FileDescriptor) { mappings_.gone(gone); }
  void on(const shm::Missed& missed, FileDescriptor) { handovers_->missed(missed.region); }
  void on(const shm::SegmentDropped& drop, FileDescriptor) { mappings_.drop(drop.slot); }
  void on(const shm::Unmapped& unmapped, FileDescriptor) {
    if (blocks_) blocks_->unmapped(unmapped.slot, unmapped.why);
  }
  void report(std::uint32_t slot, const Status& mapped) {
    if (!mapped.ok()) wire_.control(encode(shm::Unmapped{slot, std::string(mapped.what())}), {});
  }

  /// Returns Ok until close(), and its status from then on.
  Status end() {
    const std::lock_guard lock(mutex_);
    return end_;
  }

  Wire& wire_;
  Copier& copier_;  // for bytes that a thread on this core reads next
  Copier& away_;    // for bytes that a thread on another core reads next
  const std::uint32_t born_in_ = forks();
  const std::uint64_t nonce_ = random_word();
  std::string unusable_;  // why blocks_ is null; only the constructor sets it
  std::shared_ptr<shm::Blocks> blocks_;
  const std::shared_ptr<shm::Handovers> handovers_ = std::make_shared<shm::Handovers>(wire_);
  shm::Mappings mappings_;
  bool probed_ = false;  // only for the thread that handles control messages

  Mutex mutex_;
  Status end_;
};

}  // namespace

ShmDriver::ShmDriver(shm::Limits limits) : state_(std::make_unique<State>(limits)) {}
ShmDriver::~ShmDriver() = default;

const shm::Usage& ShmDriver::usage() const { return *state_->usage; }

std::variant<Bytes, Refusal> ShmDriver::descriptor(Device device) {
  if (device.type != DeviceType::cpu) return Refusal{formatted("shm carries CPU memory, not {}", text_of(device))};
  const auto host = boot_id();
  if (host.empty()) return Refusal{"the system does not say which host this is (/proc/sys/kernel/random/boot_id)"};
  if (const auto memory = SharedMemory::create(shm::page); !memory.ok()) {
    return Refusal{formatted("there is no shared memory: {}", memory.status().what())};
  }
  return encode(shm::ShmDescriptor{::geteuid(), host});
}

std::optional<Refusal> ShmDriver::reaches(ByteView mine, ByteView theirs) {
  const auto ours = decode<shm::ShmDescriptor>(mine), others = decode<shm::ShmDescriptor>(theirs);
  if (!ours || !others) return Refusal{"its descriptor cannot be read, or is of another version"};
  if (ours->boot_id != others->boot_id) return Refusal{"another host"};
  if (ours->uid != others->uid) return Refusal{formatted("another user: uid {}, here {}", others->uid, ours->uid)};
  return std::nullopt;
}

std::unique_ptr<Channel> ShmDriver::open(Wire& wire, DevicePair) {
  return std::make_unique<ShmChannel>(wire, state_->limits, state_->usage, state_->copier, state_->away,
                                      state_->background);
}

}  // namespace tensorferry
