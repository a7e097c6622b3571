/// A link: this agent's end of everything that it shares with one peer. It has a stream for each direction of calling,
/// a bulk connection for each direction, the channels of each device pair, and the calls in flight.
///
/// The caller dials the stream of its direction at its first call. Replies on it are read by a caller's thread that
/// waits for one, else by the pool; requests are read by the pool alone. So a thread that waits for a reply never runs
/// a handler. A link belongs to one incarnation of its peer, and to its session (agent/session.h): if the link is lost,
/// the session's next link dials again.
///
/// Threads: any, unless a function says otherwise. Completions and callbacks run under none of the link's locks.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent/call_state.h"
#include "agent/channel_set.h"
#include "agent/engine.h"
#include "agent/link_rings.h"
#include "agent/pending_calls.h"
#include "agent/session.h"
#include "agent/transport/frame_stream.h"
#include "base/futex.h"

namespace tensorferry {

/// A request's place in the queue of its order key.
struct OrderTicket {
  UniqueFunction<void()> start;  // dispatches the request; set once it has landed, if earlier requests run still
};

/// A request that the callee has not answered yet.
struct IncomingRequest {
  std::atomic<bool> cancelled{false};
  UniqueFunction<void()> on_cancelled;  // set by Reply::on_cancelled; under the link's incoming_calls_mutex_
  std::optional<Clock::time_point> deadline;
  std::uint32_t order = 0;
  std::shared_ptr<OrderTicket> order_ticket;  // null if order is 0
};

/// The route of the reply to one request: its stream, or its slot in a ring, and the call's id.
struct ReplyRoute {
  std::shared_ptr<FrameStream> stream;
  std::uint64_t call = 0;
  std::uint32_t tell_number = 0;       // the function's number, sent with the answer; 0: the caller needs none
  std::shared_ptr<IncomingRing> ring;  // null: the request came by `stream`
  SlotId slot;
  Placement placement{};  // where the answer's tensors land, from the request
};

class Link final : public FrameSink, public std::enable_shared_from_this<Link> {
 public:
  /// Makes a link that is not connected. `session`: the session that this link continues; null: the link goes to the
  /// incarnation that answers. The last reference may be dropped on any thread. If that happens inside a channel's use
  /// of its wire, another thread runs the destructor.
  static std::shared_ptr<Link> make(std::shared_ptr<Engine> engine, PeerInfo peer, std::shared_ptr<Session> session);

  // --- as the caller -----------------------------------------------------------------------------------------------
  /// Sends the request now, or when the link is connected; dials if needed. `call->link` must be set already.
  void start(const std::shared_ptr<Call::State>& call, Message message);
  /// Waits until the call has ended; see Call::wait. False: `until` has passed, or `interrupted` returned true.
  bool wait(Call::State& call, std::optional<Clock::time_point> until, const std::function<bool()>& interrupted);
  /// Ends a call with `why` and sends a cancel frame. Does nothing if the call has ended, or if its reply is landing in
  /// the caller's own memory.
  void cancel(const std::shared_ptr<Call::State>& call, const Status& why);
  /// Makes the pool read this call's reply: its caller waits for a completion, so perhaps no thread reads the reply.
  void expect_reply(Call::State& call);
  /// The same for every reply of the link, for a caller that waits for acknowledgements or other calls' replies.
  void expect_replies();
  /// Tries to make `call` the sentinel call: of the calls with lazy completions (Call::Notice::lazy), the one that
  /// the callee must report at once. True: it is the sentinel call now. False: another call is.
  bool become_sentinel(const Call::State& call);
  /// The completion of `call` has run (`completed`) or was claimed. If `call` is the sentinel call, another call may
  /// become it, and if `completed`, the other lazy completions are made prompt.
  void sentinel_ended(const Call::State& call, bool completed);
  /// Polls the slot of a call in the ring, and takes its reply if it has come.
  void poll_ring(Call::State& call);
  /// Spins for the reply of a call in the ring, and takes it; see Call::spin_wait. True: the call has ended.
  bool spin_wait(Call::State& call, std::chrono::nanoseconds at_least);
  /// Acquires credit for `bytes` bytes: blocks until the bytes in flight leave room. A message larger than the bound
  /// goes when nothing else is in flight. DeadlineExceeded after `options.timeout`. Returns Ok on a closed link, whose
  /// calls then fail by themselves.
  Status acquire_credit(std::size_t bytes, const RawCallOptions& options);
  /// Returns the credit for `bytes` bytes, and wakes the threads in acquire_credit().
  void release_credit(std::size_t bytes);

  // --- as the callee -----------------------------------------------------------------------------------------------
  /// Sends the answer to a request. Waits (without blocking) for a probe that the message needs. An answer that cannot
  /// be sent becomes an error.
  void answer(const ReplyRoute& route, Message message);
  /// Sends an error as the answer.
  void refuse(const ReplyRoute& route, const Status& status);
  /// Handles a request that was copied out of the peer's ring. An error closes the link.
  Status on_ring_request(ByteView bytes, SlotId slot);
  /// Sets the callback of Reply::on_cancelled, or runs it at once if the request is cancelled already.
  void on_cancelled(const std::shared_ptr<IncomingRequest>& incoming, UniqueFunction<void()> told);
  /// Marks the request as cancelled, and runs its callback.
  void cancel_incoming(IncomingRequest& incoming);
  /// Removes a request that has been answered or dropped, and starts the next request of its order key.
  void end_incoming(std::uint64_t call, const IncomingRequest& incoming);

  // --- connections ---------------------------------------------------------------------------------------------------
  /// Takes a connection after its handshake and hello, and sends everything that waited for it. `dialled`: this side
  /// dialled it. False: refused, because the link has ended, has such a connection already, or belongs to another
  /// incarnation. `fd` is then left as it was, unless the link ended during the call.
  bool attach(FileDescriptor& fd, bool local, bool dialled, const wire::Hello& hello);
  /// Returns whether the link has a connection on which the peer sends requests.
  [[nodiscard]] bool called() const;
  /// Ends the link, once; later calls do nothing. After ConnectionLost, first takes the replies that the peer gave
  /// before it ended. Then closes all connections and channels, fails the calls in flight with `status`, and cancels
  /// the requests that are being served.
  void close(const Status& status, Loss loss = Loss::connection);
  /// Handles a failed attempt to dial a peer of which no incarnation is known: fails the calls that wait for the
  /// connection, except those with `wait_for_ready`. True: no call waits, and the link has been closed.
  bool unreachable(const Status& why);
  /// Dials, although perhaps no call waits: the session has lost its last link.
  void redial();
  /// Asks before each attempt to dial. False: the attempt is not needed any more, because there is such a connection,
  /// or because the peer has dialled and nothing waits for this connection. Then the next message dials again.
  bool keep_dialling(wire::Hello::Purpose purpose);
  /// Asks the peer to dial the connection that this side cannot dial. False: no connection can carry the question.
  bool ask_to_dial(wire::Hello::Purpose purpose);
  /// The attempt to answer a `dial` frame has ended.
  void dialled_back(wire::Hello::Purpose purpose);
  /// Gives up the bulk connection: fails what waits for it with `why`. The next bulk data dials again.
  void give_up_bulk(const Status& why);
  /// Parts with a session whose peer is dead, unless the link has a connection already. What waits then goes to the
  /// peer's next incarnation. False: the link has a connection, whose end closes it.
  bool leave_session(const Session& dead);
  /// Returns whether the link has a connection.
  [[nodiscard]] bool connected() const;
  /// Returns the session; null if no incarnation of the peer is known yet.
  [[nodiscard]] std::shared_ptr<Session> session() const;
  /// Checks whether the peer has closed its end, and closes this end if so. The next call then goes to the peer's next
  /// incarnation over a new link.
  bool ended_by_peer();
  [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  // --- for ChannelSet ----------------------------------------------------------------------------------------------
  /// Sends a control or release frame on the stream that this side dialled; dials if needed.
  void send_control(Bytes frame, Descriptors descriptors);
  /// Sends a bulk frame and its buffer on the bulk connection that this side dialled; dials if needed.
  void send_bulk(Bytes frame, FrameStream::Part part);
  /// Continues to read the peer's bulk connection: a destination for bulk bytes has been registered.
  void resume_bulk();
  /// Returns whether the peer is connected by unix socket, so that descriptors can travel.
  [[nodiscard]] bool local() const;
  /// Returns the transport of calls to the peer: "ring", "unix" or "tcp". If it is not "ring", sets `why_no_ring`.
  std::string transport(std::string& why_no_ring);
  /// Takes the reply in a slot of the done list: the callee answered while no thread slept on the slot.
  void on_ring_done(SlotId slot);

  // --- for the reactor -----------------------------------------------------------------------------------------------
  /// Runs on the reactor thread about every millisecond. Flushes queued frames, sends acknowledgements, makes lazy
  /// completions prompt, and expires calls. True: something is under way.
  bool tick(Clock::time_point now);
  /// Runs on the reactor thread at least once a second. Sends heartbeats to a peer on another host, and closes the
  /// link after three silent intervals. False: the link has ended.
  bool keep_alive(Clock::time_point now);
  /// Sends goodbye on both calls connections.
  void say_goodbye();
  /// Runs `job` on the pool. False: the pool has been stopped, and drops the job.
  bool run(UniqueFunction<void()> job, bool with_executor);

  /// Handles one frame, on the thread that reads `stream`.
  Result<Taken> on_frame(FrameStream& stream, const wire::Header& header, ByteView body,
                         Descriptors descriptors) override;
  /// Each runs on a pool thread when a connection is readable: the peer's calls connection (on_requests), the peer's
  /// bulk connection (on_bulk_readable), and the two that this side dialled (on_replies, on_bulk_out_readable).
  void on_requests(const std::shared_ptr<FrameStream>& stream);
  void on_bulk_readable(const std::shared_ptr<FrameStream>& stream);
  void on_replies(const std::shared_ptr<FrameStream>& stream);
  void on_bulk_out_readable(const std::shared_ptr<FrameStream>& stream);

  [[nodiscard]] const PeerInfo& peer() const noexcept { return peer_; }  // incarnation 0 until connected
  [[nodiscard]] std::uint64_t incarnation() const noexcept { return incarnation_.load(std::memory_order_acquire); }
  /// Returns the number that tells this link from this agent's other ones, and the peer's number of its end of the link
  /// (0: not known, because the peer has dialled no connection of it).
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  [[nodiscard]] std::uint64_t other_number() const noexcept { return other_number_.load(std::memory_order_acquire); }
  /// Dials if needed, and waits until the link is connected and the peer has accepted or declined the ring.
  /// DeadlineExceeded after `until`; else the link's error.
  Status connect(Clock::time_point until);
  Engine& engine() noexcept { return *engine_; }
  [[nodiscard]] const Engine& engine() const noexcept { return *engine_; }
  ChannelSet& channels() noexcept { return channels_; }
  /// Describes the link for people; see RawAgent::link_state.
  [[nodiscard]] std::string state_text();
  /// Returns how long the calls with `wait_for_ready` that wait for this link may still wait for the peer; 0: none
  /// does.
  [[nodiscard]] Milliseconds patience() const;

 private:
  Link(std::shared_ptr<Engine> engine, PeerInfo peer, std::shared_ptr<Session> session);
  ~Link();

  struct Deferred {
    std::shared_ptr<Call::State> call;
    Message message;
  };

  bool close(const Status& status, Loss loss, bool unless_awaited);
  Status on_dial(ByteView payload);
  void take_last_replies();
  void fail(const std::shared_ptr<Call::State>& call, const Status& why);
  [[nodiscard]] Status status() const;  // Ok, or why the link has ended
  void drop(const Deferred& unsent, const Status& why);

  void send_request(const std::shared_ptr<FrameStream>& stream, const std::shared_ptr<Call::State>& call,
                    Message message);
  bool queued_behind(const std::shared_ptr<Call::State>& call, Message& message, bool waits);
  void send_when_probed(std::uint64_t known, const std::shared_ptr<FrameStream>& stream, Deferred request);
  void send_held(const std::shared_ptr<FrameStream>& stream, Deferred request);
  void send_now(const std::shared_ptr<FrameStream>& stream, const std::shared_ptr<Call::State>& call, Message message,
                bool by_ring);
  void transmit(const std::shared_ptr<FrameStream>& stream, Bytes frame, std::vector<FrameStream::Part> trailing,
                bool flush, Descriptors descriptors = {});
  void wake_connected();
  void finish_writes(const std::shared_ptr<FrameStream>& stream);
  bool read_or_sleep(Call::State& call, std::optional<Clock::time_point> until,
                     const std::function<bool()>& interrupted, bool& slept);
  void read_until_done(Call::State& call, const std::shared_ptr<FrameStream>& stream,
                       std::optional<Clock::time_point> until, const std::function<bool()>& interrupted, bool& stopped);
  void expect_frames();
  void stop_reading(const std::shared_ptr<FrameStream>& stream);
  void nudge();
  std::shared_ptr<FrameStream> outgoing() const;
  std::shared_ptr<FrameStream> only_incoming() const;
  std::vector<std::shared_ptr<FrameStream>> streams() const;

  void on_cancel(std::uint64_t call);
  Status on_request(const wire::Frame& frame, ReplyRoute route);
  Status on_reply(FrameStream* stream, const wire::Frame& frame);

  void offer_ring(const std::shared_ptr<FrameStream>& stream, const wire::Hello& hello);
  Status on_ring(FrameStream& stream, ByteView payload, Descriptors descriptors);
  Status on_ring_offered(const std::shared_ptr<FrameStream>& stream, std::uint64_t nonce, Descriptors descriptors);
  void add_to_pool(const std::shared_ptr<RequestSource>& source);
  void no_ring_because(std::string reason);
  void withdraw_ring();
  [[nodiscard]] bool ring_settled();
  void drop_rings();
  bool send_by_ring(const std::shared_ptr<Call::State>& call, ByteView frame);
  bool wait_in_ring(Call::State& call, std::optional<Clock::time_point> until,
                    const std::function<bool()>& interrupted);
  void expect_lazy(Clock::time_point made_before);
  [[nodiscard]] bool answered(const Call::State& call) const;
  void take_as_waiter(Call::State& call);
  void take_ring_reply(const std::shared_ptr<Call::State>& call);
  Status read_ring_reply(const std::shared_ptr<Call::State>& call);
  void take_ring_replies();
  [[nodiscard]] bool taken_out_of_ring(const Call::State& call) const;
  void send_answer(const ReplyRoute& route, ChannelSet::Built built);
  void dispatch(std::shared_ptr<const RawFunction> function, std::string name, Received arguments, Reply reply);
  void start_in_order(std::uint32_t order, OrderTicket& order_ticket, UniqueFunction<void()> start);
  void end_order_ticket(std::uint32_t order, const OrderTicket& order_ticket);
  void finish(const std::shared_ptr<Call::State>& call, Result<Received> result);
  [[nodiscard]] Status expired(const Call::State& call) const;

  const std::shared_ptr<Engine> engine_;
  PeerInfo peer_;
  std::atomic<std::uint64_t> incarnation_{0};
  const std::uint64_t number_;
  std::atomic<std::uint64_t> other_number_{0};
  ChannelSet channels_;
  PendingCalls pending_;

  mutable std::mutex connect_mutex_;  // guards the connections, and the messages that wait for them
  std::shared_ptr<Session> session_;
  std::shared_ptr<FrameStream> outgoing_, incoming_, bulk_out_, bulk_in_;
  bool dialling_ = false, dialling_bulk_ = false;            // until attach(), or keep_dialling() returns false
  bool attaching_ = false, attaching_bulk_ = false;          // a stream is about to become outgoing_, bulk_out_
  bool dialling_back_ = false, dialling_bulk_back_ = false;  // for a `dial` frame of the peer
  std::deque<Deferred> deferred_;
  std::deque<std::pair<Bytes, FrameStream::Part>> deferred_bulk_;
  std::deque<std::pair<Bytes, Descriptors>> deferred_controls_;
  int connecting_ = 0;  // threads in connect()
  /// By order key: the requests behind one that waits for a probe.
  std::unordered_map<std::uint32_t, std::deque<Deferred>> behind_;
  std::vector<std::shared_ptr<FrameStream>> writing_;  // streams whose writes a pool thread finishes
  FileDescriptor process_;                             // pidfd of a peer on this host
  Status status_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> leaving_{false};  // the peer said goodbye

  std::mutex wait_mutex_;  // guards the choice of the outgoing stream's reader, and the threads that wait to read
  std::vector<Call::State*> waiters_;  // calls whose threads sleep until they may read
  bool armed_ = false;                 // the pool is to read the outgoing stream
  bool missed_ = false;                // the pool met an event while a caller read: arm again for the unread rest
  FileDescriptor nudge_;               // eventfd: wakes a reader out of poll()

  // Calls through shared memory (link_rings.cpp). ring_out_ never changes once ring_ready_ has been true.
  std::shared_ptr<IncomingRing> ring_in_;  // under connect_mutex_
  std::shared_ptr<OutgoingRing> ring_out_;
  std::atomic<bool> ring_ready_{false};
  std::mutex ring_mutex_;  // guards the next four
  std::shared_ptr<CallRing> ring_offered_;
  std::uint64_t ring_nonce_ = 0;
  std::vector<std::weak_ptr<Call::State>> ring_calls_;  // by slot
  std::string ring_reason_;                             // why there is no ring; "": not offered yet

  /// The link whose replies this thread reads while it waits for its own call.
  static inline thread_local const Link* reading_ = nullptr;

  std::atomic<const Call::State*> sentinel_{nullptr};  // the sentinel call
  std::atomic<bool> lazy_{false};  // calls with lazy completions may be in flight besides the sentinel call

  std::mutex numbers_mutex_;
  std::unordered_map<std::string, std::uint32_t> numbers_;  // the callee's function numbers, by name

  std::mutex incoming_calls_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<IncomingRequest>> incoming_calls_;
  std::map<std::uint32_t, std::deque<std::shared_ptr<OrderTicket>>> ordered_;  // by order key; the front one runs

  std::mutex flow_mutex_;
  std::size_t bytes_in_flight_ = 0;
  std::atomic<std::uint32_t> flow_word_{0};

  std::atomic<std::uint64_t> bulk_resumes_{0};  // destinations registered so far for bulk bytes
  std::atomic<bool> bulk_held_{false};          // the bulk connection waits for a destination
  std::atomic<Clock::rep> last_flush_{0}, last_expiry_{0};

  // Used by the reactor thread alone, in keep_alive().
  Clock::time_point last_look_, last_pinged_;
  std::uint64_t received_at_last_look_ = 0, taken_at_last_look_ = 0;
  Clock::duration silent_{0};  // without the time during which this process was stopped
};

}  // namespace tensorferry
