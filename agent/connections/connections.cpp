#include "agent/connections/connections.h"

#include <sys/socket.h>

#include <algorithm>
#include <vector>

#include "agent/options.h"
#include "agent/or_end_link.h"
#include "agent/pool/pool.h"
#include "agent/pool/reactor.h"
#include "agent/transport/address.h"
#include "agent/transport/long_slice.h"
#include "base/text.h"
#include "channels/completion.h"

namespace tensorferry {

using Purpose = wire::Hello::Purpose;

namespace {

/// Drops the descriptors of a frame that goes to another host. The channel at the peer sees that none came.
void leave_out(Descriptors& descriptors, Bytes& frame, const FrameStream& stream) {
  if (descriptors.empty() || stream.local()) return;
  descriptors.clear();
  wire::Header::forget_descriptors(frame);
}

}  // namespace

ConnectionRole role_of(Purpose purpose, bool dialled) {
  if (purpose == Purpose::calls) return ConnectionRole::calls;
  return dialled == (purpose == Purpose::bulk) ? ConnectionRole::bulk_out : ConnectionRole::bulk_in;
}

Connections::Connections(const ConnectionSurroundings& around, PeerInfo peer, std::shared_ptr<Session> session)
    : around_(around), other_(std::move(peer), std::move(session)) {}

// ---- State

std::shared_ptr<Session> Connections::session() const {
  const std::lock_guard lock(mutex_);
  return other_.session();
}

std::optional<uid_t> Connections::user() const {
  const std::lock_guard lock(mutex_);
  return other_.user();
}

bool Connections::may_be_of(std::optional<uid_t> user) const {
  const std::lock_guard lock(mutex_);
  return other_.may_be_of(user);
}

bool Connections::leave_session(const Session& dead) {
  std::shared_ptr<Session> left;  // dropped after the lock is released
  const std::lock_guard lock(mutex_);
  if (incarnation() != 0) return false;
  left = other_.part_with(dead);
  return true;
}

Status Connections::status() const {
  const std::lock_guard lock(mutex_);
  return status_;
}

Connections::Stream Connections::call_stream() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

Connections::Stream Connections::call_stream_if_up() const {
  const std::lock_guard lock(mutex_);
  return slot(ConnectionRole::calls).state == State::up ? calls_ : nullptr;
}

/// Under mutex_.
const std::vector<Connections::Stream>& Connections::bulk(ConnectionRole role) const {
  return role == ConnectionRole::bulk_out ? bulk_.out : bulk_.in;
}

std::vector<Connections::Stream> Connections::streams() const {
  const std::lock_guard lock(mutex_);
  std::vector<Stream> all;
  if (calls_) all.push_back(calls_);
  all.insert(all.end(), bulk_.out.begin(), bulk_.out.end());
  all.insert(all.end(), bulk_.in.begin(), bulk_.in.end());
  return all;
}

bool Connections::reads_bulk(const FrameStream& stream) const {
  const std::lock_guard lock(mutex_);
  return std::any_of(bulk_.in.begin(), bulk_.in.end(), [&](const auto& one) { return one.get() == &stream; });
}

std::vector<std::string> Connections::networks(ConnectionRole role) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::string> hosts;
  for (const auto& stream : bulk(role)) hosts.push_back(local_host(stream->fd()));
  return hosts;
}

bool Connections::splits_bulk() const {
  const std::lock_guard lock(mutex_);
  return bulk_.splits();
}

std::size_t Connections::bulk_connections_in() const {
  const std::lock_guard lock(mutex_);
  return bulk_.in.size();
}

bool Connections::local() const {
  const auto stream = call_stream();
  return stream && stream->local();
}

std::pair<std::size_t, bool> Connections::waiting() const {
  const std::lock_guard lock(mutex_);
  return {unsent_.calls.size(), slot(ConnectionRole::calls).state == State::dialling};
}

// ---- Sending

/// absent -> dialling. False: the connection is in another state. Under mutex_.
bool Connections::begin_dialling(ConnectionRole role) {
  if (slot(role).state != State::absent) return false;
  slot(role).state = State::dialling;
  return true;
}

/// up -> dialling, for one more connection of bulk data. Under mutex_.
bool Connections::begin_another(ConnectionRole role) {
  auto& slot = this->slot(role);
  if (slot.state != State::up) return false;
  slot.state = State::dialling;
  return slot.once = true;
}

void Connections::send_call(const std::shared_ptr<Call::State>& call, Message message) {
  std::unique_lock lock(mutex_);
  if (closed()) {
    const auto ended = status_;
    lock.unlock();
    return around_.link.calls().drop({call, std::move(message)}, ended);
  }
  if (slot(ConnectionRole::calls).state == State::up) {
    const auto stream = calls_;
    lock.unlock();
    return send_within_bound(stream, call, std::move(message));
  }
  call->progress.hold = SendHold::connection;
  unsent_.calls.push_back({call, std::move(message)});
  const bool begin = begin_dialling(ConnectionRole::calls);
  lock.unlock();
  if (begin) start_dial(Purpose::calls);
}

/// Sends the call, or fails it if too many bytes wait for the socket. Only messages without buffers can be so many,
/// because the others wait for credit.
void Connections::send_within_bound(const Stream& stream, const std::shared_ptr<Call::State>& call, Message message) {
  if (stream->unwritten() <= around_.options.max_bytes_in_flight)
    return around_.link.calls().send(stream, call, std::move(message));
  around_.link.calls().drop({call, std::move(message)},
                            {Code::resource_exhausted,
                             formatted("\"{}\" does not read the calls that were sent to it before: {} bytes wait here "
                                       "(max_bytes_in_flight)",
                                       peer().name, stream->unwritten())});
}

void Connections::send_control(Bytes frame, Descriptors descriptors) {
  queue_control(std::move(frame), std::move(descriptors));
  write_controls();
}

void Connections::queue_control(Bytes frame, Descriptors descriptors) {
  std::unique_lock lock(mutex_);
  const auto stream = slot(ConnectionRole::calls).state == State::up ? calls_ : nullptr;
  if (!stream) {
    unsent_.controls.emplace_back(std::move(frame), std::move(descriptors));
    return;
  }
  lock.unlock();
  leave_out(descriptors, frame, *stream);
  stream->queue(std::move(frame), std::move(descriptors));
}

/// Ends the link if the peer does not take control frames, because most of them are answers to frames of its own.
/// Under mutex_; `stream` may be null.
void Connections::bound_controls(const Stream& stream) {
  constexpr std::size_t most_bytes = std::size_t{16} << 20;  // beside the calls that wait in the same stream
  constexpr std::size_t most_unsent = std::size_t{1} << 16;  // while the connection is being dialled
  const auto bytes = stream ? stream->unwritten() : 0;
  const bool unread = bytes > most_bytes && bytes - most_bytes > around_.options.max_bytes_in_flight;
  if (closed() || unsent_.refused_controls || (!unread && unsent_.controls.size() < most_unsent)) return;
  unsent_.refused_controls = true;
  // By way of the pool, because channels send messages while they hold locks.
  around_.pool.submit([this, held = around_.link.hold()] {
    around_.link.fail(
        {Code::resource_exhausted, "the peer does not read the control messages that it is answered with"});
  });
}

void Connections::write_controls() {
  std::unique_lock lock(mutex_);
  const auto stream = slot(ConnectionRole::calls).state == State::up ? calls_ : nullptr;
  bound_controls(stream);
  const bool begin = !stream && !unsent_.controls.empty() && !closed() && begin_dialling(ConnectionRole::calls);
  lock.unlock();
  if (begin) {  // by way of the pool, because a dial that the agent refuses ends the link
    try {
      around_.pool.submit_long([this, held = around_.link.hold()] { start_dial(Purpose::calls); });
    } catch (const std::bad_alloc&) {
      begin_no_dial(ConnectionRole::calls);
      throw;
    }
  }
  if (!stream) return;
  std::vector<FrameStream::Written> written;
  if (!stream->write_some(&written)) finish_writes(stream);
  if (!written.empty()) complete_apart(std::move(written));
}

thread_local Connections::FrameFirst* Connections::FrameFirst::innermost = nullptr;

Connections::FrameFirst::FrameFirst(Connections& connections)
    : connections_(connections), outer_(std::exchange(innermost, this)) {}

Connections::FrameFirst::~FrameFirst() {
  innermost = outer_;
  if (held_ == 0) return;
  or_end_link(connections_.around_.link, [&] { connections_.write_waiting_bulk(held_); });
}

void Connections::send_bulk(Bytes frame, FrameStream::Part part) {
  {
    std::unique_lock lock(mutex_);
    if (closed()) {
      const auto ended = status_;
      lock.unlock();
      return complete(std::move(part.written), ended);
    }
    unsent_.buffers.emplace_back(std::move(frame), std::move(part));
  }
  for (auto* first = FrameFirst::innermost; first != nullptr; first = first->outer_) {
    if (&first->connections_ != this) continue;
    ++first->held_;
    return;
  }
  write_waiting_bulk(1);
}

/// Writes up to `count` buffers that wait, until the socket is full. A pool thread writes the rest. If the connections
/// go over several networks, further pool threads write to the other idle ones.
void Connections::write_waiting_bulk(std::size_t count) {
  Stream stream;
  std::array<Stream, BulkStreams::most> others;
  std::size_t taken = 0;
  bool begin = false;
  {
    const std::lock_guard lock(mutex_);
    if (closed() || unsent_.buffers.empty()) return;
    stream = bulk_.take_idle();
    if (!stream) begin = bulk_.out.empty() ? begin_dialling(ConnectionRole::bulk_out) : begin_another_bulk_dial();
    while (stream && bulk_.splits() && taken < others.size() && taken + 1 < unsent_.buffers.size()) {
      others.at(taken) = bulk_.take_idle();
      if (!others.at(taken)) break;
      ++taken;
    }
  }
  if (begin) get_bulk();
  if (!stream) return;
  for (std::size_t i = 0; i < taken; ++i) finish_writes(others.at(i));
  or_break_off(stream, [&] {
    std::vector<FrameStream::Written> written;
    auto* const apart = Reactor::on_any_thread() ? &written : nullptr;
    auto next = NextBuffer::written;
    for (; next == NextBuffer::written && count != 0; --count) next = go_on_writing(stream, apart);
    if (!written.empty()) complete_apart(std::move(written));
    if (next == NextBuffer::written) {
      const std::lock_guard lock(mutex_);
      if (unsent_.buffers.empty()) return bulk_.give_back(stream.get());
    }
    if (next != NextBuffer::none) finish_writes(stream);
  });
}

/// up -> dialling, if a buffer waits that is worth another bulk connection. Under mutex_.
bool Connections::begin_another_bulk_dial() {
  if (unsent_.buffers.empty() || !bulk_.wants_another(unsent_.buffers.front().second.buffer.bytes)) return false;
  return begin_another(ConnectionRole::bulk_out);
}

/// Dials a bulk connection on which this side sends, or has the peer dial it.
void Connections::get_bulk() {
  Stream asked;
  {
    const std::lock_guard lock(mutex_);
    if (!dialled_) asked = calls_;
  }
  if (!asked) return start_dial(Purpose::bulk);
  wire::Header header;
  header.kind = wire::Kind::want_bulk;
  transmit(asked, wire::assemble(header, {}, {}, {}), {}, true);
}

bool Connections::transmit(const Stream& stream, Bytes frame, std::vector<FrameStream::Part> trailing, bool flush,
                           Descriptors descriptors) {
  leave_out(descriptors, frame, *stream);
  std::vector<FrameStream::Written> written;
  auto* const apart = Reactor::on_any_thread() ? &written : nullptr;
  const bool done = stream->send(std::move(frame), std::move(trailing), std::move(descriptors), flush, apart);
  if (!written.empty()) complete_apart(std::move(written));
  if (!done)
    finish_writes(stream);
  else if (!flush && stream->corked())
    around_.link.activate();
  return done;
}

bool Connections::flush() {
  bool any = false;
  for (const auto& stream : streams()) {
    if (!stream->corked()) continue;
    any = true;
    // Only a thread that has taken a bulk connection writes it; this thread is not to be kept for a large buffer.
    if (stream->use() == FrameStream::Use::bulk) continue;
    std::vector<FrameStream::Written> written;
    if (!stream->write_some(&written)) finish_writes(stream);
    if (!written.empty()) complete_apart(std::move(written));
  }
  return any;
}

/// Completes written parts on a pool thread.
void Connections::complete_apart(std::vector<FrameStream::Written> written) {
  const auto held = std::make_shared<std::vector<FrameStream::Written>>(std::move(written));
  if (!around_.pool.submit([held] { FrameStream::complete_all(*held); })) FrameStream::complete_all(*held);
}

/// Writes the next buffer that waits, if this is a bulk connection. unfinished: the socket is full, or another sender
/// has queued something. none: the stream has nothing to write, and another thread may write it.
Connections::NextBuffer Connections::go_on_writing(const Stream& stream, std::vector<FrameStream::Written>* apart) {
  std::optional<std::pair<Bytes, FrameStream::Part>> next;
  bool begin = false;
  {
    const std::lock_guard lock(mutex_);
    // A sender that met a full socket just now found the stream in writing_ and left the writing to this thread.
    if (!stream->closed() && stream->corked()) return NextBuffer::unfinished;
    if (stream->use() == FrameStream::Use::bulk && !unsent_.buffers.empty()) {
      next = std::move(unsent_.buffers.front());
      unsent_.buffers.pop_front();
      begin = begin_another_bulk_dial();
    } else {
      bulk_.give_back(stream.get());
      std::erase(writing_, stream);
      return NextBuffer::none;
    }
  }
  if (begin) get_bulk();
  std::vector<FrameStream::Part> parts;
  parts.push_back(std::move(next->second));
  const bool done = stream->send(std::move(next->first), std::move(parts), {}, true, apart);
  return done ? NextBuffer::written : NextBuffer::unfinished;
}

void Connections::say_goodbye() {
  wire::Header goodbye;
  goodbye.kind = wire::Kind::goodbye;
  if (const auto to = call_stream()) to->send(wire::assemble(goodbye, {}, {}, {}), {}, {}, true);
}

// ---- Bulk data that arrives

void Connections::read_bulk(const Stream& stream) {
  or_end_link(around_.link, [&] { read_while_readable(stream); });  // the pool may not watch the stream any more
}

void Connections::read_while_readable(const Stream& stream) {
  const LongSlice slice;
  const Milliseconds lingers(around_.options.surroundings.threads ? 2 : 0);
  while (stream->begin_read()) {
    const auto resumes = [this] {
      const std::lock_guard lock(mutex_);
      return bulk_.resumes;
    }();
    auto progress = FrameStream::Progress::some;
    while (progress == FrameStream::Progress::some) {
      progress = stream->read_some(around_.link.sink());
      if (progress == FrameStream::Progress::none && stream->wait_readable(lingers))
        progress = FrameStream::Progress::some;
    }
    if (progress == FrameStream::Progress::closed) around_.link.close_after_peer(stream->status());
    stream->end_read();
    if (progress == FrameStream::Progress::none) around_.pool.arm(stream->fd());
    if (progress != FrameStream::Progress::held) return;
    const std::lock_guard lock(mutex_);
    if (bulk_.resumes == resumes) return bulk_.held.push_back(stream);
  }
}

void Connections::resume_bulk() {
  std::vector<Stream> held;
  {
    const std::lock_guard lock(mutex_);
    ++bulk_.resumes;
    held.swap(bulk_.held);
  }
  for (const auto& stream : held) {
    bool taken = false;
    or_break_off(stream, [&] {
      (void)around_.pool.submit_long([this, held = around_.link.hold(), stream] { read_bulk(stream); });
      taken = true;
    });
    if (!taken) around_.pool.arm(stream->fd());  // a thread must notice that it was broken off
  }
}

// ---- Making connections

Connections::Stream Connections::attach(Connected& connection, const std::shared_ptr<Session>& session,
                                        std::optional<uid_t> user) {
  const auto& hello = connection.hello;
  const auto role = role_of(hello.purpose, connection.dialled);
  std::shared_ptr<Session> earlier;  // destroyed after the lock is released
  const std::lock_guard lock(mutex_);
  if (closed() || !other_.is_of(hello, user)) return nullptr;
  auto& slot = this->slot(role);
  if (slot.state == State::attaching) return nullptr;
  if (is_bulk(role)) {
    if (bulk(role).size() >= BulkStreams::most || !calls_) return nullptr;
    if ((connection.dialled ? connection.go : hello.connection) != number()) return nullptr;
  } else {
    if (calls_) return nullptr;
    const auto given = connection.go != 0 ? connection.go : around_.link.next_connection();
    const bool own = hello.incarnation == around_.self.incarnation;  // the other end is noted
    if (!(own && !connection.dialled) && !session->use_connection(given)) return nullptr;
    number_.store(given, std::memory_order_release);
    constexpr auto needed = wire::feature::pieces | wire::feature::several_bulk | wire::feature::several_networks;
    if (!connection.port->local() && (hello.features & needed) == needed) bulk_.spread();
  }
  auto stream = std::make_shared<FrameStream>(std::move(connection.port),
                                              is_bulk(role) ? FrameStream::Use::bulk : FrameStream::Use::calls);
  if (connection.go == 0) {
    wire::Header go;
    go.kind = wire::Kind::go;
    go.connection = number();
    stream->queue(wire::assemble(go, {}, {}, {}), {});  // before the others see the stream
  }
  slot.state = role == ConnectionRole::bulk_in ? State::up : State::attaching;
  slot.once = false;
  if (role == ConnectionRole::bulk_in) bulk_.in.push_back(stream);
  if (role == ConnectionRole::calls) {
    calls_ = stream;
    dialled_ = connection.dialled;
  }
  earlier = other_.meet(hello, session, user);
  changed_state();
  return stream;
}

void Connections::send_waiting(ConnectionRole role, const Stream& stream, const wire::Hello& hello) {
  std::vector<std::shared_ptr<Call::State>> sent;
  while (role == ConnectionRole::calls) {
    std::list<UnsentCall> calls;
    std::deque<std::pair<Bytes, Descriptors>> controls;
    {
      const std::lock_guard lock(mutex_);
      controls.swap(unsent_.controls);
      calls.swap(unsent_.calls);
      if (calls.empty() && controls.empty()) {
        slot(role).state = State::up;
        changed_state();
        break;
      }
    }
    for (auto& [frame, descriptors] : controls) transmit(stream, std::move(frame), {}, true, std::move(descriptors));
    for (auto& [call, message] : calls) {
      send_within_bound(stream, call, std::move(message));
      sent.push_back(call);
    }
  }
  // Who gave one of them up before the connection was up could not tell the callee.
  for (const auto& call : sent) around_.link.calls().tell_if_given_up(stream, *call);
  if (role == ConnectionRole::bulk_in) dial_again_for_peer();
  if (role != ConnectionRole::bulk_out) return;
  if (stream->local()) {
    constexpr int bytes = BulkStreams::unix_send_buffer;
    ::setsockopt(stream->fd(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  }
  add_bulk_out(stream, hello);
  finish_writes(stream);  // the buffers that wait
}

/// attaching -> up.
void Connections::add_bulk_out(const Stream& stream, const wire::Hello& hello) {
  const std::lock_guard lock(mutex_);
  if (bulk_.out.empty())
    bulk_.allow((hello.features & wire::feature::several_bulk) != 0, stream->local());
  else if (local_host(stream->fd()) != local_host(bulk_.out.front()->fd()))
    bulk_.over_several_networks();
  bulk_.add_out(stream);
  slot(ConnectionRole::bulk_out).state = State::up;
}

// ---- The end

bool Connections::end(const Status& why, bool unless_awaited, Remains& remains) noexcept {
  const std::lock_guard lock(mutex_);
  if (closed_.load() || (unless_awaited && (calls_ || !unsent_.calls.empty()))) return false;
  auto next = remains.streams.begin();
  if (calls_) *next++ = calls_;
  next = std::copy(bulk_.out.begin(), bulk_.out.end(), next);
  std::copy(bulk_.in.begin(), bulk_.in.end(), next);
  status_ = why;
  closed_.store(true, std::memory_order_release);
  changed_state();
  bulk_.held.clear();
  remains.calls.swap(unsent_.calls);
  remains.buffers.swap(unsent_.buffers);
  return true;
}

Status Connections::keep_alive(Clock::time_point now) {
  if (closed() || local() || incarnation() == 0) return {};
  BytesMoved moved;
  for (const auto& each : streams()) {
    const auto one = each->port().moved();
    moved.received += one.received;
    moved.acknowledged += one.acknowledged;
  }
  const auto interval = std::chrono::duration_cast<Clock::duration>(around_.options.heartbeat);
  const auto verdict = liveness_.look(now, moved, interval);
  const auto session = this->session();
  if (verdict == Liveness::Verdict::heard) session->heard();
  if (verdict == Liveness::Verdict::dead) {
    const auto silence = std::chrono::duration_cast<Milliseconds>(now - session->last_heard());
    return {Code::connection_lost, "it sent nothing for " + std::to_string(silence.count()) + " ms"};
  }
  if (verdict == Liveness::Verdict::ask) {
    wire::Header ping;
    ping.kind = wire::Kind::ping;
    if (const auto out = call_stream()) transmit(out, wire::assemble(ping, {}, {}, {}), {}, true);
  }
  return {};
}

}  // namespace tensorferry
