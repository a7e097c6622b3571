#include "channels/cma/cma_channel.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "base/fork.h"
#include "base/host.h"
#include "base/mutex.h"
#include "base/text.h"
#include "channels/cma/messages.h"
#include "channels/cma/process.h"
#include "channels/completion.h"
#include "channels/copy.h"
#include "channels/offers.h"
#include "channels/resends.h"
#include "channels/reserve.h"

namespace tensorferry {

/// State that all channels of a driver share.
struct CmaDriver::State {
  explicit State(cma::CmaOptions o) : options(o) {}

  const cma::CmaOptions options;
  Copier copier;
};

namespace {

using cma::Identity;
using cma::Process;

constexpr std::size_t part = std::size_t{1} << 20;  // bytes of one piece when two threads copy a buffer

/// The peer's process, and the word in its memory that shows that the peer still holds its sources.
class SenderMemory {
 public:
  SenderMemory(Process process, std::uint64_t address, std::uint64_t word)
      : process_(std::move(process)), address_(address), word_(word) {}

  /// Copies bytes and then checks the word. Returns 0 or an errno value. ESRCH: the peer or its channel has ended, so
  /// the copied bytes cannot be trusted.
  int read(Copier& copier, std::byte* to, std::uint64_t from, std::size_t bytes) const {
    const int failed = copy(copier, to, from, bytes);
    if (failed != 0 && failed != EFAULT) return failed;
    const int gone = check();
    return gone != 0 ? gone : failed;
  }

  /// Returns 0 if the word is there and the process is alive, ESRCH if not, or another errno value.
  [[nodiscard]] int check() const {
    std::uint64_t found = 0;
    const int failed = process_.read(reinterpret_cast<std::byte*>(&found), address_, sizeof found);
    if (failed != 0) return failed == EFAULT ? ESRCH : failed;
    return found == word_ && process_.alive() ? 0 : ESRCH;
  }

 private:
  int copy(Copier& copier, std::byte* to, std::uint64_t from, std::size_t bytes) const {
    if (bytes < Copier::shares_from) return process_.read(to, from, bytes);
    std::atomic<int> failed{0};
    copier.in_parts(bytes, part, [&](std::size_t at, std::size_t n) {
      if (failed.load(std::memory_order_relaxed) != 0) return;
      if (const int error = process_.read(to + at, from + at, n); error != 0) failed = error;
    });
    return failed;
  }

  const Process process_;
  const std::uint64_t address_;
  const std::uint64_t word_;
};

class CmaChannel final : public Channel {
 public:
  CmaChannel(Wire& wire, const cma::CmaOptions& options, Copier& copier)
      : wire_(wire), options_(options), copier_(copier) {
    wire_.control(encode(cma::Challenge{challenge_}), {});
  }
  ~CmaChannel() override { CmaChannel::close({}); }

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) override {
    if (sharing == Sharing::shared) return Refusal{"cma copies bytes and cannot share them"};
    if (buffer.device.type != DeviceType::cpu)
      return Refusal{formatted("cma carries CPU memory, not {}", text_of(buffer.device))};
    if (buffer.bytes > 0 && buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    const auto ended = [&] { return Refusal{formatted("the link to {} has ended", wire_.peer())}; };
    if (!end().ok()) return ended();
    if (refused_) return Refusal{"the kernel did not allow reads of the peer's memory"};
    const auto after = answered_in_.load(std::memory_order_acquire);
    if (after == 0) return Refusal{"its probe is under way", true};
    if (buffer.bytes == 0) {
      complete(std::move(released), {});
      return Ticket{.bytes = 0, .opaque = encode(EmptyBuffer{})};
    }
    if (buffer.bytes < options_.least_bytes && !message.last_resort())
      return Refusal{formatted("below {} bytes other channels are faster", options_.least_bytes), true};
    const auto number = offers_->add(buffer, std::move(released));
    if (!number) return ended();
    const auto address_in = cma::SourceAddress{*number, reinterpret_cast<std::uintptr_t>(buffer.data)};
    return Ticket{.bytes = buffer.bytes, .opaque = encode(address_in), .after = after, .acknowledge = true};
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto finish = [&](const Status& status) { complete(std::move(landed), std::move(consumed), status); };
    if (auto status = end(); !status.ok()) return finish(status);
    const auto opaque = decode<cma::CmaTicket>(ticket.opaque);
    const auto* address_in = opaque ? std::get_if<cma::SourceAddress>(&*opaque) : nullptr;
    if (!opaque || (address_in == nullptr) != (ticket.bytes == 0) ||
        (address_in != nullptr && address_in->address + ticket.bytes < address_in->address)) {
      return finish({Code::protocol_error, formatted("{} sent a ticket that cma cannot read", wire_.peer())});
    }
    const auto source = this->source();
    if (address_in != nullptr && !source)
      return finish({Code::protocol_error, formatted("{} sent a ticket before cma was ready", wire_.peer())});
    auto memory = reserve(sink, ticket.bytes, {}, wire_.peer());
    if (!memory.ok()) return finish(memory.status());
    if (address_in == nullptr) return finish({});
    const int failed = source->read(copier_, memory->data, address_in->address, ticket.bytes);
    if (failed == 0) return finish({});
    if (failed == ESRCH) return finish(lost());
    resends_.ask(wire_, address_in->offer, std::move(*memory), std::move(landed), std::move(consumed));
    if (cma::is_refusal(failed)) refuse(failed);
  }

  [[nodiscard]] bool copies_into(const Sink&) const override { return true; }

  void withdraw(const Ticket& ticket) override {
    const auto opaque = decode<cma::CmaTicket>(ticket.opaque);
    if (const auto* address_in = opaque ? std::get_if<cma::SourceAddress>(&*opaque) : nullptr)
      offers_->end(address_in->offer);
  }

  void control(ByteView message, Descriptors) override {
    const auto parsed = decode<cma::Control>(message);
    if (!parsed || !end().ok()) return;
    std::visit([&](const auto& each) { on(each); }, *parsed);
  }

  void close(Status status) noexcept override {
    if (born_in_ != forks()) return;  // a forked child: the parent owns the channel, and its locks may stay held
    {
      const std::lock_guard lock(mutex_);
      if (!end_.ok()) return;
      end_ = status.ok() ? Status(Code::connection_lost, "the link has ended") : std::move(status);
      status = end_;
      source_.reset();
      word_.store(0, std::memory_order_seq_cst);  // before a source is released: a receiver that reads it now sees this
    }
    offers_->close(std::move(status));
  }

 private:
  /// Ends the pair, because the kernel would refuse the next buffer too.
  void refuse(int error) {
    if (!refused_.exchange(true)) wire_.ready({Code::channel_unavailable, cma::text_of_refusal(error)});
  }

  [[nodiscard]] Status lost() const {
    return {Code::connection_lost,
            formatted("{} ended, or closed the link, while cma read a buffer from its memory", wire_.peer())};
  }

  void on(const cma::Challenge& challenge) {
    {
      const std::lock_guard lock(mutex_);
      if (!end_.ok() || std::exchange(challenged_, true)) return;
      word_.store(~challenge.random, std::memory_order_seq_cst);
    }
    const auto self = cma::own_identity().value_or(Identity{});
    const cma::WordAddress answer{self, reinterpret_cast<std::uintptr_t>(&word_)};
    answered_in_.store(wire_.control(encode(answer), {}), std::memory_order_release);
  }

  void on(const cma::WordAddress& answer) {
    if (std::exchange(answered_, true)) return;
    auto status = probe(answer);
    wire_.ready(std::move(status));
  }

  Status probe(const cma::WordAddress& answer) {
    if (answer.process.pid == ::getpid() && !options_.within_process)
      return {Code::channel_unavailable, "the peer says that it is this process"};
    auto process = Process::find(answer.process);
    if (!process.ok()) return {Code::channel_unavailable, std::string(process.status().what())};
    auto found = std::make_shared<const SenderMemory>(std::move(*process), answer.address, ~challenge_);
    if (const int failed = found->check(); failed == ESRCH) {
      return {Code::channel_unavailable,
              formatted("process {} is not the peer, or has ended: its memory does not hold the word of the probe",
                        answer.process.pid)};
    } else if (failed != 0) {
      refused_ = true;
      return {Code::channel_unavailable, cma::text_of_refusal(failed)};
    }
    const std::lock_guard lock(mutex_);
    if (end_.ok()) source_ = std::move(found);
    return {};
  }

  void on(const Resend& resend) { resends_.answer(wire_, resend); }

  /// Returns Ok until close(), and its status from then on.
  Status end() {
    const std::lock_guard lock(mutex_);
    return end_;
  }
  std::shared_ptr<const SenderMemory> source() {
    const std::lock_guard lock(mutex_);
    return source_;
  }

  Wire& wire_;
  const cma::CmaOptions options_;
  Copier& copier_;
  const std::uint32_t born_in_ = forks();
  const std::uint64_t challenge_ = random_word();
  const std::shared_ptr<Offers> offers_ = std::make_shared<Offers>();
  Resends resends_{offers_};
  /// The answer to the peer's challenge, which the peer reads here. 0 before the challenge and after close().
  std::atomic<std::uint64_t> word_{0};
  std::atomic<ControlId> answered_in_{0};  // the control message that carried the answer; 0: not sent yet
  std::atomic<bool> refused_{false};       // the kernel refuses reads: offers are refused
  bool challenged_ = false;                // guarded by mutex_
  bool answered_ = false;                  // only for the thread that handles control messages

  Mutex mutex_;
  Status end_;
  std::shared_ptr<const SenderMemory> source_;  // null before the probe and after close()
};

}  // namespace

CmaDriver::CmaDriver(cma::CmaOptions options) : state_(std::make_unique<State>(options)) {}
CmaDriver::~CmaDriver() = default;

std::variant<Bytes, Refusal> CmaDriver::descriptor(Device device) {
  if (device.type != DeviceType::cpu) return Refusal{formatted("cma carries CPU memory, not {}", text_of(device))};
  const auto host = boot_id();
  const auto self = cma::own_identity();
  const auto pids = own_namespace("pid"), users = own_namespace("user");
  if (host.empty() || !self || pids == 0 || users == 0)
    return Refusal{"the system does not identify this process: /proc is missing, or belongs to another pid namespace"};
  if (auto refusal = cma::own_scope_refusal()) return Refusal{std::move(*refusal)};
  return encode(cma::CmaDescriptor{::geteuid(), pids, users, *self, host});
}

std::optional<Refusal> CmaDriver::reaches(ByteView mine, ByteView theirs) {
  const auto ours = decode<cma::CmaDescriptor>(mine), others = decode<cma::CmaDescriptor>(theirs);
  if (!ours || !others) return Refusal{"its descriptor cannot be read, or is of another version"};
  if (ours->boot_id != others->boot_id) return Refusal{"another host"};
  if (ours->pid_namespace != others->pid_namespace) return Refusal{"another pid namespace (another container)"};
  if (ours->user_namespace != others->user_namespace) return Refusal{"another user namespace"};
  if (ours->uid != others->uid) return Refusal{formatted("another user: uid {}, here {}", others->uid, ours->uid)};
  if (ours->process == others->process && !state_->options.within_process)
    return Refusal{"the same process: xth carries there"};
  return std::nullopt;
}

std::unique_ptr<Channel> CmaDriver::open(Wire& wire, DevicePair) {
  return std::make_unique<CmaChannel>(wire, state_->options, state_->copier);
}

}  // namespace tensorferry
