// A link's connections, frames and liveness. The calls of its peer are in link_serving.cpp and link_rings.cpp.
#include "agent/link.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
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

/// The bytes of replies that may wait for a socket of the peer. While there are more, its requests are not read.
constexpr std::size_t most_unread_replies = std::size_t{64} << 20;
constexpr std::size_t resume_after = std::size_t{1} << 20;

/// Returns whether the peer has closed its end.
bool has_ended(const FrameStream& stream) {
  pollfd state{stream.fd(), POLLRDHUP, 0};
  return ::poll(&state, 1, 0) > 0 && (state.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

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
      calls_(*this),
      credits_(engine_->options.max_bytes_in_flight),
      incoming_calls_({static_cast<std::size_t>(std::max(1, engine_->options.max_queued_calls)),
                       engine_->options.max_queued_bytes}),
      untaken_replies_(engine_->options.max_bytes_in_flight, [this](bool pause) { pause_handlers(pause); }),
      session_(std::move(session)) {}

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

std::shared_ptr<FrameStream> Link::incoming() const {
  const std::lock_guard lock(connect_mutex_);
  return incoming_;
}

std::vector<std::shared_ptr<FrameStream>> Link::streams() const {
  const std::lock_guard lock(connect_mutex_);
  std::vector<std::shared_ptr<FrameStream>> all;
  for (const auto& stream : {outgoing_, incoming_}) {
    if (stream) all.push_back(stream);
  }
  all.insert(all.end(), bulk_.out.begin(), bulk_.out.end());
  all.insert(all.end(), bulk_.in.begin(), bulk_.in.end());
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
    const bool full =
        bulk ? (sends ? bulk_.out : bulk_.in).size() >= BulkStreams::most : (sends ? outgoing_ : incoming_) != nullptr;
    if (full || (sends && (bulk ? attaching_bulk_ : attaching_))) return false;
    if (sends) (bulk ? attaching_bulk_ : attaching_) = true;
    session_ = session;
    if (!dialled) other_number_.store(hello.link, std::memory_order_release);
    stream =
        std::make_shared<FrameStream>(std::move(fd), local, bulk ? FrameStream::Use::bulk : FrameStream::Use::calls);
    // A stream that this side writes becomes visible below, after the messages that waited for it.
    if (!sends && bulk) bulk_.in.push_back(stream);
    if (!sends && !bulk) incoming_ = stream;
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
  calls_.meet(hello);
  const auto self = weak_from_this();
  auto& pool = *engine_->pool;
  if (pidfd >= 0) pool.add(pidfd, std::make_shared<PeerProcess>(self), Pool::Watch::always);
  const auto report = bulk ? (sends ? &Link::on_bulk_out_readable : &Link::on_bulk_readable)
                           : (sends ? &Link::on_replies : &Link::on_requests);
  const auto watch = sends ? Pool::Watch::closing : bulk ? Pool::Watch::blocking : Pool::Watch::always;
  pool.add(stream->fd(), std::make_shared<Connection>(self, stream, report), watch);

  while (sends && !bulk) {  // new messages queue behind those that waited, until none is left
    std::deque<UnsentCall> calls;
    std::deque<std::pair<Bytes, Descriptors>> controls;
    {
      const std::lock_guard lock(connect_mutex_);
      controls.swap(deferred_controls_);
      calls.swap(deferred_);
      if (calls.empty() && controls.empty()) {
        outgoing_ = stream;
        break;
      }
    }
    for (auto& [frame, descriptors] : controls) transmit(stream, std::move(frame), {}, true, std::move(descriptors));
    for (auto& [call, message] : calls) calls_.send(stream, call, std::move(message));
  }
  if (sends && bulk) {
    if (local) {
      constexpr int bytes = BulkStreams::unix_send_buffer;
      ::setsockopt(stream->fd(), SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    }
    {
      const std::lock_guard lock(connect_mutex_);
      if (bulk_.out.empty()) bulk_.allow((hello.features & wire::feature::several_bulk) != 0, local);
      bulk_.add_out(stream);
      attaching_bulk_ = dialling_bulk_ = false;
    }
    finish_writes(stream);  // the buffers that wait
  }
  if (sends && !bulk) offer_ring(stream, hello);
  if (closed()) {  // close() may have run without seeing this stream
    if (pidfd >= 0) pool.remove(pidfd);
    pool.remove(stream->fd());
    stream->close({Code::connection_lost, "the link has ended"});
    return false;
  }
  calls_.wake_waiting();
  return true;
}

void Link::close(const Status& status, Loss loss) { close(status, loss, false); }

/// The longest time that take_last_replies() waits for another thread to finish reading.
constexpr Milliseconds longest_last_look(50);

/// Takes the replies that the peer gave before it ended: the thread that notices the end may be ahead of the thread
/// that reads the replies.
void Link::take_last_replies() {
  calls_.ring().take_all();  // first, because a slot may say that its reply comes by socket
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
  std::deque<UnsentCall> deferred;
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
    for (const auto& stream : {outgoing_, incoming_}) {
      if (stream) streams.push_back(stream);
    }
    streams.insert(streams.end(), bulk_.out.begin(), bulk_.out.end());
    streams.insert(streams.end(), bulk_.in.begin(), bulk_.in.end());
    bulk_.held.clear();
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
  for (const auto& unsent : deferred) calls_.drop(unsent, why);
  calls_.fail_all(why);
  drop_rings();
  // An idempotent call goes on: its caller asks for the answer over the session's next link.
  incoming_calls_.cancel_all(loss == Loss::connection && why.code() != Code::agent_closed);
  untaken_replies_.close();
  resume_requests();
  pool.start_waiting(this);
  credits_.close();
  calls_.wake_waiting();
  if (const auto self = weak_from_this().lock()) engine_->lost(self, why, loss);
  return true;
}

bool Link::unreachable(const Status& why) {
  std::deque<UnsentCall> impatient;
  {
    const std::lock_guard lock(connect_mutex_);
    std::deque<UnsentCall> patient;
    for (auto& unsent : deferred_) {
      const bool waits = unsent.call->options.wait_for_ready && calls_.contains(*unsent.call);
      (waits ? patient : impatient).push_back(std::move(unsent));
    }
    deferred_ = std::move(patient);
  }
  const Status named(why.code(), "no link to \"" + peer_.name + "\": " + std::string(why.what()));
  for (const auto& unsent : impatient) calls_.drop(unsent, named);
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
  std::deque<UnsentCall> ended;  // their calls have ended meanwhile, by their deadlines for example
  bool wanted = false;
  {
    const std::lock_guard lock(connect_mutex_);
    if (closed() || (bulk ? attaching_bulk_ : attaching_)) return false;
    if (bulk && !bulk_.out.empty()) {  // one more: tried once
      if (std::exchange(bulk_.attempt_due, false)) return true;
      bulk_.allow_no_more();
      return dialling_bulk_ = false;
    }
    if (!bulk && outgoing_) return false;
    std::deque<UnsentCall> waiting;
    for (auto& unsent : deferred_) (calls_.contains(*unsent.call) ? waiting : ended).push_back(std::move(unsent));
    deferred_ = std::move(waiting);
    wanted = bulk ? !deferred_bulk_.empty()
                  : !incoming_ || !deferred_.empty() || !deferred_controls_.empty() || connecting_ != 0;
    if (!wanted) (bulk ? dialling_bulk_ : dialling_) = false;
  }
  for (const auto& unsent : ended) calls_.drop(unsent, {Code::cancelled, "the call has ended"});
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
    if (bulk ? !bulk_.in.empty() : incoming_ != nullptr) return {};
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
  std::vector<FrameStream::Written> written;
  auto* const apart = Reactor::on_any_thread() ? &written : nullptr;
  const bool done = stream->send(std::move(frame), std::move(trailing), std::move(descriptors), flush, apart);
  if (!written.empty()) complete_apart(std::move(written));
  if (!done) {
    finish_writes(stream);
    if (stream->unwritten() > most_unread_replies && stream == incoming()) hold_requests();
  } else if (!flush && stream->corked()) {
    engine_->reactor->kick();
  }
}

/// Completes written parts on a pool thread.
void Link::complete_apart(std::vector<FrameStream::Written> written) {
  const auto held = std::make_shared<std::vector<FrameStream::Written>>(std::move(written));
  if (!engine_->pool->submit([held] { FrameStream::complete_all(*held); })) FrameStream::complete_all(*held);
}

/// Makes a pool thread write the rest after the socket was full, so that no caller waits for a slow peer. On a bulk
/// connection, which the caller has taken, it then writes the buffers that wait.
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
    } while (self->go_on_writing(stream));
  });
}

/// Returns whether the caller must dial another bulk connection, because a buffer waits. Under connect_mutex_.
bool Link::claim_another_bulk_dial() {
  if (deferred_bulk_.empty() || !bulk_.wants_another(deferred_bulk_.front().second.buffer.bytes)) return false;
  if (std::exchange(dialling_bulk_, true)) return false;
  return bulk_.attempt_due = true;
}

/// Queues the next buffer that waits, if this is a bulk connection. False: the stream has nothing to write, and another
/// thread may write it.
bool Link::go_on_writing(const std::shared_ptr<FrameStream>& stream) {
  std::optional<std::pair<Bytes, FrameStream::Part>> next;
  bool dial = false;
  {
    const std::lock_guard lock(connect_mutex_);
    // A sender that met a full socket just now found the stream in writing_ and left the writing to this thread.
    if (!stream->closed() && stream->corked()) return true;
    if (stream->use() == FrameStream::Use::bulk && !deferred_bulk_.empty()) {
      next = std::move(deferred_bulk_.front());
      deferred_bulk_.pop_front();
      dial = claim_another_bulk_dial();
    } else {
      bulk_.give_back(stream.get());
      std::erase(writing_, stream);
      return false;
    }
  }
  if (dial) engine_->dial(shared_from_this(), wire::Hello::Purpose::bulk);
  std::vector<FrameStream::Part> parts;
  parts.push_back(std::move(next->second));
  stream->send(std::move(next->first), std::move(parts), {}, true);
  return true;
}

/// Control frames always go on the stream that this side dialled. The peer reads that stream at all times, but reads
/// the stream of its own calls only while it waits for a reply.
void Link::send_control(Bytes frame, Descriptors descriptors) {
  queue_control(std::move(frame), std::move(descriptors));
  write_controls();
}

void Link::write_controls() {
  std::unique_lock lock(connect_mutex_);
  const auto stream = outgoing_;
  const bool dial = !stream && !deferred_controls_.empty() && !closed() && !std::exchange(dialling_, true);
  lock.unlock();
  if (dial) {  // by way of the pool, because a dial that the agent refuses ends the link
    engine_->pool->submit_long([self = shared_from_this()] { self->engine_->dial(self, wire::Hello::Purpose::calls); });
  }
  if (!stream) return;
  std::vector<FrameStream::Written> written;
  if (!stream->write_some(&written)) finish_writes(stream);
  if (!written.empty()) complete_apart(std::move(written));
}

void Link::queue_control(Bytes frame, Descriptors descriptors) {
  std::unique_lock lock(connect_mutex_);
  const auto stream = outgoing_;
  if (!stream) {
    deferred_controls_.emplace_back(std::move(frame), std::move(descriptors));
    return;
  }
  lock.unlock();
  if (!descriptors.empty() && !stream->local()) {  // the channel at the peer sees that no descriptors came
    descriptors.clear();
    wire::Header::forget_descriptors(frame);
  }
  stream->queue(std::move(frame), std::move(descriptors));
}

void Link::send_bulk(Bytes frame, FrameStream::Part part) {
  std::unique_lock lock(connect_mutex_);
  if (closed()) {
    const auto ended = status_;
    lock.unlock();
    return complete(std::move(part.written), ended);
  }
  if (const auto stream = bulk_.take_idle()) {
    lock.unlock();
    return write_bulk(stream, std::move(frame), std::move(part));
  }
  deferred_bulk_.emplace_back(std::move(frame), std::move(part));
  const bool dial = bulk_.out.empty() ? !std::exchange(dialling_bulk_, true) : claim_another_bulk_dial();
  lock.unlock();
  if (dial) engine_->dial(shared_from_this(), wire::Hello::Purpose::bulk);
}

/// Writes a buffer on a bulk connection that the caller has taken. A pool thread writes the rest if the socket is full,
/// and the buffers that have come meanwhile.
void Link::write_bulk(const std::shared_ptr<FrameStream>& stream, Bytes frame, FrameStream::Part part) {
  std::vector<FrameStream::Part> parts;
  parts.push_back(std::move(part));
  std::vector<FrameStream::Written> written;
  auto* const apart = Reactor::on_any_thread() ? &written : nullptr;
  const bool done = stream->send(std::move(frame), std::move(parts), {}, true, apart);
  if (!written.empty()) complete_apart(std::move(written));
  if (done) {
    const std::lock_guard lock(connect_mutex_);
    if (deferred_bulk_.empty()) return bulk_.give_back(stream.get());
  }
  finish_writes(stream);
}

void Link::on_requests(const std::shared_ptr<FrameStream>& stream) {
  if (requests_held_) {
    engine_->pool->disarm(stream->fd());
    if (!has_ended(*stream)) return;  // else reads what the peer sent before it ended
  }
  if (!stream->begin_read()) {
    // A thread reads, and something in a frame holds it up. It arms the stream again, because `requests_missed_` is
    // set; until then the stream must not be reported again and again.
    requests_missed_ = true;
    engine_->pool->disarm(stream->fd());
    if (!stream->begin_read()) return;
    requests_missed_ = true;  // the thread that read may have armed the stream before it was disarmed here
  }
  if (stream->read_some(*this) == FrameStream::Progress::closed) close(stream->status());
  stream->end_read();
  if (requests_missed_.exchange(false)) arm_requests(*stream);
}

void Link::arm_requests(const FrameStream& stream) {
  if (!requests_held_) engine_->pool->arm(stream.fd());
}

void Link::on_replies(const std::shared_ptr<FrameStream>& stream) { calls_.reader().on_readable(stream); }

/// Edge-triggered. The peer sends nothing on this connection, so the only event is its end.
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
      if (progress == FrameStream::Progress::none && stream->wait_readable(Milliseconds(2)))
        progress = FrameStream::Progress::some;
    }
    if (progress == FrameStream::Progress::closed) close(stream->status());
    stream->end_read();
    if (progress == FrameStream::Progress::none) engine_->pool->arm(stream->fd());
    if (progress != FrameStream::Progress::held) return;
    const std::lock_guard lock(connect_mutex_);
    if (bulk_resumes_ == resumes) return bulk_.held.push_back(stream);
  }
}

void Link::resume_bulk() {
  std::vector<std::shared_ptr<FrameStream>> held;
  {
    const std::lock_guard lock(connect_mutex_);
    ++bulk_resumes_;
    held.swap(bulk_.held);
  }
  for (const auto& stream : held)
    engine_->pool->submit_long([self = shared_from_this(), stream] { self->on_bulk_readable(stream); });
}

Result<FrameSink::Taken> Link::on_frame(FrameStream& stream, const wire::Header& header, ByteView body,
                                        Descriptors descriptors) {
  if (header.kind == wire::Kind::bulk) {
    const auto bulk = [&] {
      const std::lock_guard lock(connect_mutex_);
      return std::any_of(bulk_.in.begin(), bulk_.in.end(), [&](const auto& one) { return one.get() == &stream; });
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
      status = !from_caller ? calls_.on_reply(&stream, *frame)
                            : Status(Code::protocol_error, "a reply arrived on a connection for requests");
      break;
    case wire::Kind::cancel:
      if (from_caller) incoming_calls_.cancel(header.call);
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
      // Bytes on their way are a sign of life too. A peer that reads nothing gets no pong, so its pings do not pile up.
      if (const auto& back = from_caller ? incoming : outgoing; back && back->unwritten() < most_unread_replies)
        transmit(back, wire::assemble(pong, {}, {}, {}), {}, true);
      break;
    }
    case wire::Kind::goodbye:
      leaving_ = true;
      break;
    case wire::Kind::status:
      if (from_caller)
        tell_status(incoming, header.call);
      else
        status = calls_.on_status(header.call, frame->payload);
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
  bool under_way = false;
  if (requests_held_) {
    const auto stream = incoming();
    if (!stream || stream->unwritten() + resume_after < most_unread_replies) resume_requests();
    under_way = true;
  }
  for (const auto& stream : streams()) {
    if (!stream->corked()) continue;
    under_way = true;
    // Only a thread that has taken a bulk connection writes it; this thread is not to be kept for a large buffer.
    if (stream->use() == FrameStream::Use::bulk) continue;
    std::vector<FrameStream::Written> written;
    if (!stream->write_some(&written)) finish_writes(stream);
    if (!written.empty()) complete_apart(std::move(written));
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
  return calls_.tick(now) || under_way;
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
  if (!called()) calls_.reader().expect_frames();  // the peer may ask to be dialled, while no thread waits for a reply
  if (silent_ > 3 * interval) {
    const auto silence = std::chrono::duration_cast<Milliseconds>(now - session->last_heard());
    const Status why(Code::connection_lost, "it sent nothing for " + std::to_string(silence.count()) + " ms");
    engine_->pool->submit([self = shared_from_this(), why] { self->close(why); });
    return false;
  }
  if (silent_ > interval && now - last_pinged_ > interval) {
    last_pinged_ = now;
    wire::Header ping;
    ping.kind = wire::Kind::ping;
    if (const auto stream = outgoing()) transmit(stream, wire::assemble(ping, {}, {}, {}), {}, true);
    calls_.expect_replies();
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
