// A link's connections, frames and liveness. Its calls are in link_calls.cpp, link_serving.cpp and link_rings.cpp.
#include "agent/link.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

#include "agent/auth.h"
#include "agent/transport/tcp_liveness.h"
#include "base/log.h"
#include "base/thread_signals.h"
#include "channels/completion.h"
#include "channels/wire_use.h"

namespace tensorferry {
namespace {

/// A link's connection in the pool's epoll set. Its reference to the link is weak, so that the set keeps no ended link.
class Connection final : public Readable {
 public:
  using Report = void (Link::*)(const std::shared_ptr<FrameStream>&);
  Connection(std::weak_ptr<Link> link, std::shared_ptr<FrameStream> stream, Report report)
      : link_(std::move(link)), stream_(std::move(stream)), report_(report) {}
  void on_readable() override {
    if (const auto link = link_.lock()) (link.get()->*report_)(stream_);
  }

 private:
  const std::weak_ptr<Link> link_;
  const std::shared_ptr<FrameStream> stream_;
  const Report report_;
};

/// The pidfd of a peer's process on this host. It is readable when the process has ended, even if a forked child still
/// holds the process's sockets.
class PeerProcess final : public Readable {
 public:
  explicit PeerProcess(std::weak_ptr<Link> link) : link_(std::move(link)) {}
  void on_readable() override {
    const auto link = link_.lock();
    const auto session = link ? link->session() : nullptr;
    // The event may be an older one of another descriptor, which had this one's number and is closed.
    if (!session || !session->process_ended()) return;
    link->close({Code::connection_lost, "its process has ended"}, Loss::peer);
  }

 private:
  const std::weak_ptr<Link> link_;
};

}  // namespace

Link::Link(std::shared_ptr<Engine> engine, PeerInfo peer, std::shared_ptr<Session> session)
    : engine_(std::move(engine)),
      peer_(std::move(peer)),
      number_(++engine_->links_made),
      channels_(*this),
      session_(std::move(session)),
      nudge_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

std::shared_ptr<Link> Link::make(std::shared_ptr<Engine> engine, PeerInfo peer, std::shared_ptr<Session> session) {
  return {new Link(std::move(engine), std::move(peer), std::move(session)), [](Link* link) {
            if (!WireUse::inside()) {
              delete link;
              return;
            }
            // The destructor of a channel waits until no thread uses its wire, and this thread may be using one.
            try {
              std::thread([link] {
                block_signals_of_others();
                delete link;
              }).detach();
            } catch (const std::system_error&) {  // the system gives no thread: the link leaks
            }
          }};
}

Link::~Link() {
  close({Code::agent_closed, "the link was dropped"});
  channels_.destroy_channels();  // the channels' threads may use all of the link until then
}

bool Link::run(UniqueFunction<void()> job, bool with_executor) {
  return engine_->pool->submit(std::move(job), with_executor);
}

std::shared_ptr<FrameStream> Link::outgoing() const {
  const std::lock_guard lock(connect_mutex_);
  return outgoing_;
}

std::vector<std::shared_ptr<FrameStream>> Link::streams() const {
  const std::lock_guard lock(connect_mutex_);
  std::vector<std::shared_ptr<FrameStream>> all;
  for (const auto& stream : {outgoing_, incoming_, bulk_out_, bulk_in_}) {
    if (stream) all.push_back(stream);
  }
  return all;
}

bool Link::local() const {
  const std::lock_guard lock(connect_mutex_);
  const auto& stream = outgoing_ ? outgoing_ : incoming_;
  return stream && stream->local();
}

bool Link::called() const {
  const std::lock_guard lock(connect_mutex_);
  return incoming_ != nullptr;
}

bool Link::attach(FileDescriptor& fd, bool local, bool dialled, const wire::Hello& hello) {
  using Purpose = wire::Hello::Purpose;
  const bool bulk = hello.purpose == Purpose::bulk || hello.purpose == Purpose::bulk_back;
  const bool back = hello.purpose == Purpose::calls_back || hello.purpose == Purpose::bulk_back;
  const bool sends = dialled != back;  // this side sends requests, or bulk data, on the connection
  std::shared_ptr<FrameStream> stream;
  int pidfd = -1;
  const auto session = engine_->session_of({peer_.name, hello.rank, hello.incarnation});
  {
    const std::lock_guard lock(connect_mutex_);
    if (closed()) return false;
    if (incarnation() != 0 && incarnation() != hello.incarnation) return false;
    if (!dialled) {
      const bool stale = hello.other_link != 0 && hello.other_link != number_;
      if (stale || (other_number() != 0 && other_number() != hello.link)) return false;
    }
    auto& place = bulk ? (sends ? bulk_out_ : bulk_in_) : (sends ? outgoing_ : incoming_);
    if (place || (sends && (bulk ? attaching_bulk_ : attaching_))) return false;
    if (sends) (bulk ? attaching_bulk_ : attaching_) = true;
    session_ = session;
    if (!dialled) other_number_.store(hello.link, std::memory_order_release);
    stream =
        std::make_shared<FrameStream>(std::move(fd), local, bulk ? FrameStream::Use::bulk : FrameStream::Use::calls);
    if (!sends) place = stream;  // else it becomes visible below, after the messages that waited for it
    if (incarnation() == 0) {
      peer_.rank = hello.rank;
      peer_.incarnation = hello.incarnation;
      incarnation_.store(hello.incarnation, std::memory_order_release);
    }
    if (!process_ && local) {
      process_ = unix_peer_process(stream->fd());
      pidfd = process_.get();
    }
  }
  if (local)
    session->watch(unix_peer_process(stream->fd()));
  else
    bound_silence(stream->fd(), 3 * engine_->options.heartbeat);
  session->heard();
  channels_.meet(hello);
  const auto self = weak_from_this();
  auto& pool = *engine_->pool;
  if (pidfd >= 0) pool.add(pidfd, std::make_shared<PeerProcess>(self), Pool::Watch::always);
  const auto report = bulk ? (sends ? &Link::on_bulk_out_readable : &Link::on_bulk_readable)
                           : (sends ? &Link::on_replies : &Link::on_requests);
  const auto watch = sends ? Pool::Watch::closing : bulk ? Pool::Watch::blocking : Pool::Watch::always;
  pool.add(stream->fd(), std::make_shared<Connection>(self, stream, report), watch);

  while (true) {  // new messages queue behind those that waited, until none is left
    std::deque<Deferred> calls;
    std::deque<std::pair<Bytes, FrameStream::Part>> buffers;
    std::deque<std::pair<Bytes, Descriptors>> controls;
    {
      const std::lock_guard lock(connect_mutex_);
      if (sends && !bulk) controls.swap(deferred_controls_);
      if (sends) (bulk ? buffers.swap(deferred_bulk_) : calls.swap(deferred_));
      if (calls.empty() && buffers.empty() && controls.empty()) {
        if (sends) (bulk ? bulk_out_ : outgoing_) = stream;
        break;
      }
    }
    for (auto& [frame, descriptors] : controls) transmit(stream, std::move(frame), {}, true, std::move(descriptors));
    for (auto& [call, message] : calls) send_request(stream, call, std::move(message));
    for (auto& [frame, part] : buffers) {
      std::vector<FrameStream::Part> parts;
      parts.push_back(std::move(part));
      transmit(stream, std::move(frame), std::move(parts), true);
    }
  }
  if (sends && !bulk) offer_ring(stream, hello);
  if (closed()) {  // close() may have run without seeing this stream
    if (pidfd >= 0) pool.remove(pidfd);
    pool.remove(stream->fd());
    stream->close({Code::connection_lost, "the link has ended"});
    return false;
  }
  wake_connected();
  return true;
}

/// Wakes the threads that sleep because there was no stream to read. Makes the pool read the stream for calls with
/// completions.
void Link::wake_connected() {
  {
    const std::lock_guard lock(wait_mutex_);
    for (auto* waiter : waiters_) waiter->wake();
  }
  if (pending_.size() != 0) expect_replies();
}

void Link::close(const Status& status, Loss loss) { close(status, loss, false); }

/// The longest time that take_last_replies() waits for another thread to finish reading.
constexpr Milliseconds longest_last_look(50);

/// Takes the replies that the peer gave before it ended: the thread that notices the end may be ahead of the thread
/// that reads the replies.
void Link::take_last_replies() {
  take_ring_replies();  // first, because a slot may say that its reply comes by socket
  const auto stream = outgoing();
  const auto until = Clock::now() + longest_last_look;
  while (stream && !stream->closed()) {
    if (stream->begin_read()) {
      while (stream->read_some(*this) == FrameStream::Progress::some) {
      }
      return stream->end_read();
    }
    // Another thread reads them, and closes the stream when it reaches the end. If a forked child of the peer keeps the
    // connection open, there is no end, so the wait is bounded.
    if (Clock::now() > until) return;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

bool Link::close(const Status& status, Loss loss, bool unless_awaited) {
  if (!closed() && status.code() == Code::connection_lost) take_last_replies();
  std::vector<std::shared_ptr<FrameStream>> streams;
  std::deque<Deferred> deferred;
  std::deque<std::pair<Bytes, FrameStream::Part>> buffers;
  Status why;
  int pidfd = -1;
  {
    const std::lock_guard lock(connect_mutex_);
    if (closed_.load()) return true;
    if (unless_awaited && !deferred_.empty()) return false;
    const bool said = status.code() == Code::agent_closed;
    why = said ? status
               : Status(status.code(), "the link to \"" + peer_.name + "\" has ended: " +
                                           (leaving_ ? "it left the job" : std::string(status.what())));
    status_ = why;
    closed_.store(true, std::memory_order_release);
    for (const auto& stream : {outgoing_, incoming_, bulk_out_, bulk_in_}) {
      if (stream) streams.push_back(stream);
    }
    deferred.swap(deferred_);
    buffers.swap(deferred_bulk_);
    pidfd = process_.get();
  }
  if (leaving_) loss = Loss::peer;
  // A link that never connected is not logged: its calls report the error.
  const bool expected = leaving_ || incarnation() == 0 || why.code() == Code::agent_closed;
  if (!expected) log_warning("peer=" + peer_.name + " connection lost: " + status.text());
  auto& pool = *engine_->pool;
  if (pidfd >= 0) pool.remove(pidfd);
  for (const auto& stream : streams) {
    pool.remove(stream->fd());
    stream->close(why);
  }
  for (auto& [frame, part] : buffers) complete(std::move(part.written), why);
  channels_.close(why);
  for (const auto& unsent : deferred) drop(unsent, why);
  for (const auto& call : pending_.all()) {
    // Two kinds of calls end elsewhere. A call whose reply is landing in the caller's own memory ends when its landing
    // does; closing the channels above has failed that landing. A call whose reply a thread has just taken out of its
    // slot is ended by that thread.
    if (!taken_out_of_ring(*call)) fail(call, why);
  }
  drop_rings();
  std::vector<std::shared_ptr<IncomingRequest>> incoming_calls;
  {
    const std::lock_guard lock(incoming_calls_mutex_);
    for (const auto& [id, incoming] : incoming_calls_) incoming_calls.push_back(incoming);
  }
  for (const auto& incoming : incoming_calls) cancel_incoming(*incoming);
  flow_word_.fetch_add(1);
  futex_wake(flow_word_);
  wake_connected();
  if (const auto self = weak_from_this().lock()) engine_->lost(self, why, loss);
  return true;
}

void Link::drop(const Deferred& unsent, const Status& why) {
  const auto& call = unsent.call;
  release_credit(call->counted_bytes);
  call->release_arguments();
  fail(call, why);
}

/// Ends a call with the link's error `why`.
void Link::fail(const std::shared_ptr<Call::State>& call, const Status& why) {
  if (!pending_.give_up(call->id)) return;
  finish(call, Status(why.code(), "\"" + call->shown() + "\": " + std::string(why.what())));
}

bool Link::unreachable(const Status& why) {
  std::deque<Deferred> impatient;
  {
    const std::lock_guard lock(connect_mutex_);
    std::deque<Deferred> patient;
    for (auto& unsent : deferred_) {
      const bool waits = unsent.call->options.wait_for_ready && pending_.find(unsent.call->id);
      (waits ? patient : impatient).push_back(std::move(unsent));
    }
    deferred_ = std::move(patient);
  }
  const Status named(why.code(), "no link to \"" + peer_.name + "\": " + std::string(why.what()));
  for (const auto& unsent : impatient) drop(unsent, named);
  return close(why, Loss::connection, true);
}

void Link::redial() {
  {
    const std::lock_guard lock(connect_mutex_);
    if (closed() || std::exchange(dialling_, true)) return;
  }
  engine_->dial(shared_from_this(), wire::Hello::Purpose::calls);
}

bool Link::keep_dialling(wire::Hello::Purpose purpose) {
  const bool bulk = purpose == wire::Hello::Purpose::bulk;
  std::deque<Deferred> ended;  // their calls have ended meanwhile, by their deadlines for example
  bool wanted = false;
  {
    const std::lock_guard lock(connect_mutex_);
    if (closed() || (bulk ? bulk_out_ : outgoing_) || (bulk ? attaching_bulk_ : attaching_)) return false;
    std::deque<Deferred> waiting;
    for (auto& unsent : deferred_) (pending_.find(unsent.call->id) ? waiting : ended).push_back(std::move(unsent));
    deferred_ = std::move(waiting);
    wanted = bulk ? !deferred_bulk_.empty()
                  : !incoming_ || !deferred_.empty() || !deferred_controls_.empty() || connecting_ != 0;
    if (!wanted) (bulk ? dialling_bulk_ : dialling_) = false;
  }
  for (const auto& unsent : ended) drop(unsent, {Code::cancelled, "the call has ended"});
  return wanted;
}

bool Link::ask_to_dial(wire::Hello::Purpose purpose) {
  std::shared_ptr<FrameStream> stream;
  {
    const std::lock_guard lock(connect_mutex_);
    stream = incoming_ ? incoming_ : outgoing_;
  }
  if (!stream) return false;
  const Bytes wanted{static_cast<std::byte>(purpose)};
  wire::Header header;
  header.kind = wire::Kind::dial;
  transmit(stream, wire::assemble(header, {}, {}, wanted), {}, true);
  return true;
}

Status Link::on_dial(ByteView payload) {
  const auto wanted = decode<wire::DialRequest>(payload);
  if (!wanted) return {Code::protocol_error, "a malformed dial frame"};
  const bool bulk = wanted->purpose == wire::Hello::Purpose::bulk;
  {
    const std::lock_guard lock(connect_mutex_);
    if (bulk ? bulk_in_ : incoming_) return {};
    if (std::exchange(bulk ? dialling_bulk_back_ : dialling_back_, true)) return {};
  }
  engine_->dial_back(shared_from_this(), bulk ? wire::Hello::Purpose::bulk_back : wire::Hello::Purpose::calls_back);
  return {};
}

void Link::dialled_back(wire::Hello::Purpose purpose) {
  const std::lock_guard lock(connect_mutex_);
  (purpose == wire::Hello::Purpose::bulk_back ? dialling_bulk_back_ : dialling_back_) = false;
}

void Link::give_up_bulk(const Status& why) {
  std::deque<std::pair<Bytes, FrameStream::Part>> buffers;
  {
    const std::lock_guard lock(connect_mutex_);
    buffers.swap(deferred_bulk_);
    dialling_bulk_ = false;
  }
  for (auto& [frame, part] : buffers) complete(std::move(part.written), why);
}

bool Link::leave_session(const Session& dead) {
  std::shared_ptr<Session> left;  // dropped after the lock is released
  const std::lock_guard lock(connect_mutex_);
  if (incarnation() != 0) return false;
  if (session_.get() == &dead) left = std::move(session_);
  return true;
}

bool Link::connected() const {
  const std::lock_guard lock(connect_mutex_);
  return outgoing_ || incoming_;
}

std::shared_ptr<Session> Link::session() const {
  const std::lock_guard lock(connect_mutex_);
  return session_;
}

void Link::transmit(const std::shared_ptr<FrameStream>& stream, Bytes frame, std::vector<FrameStream::Part> trailing,
                    bool flush, Descriptors descriptors) {
  if (!descriptors.empty() && !stream->local()) {  // the channel at the peer sees that no descriptors came
    descriptors.clear();
    wire::Header::forget_descriptors(frame);
  }
  if (!stream->send(std::move(frame), std::move(trailing), std::move(descriptors), flush))
    finish_writes(stream);
  else if (!flush && stream->corked())
    engine_->reactor->kick();
}

/// Makes a pool thread write the rest after the socket was full, so that no caller waits for a slow peer.
void Link::finish_writes(const std::shared_ptr<FrameStream>& stream) {
  {
    const std::lock_guard lock(connect_mutex_);
    if (std::find(writing_.begin(), writing_.end(), stream) != writing_.end()) return;
    writing_.push_back(stream);
  }
  engine_->pool->submit_long([self = shared_from_this(), stream] {
    do {
      while (!stream->closed() && !stream->write_some()) {
        pollfd writable{stream->fd(), POLLOUT, 0};
        ::poll(&writable, 1, 1000);
      }
      const std::lock_guard lock(self->connect_mutex_);
      std::erase(self->writing_, stream);
      // A sender that met a full socket just now found the stream in the list and left the writing to this thread.
      if (!stream->closed() && stream->corked())
        self->writing_.push_back(stream);
      else
        return;
    } while (true);
  });
}

/// Control frames always go on the stream that this side dialled. The peer reads that stream at all times, but reads
/// the stream of its own calls only while it waits for a reply.
void Link::send_control(Bytes frame, Descriptors descriptors) {
  std::unique_lock lock(connect_mutex_);
  if (const auto stream = outgoing_) {
    lock.unlock();
    return transmit(stream, std::move(frame), {}, true, std::move(descriptors));
  }
  deferred_controls_.emplace_back(std::move(frame), std::move(descriptors));
  const bool dial = !closed() && !std::exchange(dialling_, true);
  lock.unlock();
  if (dial) engine_->dial(shared_from_this(), wire::Hello::Purpose::calls);
}

void Link::send_bulk(Bytes frame, FrameStream::Part part) {
  std::unique_lock lock(connect_mutex_);
  if (closed()) {
    const auto ended = status_;
    lock.unlock();
    return complete(std::move(part.written), ended);
  }
  if (const auto stream = bulk_out_) {
    lock.unlock();
    std::vector<FrameStream::Part> parts;
    parts.push_back(std::move(part));
    return transmit(stream, std::move(frame), std::move(parts), true);
  }
  deferred_bulk_.emplace_back(std::move(frame), std::move(part));
  const bool dial = !std::exchange(dialling_bulk_, true);
  lock.unlock();
  if (dial) engine_->dial(shared_from_this(), wire::Hello::Purpose::bulk);
}

void Link::on_requests(const std::shared_ptr<FrameStream>& stream) {
  if (!stream->begin_read()) return;
  if (stream->read_some(*this) == FrameStream::Progress::closed) close(stream->status());
  stream->end_read();
}

/// May run before `outgoing_` is set. The events are edge-triggered: bytes that this leaves unread, or an end behind a
/// reply, are not reported again. So this reads until nothing is left.
void Link::on_replies(const std::shared_ptr<FrameStream>& stream) {
  if (!stream->begin_read()) {
    const std::lock_guard lock(wait_mutex_);
    if (!stream->begin_read()) {
      // A waiting caller reads the stream. It arms the stream again in stop_reading(), because `missed_` is set.
      if (std::exchange(armed_, false)) engine_->pool->disarm(stream->fd());
      missed_ = true;
      return;
    }
  }
  auto progress = FrameStream::Progress::some;
  while (progress == FrameStream::Progress::some) progress = stream->read_some(*this);
  if (progress == FrameStream::Progress::closed) close(stream->status());
  stop_reading(stream);
}

/// Edge-triggered too. The peer sends nothing on this connection, so the only event is its end.
void Link::on_bulk_out_readable(const std::shared_ptr<FrameStream>& stream) {
  if (!stream->begin_read()) return;
  auto progress = FrameStream::Progress::some;
  while (progress == FrameStream::Progress::some) progress = stream->read_some(*this);
  if (progress == FrameStream::Progress::closed) close(stream->status());
  stream->end_read();
}

/// Runs on a pool thread that does not lead, so it may take long. Reads until no bytes have come for 2 ms (the stream
/// is then armed again), or until a frame has no destination yet (resume_bulk() continues then).
void Link::on_bulk_readable(const std::shared_ptr<FrameStream>& stream) {
  while (stream->begin_read()) {
    const auto resumes = bulk_resumes_.load();
    auto progress = FrameStream::Progress::some;
    while (progress == FrameStream::Progress::some) {
      progress = stream->read_some(*this);
      if (progress == FrameStream::Progress::none) {
        pollfd readable{stream->fd(), POLLIN, 0};
        if (::poll(&readable, 1, 2) > 0) progress = FrameStream::Progress::some;
      }
    }
    if (progress == FrameStream::Progress::closed) close(stream->status());
    stream->end_read();
    if (progress == FrameStream::Progress::none) engine_->pool->arm(stream->fd());
    if (progress != FrameStream::Progress::held) return;
    bulk_held_ = true;
    if (bulk_resumes_ == resumes || !bulk_held_.exchange(false)) return;
  }
}

void Link::resume_bulk() {
  ++bulk_resumes_;
  if (!bulk_held_.exchange(false)) return;  // no reader waits for a destination
  std::shared_ptr<FrameStream> stream;
  {
    const std::lock_guard lock(connect_mutex_);
    stream = bulk_in_;
  }
  if (stream) engine_->pool->submit_long([self = shared_from_this(), stream] { self->on_bulk_readable(stream); });
}

Result<FrameSink::Taken> Link::on_frame(FrameStream& stream, const wire::Header& header, ByteView body,
                                        Descriptors descriptors) {
  if (header.kind == wire::Kind::bulk) {
    const auto bulk = [&] {
      const std::lock_guard lock(connect_mutex_);
      return bulk_in_.get() == &stream;
    }();
    if (!bulk) return Status(Code::protocol_error, "a bulk frame arrived on a connection for calls");
    return channels_.on_bulk(stream, header);
  }
  auto frame = wire::Frame::decode(header, body);
  if (!frame) return frame.status();
  if (!frame->releases.empty()) channels_.acknowledged(frame->releases);
  std::shared_ptr<FrameStream> outgoing, incoming;
  {
    const std::lock_guard lock(connect_mutex_);
    outgoing = outgoing_;
    incoming = incoming_;
  }
  const bool from_caller = incoming.get() == &stream;
  Status status;
  switch (header.kind) {
    case wire::Kind::request:
      status = from_caller ? on_request(*frame, {incoming, header.call, 0, nullptr, {}})
                           : Status(Code::protocol_error, "a request arrived on a connection for replies");
      break;
    case wire::Kind::reply:
      status = !from_caller ? on_reply(&stream, *frame)
                            : Status(Code::protocol_error, "a reply arrived on a connection for requests");
      break;
    case wire::Kind::cancel:
      if (from_caller) on_cancel(header.call);
      break;
    case wire::Kind::control:
      status = from_caller ? channels_.on_control(header.control, frame->payload, std::move(descriptors))
                           : Status(Code::protocol_error, "a control frame arrived on a connection for replies");
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
      if (const auto& back = from_caller ? incoming : outgoing)
        transmit(back, wire::assemble(pong, {}, {}, {}), {}, true);
      break;
    }
    case wire::Kind::goodbye:
      leaving_ = true;
      break;
    case wire::Kind::dial:
      status = on_dial(frame->payload);
      break;
    default:
      status = {Code::protocol_error, "a frame of this kind is not allowed on an open connection"};
  }
  if (status.ok() && stream.unclaimed() != 0)
    status = {Code::protocol_error, "more bytes follow the frame than its buffers have"};
  if (!status.ok()) return status;
  return Taken::yes;
}

bool Link::tick(Clock::time_point now) {
  bool under_way = pending_.size() != 0;
  for (const auto& stream : streams()) {
    if (!stream->corked()) continue;
    under_way = true;
    if (!stream->write_some()) finish_writes(stream);
  }
  if (const auto releases = channels_.take_releases(4096); !releases.empty()) {
    Bytes extensions;
    Writer writer(extensions);
    wire::put_extension(writer, wire::extension::releases, std::as_bytes(std::span(releases)));
    wire::Header header;
    header.kind = wire::Kind::release;
    send_control(wire::assemble(header, extensions, {}, {}), {});
    under_way = true;
  }
  expect_lazy(now - Milliseconds(1));
  if (pending_.size() != 0 &&
      now.time_since_epoch().count() - last_expiry_ > std::chrono::nanoseconds(Milliseconds(10)).count()) {
    last_expiry_ = now.time_since_epoch().count();
    for (const auto& call : pending_.all()) {
      if (call->deadline && *call->deadline <= now) cancel(call, expired(*call));
    }
    if (ring_ready_.load(std::memory_order_acquire)) ring_out_->calls->reclaim();
    expect_replies();  // for calls without a waiting thread
  }
  return under_way;
}

/// Needed between hosts only: there, silence is the only sign that a peer is gone. Bytes that arrive are a sign of
/// life, also in the middle of a frame. So are bytes that the peer takes, because they hold up the pings behind them;
/// the kernel of a stopped peer takes pings, and a stopped peer counts as silent.
bool Link::keep_alive(Clock::time_point now) {
  if (closed() || local() || incarnation() == 0) return !closed();
  const auto interval = std::chrono::duration_cast<Clock::duration>(engine_->options.heartbeat);
  TcpMoved moved;
  for (const auto& stream : streams()) {
    const auto one = bytes_moved(stream->fd());
    moved.received += one.received;
    moved.acknowledged += one.acknowledged;
  }
  constexpr std::uint64_t more_than_pings = 4096;
  const bool heard = moved.received != std::exchange(received_at_last_look_, moved.received) ||
                     moved.acknowledged > std::exchange(taken_at_last_look_, moved.acknowledged) + more_than_pings;
  const auto session = this->session();
  // This process may have been stopped between two checks, so each check adds one interval of silence at most.
  if (heard) {
    silent_ = {};
    session->heard();
  } else {
    silent_ += std::min(now - last_look_, interval);
  }
  last_look_ = now;
  if (!called()) expect_frames();  // the peer may ask to be dialled, while no thread waits for a reply
  if (silent_ > 3 * interval) {
    const auto silence = std::chrono::duration_cast<Milliseconds>(now - session->last_heard());
    close({Code::connection_lost, "it sent nothing for " + std::to_string(silence.count()) + " ms"});
    return false;
  }
  if (silent_ > interval && now - last_pinged_ > interval) {
    last_pinged_ = now;
    wire::Header ping;
    ping.kind = wire::Kind::ping;
    if (const auto stream = outgoing()) transmit(stream, wire::assemble(ping, {}, {}, {}), {}, true);
    expect_replies();
  }
  return true;
}

Milliseconds Link::patience() const {
  Milliseconds longest{0};
  const std::lock_guard lock(connect_mutex_);
  for (const auto& [call, message] : deferred_) {
    if (!call->options.wait_for_ready) continue;
    const auto left = call->deadline ? std::chrono::duration_cast<Milliseconds>(*call->deadline - Clock::now())
                                     : std::chrono::hours(24);
    longest = std::max(longest, left);
  }
  return longest;
}

Status Link::connect(Clock::time_point until) {
  bool dial = false;
  {
    const std::lock_guard lock(connect_mutex_);
    ++connecting_;
    if (!closed() && !outgoing_) dial = !std::exchange(dialling_, true);
  }
  if (dial) engine_->dial(shared_from_this(), wire::Hello::Purpose::calls);
  while (!closed() && !(outgoing() && ring_settled())) {
    if (Clock::now() >= until) break;
    std::this_thread::sleep_for(Milliseconds(1));
  }
  const std::lock_guard lock(connect_mutex_);
  --connecting_;
  if (!closed() && !outgoing_) return {Code::deadline_exceeded, "no link to \"" + peer_.name + "\" yet"};
  return status_;
}

Status Link::status() const {
  const std::lock_guard lock(connect_mutex_);
  return status_;
}

void Link::say_goodbye() {
  wire::Header goodbye;
  goodbye.kind = wire::Kind::goodbye;
  std::vector<std::shared_ptr<FrameStream>> both;
  {
    const std::lock_guard lock(connect_mutex_);
    both = {outgoing_, incoming_};
  }
  for (const auto& stream : both) {
    if (stream) stream->send(wire::assemble(goodbye, {}, {}, {}), {}, {}, true);
  }
}

}  // namespace tensorferry
