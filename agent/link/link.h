/// A link: this agent's end of everything that it shares with one peer. It has one connection for the calls of both
/// directions, up to four bulk connections for each direction, the channels of each device pair, and the calls in
/// flight.
///
/// Either side dials at its first call. StreamReader says which thread reads the connection for calls; handlers run on
/// the pool. A link belongs to one incarnation of its peer, and to its session (agent/connections/session.h): if the
/// link is lost, the session's next link dials again.
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

#include "agent/buffers/channel_link.h"
#include "agent/buffers/channel_set.h"
#include "agent/calls/credits.h"
#include "agent/calls/incoming_calls.h"
#include "agent/calls/outgoing_calls.h"
#include "agent/calls/rings.h"
#include "agent/calls/stream_reader.h"
#include "agent/connections/connections.h"
#include "agent/connections/session.h"
#include "agent/link/dial_link.h"
#include "agent/link/engine.h"
#include "agent/observing/agent_metrics.h"
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

/// Returns the user at the other end of a connection, as the kernel tells; nullopt: the kernel does not know.
std::optional<uid_t> user_at_the_other_end(const StreamPort& port);

/// The bytes that may wait for the connection for calls. While there are more, no further handler of the peer's
/// requests starts. At twice as many, beside what this side's own calls may have in flight, the link ends.
inline constexpr std::size_t most_unread = std::size_t{64} << 20;

/// ConnectionLost: there is no connected link to that peer.
Status no_link_to(std::string_view peer);

class Link final : public FrameSink,
                   public ChannelLink,
                   public ReadLink,
                   public CallLink,
                   public ConnectedLink,
                   public RingLink,
                   public DialLink,
                   public HandleLink,
                   public TickedLink,
                   public std::enable_shared_from_this<Link> {
 public:
  /// Makes a link that is not connected. `session`: the session that this link continues; null: the link goes to the
  /// incarnation that answers. The last reference may be dropped on any thread. If that happens inside a channel's use
  /// of its wire, another thread runs the destructor.
  static std::shared_ptr<Link> make(std::shared_ptr<Engine> engine, PeerInfo peer, std::shared_ptr<Session> session);

  // --- as the caller -----------------------------------------------------------------------------------------------
  /// Adds the call to calls(), and sends its request now, or when the link is connected; dials if needed. `call->link`
  /// must be set already. If there is no memory, the call fails with ResourceExhausted, and maybe the link with it.
  void start(const std::shared_ptr<Call::State>& call, Message message);
  /// Acquires credit for `bytes` bytes; see Credits. DeadlineExceeded after `options.timeout`.
  Status acquire_credit(std::size_t bytes, const RawCallOptions& options);

  // --- as the callee -----------------------------------------------------------------------------------------------
  /// Sends the answer to a request. Waits (without blocking) for a probe that the message needs. An answer that cannot
  /// be sent becomes an error.
  void answer(const ReplyRoute& route, Message message);
  /// Sends an error as the answer.
  void refuse(const ReplyRoute& route, const Status& status);
  /// The handler of a request begins at `now`.
  void begin(IncomingRequest& incoming, Clock::time_point now);
  /// Adds the record of a request that is about to be answered. The caller may end its recording when the answer comes.
  void record_answer(const IncomingRequest& incoming);
  /// A request is answered after its caller had given up.
  void answered_late(const IncomingRequest& incoming);
  /// Removes a request that has been answered or dropped.
  void end_incoming(std::uint64_t call, IncomingRequest& incoming);
  IncomingCalls& incoming_calls() noexcept { return incoming_calls_; }
  UntakenReplies& untaken_replies() noexcept { return untaken_replies_; }

  // --- connections ---------------------------------------------------------------------------------------------------
  /// Takes a connection, and sends everything that waited for it. False: refused, as by Connections::attach.
  /// `connection` is then left as it was, unless the link ended during the call. For Peers::admit.
  bool attach(Connected& connection);
  /// Ends the link, once; later calls do nothing. After ConnectionLost, first takes the replies that the peer gave
  /// before it ended. Then closes all connections and channels, fails the calls in flight with `status`, and cancels
  /// the requests that are being served.
  void close(const Status& status, Loss loss = Loss::connection);
  /// Ends the link because the peer has closed a connection or its ring. Waits a moment for the end of the peer's
  /// process on this host, which is the reason then. Not for the reactor thread.
  void close_after_peer(const Status& status) noexcept override;
  /// Checks whether the peer has closed its end, and closes this end if so. The next call then goes to the peer's next
  /// incarnation over a new link.
  bool ended_by_peer();
  /// Returns whether the peer has said that it leaves the job.
  [[nodiscard]] bool left_by_peer() const noexcept { return leaving_; }
  [[nodiscard]] bool closed() const noexcept override { return connections_.closed(); }

  // --- ChannelLink ---------------------------------------------------------------------------------------------------
  void queue_control(Bytes frame, Descriptors descriptors) override {
    connections_.queue_control(std::move(frame), std::move(descriptors));
  }
  void write_controls() override { connections_.write_controls(); }
  void send_bulk(Bytes frame, FrameStream::Part part) override {
    connections_.send_bulk(std::move(frame), std::move(part));
  }
  [[nodiscard]] bool splits_bulk() const override { return connections_.splits_bulk(); }
  void resume_bulk() override { connections_.resume_bulk(); }
  [[nodiscard]] std::size_t bulk_connections_in() const override { return connections_.bulk_connections_in(); }
  [[nodiscard]] bool local() const override { return connections_.local(); }
  void fail(const Status& why) override { close(why); }
  bool run(UniqueFunction<void()> job) override { return run(std::move(job), false); }
  bool run_long(UniqueFunction<void()> job) override;
  std::shared_ptr<void> hold() override { return shared_from_this(); }

  // --- ConnectedLink -------------------------------------------------------------------------------------------------
  void start_dial(wire::Hello::Purpose purpose) override { engine_->dial(shared_from_this(), purpose); }
  std::uint64_t next_connection() override { return engine_->peers.next_connection(); }

  // --- HandleLink ----------------------------------------------------------------------------------------------------
  bool run(UniqueFunction<void()> job, bool with_executor) override;
  [[nodiscard]] bool inherited() const noexcept override { return engine_->inherited(); }
  [[nodiscard]] Status used_after_fork() const override { return engine_->used_after_fork(); }

  // --- DialLink ------------------------------------------------------------------------------------------------------
  void give_up(const Status& why, Loss loss) override { close(why, loss); }
  bool unreachable(const Status& why, bool may_answer) override;

  // --- RingLink ------------------------------------------------------------------------------------------------------
  [[nodiscard]] bool needs_executor(std::uint32_t number) const override;
  Status on_ring_request(ByteView bytes, SlotId slot) override;
  void on_ring_reply(SlotId slot) override { calls_.ring().on_done(slot); }

  // --- ReadLink ------------------------------------------------------------------------------------------------------
  [[nodiscard]] std::shared_ptr<FrameStream> stream() const override { return connections_.call_stream(); }
  FrameSink& sink() override { return *this; }
  void expire(Call::State& call) override { calls_.expire(call.shared_from_this()); }
  void progress_until_done(const Call::State& call) override {
    channels_.progress_until([&] { return call.done(); });
  }

  /// Returns the transport of calls to the peer: "ring", "unix" or "tcp". If it is not "ring", sets `why_no_ring`.
  std::string transport(std::string& why_no_ring);

  // --- for the reactor -----------------------------------------------------------------------------------------------
  void activate() override;
  /// Runs on the reactor thread while the link is active. Flushes queued frames, sends acknowledgements, makes lazy
  /// completions prompt, and expires calls.
  Pace tick(Clock::time_point now) override;
  bool stay_active() noexcept override { return !active_.exchange(true, std::memory_order_seq_cst); }
  /// Runs on the reactor thread at least once a second. Sends heartbeats to a peer on another host, and closes the
  /// link after three silent intervals. False: the link has ended.
  bool keep_alive(Clock::time_point now);
  void say_goodbye() { connections_.say_goodbye(); }

  /// Handles one frame, on the thread that reads `stream`.
  Result<Taken> on_frame(FrameStream& stream, const wire::Header& header, ByteView body,
                         Descriptors descriptors) override;
  /// Runs on a pool thread when a connection is readable.
  void on_readable(ConnectionRole role, const std::shared_ptr<FrameStream>& stream);

  [[nodiscard]] const PeerInfo& peer() const noexcept override { return connections_.peer(); }
  [[nodiscard]] std::uint64_t incarnation() const noexcept { return connections_.incarnation(); }
  [[nodiscard]] std::shared_ptr<Session> session() const override { return connections_.session(); }
  /// See RawAgent::check_process.
  [[nodiscard]] Status check_process(std::int32_t pid) const;
  /// Dials if needed, and waits until the link is connected and the peer has accepted or declined the ring.
  /// DeadlineExceeded after `until`; else the link's error.
  Status connect(Clock::time_point until);
  [[nodiscard]] Clock::time_point now() const { return engine_->clock.now(); }
  Connections& connections() noexcept override { return connections_; }
  [[nodiscard]] const Connections& connections() const noexcept { return connections_; }
  ChannelSet& channels() noexcept { return channels_; }
  OutgoingCalls& calls() noexcept override { return calls_; }

  // --- CallLink ------------------------------------------------------------------------------------------------------
  [[nodiscard]] std::shared_ptr<FrameStream> outgoing() const override { return connections_.call_stream_if_up(); }
  void transmit(const std::shared_ptr<FrameStream>& stream, Bytes frame, std::vector<FrameStream::Part> trailing,
                bool flush, Descriptors descriptors) override;
  /// Returns whether the peer has accepted or declined the ring, or none can be offered.
  [[nodiscard]] bool ring_settled();
  [[nodiscard]] Status status() const override { return connections_.status(); }

  /// Describes the link for people; see RawAgent::link_state.
  [[nodiscard]] std::string state_text();
  /// Describes the link for RawAgent::metrics().
  [[nodiscard]] LinkMetrics metrics();
  /// Adds an event of this link to the agent's flight recorder and, at its level info, to the log.
  void note(std::string_view event) override;

 private:
  Link(std::shared_ptr<Engine> engine, PeerInfo peer, std::shared_ptr<Session> session);
  ~Link();

  bool close(const Status& status, Loss loss, bool unless_awaited);
  void end_all_work(Connections::Remains& remains, const Status& why, Loss loss);
  void take_last_replies();
  void on_bulk_out_readable(const std::shared_ptr<FrameStream>& stream);

  void tell_status(const std::shared_ptr<FrameStream>& stream, std::uint64_t call);
  Status on_request(const wire::Frame& frame, ReplyRoute route);
  Status refuse_request(FrameStream* stream, const wire::Frame& frame, const ReplyRoute& route, const Status& why);
  [[nodiscard]] Status busy(const Status& why) const;
  void cancel_incoming(std::uint64_t call);
  void pause_handlers(bool pause);
  void hold_requests();
  void resume_requests();

  void want_ring();
  void offer_ring(const std::shared_ptr<FrameStream>& stream);
  Status on_ring(FrameStream& stream, ByteView payload, Descriptors descriptors);
  Status on_ring_offered(const std::shared_ptr<FrameStream>& stream, std::uint64_t nonce, Descriptors descriptors);
  void add_to_pool(const std::shared_ptr<RequestSource>& source);
  void no_ring_because(std::string reason);
  void withdraw_ring();
  void drop_rings();
  [[nodiscard]] std::shared_ptr<CallRecord> record_of(const wire::Frame& frame, const std::string& function,
                                                      const ReplyRoute& route) const;
  void send_answer(const ReplyRoute& route, ChannelSet::Built built, bool at_once);
  void dispatch(std::shared_ptr<const RawFunction> function, std::string name, Received arguments,
                std::shared_ptr<IncomingRequest> incoming, Reply reply);

  const std::shared_ptr<Engine> engine_;
  Connections connections_;
  StreamReader reader_;
  ChannelSet channels_;
  OutgoingCalls calls_;
  Credits credits_;
  IncomingCalls incoming_calls_;
  UntakenReplies untaken_replies_;
  LinkCounters counters_;
  std::atomic<bool> requests_held_{false};   // no handler of the peer's starts: it reads no replies. Under rings_.mutex
  std::atomic<bool> refused_unread_{false};  // the link is about to end, because the peer reads nothing
  std::atomic<bool> leaving_{false};         // the peer said goodbye
  std::atomic<bool> active_{false};          // the engine's tick ticks this link

  /// How the two sides agree on calls through shared memory (link_rings.cpp). Once the peer has accepted this side's
  /// ring, calls_ has it.
  struct Rings {
    std::atomic<bool> wanted{false};     // this side has made a call
    std::atomic<bool> peer_maps{false};  // the peer can map rings
    Mutex mutex;                         // guards the members below
    std::shared_ptr<IncomingRing> in;
    std::shared_ptr<CallRing> offered;
    std::uint64_t nonce = 0;  // of the offer
    bool begun = false;       // this side has offered one
    bool was_offered = false;
    std::string reason;  // why there is no ring; "": not offered yet
  };
  Rings rings_;
};

}  // namespace tensorferry
