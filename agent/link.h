/// A link: this agent's end of everything that it shares with one peer. It has a stream for each direction of calling,
/// a bulk connection for each direction, the channels of each device pair, and the calls in flight (OutgoingCalls).
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

#include "agent/channel_set.h"
#include "agent/credits.h"
#include "agent/engine.h"
#include "agent/incoming_calls.h"
#include "agent/link_rings.h"
#include "agent/outgoing_calls.h"
#include "agent/session.h"
#include "agent/transport/bulk_streams.h"
#include "agent/transport/frame_stream.h"
#include "base/mutex.h"

namespace tensorferry {

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
  /// Adds the call to calls(), and sends its request now, or when the link is connected; dials if needed. `call->link`
  /// must be set already.
  void start(const std::shared_ptr<Call::State>& call, Message message);
  /// Acquires credit for `bytes` bytes; see Credits. DeadlineExceeded after `options.timeout`.
  Status acquire_credit(std::size_t bytes, const RawCallOptions& options);
  Credits& credits() noexcept { return credits_; }

  // --- as the callee -----------------------------------------------------------------------------------------------
  /// Sends the answer to a request. Waits (without blocking) for a probe that the message needs. An answer that cannot
  /// be sent becomes an error.
  void answer(const ReplyRoute& route, Message message);
  /// Sends an error as the answer.
  void refuse(const ReplyRoute& route, const Status& status);
  /// Handles a request that was copied out of the peer's ring. An error closes the link.
  Status on_ring_request(ByteView bytes, SlotId slot);
  /// The handler of a request begins at `now`.
  void begin(IncomingRequest& incoming, Clock::time_point now);
  /// A request is answered after its caller had given up.
  void answered_late(const IncomingRequest& incoming);
  /// Removes a request that has been answered or dropped.
  void end_incoming(std::uint64_t call, IncomingRequest& incoming);
  IncomingCalls& incoming_calls() noexcept { return incoming_calls_; }
  UntakenReplies& untaken_replies() noexcept { return untaken_replies_; }

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
  /// Sends a control or release frame on the stream that this side dialled; dials if needed. The two halves of it:
  /// queue_control() only queues the frame, and write_controls() writes what is queued. Neither runs a completion on
  /// this thread, because channels send messages while they hold locks.
  void send_control(Bytes frame, Descriptors descriptors);
  void queue_control(Bytes frame, Descriptors descriptors);
  void write_controls();
  /// Sends a bulk frame and its buffer on a bulk connection of this side's; dials one if there is none, and another one
  /// if all are busy.
  void send_bulk(Bytes frame, FrameStream::Part part);
  /// Continues to read the peer's bulk connections: a destination for bulk bytes has been registered.
  void resume_bulk();
  /// Returns whether the peer is connected by unix socket, so that descriptors can travel.
  [[nodiscard]] bool local() const;
  /// Returns the transport of calls to the peer: "ring", "unix" or "tcp". If it is not "ring", sets `why_no_ring`.
  std::string transport(std::string& why_no_ring);

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
  /// bulk connection (on_bulk_readable), and the two that this side dialled (on_replies, on_bulk_out_readable). For
  /// on_replies see ReplyReader::on_readable.
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
  OutgoingCalls& calls() noexcept { return calls_; }

  // --- for OutgoingCalls and its parts -------------------------------------------------------------------------------
  /// Returns the stream of requests that this side dialled; null until it is connected.
  [[nodiscard]] std::shared_ptr<FrameStream> outgoing() const;
  /// Sends a frame on `stream`; `flush` false: the tick, or a later frame, may do it. A pool thread writes what the
  /// socket does not take at once.
  void transmit(const std::shared_ptr<FrameStream>& stream, Bytes frame, std::vector<FrameStream::Part> trailing,
                bool flush, Descriptors descriptors = {});
  /// Makes a pool thread write the rest after the socket was full, so that no caller waits for a slow peer.
  void finish_writes(const std::shared_ptr<FrameStream>& stream);
  /// Returns whether the peer has accepted or declined the ring, or none can be offered.
  [[nodiscard]] bool ring_settled();
  /// Returns Ok, or why the link has ended.
  [[nodiscard]] Status status() const;

  /// Describes the link for people; see RawAgent::link_state.
  [[nodiscard]] std::string state_text();
  /// Returns how long the calls with `wait_for_ready` that wait for this link may still wait for the peer; 0: none
  /// does.
  [[nodiscard]] Milliseconds patience() const;

 private:
  Link(std::shared_ptr<Engine> engine, PeerInfo peer, std::shared_ptr<Session> session);
  ~Link();

  bool close(const Status& status, Loss loss, bool unless_awaited);
  Status on_dial(ByteView payload);
  void take_last_replies();
  std::shared_ptr<FrameStream> only_incoming() const;
  std::shared_ptr<FrameStream> incoming() const;
  std::vector<std::shared_ptr<FrameStream>> streams() const;
  bool claim_another_bulk_dial();
  bool go_on_writing(const std::shared_ptr<FrameStream>& stream);
  void write_bulk(const std::shared_ptr<FrameStream>& stream, Bytes frame, FrameStream::Part part);
  void complete_apart(std::vector<FrameStream::Written> written);

  void tell_status(const std::shared_ptr<FrameStream>& stream, std::uint64_t call);
  Status on_request(const wire::Frame& frame, ReplyRoute route);
  Status refuse_request(FrameStream* stream, const wire::Frame& frame, const ReplyRoute& route, const Status& why);
  void arm_requests(const FrameStream& stream);
  void pause_handlers(bool pause);
  void hold_requests();
  void resume_requests();

  void offer_ring(const std::shared_ptr<FrameStream>& stream, const wire::Hello& hello);
  Status on_ring(FrameStream& stream, ByteView payload, Descriptors descriptors);
  Status on_ring_offered(const std::shared_ptr<FrameStream>& stream, std::uint64_t nonce, Descriptors descriptors);
  void add_to_pool(const std::shared_ptr<RequestSource>& source);
  void no_ring_because(std::string reason);
  void withdraw_ring();
  void drop_rings();
  [[nodiscard]] std::shared_ptr<CallRecord> record_of(const wire::Frame& frame, const std::string& function,
                                                      const ReplyRoute& route) const;
  void send_answer(const ReplyRoute& route, ChannelSet::Built built);
  bool admit(const wire::IdempotencyKey& key, const std::shared_ptr<IncomingRequest>& incoming, Reply& reply);
  void dispatch(std::shared_ptr<const RawFunction> function, std::string name, Received arguments,
                std::shared_ptr<IncomingRequest> incoming, Reply reply);

  const std::shared_ptr<Engine> engine_;
  PeerInfo peer_;
  std::atomic<std::uint64_t> incarnation_{0};
  const std::uint64_t number_;
  std::atomic<std::uint64_t> other_number_{0};
  ChannelSet channels_;
  OutgoingCalls calls_;
  Credits credits_;
  IncomingCalls incoming_calls_;
  UntakenReplies untaken_replies_;
  std::atomic<bool> requests_held_{false};    // the peer's requests are not read: it reads no replies
  std::atomic<bool> requests_missed_{false};  // the pool met an event while a thread read the requests: arm again

  mutable Mutex connect_mutex_;  // guards the connections, and the messages that wait for them
  std::shared_ptr<Session> session_;
  std::shared_ptr<FrameStream> outgoing_, incoming_;
  BulkStreams bulk_;
  bool dialling_ = false, dialling_bulk_ = false;            // until attach(), or keep_dialling() returns false
  bool attaching_ = false, attaching_bulk_ = false;          // a stream is about to become outgoing_, one of bulk_.out
  bool dialling_back_ = false, dialling_bulk_back_ = false;  // for a `dial` frame of the peer
  std::deque<UnsentCall> deferred_;
  std::deque<std::pair<Bytes, FrameStream::Part>> deferred_bulk_;  // for the next connection of bulk_.out that is free
  std::deque<std::pair<Bytes, Descriptors>> deferred_controls_;
  int connecting_ = 0;                                 // threads in connect()
  std::vector<std::shared_ptr<FrameStream>> writing_;  // streams whose writes a pool thread finishes
  FileDescriptor process_;                             // pidfd of a peer on this host
  Status status_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> leaving_{false};  // the peer said goodbye

  // Calls through shared memory (link_rings.cpp); the outgoing ring is in calls_, once the peer has accepted it.
  std::shared_ptr<IncomingRing> ring_in_;  // under connect_mutex_
  Mutex ring_mutex_;                       // guards the next three
  std::shared_ptr<CallRing> ring_offered_;
  std::uint64_t ring_nonce_ = 0;
  std::string ring_reason_;  // why there is no ring; "": not offered yet

  std::atomic<std::uint64_t> bulk_resumes_{0};  // destinations registered so far for bulk bytes

  // Used by the reactor thread alone, in keep_alive().
  Clock::time_point last_look_, last_pinged_;
  std::uint64_t received_at_last_look_ = 0, taken_at_last_look_ = 0;
  Clock::duration silent_{0};  // without the time during which this process was stopped
};

}  // namespace tensorferry
