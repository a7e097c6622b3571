// The caller's side of a link: sends requests, takes replies, and decides which thread reads them.
#include <poll.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <utility>

#include "agent/link.h"
#include "agent/placement.h"
#include "base/futex.h"
#include "base/text.h"

namespace tensorferry {
namespace {

constexpr std::size_t longest_name = 4096;
constexpr auto burst = std::chrono::microseconds(50);  // calls made closer together than this may share a system call

/// Holds a request's arguments and its credit until the peer has read all of its buffers.
struct ArgumentPin {
  ArgumentPin(std::shared_ptr<Call::State> of, std::shared_ptr<Link> by, std::size_t size)
      : call(std::move(of)), link(std::move(by)), bytes(size) {
    call->hold_arguments();
  }
  ~ArgumentPin() {
    call->release_arguments();
    link->release_credit(bytes);
  }
  ArgumentPin(const ArgumentPin&) = delete;
  ArgumentPin& operator=(const ArgumentPin&) = delete;

  std::shared_ptr<Call::State> call;
  std::shared_ptr<Link> link;
  std::size_t bytes;
};

std::uint32_t remaining_ms(std::optional<Clock::time_point> deadline) {
  if (!deadline) return 0;
  const auto left = std::chrono::ceil<Milliseconds>(*deadline - Clock::now()).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(left, 1, 0xffffffff));
}

}  // namespace

Status Link::acquire_credit(std::size_t bytes, const RawCallOptions& options) {
  const auto until = options.timeout.count() > 0 ? std::optional(Clock::now() + options.timeout) : std::nullopt;
  bool first = true;
  while (true) {
    const auto word = flow_word_.load();
    {
      const std::lock_guard lock(flow_mutex_);
      if (closed() || bytes_in_flight_ == 0 || bytes_in_flight_ + bytes <= engine_->options.max_bytes_in_flight) {
        bytes_in_flight_ += bytes;
        return {};
      }
    }
    if (until && Clock::now() >= *until) {
      return {Code::deadline_exceeded, "\"" + peer_.name +
                                           "\" did not read the messages that were sent to it before (" +
                                           std::to_string(engine_->options.max_bytes_in_flight) +
                                           " bytes may be in flight). Raise max_bytes_in_flight or timeout"};
    }
    if (std::exchange(first, false)) {
      engine_->pool->about_to_block();
      expect_replies();  // replies carry the acknowledgements that return credit
    }
    futex_wait(flow_word_, word, until);
  }
}

void Link::release_credit(std::size_t bytes) {
  if (bytes == 0) return;
  {
    const std::lock_guard lock(flow_mutex_);
    bytes_in_flight_ -= bytes;
  }
  flow_word_.fetch_add(1);
  futex_wake(flow_word_);
}

void Link::start(const std::shared_ptr<Call::State>& call, Message message) {
  pending_.add(call);
  ++engine_->pending;
  ++engine_->calls_sent;
  if (call->deadline) engine_->reactor->kick();
  std::unique_lock lock(connect_mutex_);
  if (closed()) {
    const auto ended = status_;
    lock.unlock();
    if (pending_.remove(call->id)) finish(call, ended);
    release_credit(call->counted_bytes);
    call->release_arguments();
    return;
  }
  if (const auto stream = outgoing_) {
    lock.unlock();
    return send_request(stream, call, std::move(message));
  }
  deferred_.push_back({call, std::move(message)});
  const bool dial = !std::exchange(dialling_, true);
  lock.unlock();
  if (dial) engine_->dial(shared_from_this(), wire::Hello::Purpose::calls);
}

void Link::send_request(const std::shared_ptr<FrameStream>& stream, const std::shared_ptr<Call::State>& call,
                        Message message) {
  if (queued_behind(call, message, false)) return;
  const auto known = channels_.probing(message, call->options.require, call->options.arguments);
  if (!known) return send_now(stream, call, std::move(message), true);
  if (!queued_behind(call, message, true)) send_when_probed(*known, stream, {call, std::move(message)});
}

/// Queues the request if an earlier one of its order key waits for a probe. False: there is no earlier one. If this
/// request itself `waits` for a probe, later ones of its key queue behind it from then on.
bool Link::queued_behind(const std::shared_ptr<Call::State>& call, Message& message, bool waits) {
  const auto order = call->options.order;
  if (order == 0) return false;
  const std::lock_guard lock(connect_mutex_);
  if (const auto it = behind_.find(order); it != behind_.end()) {
    it->second.push_back({call, std::move(message)});
    return true;
  }
  if (waits) behind_.try_emplace(order);
  return false;
}

void Link::send_when_probed(std::uint64_t known, const std::shared_ptr<FrameStream>& stream, Deferred request) {
  channels_.when_probed(known, [self = shared_from_this(), stream, held = std::move(request)]() mutable {
    self->send_held(stream, std::move(held));
  });
}

/// Sends a request that waited for a probe, then the requests queued behind it, until one needs another probe. They go
/// by socket, because a thread that waits for the reply waits there by now.
void Link::send_held(const std::shared_ptr<FrameStream>& stream, Deferred request) {
  for (std::optional<Deferred> next = std::move(request); next;) {
    const auto call = next->call;
    const auto known = channels_.probing(next->message, call->options.require, call->options.arguments);
    if (known) return send_when_probed(*known, stream, *std::move(next));
    if (closed())
      drop(*next, status());
    else
      send_now(stream, call, std::move(next->message), false);
    next.reset();
    if (call->options.order == 0) return;
    const std::lock_guard lock(connect_mutex_);
    const auto it = behind_.find(call->options.order);
    if (it->second.empty()) {
      behind_.erase(it);
      return;
    }
    next = std::move(it->second.front());
    it->second.pop_front();
  }
}

void Link::send_now(const std::shared_ptr<FrameStream>& stream, const std::shared_ptr<Call::State>& call,
                    Message message, bool by_ring) {
  // A message without buffers is copied into its frame, so nothing has to be held.
  auto held =
      message.buffers.empty() ? nullptr : std::make_shared<ArgumentPin>(call, shared_from_this(), call->counted_bytes);
  call->release_arguments();
  if (!pending_.find(call->id)) return;  // it ended while the link was being dialled
  wire::Header header;
  header.kind = wire::Kind::request;
  header.call = call->id;
  header.remaining_ms = remaining_ms(call->deadline);
  header.order = call->options.order;
  Bytes extensions;
  {
    const std::lock_guard lock(numbers_mutex_);
    if (const auto it = numbers_.find(call->function); it != numbers_.end()) header.function = it->second;
  }
  Status status;
  if (header.function == 0) {
    if (call->function.empty() || call->function.size() > longest_name) {
      status = {Code::invalid_argument, "a function's name has 1 to " + std::to_string(longest_name) + " bytes"};
    }
    Writer writer(extensions);
    wire::put_extension(writer, wire::extension::function_name,
                        view_of(std::string_view(call->function).substr(0, longest_name)));
  }
  if (!call->options.results.empty()) {
    Writer writer(extensions);
    wire::put_extension(writer, wire::extension::placement, wire::encode_placement(on_wire(call->options.results)));
  }
  // A burst of calls shares system calls: a thread that waits for a reply flushes, and so does the tick.
  const auto now = Clock::now().time_since_epoch().count();
  const bool flush = pending_.size() < 3 || now - last_flush_ > std::chrono::nanoseconds(burst).count();
  last_flush_ = now;
  auto built = status.ok() ? channels_.build(header, std::move(extensions), std::move(message), call->options.require,
                                             call->options.arguments, held)
                           : Result<ChannelSet::Built>(status);
  held.reset();
  if (!built) {
    if (pending_.remove(call->id)) finish(call, built.status());
    return;
  }
  if (by_ring && built->trailing.empty() && send_by_ring(call, built->frame)) return;
  transmit(stream, std::move(built->frame), std::move(built->trailing), flush);
}

bool Link::wait(Call::State& call, std::optional<Clock::time_point> until, const std::function<bool()>& interrupted) {
  if (call.in_ring.load(std::memory_order_acquire) && !wait_in_ring(call, until, interrupted)) return false;
  if (call.done()) return true;
  const auto stream_now = outgoing();
  if (stream_now && stream_now->corked() && !stream_now->write_some()) finish_writes(stream_now);
  engine_->pool->about_to_block();
  call.waited = true;
  bool slept = false;
  const bool done = read_or_sleep(call, until, interrupted, slept);
  // stop_reading() may have woken this thread to read for the others at the moment it left.
  if (const auto stream = slept ? outgoing() : nullptr; stream && stream->begin_read()) stop_reading(stream);
  return done;
}

/// Waits for a call whose reply comes by stream: as the stream's reader, or asleep while another thread reads
/// (`slept`). False: interrupted, or `until` has passed. tests/models/reader.pml models it.
bool Link::read_or_sleep(Call::State& call, std::optional<Clock::time_point> until,
                         const std::function<bool()>& interrupted, bool& slept) {
  bool stopped = false;
  while (!call.done()) {
    const auto now = Clock::now();
    if (until && now >= *until) return false;
    if (call.deadline && now >= *call.deadline) cancel(call.shared_from_this(), expired(call));
    // A call whose reply is landing in the caller's own memory has no deadline: the reply has come, and after
    // a time-out the channels would still write to that memory.
    const bool bound = call.deadline && !call.lands_at_callers();
    auto limit = until;
    if (bound && (!limit || *call.deadline < *limit)) limit = call.deadline;
    if (call.done()) break;

    call.prepare_to_sleep();
    auto stream = outgoing();
    bool reader = false;
    {
      const std::lock_guard lock(wait_mutex_);
      if (call.done()) break;
      reader = stream && !stream->closed() && stream->begin_read();
      if (!reader) waiters_.push_back(&call);
    }
    if (reader) {
      reading_ = this;
      read_until_done(call, stream, limit, interrupted, stopped);
      reading_ = nullptr;
      stop_reading(stream);
    } else {
      slept = true;
      stopped = !call.sleep(limit) && interrupted && interrupted();
      const std::lock_guard lock(wait_mutex_);
      waiters_.erase(std::find(waiters_.begin(), waiters_.end(), &call));
    }
    if (stopped) return false;
  }
  return true;
}

void Link::read_until_done(Call::State& call, const std::shared_ptr<FrameStream>& stream,
                           std::optional<Clock::time_point> until, const std::function<bool()>& interrupted,
                           bool& stopped) {
  while (!call.done() && !stream->closed()) {
    pollfd sources[2] = {{stream->fd(), POLLIN, 0}, {nudge_.get(), POLLIN, 0}};
    timespec left{};
    if (until) {
      const auto nanoseconds = std::max<std::int64_t>(0, std::chrono::nanoseconds(*until - Clock::now()).count());
      left = {nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
    }
    const int ready = ::ppoll(sources, 2, until ? &left : nullptr, nullptr);
    if (ready == 0) return;
    if (ready < 0) {
      stopped = interrupted && interrupted();
      if (stopped) return;
      continue;
    }
    if (sources[1].revents != 0) {
      std::uint64_t count = 0;
      (void)!::read(nudge_.get(), &count, sizeof count);
    }
    if (sources[0].revents != 0 && stream->read_some(*this) == FrameStream::Progress::closed) close(stream->status());
  }
}

/// Gives up the right to read, and hands it to another waiting thread, or to the pool if calls are in flight.
void Link::stop_reading(const std::shared_ptr<FrameStream>& stream) {
  stream->end_read();
  const std::lock_guard lock(wait_mutex_);
  for (auto* waiter : waiters_) {
    if (waiter->done()) continue;
    waiter->wake();
    return;
  }
  // The pool also reads when no call is in flight, until the peer has answered the offer of a ring.
  const bool wanted = (pending_.size() != 0 || !ring_settled()) && !stream->closed();
  if (wanted == armed_ && !std::exchange(missed_, false)) return;
  armed_ = wanted;
  if (wanted)
    engine_->pool->arm(stream->fd());
  else
    engine_->pool->disarm(stream->fd());
}

void Link::expect_reply(Call::State& call) {
  if (!call.in_ring.load(std::memory_order_seq_cst)) return expect_frames();
  if (!ring_out_->calls->watch(call.slot)) poll_ring(call);
}

void Link::expect_replies() {
  if (ring_ready_.load(std::memory_order_acquire)) {
    for (const auto& call : pending_.all()) {
      if (call->in_ring.load(std::memory_order_acquire)) expect_reply(*call);
    }
  }
  expect_frames();
}

bool Link::become_sentinel(const Call::State& call) {
  const Call::State* none = nullptr;
  if (sentinel_.compare_exchange_strong(none, &call)) return true;
  lazy_ = true;
  engine_->reactor->kick();
  return false;
}

void Link::sentinel_ended(const Call::State& call, bool completed) {
  const auto* sentinel = &call;
  if (sentinel_.load() != sentinel || !sentinel_.compare_exchange_strong(sentinel, nullptr)) return;
  if (completed) expect_lazy(Clock::time_point::max());
}

/// Makes the lazy completions of calls made before `made_before` prompt: the pool takes their replies.
void Link::expect_lazy(Clock::time_point made_before) {
  if (!lazy_.exchange(false)) return;
  for (const auto& call : pending_.all()) {
    if (!call->lazy) continue;
    if (call->made < made_before)
      call->escalate();
    else
      lazy_ = true;
  }
}

/// Makes the pool read the outgoing stream.
void Link::expect_frames() {
  const auto stream = outgoing();
  if (!stream) return;
  const std::lock_guard lock(wait_mutex_);
  if (armed_) return;
  armed_ = true;
  engine_->pool->arm(stream->fd());
}

/// Wakes the thread that reads the outgoing stream in poll(), so that it checks its call.
void Link::nudge() {
  const std::uint64_t one = 1;
  (void)!::write(nudge_.get(), &one, sizeof one);
}

Status Link::on_reply(FrameStream* stream, const wire::Frame& frame) {
  const auto [call, again] = pending_.land(frame.header.call);
  if (!call) {  // the call was cancelled or has expired
    channels_.discard(stream, frame);
    return {};
  }
  if (again) return {Code::protocol_error, "a second reply to one call arrived"};
  if (frame.function_number != 0) {
    const std::lock_guard lock(numbers_mutex_);
    numbers_[call->function] = frame.function_number;
  }
  if ((frame.header.flags & wire::flag::error) != 0) {
    auto status = wire::decode_status(frame.payload);
    // The callee may notice first that the deadline has passed; the caller's own error says more.
    const bool late = call->deadline && *call->deadline <= Clock::now();
    if (late && status.code() == Code::deadline_exceeded) status = expired(*call);
    if (pending_.remove(call->id)) finish(call, std::move(status));
    return {};
  }
  channels_.receive(
      stream, frame, call->options.into, [self = shared_from_this(), call = call](Status status, Received received) {
        if (!self->pending_.remove(call->id)) return;
        self->finish(call, status.ok() ? Result<Received>(std::move(received)) : Result<Received>(std::move(status)));
      });
  return {};
}

void Link::finish(const std::shared_ptr<Call::State>& call, Result<Received> result) {
  --engine_->pending;
  if (!result) ++engine_->calls_failed;
  call->complete(std::move(result));
  if (call->in_ring.load(std::memory_order_acquire)) ring_out_->calls->abandon(call->slot);
  if (call->waited && reading_ != this) nudge();  // the waiting thread may be the reader, asleep in poll()
}

void Link::cancel(const std::shared_ptr<Call::State>& call, const Status& why) {
  if (!pending_.give_up(call->id)) return;
  finish(call, why);  // first: a callee that reads this frame before the ring's request must find the slot abandoned
  wire::Header header;
  header.kind = wire::Kind::cancel;
  header.call = call->id;
  if (const auto stream = outgoing()) transmit(stream, wire::assemble(header, {}, {}, {}), {}, true);
}

Status Link::expired(const Call::State& call) const {
  const auto seconds = [](auto duration) {
    const auto all = std::chrono::duration_cast<Milliseconds>(duration).count();
    if (all < 100) return std::to_string(all) + " ms";
    return std::to_string(all / 1000) + "." + std::to_string(all / 100 % 10) + " s";
  };
  return {Code::deadline_exceeded, "\"" + call.shown() + "\" on \"" + peer_.name + "\" did not answer in " +
                                       seconds(call.options.timeout) + " (sent " + seconds(Clock::now() - call.made) +
                                       " ago, " + (outgoing() ? "link up" : "no link yet") +
                                       "). Raise timeout= or the deadline around the call"};
}

std::string Link::state_text() {
  std::size_t deferred = 0;
  bool dialling = false;
  {
    const std::lock_guard lock(connect_mutex_);
    deferred = deferred_.size();
    dialling = dialling_;
  }
  const auto stream = outgoing();
  std::string why_no_ring;
  const auto transport = this->transport(why_no_ring);
  std::string out = "link to \"" + peer_.name + "\": " +
                    (closed()   ? "ended, " + status().text()
                     : stream   ? "up, calls by " + transport
                     : dialling ? "being dialled"
                                : "not dialled");
  if (!why_no_ring.empty()) out += ", no ring: " + why_no_ring;
  if (stream) {
    int unread = 0;
    ::ioctl(stream->fd(), FIONREAD, &unread);
    const std::lock_guard lock(wait_mutex_);
    out += formatted("; {} bytes of replies unread, {}, {} threads wait to read", unread,
                     stream->being_read() ? "a thread reads"
                     : armed_             ? "the pool is to read"
                                          : "no thread reads",
                     waiters_.size());
  }
  out += formatted("; {} calls wait for the link, {} in flight", deferred, pending_.size());
  constexpr std::array states{"free",     "pending",   "a thread sleeps", "watched by the pool",
                              "answered", "by socket", "given up",        "answered late"};
  for (const auto& call : pending_.all()) {
    const auto age = std::chrono::duration_cast<Milliseconds>(Clock::now() - call->made).count();
    out += formatted("\n  \"{}\", made {} ms ago", call->shown(), age);
    if (call->in_ring) {
      const auto state = ring_out_->calls->state(call->slot);
      out += formatted(", in slot {}: {}", call->slot.index, states[static_cast<std::size_t>(state) % states.size()]);
    }
    if (call->lazy) out += ", its completion may wait";
    if (sentinel_.load() == call.get()) out += ", watched for the others";
    if (call->waited) out += ", waited for";
    if (call->landing) out += ", its reply is landing";
  }
  return out;
}

}  // namespace tensorferry
