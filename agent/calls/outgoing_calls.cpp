#include "agent/calls/outgoing_calls.h"

#include <algorithm>
#include <utility>

#include "agent/agent_drivers.h"
#include "agent/buffers/channel_set.h"
#include "agent/buffers/placement.h"
#include "agent/calls/credits.h"
#include "agent/calls/stream_reader.h"
#include "agent/calls/time_out_text.h"
#include "agent/connections/session.h"
#include "agent/observing/agent_counters.h"
#include "agent/observing/call_trace.h"
#include "agent/pool/pool.h"
#include "base/out_of_memory.h"
#include "base/text.h"

namespace tensorferry {
namespace {

constexpr std::size_t longest_name = 4096;
constexpr auto burst = std::chrono::microseconds(50);  // calls made closer together than this may share a system call
constexpr auto slow_call = std::chrono::seconds(1);    // the flight recorder notes calls that took as long
constexpr std::size_t events_in_errors = 3;            // of the link, in the text of a call that fails with it
constexpr auto expiry_interval = Milliseconds(9);      // a slow tick, every 10 ms, may come early
constexpr auto far_deadline = Milliseconds(120);       // later than the slowest tick, every 100 ms

/// How long before its deadline the callee is asked how far a call has come: a third of the time-out, but at least some
/// intervals of the tick, and at most what a slow network and a busy peer need for an answer.
Milliseconds lead_of(Milliseconds timeout) { return std::clamp(timeout / 3, Milliseconds(50), Milliseconds(1000)); }

/// Holds a request's arguments and its credit until the peer has read all of its buffers.
struct ArgumentPin {
  ArgumentPin(std::shared_ptr<Call::State> of, std::shared_ptr<void> by, Credits& from, std::size_t size)
      : call(std::move(of)), link(std::move(by)), credits(from), bytes(size) {
    call->arguments.hold();
  }
  ~ArgumentPin() {
    call->arguments.release();
    credits.release(bytes);
  }
  ArgumentPin(const ArgumentPin&) = delete;
  ArgumentPin& operator=(const ArgumentPin&) = delete;

  std::shared_ptr<Call::State> call;
  std::shared_ptr<void> link;
  Credits& credits;  // the link's
  std::size_t bytes;
};

std::uint32_t remaining_ms(std::optional<Clock::time_point> deadline, Clock::time_point now) {
  if (!deadline) return 0;
  const auto left = std::chrono::ceil<Milliseconds>(*deadline - now).count();
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(left, 1, 0xffffffff));
}

}  // namespace

OutgoingCalls::OutgoingCalls(const CallSurroundings& around)
    : around_(around), ring_(*this, around.pool, around.clock), lazy_(pending_) {}

Status OutgoingCalls::end_link(const Status& why) {
  around_.link.fail(why);
  return around_.link.status();
}

void OutgoingCalls::acknowledged(const std::vector<std::uint64_t>& releases) {
  around_.channels.acknowledged(releases);
}

void OutgoingCalls::add(const std::shared_ptr<Call::State>& call, const Message& message) {
  if (around_.trace.on()) {
    call->progress.traced = std::make_shared<CallRecord>();
    call->progress.traced->bytes = message.payload.size();
    for (const auto& buffer : message.buffers) call->progress.traced->bytes += buffer.bytes;
  }
  pending_.add(call);
  ++around_.counters.pending;
  ++around_.counters.calls_sent;
  ++around_.of_link.calls_made;
  if (call->deadline) around_.link.activate();
}

void OutgoingCalls::send(const std::shared_ptr<FrameStream>& stream, const std::shared_ptr<Call::State>& call,
                         Message message) {
  if (queued_behind(call, message, false)) return;
  const auto known = around_.channels.probing(message, call->options.require, call->options.arguments);
  if (!known) return send_now(stream, call, std::move(message), true);
  if (!queued_behind(call, message, true)) send_when_probed(*known, stream, {call, std::move(message)});
}

/// Queues the request if an earlier one of its order key waits for a probe. False: there is no earlier one. If this
/// request itself `waits` for a probe, later ones of its key queue behind it from then on.
bool OutgoingCalls::queued_behind(const std::shared_ptr<Call::State>& call, Message& message, bool waits) {
  const auto order = call->options.order;
  if (order == 0) return false;
  const std::lock_guard lock(waiting_mutex_);
  if (const auto it = waiting_by_order_.find(order); it != waiting_by_order_.end()) {
    call->progress.hold = SendHold::order;
    it->second.push_back({call, std::move(message)});
    return true;
  }
  if (waits) waiting_by_order_.try_emplace(order);
  return false;
}

void OutgoingCalls::send_when_probed(std::uint64_t known, const std::shared_ptr<FrameStream>& stream,
                                     UnsentCall request) {
  request.call->progress.hold = SendHold::probe;
  around_.channels.when_probed(known, [this, link = around_.link.hold(), stream, held = std::move(request)]() mutable {
    send_held(stream, std::move(held));
  });
}

/// Sends a request that waited for a probe, then the requests queued behind it, until one needs another probe. They go
/// by socket, because a thread that waits for the reply waits there by now.
void OutgoingCalls::send_held(const std::shared_ptr<FrameStream>& stream, UnsentCall request) {
  for (std::optional<UnsentCall> next = std::move(request); next;) {
    const auto call = next->call;
    const auto known = around_.channels.probing(next->message, call->options.require, call->options.arguments);
    if (known) return send_when_probed(*known, stream, *std::move(next));
    if (around_.link.closed())
      drop(*next, around_.link.status());
    else
      send_now(stream, call, std::move(next->message), false);
    next.reset();
    if (call->options.order == 0) return;
    const std::lock_guard lock(waiting_mutex_);
    const auto it = waiting_by_order_.find(call->options.order);
    if (it->second.empty()) {
      waiting_by_order_.erase(it);
      return;
    }
    next = std::move(it->second.front());
    it->second.pop_front();
  }
}

/// Names the function in a request: by the callee's number if it is known, else by its name.
Status OutgoingCalls::name_function(const Call::State& call, wire::Header& header, Bytes& extensions) {
  {
    const std::lock_guard lock(numbers_mutex_);
    if (const auto it = numbers_.find(call.function); it != numbers_.end()) header.function = it->second;
  }
  if (header.function != 0) return {};
  if (call.function.empty() || call.function.size() > longest_name)
    return {Code::invalid_argument, "a function's name has 1 to " + std::to_string(longest_name) + " bytes"};
  Writer writer(extensions);
  wire::put_extension(writer, wire::extension::function_name, view_of(std::string_view(call.function)));
  return {};
}

void OutgoingCalls::send_now(const std::shared_ptr<FrameStream>& stream, const std::shared_ptr<Call::State>& call,
                             Message message, bool by_ring) {
  // A message without buffers is copied into its frame, so nothing has to be held.
  auto held = message.buffers.empty()
                  ? nullptr
                  : std::make_shared<ArgumentPin>(call, around_.link.hold(), around_.credits, call->cost.bytes);
  call->arguments.release();
  if (!pending_.find(call->place.id)) return;  // it ended while the link was being dialled
  wire::Header header;
  header.kind = wire::Kind::request;
  header.call = call->place.id;
  const auto sent_at = around_.clock.now();
  header.remaining_ms = remaining_ms(call->deadline, sent_at);
  header.order = call->options.order;
  Bytes extensions;
  const auto status = name_function(*call, header, extensions);
  if (!call->options.results.empty()) {
    Writer writer(extensions);
    wire::put_extension(writer, wire::extension::placement, wire::encode_placement(on_wire(call->options.results)));
  }
  // A burst of calls shares system calls: a thread that waits for a reply flushes, and so does the tick.
  const auto now = sent_at.time_since_epoch().count();
  const bool flush = pending_.size() < 3 || now - last_flush_ > std::chrono::nanoseconds(burst).count();
  last_flush_ = now;
  call->progress.sent_at = now;
  const Connections::FrameFirst frame_first(around_.connections);
  auto built = status.ok() ? around_.channels.build(header, std::move(extensions), std::move(message),
                                                    call->options.require, call->options.arguments, held)
                           : Result<ChannelSet::Built>(status);
  held.reset();
  if (!built) {
    if (pending_.remove(call->place.id)) finish(call, built.status());
    return;
  }
  if (call->progress.traced && built->channel >= 0) call->progress.traced->channel = built->channel;
  if (!by_ring || !built->trailing.empty() || !ring_.send(call, built->frame))
    around_.link.transmit(stream, std::move(built->frame), std::move(built->trailing),
                          flush || frame_first.holds_bulk(), {});
  // The frame that told of it may have gone ahead of the request, and then the callee did not know the call.
  tell_if_given_up(stream, *call);
}

void OutgoingCalls::tell_if_given_up(const std::shared_ptr<FrameStream>& stream, const Call::State& call) {
  if (call.progress.given_up) tell_given_up(stream, call.place.id);
}

bool OutgoingCalls::wait(Call::State& call, std::optional<Clock::time_point> until,
                         const std::function<bool()>& interrupted) {
  if (call.place.in_ring.load(std::memory_order_acquire) && !ring_.wait(call, until, interrupted)) return false;
  if (call.done()) return true;
  const auto stream = around_.link.outgoing();
  if (stream && stream->corked() && !stream->write_some()) around_.connections.finish_writes(stream);
  const WaitInHandler place;
  return around_.reader.wait(call, until, interrupted);
}

Status OutgoingCalls::on_reply(FrameStream* stream, const wire::Frame& frame) {
  const auto [call, again] = pending_.land(frame.header.call);
  if (!call) {  // the call was cancelled or has expired
    ++around_.counters.late_replies;
    around_.channels.discard(stream, frame);
    return {};
  }
  if (call->progress.traced) call->progress.traced->reach(CallRecord::answered, around_.clock.now());
  if (again) return {Code::protocol_error, "a second reply to one call arrived"};
  if (frame.function_number != 0) {
    // Without memory for the number, later calls go by name too.
    out_of_memory::with_reserve([&, &function = call->function] {
      const std::lock_guard lock(numbers_mutex_);
      numbers_[function] = frame.function_number;
    });
  }
  if ((frame.header.flags & wire::flag::error) != 0) {
    call->progress.landing = false;  // an error has no buffers
    auto status = wire::decode_status(frame.payload);
    // The callee may notice first that the deadline has passed; the caller's own error says more.
    const bool late = call->deadline && *call->deadline <= around_.clock.now();
    if (late && status.code() == Code::deadline_exceeded) status = expired(*call);
    // The link's channels are closed at its end, and then the callee fails because it cannot read the arguments. That
    // is no answer: an idempotent call is sent again.
    const bool refused = !around_.link.closed();
    if (!refused) status = around_.link.status();
    if (!pending_.remove(call->place.id)) return {};
    call->idempotence.refused = refused;  // only the thread that ends the call writes it
    finish(call, std::move(status));
    return {};
  }
  try {
    around_.channels.receive(stream, frame, call->options.into,
                             [this, link = around_.link.hold(), call = call](const Status& status, Received received) {
                               if (!pending_.remove(call->place.id)) return;
                               finish(call, status.ok() ? Result<Received>(std::move(received))
                                                        : Result<Received>(not_landed(*call, status)));
                             });
  } catch (const std::bad_alloc&) {  // before a channel has begun to write
    out_of_memory::release_reserve();
    around_.link.fail(out_of_memory::status());
    if (pending_.remove(call->place.id)) finish(call, out_of_memory::status());
  }
  return {};
}

void OutgoingCalls::finish(const std::shared_ptr<Call::State>& call, Result<Received> result) {
  --around_.counters.pending;
  const auto code = result.status().code();
  try {
    count(*call, code);
    if (call->progress.traced) record(*call, code);
  } catch (const std::bad_alloc&) {  // what tells of the call is lost, and the call ends
    out_of_memory::release_reserve();
  }
  call->complete(std::move(result));
  ring_.call_ended(*call);
  around_.reader.call_ended(*call);
}

/// Counts a call that ends, and notes it if it has failed or was slow.
void OutgoingCalls::count(const Call::State& call, Code code) {
  auto& counters = around_.counters;
  if (code != Code::ok) {
    ++counters.calls_failed;
    ++counters.failed_by_code[static_cast<std::size_t>(code)];
  }
  const bool timed = counters.timed.load(std::memory_order_relaxed);
  if (!timed && code == Code::ok) return;
  const auto took = around_.clock.now() - call.made;
  if (timed) counters.call_time.add(took);
  if (code == Code::ok && took < slow_call) return;
  const auto text = formatted("\"{}\" {} after {} ms", call.shown(), code == Code::ok ? "ended" : name_of(code),
                              std::chrono::duration_cast<Milliseconds>(took).count());
  counters.flight.note(FlightSubject::calls, around_.link.peer().name, text);
}

/// Adds the record of a call that ends.
void OutgoingCalls::record(const Call::State& call, Code code) {
  auto& record = *call.progress.traced;
  record.function = call.shown();
  record.peer = around_.link.peer().name;
  record.flow = CallTrace::flow_of(around_.self.incarnation, around_.connections.incarnation(), call.place.id);
  record.transport = call.place.in_ring ? "ring" : around_.link.local() ? "unix" : "tcp";
  record.stages[CallRecord::made] = call.made.time_since_epoch().count();
  record.stages[CallRecord::sent] = call.progress.sent_at.load();
  record.code = code;
  if (const int channel = record.channel; channel >= 0) {
    const auto driver = static_cast<std::size_t>(channel);
    record.channel_name = driver < around_.drivers.size() ? around_.drivers[driver].name() : "inline";
  }
  record.reach(CallRecord::landed, around_.clock.now());
  around_.trace.add(call.progress.traced);
}

void OutgoingCalls::cancel(const std::shared_ptr<Call::State>& call, const Status& why) {
  if (!pending_.give_up(call->place.id)) return;
  call->progress.given_up = true;  // first: send_now() reads it after it has sent the request
  finish(call, why);  // first: a callee that reads this frame before the ring's request must find the slot abandoned
  if (const auto stream = around_.link.outgoing()) tell_given_up(stream, call->place.id);
}

void OutgoingCalls::tell_given_up(const std::shared_ptr<FrameStream>& stream, std::uint64_t call) {
  wire::Header header;
  header.kind = wire::Kind::cancel;
  header.call = call;
  around_.link.transmit(stream, wire::assemble(header, {}, {}, {}), {}, true, {});
}

void OutgoingCalls::expire(const std::shared_ptr<Call::State>& call) { cancel(call, expired(*call)); }

void OutgoingCalls::fail(const std::shared_ptr<Call::State>& call, const Status& why) {
  if (!pending_.give_up(call->place.id)) return;
  auto told = why;
  out_of_memory::with_reserve([&] { told = explained(*call, why); });
  finish(call, std::move(told));
}

/// Returns the error of a call that fails with `why`.
Status OutgoingCalls::explained(const Call::State& call, const Status& why) const {
  auto text = "\"" + call.shown() + "\": " + std::string(why.what());
  if (why.code() == Code::connection_lost || why.code() == Code::protocol_error) {
    const auto events = around_.counters.flight.last(FlightSubject::link, around_.link.peer().name, events_in_errors);
    if (!events.empty()) text += ". Before that, on this link: " + events;
  }
  return {why.code(), std::move(text)};
}

/// Returns the error of a call whose reply came and whose buffers did not land. The channels say what happened to the
/// connection; the link says to which peer.
Status OutgoingCalls::not_landed(const Call::State& call, const Status& why) const {
  auto told = why;
  out_of_memory::with_reserve([&] {
    if (why.code() != Code::connection_lost) return;
    told = around_.link.closed() ? around_.link.status()
                                 : Status(why.code(), formatted("the link to \"{}\" has ended: {}",
                                                                around_.link.peer().name, std::string(why.what())));
    told = explained(call, told);
  });
  return told;
}

void OutgoingCalls::drop(const UnsentCall& unsent, const Status& why) {
  const auto& call = unsent.call;
  around_.credits.release(call->cost.bytes);
  call->arguments.release();
  fail(call, why);
}

void OutgoingCalls::fail_all(const Status& why) {
  for (const auto& call : pending_.all()) {
    // Two kinds of calls end elsewhere. A call whose reply is landing in the caller's own memory ends when its landing
    // does; the end of the channels has failed that landing. A call whose reply a thread has just taken out of its slot
    // is ended by that thread.
    if (!ring_.taken(*call)) fail(call, why);
  }
}

void OutgoingCalls::expect_reply(Call::State& call) {
  if (call.place.in_ring.load(std::memory_order_seq_cst)) ring_.expect_reply(call);
}

void OutgoingCalls::expect_replies() {
  if (!ring_.is_open()) return;
  for (const auto& call : pending_.all()) {
    if (call->place.in_ring.load(std::memory_order_acquire)) expect_reply(*call);
  }
}

void OutgoingCalls::wake_waiting() {
  around_.reader.wake_sleepers();
  if (count() != 0) expect_replies();
}

Pace OutgoingCalls::tick(Clock::time_point now) {
  lazy_.escalate(now - Milliseconds(1));
  if (const auto replies = pending_.replies(); replies_at_tick_.exchange(replies) != replies)
    last_reply_ = now.time_since_epoch().count();
  if (count() == 0) return Pace::rest;
  const auto pace = lazy_.any() ? Pace::run : Pace::walk;
  const auto added = pending_.added();
  if (now - look_.at < expiry_interval) return pace == Pace::walk && added == look_.added ? look_.pace : pace;
  auto calls = pending_.all();
  bool any_done = false;
  auto next = Clock::time_point::max();  // when something is to be done for a call
  for (const auto& call : calls) {
    if (call->deadline) next = std::min(next, watch_deadline(call, now));
    any_done = any_done || call->done();
  }
  // The last reference to a call drops memory of the program's, which may wait for the program's locks.
  if (any_done) around_.pool.submit([dropped = std::move(calls)] {});
  if (ring_.is_open()) ring_.ring()->memory->reclaim();
  expect_replies();  // for calls without a waiting thread
  look_ = {now, added, next - now > far_deadline ? Pace::stroll : Pace::walk};
  return pace == Pace::run ? pace : look_.pace;
}

/// Ends the call if its deadline has passed, or asks how far it has come. Returns when it is to be looked at again.
Clock::time_point OutgoingCalls::watch_deadline(const std::shared_ptr<Call::State>& call, Clock::time_point now) {
  const auto deadline = *call->deadline;
  if (deadline <= now) {
    expire(call);
    return Clock::time_point::max();
  }
  const auto asks = deadline - lead_of(call->options.timeout);
  if (asks > now) return asks;
  ask(*call);
  return deadline;
}

/// Asks the callee how far the call has come, once. The tick flushes the frame.
void OutgoingCalls::ask(Call::State& call) {
  if (!answers_status_ || call.progress.sent_at == 0 || call.progress.landing || call.progress.asked.exchange(true))
    return;
  wire::Header header;
  header.kind = wire::Kind::status;
  header.call = call.place.id;
  if (const auto stream = around_.link.outgoing())
    around_.link.transmit(stream, wire::assemble(header, {}, {}, {}), {}, false, {});
}

Status OutgoingCalls::on_status(std::uint64_t id, ByteView payload) {
  const auto status = decode<wire::CallStatus>(payload);
  if (!status) return {Code::protocol_error, "a malformed status frame"};
  const auto now = around_.clock.now();
  last_reply_ = now.time_since_epoch().count();
  if (const auto call = pending_.find(id)) call->set_report({*status, now});
  return {};
}

Status OutgoingCalls::expired(const Call::State& call) const {
  const auto now = around_.clock.now();
  TimeOutContext view;
  view.peer = around_.link.peer().name;
  view.connected = around_.link.outgoing() != nullptr;
  if (!view.connected) view.dialling = around_.connections.dial_progress();
  view.transport = call.place.in_ring ? "shared memory" : around_.link.local() ? "unix socket" : "tcp";
  if (call.progress.landing) view.awaited = around_.channels.awaited();
  const auto session = around_.link.session();
  auto heard = Clock::time_point(Clock::duration(last_reply_));
  if (session) heard = std::max(heard, session->last_heard());
  if (session) view.silence = now - heard;
  return {Code::deadline_exceeded, time_out_text(call, view, now)};
}

std::string OutgoingCalls::state_text() const {
  std::string out;
  for (const auto& call : pending_.all()) {
    const auto since = [now = around_.clock.now()](Clock::time_point then) {
      return std::chrono::duration_cast<Milliseconds>(now - then).count();
    };
    out += formatted("\n  \"{}\", made {} ms ago", call->shown(), since(call->made));
    if (const auto sent = call->progress.sent_at.load(); sent != 0)
      out += formatted(", sent {} ms ago", since(Clock::time_point(Clock::duration(sent))));
    if (const auto slot = ring_.state_text(*call); !slot.empty()) out += ", " + slot;
    if (call->wait.lazy) out += ", its completion may wait";
    if (lazy_.is_sentinel(*call)) out += ", watched for the others";
    if (call->wait.waited) out += ", waited for";
    if (call->progress.landing) out += ", its reply is landing";
  }
  return out;
}

}  // namespace tensorferry
