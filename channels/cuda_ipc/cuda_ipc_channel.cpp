#include "channels/cuda_ipc/cuda_ipc_channel.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/fork.h"
#include "base/host.h"
#include "base/mutex.h"
#include "base/text.h"
#include "channels/allocations.h"
#include "channels/completion.h"
#include "channels/cuda/copy_timer.h"
#include "channels/cuda/event_poller.h"
#include "channels/cuda_ipc/exports.h"
#include "channels/cuda_ipc/imports.h"
#include "channels/cuda_ipc/messages.h"
#include "channels/cuda_ipc/probe.h"
#include "channels/cuda_ipc/stream_semaphores.h"
#include "channels/offers.h"
#include "channels/reserve.h"
#include "channels/xth/directory.h"

namespace tensorferry {
namespace {

using cuda::DeviceGuard;
using cuda::EventPoller;
using cuda_ipc::CudaIpcOptions;
using cuda_ipc::CudaIpcTicket;
using cuda_ipc::Exports;
using cuda_ipc::Imports;
using cuda_ipc::SignalSemaphores;
using cuda_ipc::WaitSemaphores;

/// The state that the channel shares with jobs on the background thread; may outlive the channel.
struct ChannelState {
  ChannelState(Wire& wire, int d, cuda_ipc::CudaIpcOptions options)
      : device(d),
        streams_wait(options.wait == CudaIpcOptions::Wait::by_stream ||
                     (options.wait == CudaIpcOptions::Wait::automatic && !cuda::few_queues())),
        use(std::make_shared<WireUse>(wire)),
        exports(std::make_shared<Exports>(use, options.within_process)),
        imports(std::make_shared<Imports>(d)) {}

  const int device;
  const bool streams_wait;  // for the sender's stream; else the host waits
  const std::shared_ptr<WireUse> use;
  const std::shared_ptr<Exports> exports;
  const std::shared_ptr<Imports> imports;
  const std::shared_ptr<Offers> offers = std::make_shared<Offers>();

  Mutex mutex;  // guards the members below
  Status end;   // ok until close()
  std::shared_ptr<SignalSemaphores> words_out;
  std::shared_ptr<WaitSemaphores> words_in;
  std::shared_ptr<cuda_ipc::ProbeMemory> probe_memory;  // dropped when both ends have probed
  bool peer_probed = false, tried = false;
  struct AskedProbe {
    cuda_ipc::Probe asked;
    FileDescriptor memory;
  };
  std::optional<AskedProbe> asked;  // the peer's probe, which waits for this end's memory
  std::string link;                 // the probe's description of the link; "" until it has succeeded

  [[nodiscard]] std::shared_ptr<WaitSemaphores> incoming() {
    const std::lock_guard lock(mutex);
    return words_in;
  }
  /// Records that an end has probed: `who` is peer_probed or tried. Background thread only, because freeing the memory
  /// may take a while.
  void has_probed(bool& who) {
    std::shared_ptr<cuda_ipc::ProbeMemory> unused;
    const std::lock_guard lock(mutex);
    who = true;
    if (peer_probed && tried) unused = std::move(probe_memory);
  }
  void ready(const Status& status) {
    use->with([&](Wire& wire) { wire.ready(status); });
  }
  void ready_when_complete() {
    bool complete = false;
    {
      const std::lock_guard lock(mutex);
      complete = end.ok() && words_in && !link.empty();
    }
    if (complete) ready({});
  }
};
using ChannelStatePtr = std::shared_ptr<ChannelState>;

constexpr std::chrono::seconds first_retry{1}, last_retry{64};

/// Makes the page of words and passes it to the peer.
Status pass_words(const ChannelStatePtr& shared) {
  auto page = SharedMemory::create(cuda_ipc::words_bytes);
  auto pinned = page.ok() ? cuda::Pinned::lock(std::move(*page), shared->device) : Result<cuda::Pinned>(page.status());
  if (!pinned.ok()) return pinned.status();
  auto descriptor = pinned->memory().share();
  if (!descriptor.ok()) return descriptor.status();
  pinned->memory().close_descriptor();
  Descriptors of_words;
  of_words.push_back(std::move(*descriptor));
  {
    const std::lock_guard lock(shared->mutex);
    if (!shared->end.ok()) return shared->end;
    shared->words_out = std::make_shared<SignalSemaphores>(std::move(*pinned));
  }
  shared->use->with([&](Wire& wire) { wire.control(encode(cuda_ipc::Words{}), std::move(of_words)); });
  return {};
}

/// Makes the probe's memory and passes it to the peer.
Status pass_probe(const ChannelStatePtr& shared) {
  const auto nonce = random_word();
  auto memory = cuda_ipc::ProbeMemory::make(shared->device, nonce);
  if (!memory.ok()) return memory.status();
  cuda_ipc::Probe probe{nonce, (*memory)->bytes(), {}};
  if (const auto gpu = cuda::uuid_of(shared->device); gpu && gpu->size() == probe.gpu.size())
    std::memcpy(probe.gpu.data(), gpu->data(), gpu->size());
  Descriptors of_memory;
  of_memory.push_back((*memory)->take_descriptor());
  {
    const std::lock_guard lock(shared->mutex);
    if (!shared->end.ok()) return shared->end;
    shared->probe_memory = std::move(*memory);
  }
  shared->use->with([&](Wire& wire) { wire.control(encode(probe), std::move(of_memory)); });
  return {};
}

void run_probe(const ChannelStatePtr& shared, const cuda_ipc::Probe& asked, FileDescriptor memory);

/// Begins the probe; background thread only. If the GPU has no memory for it, reports that and tries again later, so a
/// GPU that was full when the pair was opened does not keep it from this channel for good.
void begin_probe(const ChannelStatePtr& shared, std::chrono::seconds retry) {
  bool words = false;
  {
    const std::lock_guard lock(shared->mutex);
    if (!shared->end.ok()) return;
    words = shared->words_out != nullptr;
  }
  auto status = words ? Status() : pass_words(shared);
  if (status.ok()) status = pass_probe(shared);
  if (!status.ok()) {
    shared->ready(status);
    if (status.code() != Code::resource_exhausted) return;
    const auto next = std::min(2 * retry, last_retry);
    cuda::background().submit(
        [weak = std::weak_ptr(shared), next] {
          if (const auto still = weak.lock()) begin_probe(still, next);
        },
        std::chrono::steady_clock::now() + retry);
    return;
  }
  std::optional<ChannelState::AskedProbe> asked;
  {
    const std::lock_guard lock(shared->mutex);
    asked = std::exchange(shared->asked, std::nullopt);
  }
  if (asked) run_probe(shared, asked->asked, std::move(asked->memory));
}

void map_words(const ChannelStatePtr& shared, FileDescriptor received) {
  auto page = SharedMemory::map(std::move(received), cuda_ipc::words_bytes);
  auto pinned = !page.ok()             ? Result<cuda::Pinned>(page.status())
                : shared->streams_wait ? cuda::Pinned::lock(std::move(*page), shared->device)
                                       : cuda::Pinned::unlocked(std::move(*page));
  if (!pinned.ok()) return shared->ready(pinned.status());
  {
    const std::lock_guard lock(shared->mutex);
    if (!shared->end.ok() || shared->words_in) return;
    shared->words_in = std::make_shared<WaitSemaphores>(std::move(*pinned));
  }
  shared->ready_when_complete();
}

void run_probe(const ChannelStatePtr& shared, const cuda_ipc::Probe& asked, FileDescriptor memory) {
  std::shared_ptr<cuda_ipc::ProbeMemory> mine;
  {
    const std::lock_guard lock(shared->mutex);
    mine = shared->probe_memory;
    if (!mine && shared->end.ok()) {  // until begin_probe() has got memory
      shared->asked = {asked, std::move(memory)};
      return;
    }
  }
  if (!mine) return;  // the link has ended
  const auto speed = cuda_ipc::probe(std::move(memory), asked.nonce, asked.bytes, shared->device, *mine);
  mine.reset();
  shared->has_probed(shared->tried);
  shared->use->with([](Wire& wire) { wire.control(encode(cuda_ipc::MemoryProbed{}), {}); });
  if (!speed.ok()) return shared->ready(speed.status());
  {
    const std::lock_guard lock(shared->mutex);
    const auto gpu = cuda::device_of(text_of(ByteView(asked.gpu)));
    shared->link = cuda::described(cuda::link_between(shared->device, gpu), *speed);
  }
  shared->ready_when_complete();
}

class CudaIpcChannel final : public Channel {
 public:
  CudaIpcChannel(Wire& wire, DevicePair pair, CudaIpcOptions options)
      : wire_(wire), pair_(pair), shared_(std::make_shared<ChannelState>(wire, pair.local.index, options)) {
    Allocations::of_this_process().tell(shared_->exports);
    cuda::background().submit([shared = shared_] { begin_probe(shared, first_retry); });
  }

  ~CudaIpcChannel() override {
    CudaIpcChannel::close({});
    shared_->use->end();
  }

  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing& message, Completion released) override {
    if (auto refusal = cuda::refusal_of("cuda_ipc", buffer)) return std::move(*refusal);
    if (sharing == Sharing::shared) return Refusal{"cuda_ipc copies bytes and cannot share them"};
    const auto ended = [&] { return Refusal{formatted("the link to {} has ended", wire_.peer())}; };
    std::shared_ptr<SignalSemaphores> words;
    {
      const std::lock_guard lock(shared_->mutex);
      if (!shared_->end.ok()) return ended();
      words = shared_->words_out;
    }
    if (!words) return Refusal{"its probe is under way", true};
    if (buffer.bytes == 0) {
      complete(std::move(released), {});
      return Ticket{.bytes = 0, .opaque = encode(CudaIpcTicket{})};
    }
    const DeviceGuard here(pair_.local.index);
    if (!here.status().ok()) return Refusal{std::string(here.status().what())};
    auto found = shared_->exports->find(buffer.data, buffer.bytes, message.last_resort());
    if (auto* refusal = std::get_if<Refusal>(&found)) return std::move(*refusal);
    auto& [parsed, after, found_uses] = std::get<Exports::Found>(found);
    const auto order = cuda::order_of(buffer.stream);
    if (order == cuda::Order::capturing) {
      shared_->exports->release(found_uses);
      return Refusal{"a CUDA graph is being captured on the buffer's stream"};
    }
    if (order == cuda::Order::busy) {
      const auto used = words->write_on(static_cast<CUstream>(buffer.stream));
      if (!used) {
        shared_->exports->release(found_uses);
        return Refusal{"all stream semaphores are in use", true};
      }
      parsed.word = used->word;
      parsed.value = used->value;
    }
    const auto give_back = [words, word = parsed.word, exports = shared_->exports, uses = std::move(found_uses)] {
      if (word != CudaIpcTicket::none) words->give_back(word);
      exports->release(uses);
    };
    const auto number = shared_->offers->add(
        buffer, [give_back, released = std::make_shared<Completion>(std::move(released))](Status status) {
          give_back();
          (*released)(std::move(status));
        });
    if (!number) {
      give_back();
      return ended();
    }
    parsed.offer = *number;
    return Ticket{.bytes = buffer.bytes, .opaque = encode(parsed), .after = after, .acknowledge = true};
  }

  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto finish = [&](const Status& status) { complete(std::move(landed), std::move(consumed), status); };
    if (auto status = end(); !status.ok()) return finish(status);
    const auto parsed = decode<CudaIpcTicket>(ticket.opaque);
    if (!parsed || parsed->bytes != ticket.bytes || (parsed->offer == 0) != (ticket.bytes == 0) ||
        (parsed->word != CudaIpcTicket::none && (parsed->word >= cuda_ipc::words || !shared_->incoming()))) {
      return finish({Code::protocol_error, formatted("{} sent a ticket that cuda_ipc cannot read", wire_.peer())});
    }
    auto memory = reserve(sink, ticket.bytes, pair_.local, wire_.peer());
    if (!memory.ok()) return finish(memory.status());
    if (ticket.bytes == 0) return finish({});
    if (const auto capturing = cuda::refusal_of_capture(pair_.local.index, memory->stream); !capturing.ok())
      return finish(capturing);
    shared_->imports->find(
        *parsed, [shared = shared_, parsed = *parsed, memory = std::move(*memory), landed = std::move(landed),
                  consumed = std::move(consumed)](Result<Imports::ImportedMemory> source) mutable {
          copy_in_order(shared, parsed, std::move(source), std::move(memory), std::move(landed), std::move(consumed));
        });
  }

  [[nodiscard]] std::string describe() const override {
    const std::lock_guard lock(shared_->mutex);
    return shared_->link;
  }

  void withdraw(const Ticket& ticket) override {
    if (const auto parsed = decode<CudaIpcTicket>(ticket.opaque); parsed && parsed->offer != 0)
      shared_->offers->end(parsed->offer);
  }

  void progress() override { cuda::EventPoller::of_this_process().poll_now(); }

  void control(ByteView message, Descriptors descriptors) override {
    auto parsed = decode<cuda_ipc::Control>(message);
    if (!parsed || !end().ok()) return;
    std::visit([&](const auto& each) { on(each, std::move(descriptors)); }, *parsed);
  }

  void close(Status status) noexcept override {
    if (born_in_ != forks()) return;  // in a forked child: threads of the parent may have held the locks
    std::shared_ptr<WaitSemaphores> words;
    std::shared_ptr<cuda_ipc::ProbeMemory> unprobed;
    {
      const std::lock_guard lock(shared_->mutex);
      if (!shared_->end.ok()) return;
      shared_->end = status.ok() ? Status(Code::connection_lost, "the link has ended") : std::move(status);
      status = shared_->end;
      words = shared_->words_in;
      unprobed = std::move(shared_->probe_memory);
    }
    if (words) words->close(status);
    if (unprobed) cuda::background().submit([unprobed = std::move(unprobed)]() mutable { unprobed.reset(); });
    shared_->imports->clear();
    shared_->offers->close(std::move(status));
  }

 private:
  /// Enqueues the copy on the stream of `memory`: behind a wait for the sender's stream if that is busy, or when it has
  /// reached the bytes.
  static void copy_in_order(const ChannelStatePtr& shared, const CudaIpcTicket& parsed,
                            Result<Imports::ImportedMemory> source, Buffer memory, Completion landed,
                            Completion consumed) {
    if (!source.ok()) return complete(std::move(landed), std::move(consumed), source.status());
    const bool busy = parsed.word != CudaIpcTicket::none && !shared->incoming()->reached(parsed.word, parsed.value);
    if (!busy || shared->streams_wait)
      return copy(*shared, parsed, busy, std::move(*source), memory, std::move(landed), std::move(consumed));
    shared->incoming()->when_reached(
        parsed.word, parsed.value,
        [shared, parsed, source = std::move(*source), memory = std::move(memory), landed = std::move(landed),
         consumed = std::move(consumed)](const Status& ready) mutable {
          if (!ready.ok()) return complete(std::move(landed), std::move(consumed), ready);
          copy(*shared, parsed, false, std::move(source), memory, std::move(landed), std::move(consumed));
        });
  }

  static void copy(ChannelState& shared, const CudaIpcTicket& parsed, bool waits, Imports::ImportedMemory source,
                   const Buffer& memory, Completion landed, Completion consumed) {
    const DeviceGuard here(shared.device);
    const auto words = shared.incoming();
    auto* const stream = static_cast<CUstream>(memory.stream);
    auto status = here.status();
    // Asked once more, because the memory may have been mapped meanwhile, or the host has waited.
    if (status.ok()) status = cuda::refusal_of_capture(shared.device, memory.stream);
    if (status.ok() && waits)
      status = cuda::status_of(words->wait_on(stream, parsed.word, parsed.value), "cuda_ipc's wait");
    const bool waiting = status.ok() && waits;
    if (status.ok()) {
      const auto to = cuda::address_of(memory.data);
      status = cuda::status_of(cuda::api()->memcpy_async(to, source.address, parsed.bytes, stream), "cuda_ipc's copy");
    }
    if (!status.ok() && !waiting) return complete(std::move(landed), std::move(consumed), status);
    EventPoller::of_this_process().when_done(
        cuda::Watch::loosely, shared.device, memory.stream,
        [words, parsed, waiting, status, owner = memory.owner, mappings = std::move(source.mappings),
         consumed = std::move(consumed)](Status copied) mutable {
          if (waiting) words->done(parsed.word, parsed.value);
          mappings.clear();
          complete(std::move(consumed), status.ok() ? std::move(copied) : status);
        });
    complete(std::move(landed), std::move(status));
  }

  void on(const cuda_ipc::Words&, Descriptors descriptors) {
    if (descriptors.size() != 1)
      return shared_->ready(
          {Code::channel_unavailable,
           "no file descriptor came: the link has no unix socket, or a process has no more descriptors (ulimit -n)"});
    cuda::background().submit(
        [shared = shared_, page = std::move(descriptors.front())]() mutable { map_words(shared, std::move(page)); });
  }

  void on(const cuda_ipc::Probe& asked, Descriptors descriptors) {
    const bool known = asked.bytes == cuda_ipc::probe_bytes || asked.bytes == cuda_ipc::small_probe_bytes;
    if (descriptors.size() != 1 || !known || std::exchange(probing_, true)) return;
    cuda::background().submit([shared = shared_, asked, memory = std::move(descriptors.front())]() mutable {
      run_probe(shared, asked, std::move(memory));
    });
  }

  void on(const cuda_ipc::MemoryProbed&, const Descriptors&) {
    cuda::background().submit([shared = shared_] { shared->has_probed(shared->peer_probed); });
  }

  void on(const cuda_ipc::AllocationHandle& handle, const Descriptors&) {
    shared_->imports->add(handle, tell_opened(handle.id));
  }

  void on(const cuda_ipc::Chunk& chunk, Descriptors descriptors) {
    if (descriptors.size() != 1) return tell_opened(chunk.id)(false);
    shared_->imports->add(chunk, std::move(descriptors.front()), tell_opened(chunk.id));
  }

  void on(const cuda_ipc::Opened& opened, const Descriptors&) { shared_->exports->opened(opened); }
  void on(const cuda_ipc::AllocationFreed& gone, const Descriptors&) { shared_->imports->remove(gone); }

  [[nodiscard]] Imports::Resolved tell_opened(std::uint64_t id) const {
    return [use = shared_->use, id](bool ok) {
      use->with([&](Wire& wire) { wire.control(encode(cuda_ipc::Opened{id, ok}), {}); });
    };
  }

  Status end() {
    const std::lock_guard lock(shared_->mutex);
    return shared_->end;
  }

  Wire& wire_;
  const DevicePair pair_;
  const std::uint32_t born_in_ = forks();
  const ChannelStatePtr shared_;
  bool probing_ = false;  // used by the reading thread alone
};

}  // namespace

std::variant<Bytes, Refusal> CudaIpcDriver::descriptor(Device device) {
  if (device.type != DeviceType::cuda)
    return Refusal{formatted("cuda_ipc carries GPU memory, not {}", text_of(device))};
  if (cuda::api() == nullptr) return Refusal{cuda::why_missing()};
  const auto gpu = cuda::uuid_of(device.index);
  const auto host = boot_id();
  if (!gpu || host.empty()) return Refusal{"the system does not identify this GPU or this host"};
  const auto barred = cuda::without_access_to(device.index);
  return encode(cuda_ipc::CudaIpcDescriptor{host, *gpu, xth::nonce_of_this_process(), barred});
}

/// Asks the two descriptors alone, not the driver: the other process may see other GPUs than this one.
std::optional<Refusal> CudaIpcDriver::reaches(ByteView mine, ByteView theirs) {
  const auto ours = decode<cuda_ipc::CudaIpcDescriptor>(mine), others = decode<cuda_ipc::CudaIpcDescriptor>(theirs);
  if (!ours || !others) return Refusal{"its descriptor cannot be read, or is of another version"};
  if (ours->boot_id != others->boot_id) return Refusal{"another host"};
  if (ours->process == others->process && !options_.within_process)
    return Refusal{"the same process: cuda_xth carries there"};
  if (ours->bars(others->gpu) || others->bars(ours->gpu))
    return Refusal{"the two GPUs have no access to each other's memory"};
  return std::nullopt;  // if neither process sees both GPUs, the probe decides
}

std::unique_ptr<Channel> CudaIpcDriver::open(Wire& wire, DevicePair pair) {
  return std::make_unique<CudaIpcChannel>(wire, pair, options_);
}

}  // namespace tensorferry
