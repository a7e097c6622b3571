/// One peer: a stream for each direction of calling, bulk connections, the channels of each device pair, and the calls
/// in flight.
///
/// Each direction has a stream of its own, dialled by the caller on first use: only callers read its replies (the pool,
/// where none of them waits), only the pool's leader reads its requests; so a thread that waits for a reply never runs
/// a handler. A link belongs to one incarnation of its peer and ends with it.
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
#include "agent/engine.h"
#include "agent/futex.h"
#include "agent/link_rings.h"
#include "agent/pairs.h"
#include "agent/pending_calls.h"
#include "agent/transport/frame_stream.h"

namespace tensorferry {

/// A place in the order of calls that share an order key.
struct Turn {
  UniqueFunction<void()> start;  // empty until the request has landed
};

/// A request that has not been answered, as the callee sees it.
struct Serving {
  std::atomic<bool> cancelled{false};
  UniqueFunction<void()> told;  // Reply::on_cancelled's; under the link's serving_mutex_
  std::optional<Clock::time_point> deadline;
  std::uint32_t order = 0;
  std::shared_ptr<Turn> turn;  // where order is not 0
};

/// How the answer to a request goes back.
struct AnswerWay {
  std::shared_ptr<FrameStream> stream;
  std::uint64_t call = 0;
  std::uint32_t tell_number = 0;       // 0: the caller has it
  std::shared_ptr<IncomingRing> ring;  // null: the request came by `stream`
  SlotId slot;
  Placement placement{};  // of the answer's tensors, as the request has it
};

class Link final : public FrameSink, public std::enable_shared_from_this<Link> {
 public:
  /// May be let go of anywhere; where that is inside a use of a channel's wire, another thread destroys the link.
  static std::shared_ptr<Link> make(std::shared_ptr<Engine> engine, PeerInfo peer);

  // --- as the caller -----------------------------------------------------------------------------------------------
  /// Sends the request now, or when the link is up. The state's `link` is set already.
  void start(const std::shared_ptr<Call::State>& call, Message message);
  bool wait(Call::State& call, std::optional<Clock::time_point> until, const std::function<bool()>& interrupted);
  /// Ends a call here with `why` and tells the peer; nothing where its reply is landing in the caller's own memory.
  void cancel(const std::shared_ptr<Call::State>& call, const Status& why);
  /// Something waits for a reply, or for what it says of other calls, that perhaps nobody reads: the pool shall.
  void expect_reply(Call::State& call);
  void expect_replies();
  /// Of the calls whose completions are not urgent one is watched for all (Call::Notice::relaxed). True: it is this
  /// one.
  bool scouts(const Call::State& call);
  /// Its completion has run, or been claimed: the next one may scout.
  void scout_returned(const Call::State& call, bool completed);
  /// Takes the call's answer where it has come into shared memory and nobody has looked.
  void look(Call::State& call);
  bool look_for_a_while(Call::State& call, std::chrono::nanoseconds at_least);
  /// Waits until the bytes in flight leave room. DeadlineExceeded; the link's error.
  Status admit(std::size_t bytes, const RawCallOptions& options);
  void discharged(std::size_t bytes);

  // --- as the callee -----------------------------------------------------------------------------------------------
  void answer(const AnswerWay& way, Message message);
  void refuse(const AnswerWay& way, const Status& status);
  Status on_ring_request(ByteView bytes, SlotId slot);
  void on_cancelled(const std::shared_ptr<Serving>& serving, UniqueFunction<void()> told);
  void cancel_serving(Serving& serving);
  /// The request has been answered, or dropped: the next of its order key may run.
  void served(std::uint64_t call, const Serving& serving);

  // --- connections ---------------------------------------------------------------------------------------------------
  /// Takes a greeted connection whose hello has been read. `dialled`: by this side. False: not wanted, because the link
  /// has ended, or has one already, or is of another incarnation; `fd` is left as it is, unless the link ended
  /// meanwhile.
  bool attach(FileDescriptor& fd, bool local, bool dialled, const wire::Hello& hello);
  /// Its peer's requests come here.
  [[nodiscard]] bool called() const;
  void close(const Status& status);
  /// The peer could not be reached: fails what was to be sent to it, but for calls that wait for it to come. True:
  /// there are none, and the link has been closed.
  bool unreachable(const Status& why);
  /// The peer has closed its end, perhaps just now: closes this one. A call made after that goes to the peer's next
  /// life.
  bool ended_by_peer();
  [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

  // --- for Pairs
  // -------------------------------------------------------------------------------------------------------
  void send_control(Bytes frame, Descriptors descriptors);
  void send_bulk(Bytes frame, FrameStream::Part part);
  void resume_bulk();
  /// Descriptors can travel to this peer.
  [[nodiscard]] bool local() const;
  /// "ring", "unix", "tcp": what carries calls to the peer; and why not the first.
  std::string transport(std::string& why_no_ring);
  void on_ring_done(SlotId slot);

  // --- for the housekeeping
  // --------------------------------------------------------------------------------------------
  /// Flushes, expires, keeps alive. True: something is under way.
  bool tick(Clock::time_point now);
  bool keep_alive(Clock::time_point now);
  void say_goodbye();
  /// Runs `job` on the pool; false: there is none any more.
  bool run(UniqueFunction<void()> job, bool with_executor);

  Result<Taken> on_frame(FrameStream& stream, const wire::Header& header, ByteView body,
                         Descriptors descriptors) override;
  /// The pool found one of the link's connections readable: one on which the peer calls or sends bulk data, or one that
  /// this side dialled.
  void on_requests(const std::shared_ptr<FrameStream>& stream);
  void on_bulk_readable(const std::shared_ptr<FrameStream>& stream);
  void on_replies(const std::shared_ptr<FrameStream>& stream);
  void on_bulk_out_readable(const std::shared_ptr<FrameStream>& stream);

  [[nodiscard]] const PeerInfo& peer() const noexcept { return peer_; }  // incarnation 0 until connected
  [[nodiscard]] std::uint64_t incarnation() const noexcept { return incarnation_.load(std::memory_order_acquire); }
  /// Waits until connected (dialling where nobody does) and until it is settled whether calls go through shared memory.
  /// The link's error otherwise.
  Status connect(Clock::time_point until);
  Engine& engine() noexcept { return *engine_; }
  [[nodiscard]] const Engine& engine() const noexcept { return *engine_; }
  Pairs& pairs() noexcept { return pairs_; }
  /// See RawAgent::link_state.
  [[nodiscard]] std::string state_text();
  /// How long the calls that wait for this link are ready to wait for its peer to come.
  [[nodiscard]] Milliseconds patience() const;

 private:
  Link(std::shared_ptr<Engine> engine, PeerInfo peer);
  ~Link();

  struct Deferred {
    std::shared_ptr<Call::State> call;
    Message message;
  };

  bool close(const Status& status, bool unless_awaited);
  void take_last_replies();
  void fail(const std::shared_ptr<Call::State>& call, const Status& why);
  [[nodiscard]] Status status() const;  // why it has ended
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
  Status on_request(const wire::Frame& frame, AnswerWay way);
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
  void expect_relaxed(Clock::time_point made_before);
  [[nodiscard]] bool answered(const Call::State& call) const;
  void take_as_waiter(Call::State& call);
  void take_ring_reply(const std::shared_ptr<Call::State>& call);
  Status read_ring_reply(const std::shared_ptr<Call::State>& call);
  void take_ring_replies();
  [[nodiscard]] bool taken_out_of_ring(const Call::State& call) const;
  void send_answer(const AnswerWay& way, Pairs::Built built);
  void dispatch(std::shared_ptr<const Function> function, std::string name, Received arguments, Reply reply);
  void take_turn(std::uint32_t order, Turn& turn, UniqueFunction<void()> start);
  void end_turn(std::uint32_t order, const Turn& turn);
  void finish(const std::shared_ptr<Call::State>& call, Result<Received> result);
  [[nodiscard]] Status expired(const Call::State& call) const;

  const std::shared_ptr<Engine> engine_;
  PeerInfo peer_;
  std::atomic<std::uint64_t> incarnation_{0};
  Pairs pairs_;
  PendingCalls pending_;

  mutable std::mutex connect_mutex_;  // guards the connections and what waits for them
  std::shared_ptr<FrameStream> outgoing_, incoming_, bulk_out_, bulk_in_;
  bool dialling_ = false, dialling_bulk_ = false;
  std::deque<Deferred> deferred_;
  std::deque<std::pair<Bytes, FrameStream::Part>> deferred_bulk_;
  std::deque<std::pair<Bytes, Descriptors>> deferred_controls_;
  /// By order key: what was sent behind a request that waits for a probe.
  std::unordered_map<std::uint32_t, std::deque<Deferred>> behind_;
  std::vector<std::shared_ptr<FrameStream>> writing_;  // a pool thread finishes their writes
  FileDescriptor process_;                             // pidfd of a peer on this host
  Status status_;
  std::atomic<bool> closed_{false};
  std::atomic<bool> leaving_{false};  // the peer said goodbye

  std::mutex wait_mutex_;  // guards who reads the outgoing stream, and who waits for it
  std::vector<Call::State*> waiters_;
  bool armed_ = false;
  bool missed_ = false;   // the pool was told of something while a caller read, and is to be told again
  FileDescriptor nudge_;  // eventfd: calls a reader out of poll()

  // Calls through shared memory (link_rings.cpp). ring_out_ never changes once ring_ready_ has been true.
  std::shared_ptr<IncomingRing> ring_in_;  // under connect_mutex_
  std::shared_ptr<OutgoingRing> ring_out_;
  std::atomic<bool> ring_ready_{false};
  std::mutex ring_mutex_;  // guards the rest
  std::shared_ptr<CallRing> ring_offered_;
  std::uint64_t ring_nonce_ = 0;
  std::vector<std::weak_ptr<Call::State>> ring_calls_;  // by slot
  std::string ring_reason_;                             // "": it has not been offered yet

  /// The link whose replies this thread takes for a call of its own.
  static inline thread_local const Link* reading_ = nullptr;

  std::atomic<const Call::State*> scout_{nullptr};
  std::atomic<bool> relaxed_{false};  // perhaps calls are in flight whose completions are not watched for

  std::mutex numbers_mutex_;
  std::unordered_map<std::string, std::uint32_t> numbers_;  // the callee's, by function name

  std::mutex serving_mutex_;
  std::unordered_map<std::uint64_t, std::shared_ptr<Serving>> serving_;
  std::map<std::uint32_t, std::deque<std::shared_ptr<Turn>>> ordered_;  // by order key; the front one runs

  std::mutex flow_mutex_;
  std::size_t bytes_in_flight_ = 0;
  std::atomic<std::uint32_t> flow_word_{0};

  std::atomic<std::uint64_t> bulk_resumes_{0};  // destinations that have been given for bulk bytes
  std::atomic<bool> bulk_held_{false};          // the bulk connection waits for one
  std::atomic<Clock::rep> last_heard_{0}, last_flush_{0}, last_expiry_{0};

  // The housekeeping thread's, in keep_alive().
  Clock::time_point last_look_, last_pinged_;
  Clock::rep heard_at_last_look_ = 0;
  Clock::duration silent_{0};  // without the time that this process slept through
};

}  // namespace tensorferry
