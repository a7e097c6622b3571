// A link's frames, and its end. Its connections are in connections.cpp, the calls of its peer in link_serving.cpp and
// link_rings.cpp.
#include "agent/link/link.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

#include "agent/handshake/auth.h"
#include "agent/or_end_link.h"
#include "agent/transport/tcp_liveness.h"
#include "agent/transport/tcp_owner.h"
#include "base/log.h"
#include "base/out_of_memory.h"
#include "base/text.h"
#include "base/threads.h"
#include "channels/completion.h"
#include "channels/wire_use.h"

namespace tensorferry {
namespace {

/// A link's connection in the pool's epoll set. Its reference to the link is weak, so that the set keeps no ended link.
class ReadableConnection final : public Readable {
 public:
  ReadableConnection(std::weak_ptr<Link> link, std::shared_ptr<FrameStream> stream, ConnectionRole role)
      : link_(std::move(link)), stream_(std::move(stream)), role_(role) {}
  void on_readable() override {
    if (const auto link = link_.lock()) link->on_readable(role_, stream_);
  }

 private:
  const std::weak_ptr<Link> link_;
  const std::shared_ptr<FrameStream> stream_;
  const ConnectionRole role_;
};

constexpr std::size_t resume_after = std::size_t{1} << 20;

/// Returns whether a peer that makes no calls sends such frames, beside those of a new link.
constexpr bool is_answer(wire::Kind kind) {
  using wire::Kind;
  return kind == Kind::reply || kind == Kind::release || kind == Kind::status || kind == Kind::pong;
}

/// For the log: " rank=3"; "" of an agent without a rank.
std::string shown_rank(int rank) { return rank < 0 ? "" : formatted(" rank={}", rank); }

std::string shown_user(std::optional<uid_t> user) {
  return user ? formatted("uid {}", *user) : std::string("a user that the kernel does not name");
}

}  // namespace

std::optional<uid_t> user_at_the_other_end(const StreamPort& port) {
  return port.local() ? unix_peer_uid(port.descriptor()) : tcp_peer_uid(port.descriptor());
}

Status no_link_to(std::string_view peer) {
  return {Code::connection_lost, formatted("there is no link to \"{}\" now", peer)};
}

Link::Link(std::shared_ptr<Engine> engine, PeerInfo peer, std::shared_ptr<Session> session)
    : engine_(std::move(engine)),
      connections_({*this, *engine_->pool, *engine_->reactor, engine_->clock, engine_->identity.self, engine_->options},
                   std::move(peer), std::move(session)),
      reader_(*this, *engine_->pool, engine_->clock),
      channels_(
          {*this, engine_->drivers, engine_->memory, engine_->counters, counters_, engine_->options.shared_memory}),
      calls_({*this, channels_, reader_, connections_, credits_, counters_, engine_->counters, engine_->trace,
              engine_->drivers, engine_->identity.self, *engine_->pool, engine_->clock}),
      credits_(engine_->options.max_bytes_in_flight, engine_->clock),
      incoming_calls_({static_cast<std::size_t>(std::max(1, engine_->options.max_queued_calls)),
                       engine_->options.max_queued_bytes}),
      untaken_replies_(engine_->options.max_bytes_in_flight, [this](bool pause) { pause_handlers(pause); }) {}

std::shared_ptr<Link> Link::make(std::shared_ptr<Engine> engine, PeerInfo peer, std::shared_ptr<Session> session) {
  return {new Link(std::move(engine), std::move(peer), std::move(session)), [](Link* link) {
            if (!WireUse::inside()) {
              delete link;
              return;
            }
            // The destructor of a channel waits until no thread uses its wire, and this thread may be using one.
            try {
              start_thread([link] { delete link; }).detach();
            } catch (const std::system_error&) {  // the system gives no thread: the link leaks
            }
          }};
}

Link::~Link() {
  out_of_memory::with_reserve([this] { close({Code::agent_closed, "the link was dropped"}); });
  channels_.destroy_channels();  // the channels' threads may use all of the link until then
}

bool Link::run(UniqueFunction<void()> job, bool with_executor) {
  return engine_->pool->submit(std::move(job), with_executor);
}

bool Link::run_long(UniqueFunction<void()> job) { return engine_->pool->submit_long(std::move(job)); }

bool Link::attach(Connected& connection) {
  const auto& hello = connection.hello;
  const bool local = connection.port->local();
  const auto user = user_at_the_other_end(*connection.port);
  const auto session = engine_->peers.session_of({peer().name, hello.rank, hello.incarnation});
  const auto stream = connections_.attach(connection, session, user);
  if (!stream) {
    if (connection.port && !connections_.may_be_of(user))
      log_warning(formatted("peer={} refused a connection: {}, but its other connections are of {}", peer().name,
                            shown_user(user), shown_user(connections_.user())));
    return false;
  }
  const auto role = role_of(hello.purpose, connection.dialled);
  // Before it carries a call, whose error may quote the event.
  note(formatted("connection for {} {} ({})", is_bulk(role) ? "bytes" : "calls",
                 connection.dialled ? "dialled" : "accepted", local ? "unix socket" : "tcp"));
  if (local)
    engine_->peers.watch_process(session, unix_peer_process(stream->fd()), unix_peer_pid(stream->fd()));
  else
    bound_silence(stream->fd(), 3 * engine_->options.heartbeat);
  session->heard();
  channels_.meet(hello, user);
  calls_.meet(hello);
  if (!stream->write_some()) connections_.finish_writes(stream);  // the `go` frame
  auto& pool = *engine_->pool;
  try {
    auto readable = std::make_shared<ReadableConnection>(weak_from_this(), stream, role);
    if (role == ConnectionRole::calls)
      reader_.watch(stream, std::move(readable));
    else
      pool.add(stream->fd(), std::move(readable),
               role == ConnectionRole::bulk_out ? Pool::Watch::closing : Pool::Watch::blocking);
    if (role == ConnectionRole::calls) rings_.peer_maps = (hello.features & wire::feature::ring) != 0;
    connections_.send_waiting(role, stream, hello);
    if (role == ConnectionRole::calls && rings_.wanted) offer_ring(stream);
  } catch (const std::bad_alloc&) {
    pool.remove(stream->fd());  // close() may have run without seeing this stream
    throw;
  }
  if (closed()) {  // close() may have run without seeing this stream
    pool.remove(stream->fd());
    stream->close({Code::connection_lost, "the link has ended"});
    return false;
  }
  ++engine_->counters.links_opened;
  calls_.wake_waiting();
  return true;
}

void Link::on_readable(ConnectionRole role, const std::shared_ptr<FrameStream>& stream) {
  switch (role) {
    case ConnectionRole::calls:
      return reader_.on_readable(stream);
    case ConnectionRole::bulk_out:
      return on_bulk_out_readable(stream);
    case ConnectionRole::bulk_in:
      return connections_.read_bulk(stream);
  }
}

void Link::close(const Status& status, Loss loss) { close(status, loss, false); }

/// The longest time between the end of a process's connections and its own end, on a busy machine.
constexpr Milliseconds longest_exit(100);

void Link::close_after_peer(const Status& status) noexcept {
  out_of_memory::with_reserve([&] {
    const auto known = !closed() && !leaving_ && status.code() == Code::connection_lost ? session() : nullptr;
    if (known && known->process_ended(longest_exit))
      return close(known->end_of_process(engine_->identity.record.host), Loss::peer);
    close(status);
  });
}

/// The longest time that take_last_replies() waits for another thread to finish reading.
constexpr Milliseconds longest_last_look(50);

/// Takes the replies that the peer gave before it ended: the thread that notices the end may be ahead of the thread
/// that reads them.
void Link::take_last_replies() {
  calls_.ring().take_all();  // first, because a slot may say that its reply comes by socket
  // Before it is up it carried no call, and the peer's hello has not been read.
  const auto stream = connections_.call_stream_if_up();
  const auto until = std::chrono::steady_clock::now() + longest_last_look;
  while (stream && !stream->closed()) {
    if (stream->begin_read()) {
      while (stream->read_some(*this) == FrameStream::Progress::some) {
      }
      return stream->end_read();
    }
    // Another thread reads them, and closes the stream when it reaches the end. If a forked child of the peer keeps the
    // connection open, there is no end, so the wait is bounded.
    if (std::chrono::steady_clock::now() > until) return;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool Link::close(const Status& status, Loss loss, bool unless_awaited) {
  if (!closed() && !unless_awaited && status.code() == Code::connection_lost)
    out_of_memory::with_reserve([this] { take_last_replies(); });
  auto why = status;
  if (status.code() != Code::agent_closed) {
    out_of_memory::with_reserve([&] {
      why = {status.code(), formatted("the link to \"{}\" has ended: {}", peer().name,
                                      leaving_ ? "it left the job" : std::string(status.what()))};
    });
  }
  Connections::Remains remains;
  if (!connections_.end(why, unless_awaited, remains)) return closed();
  if (leaving_) loss = Loss::peer;
  // A link that never connected is not logged: its calls report the error.
  const bool expected = leaving_ || incarnation() == 0 || why.code() == Code::agent_closed;
  if (!expected) {
    ++engine_->counters.links_lost;
    out_of_memory::with_reserve([&] {
      log_warning(formatted("peer={}{} connection lost: {}", peer().name, shown_rank(peer().rank), status.text()));
    });
  }
  end_all_work(remains, why, loss);
  out_of_memory::with_reserve([&] { note("ended: " + (leaving_ ? "it left the job" : std::string(status.what()))); });
  // Last the session, which may make its next link.
  if (const auto self = weak_from_this().lock())
    out_of_memory::with_reserve([&] { engine_->peers.lost(self, why, loss); });
  return true;
}

/// Ends all that was under way, when no thread can add to it any more. Each step is done also if another has no memory.
void Link::end_all_work(Connections::Remains& remains, const Status& why, Loss loss) {
  const auto step = [](const auto& work) { out_of_memory::with_reserve(work); };
  auto& pool = *engine_->pool;
  // The connections: no thread reads a frame of them from here on, and what was to be written is given up.
  step([&] {
    for (const auto& stream : remains.streams) {
      if (!stream) break;
      pool.remove(stream->fd());
      stream->close(why);
    }
  });
  for (auto& [frame, part] : remains.buffers) complete(std::move(part.written), why);
  // The channels, before the calls: a call that has failed gives the caller's memory back, and no channel may use it.
  step([&] { channels_.close(why); });
  // This side's calls: those that were never sent hold credit besides.
  step([&] {
    for (; !remains.calls.empty(); remains.calls.pop_front()) calls_.drop(remains.calls.front(), why);
  });
  step([&] { calls_.fail_all(why); });
  // The rings, after the calls: a thread that waits in a slot sees that its call has ended.
  step([&] { drop_rings(); });
  // The peer's calls: handlers hear that their callers are gone, and those that were held back for the peer's sake run.
  step([&] { incoming_calls_.cancel_all(loss == Loss::connection && why.code() != Code::agent_closed); });
  step([&] { untaken_replies_.close(); });
  step([&] { resume_requests(); });
  step([&] { pool.start_waiting(this); });
  // Threads that wait for credit or for a reply, last, so that they find everything ended.
  step([&] { credits_.close(); });
  step([&] { calls_.wake_waiting(); });
}

bool Link::unreachable(const Status& why, bool may_answer) {
  connections_.fail_impatient(why, may_answer);
  if (may_answer && connections_.is_awaited()) return closed();  // a thread waits for as long as it can, as a call does
  return close(why, Loss::connection, true);
}

void Link::transmit(const std::shared_ptr<FrameStream>& stream, Bytes frame, std::vector<FrameStream::Part> trailing,
                    bool flush, Descriptors descriptors) {
  if (connections_.transmit(stream, std::move(frame), std::move(trailing), flush, std::move(descriptors))) return;
  const auto unread = stream->unwritten();
  if (unread > most_unread) hold_requests();
  // This side's own requests wait there too, within max_bytes_in_flight.
  const auto own = calls_.count() != 0 ? engine_->options.max_bytes_in_flight : 0;
  if (unread < 2 * most_unread || unread - 2 * most_unread < own || refused_unread_.exchange(true)) return;
  // By way of the pool, because channels send messages while they hold locks.
  engine_->pool->submit([self = shared_from_this()] {
    self->close({Code::resource_exhausted, "the peer does not read what it is answered with"});
  });
}

/// Edge-triggered. The peer sends nothing on this connection, so the only event is its end.
void Link::on_bulk_out_readable(const std::shared_ptr<FrameStream>& stream) {
  if (!stream->begin_read()) return;
  auto progress = FrameStream::Progress::some;
  while (progress == FrameStream::Progress::some) progress = stream->read_some(*this);
  if (progress == FrameStream::Progress::closed) close_after_peer(stream->status());
  stream->end_read();
}

Result<FrameSink::Taken> Link::on_frame(FrameStream& stream, const wire::Header& header, ByteView body,
                                        Descriptors descriptors) {
  if (header.kind == wire::Kind::bulk) {
    if (!connections_.reads_bulk(stream))
      return Status(Code::protocol_error, "a bulk frame arrived on a connection for calls");
    return channels_.on_bulk(stream, header);
  }
  auto frame = wire::Frame::decode(header, body);
  if (!frame) return frame.status();
  if (!frame->releases.empty()) channels_.acknowledged(frame->releases);
  const auto calls = connections_.call_stream();
  if (calls.get() != &stream) return Status(Code::protocol_error, "a frame of calls arrived on a bulk connection");
  if (!is_answer(header.kind)) reader_.peer_spoke(engine_->clock.now());
  Status status;
  switch (header.kind) {
    case wire::Kind::request:
      status = on_request(*frame, {calls, header.call, 0, nullptr, {}});
      break;
    case wire::Kind::reply:
      status = calls_.on_reply(&stream, *frame);
      break;
    case wire::Kind::cancel:
      cancel_incoming(header.call);
      break;
    case wire::Kind::control:
      status = channels_.on_control(header.control, frame->payload, std::move(descriptors));
      break;
    case wire::Kind::ring:
      status = on_ring(stream, frame->payload, std::move(descriptors));
      break;
    case wire::Kind::release:
    case wire::Kind::pong:
      break;
    case wire::Kind::ping: {
      wire::Header pong;
      pong.kind = wire::Kind::pong;
      // Bytes on their way are a sign of life too. A peer that reads nothing gets no pong, so its pings do not pile up.
      if (calls->unwritten() < most_unread) connections_.transmit(calls, wire::assemble(pong, {}, {}, {}), {}, true);
      break;
    }
    case wire::Kind::goodbye:
      leaving_ = true;
      break;
    case wire::Kind::status:
      if (frame->payload.empty())  // the caller asks
        tell_status(calls, header.call);
      else
        status = calls_.on_status(header.call, frame->payload);
      break;
    case wire::Kind::want_bulk:
      status = connections_.on_want_bulk();
      break;
    default:
      status = {Code::protocol_error, "a frame of this kind is not allowed on an open connection"};
  }
  if (status.ok() && stream.unclaimed() != 0)
    status = {Code::protocol_error, "more bytes follow the frame than its buffers have"};
  if (!status.ok()) return status;
  return Taken::yes;
}

void Link::activate() {
  if (active_.load(std::memory_order_seq_cst)) return engine_->reactor->kick();
  if (!stay_active()) return;
  try {
    engine_->activate(weak_from_this());
  } catch (const std::bad_alloc&) {  // the next one tries again
    active_ = false;
    throw;
  }
}

Pace Link::tick(Clock::time_point now) {
  active_.store(false, std::memory_order_seq_cst);  // first: a thread that begins something from now on activates again
  auto pace = Pace::rest;
  if (requests_held_) {
    const auto stream = connections_.call_stream();
    if (!stream || stream->unwritten() + resume_after < most_unread) resume_requests();
    pace = Pace::run;
  }
  reader_.tick();
  if (connections_.flush()) pace = Pace::run;
  if (const auto releases = channels_.take_releases(4096); !releases.empty()) {
    or_end_link(*this, [&] {  // else the peer would hold these buffers for ever
      Bytes extensions;
      Writer writer(extensions);
      wire::put_extension(writer, wire::extension::releases, std::as_bytes(std::span(releases)));
      wire::Header header;
      header.kind = wire::Kind::release;
      connections_.send_control(wire::assemble(header, extensions, {}, {}), {});
    });
    pace = Pace::run;
  }
  return std::max(pace, calls_.tick(now));
}

bool Link::keep_alive(Clock::time_point now) {
  reader_.give_back_if_idle();
  if (calls_.ring().is_open()) calls_.ring().ring()->memory->give_back_if_idle();
  const auto why = connections_.keep_alive(now);
  if (why.ok()) return !closed();
  engine_->pool->submit([self = shared_from_this(), why] { self->close(why); });
  return false;
}

Status Link::check_process(std::int32_t pid) const {
  const auto session = this->session();
  if (!session || closed() || !connections_.connected()) return no_link_to(peer().name);
  if (const auto user = connections_.user(); key_needed(user, ::geteuid()))
    return {Code::permission_denied,
            formatted("\"{}\" is a process of {}, here is uid {}", peer().name, shown_user(user), ::geteuid())};
  const auto known = session->pid();
  if (known == 0 || pid == 0 || known == pid) return {};
  return {Code::permission_denied,
          formatted("\"{}\" names process {} as its own, but it is process {}", peer().name, pid, known)};
}

Status Link::connect(Clock::time_point until) {
  want_ring();
  return connections_.connect(until, [this] { return ring_settled(); });
}

}  // namespace tensorferry
