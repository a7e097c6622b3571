/// The calls that this side of a link has made and that have not ended: sends their requests, takes their replies, and
/// ends them.
///
/// A call ends once: the reply, its deadline, a cancel and the end of the link compete to take it out of the table of
/// pending calls; the winner completes it. docs/architecture.md draws the states of a call.
///
/// Threads: any. Completions run under no lock of the link's.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "agent/call_state.h"
#include "agent/calls/lazy_completions.h"
#include "agent/calls/pending_calls.h"
#include "agent/calls/ring_calls.h"
#include "agent/connections/connections.h"
#include "agent/connections/unsent_messages.h"
#include "agent/pool/pace.h"
#include "agent/transport/frame_stream.h"
#include "agent/wire/frame.h"
#include "base/mutex.h"

namespace tensorferry {

class AgentDrivers;
class CallTrace;
class ChannelSet;
class Credits;
class Session;
class StreamReader;
struct AgentCounters;
struct LinkCounters;

/// A link, as the calls that are made on it see it. Threads: any.
class CallLink {
 public:
  [[nodiscard]] virtual bool closed() const noexcept = 0;
  /// Returns Ok, or why the link has ended.
  [[nodiscard]] virtual Status status() const = 0;
  /// Ends the link.
  virtual void fail(const Status& why) = 0;
  [[nodiscard]] virtual const PeerInfo& peer() const noexcept = 0;
  /// Returns whether the peer is connected by unix socket.
  [[nodiscard]] virtual bool local() const = 0;
  [[nodiscard]] virtual std::shared_ptr<Session> session() const = 0;
  /// Returns the connection's stream if requests may go by it; null until it is up.
  [[nodiscard]] virtual std::shared_ptr<FrameStream> outgoing() const = 0;
  /// Connections::transmit(). If the peer leaves too much unread, lets no further handler of its requests start.
  virtual void transmit(const std::shared_ptr<FrameStream>& stream, Bytes frame,
                        std::vector<FrameStream::Part> trailing, bool flush, Descriptors descriptors) = 0;
  /// Makes the reactor tick the link.
  virtual void activate() = 0;
  /// Returns what keeps the link as long as it is held.
  virtual std::shared_ptr<void> hold() = 0;

 protected:
  ~CallLink() = default;
};

/// The parts of a link and of its agent that its calls use. What it names outlives them.
struct CallSurroundings {
  CallLink& link;
  ChannelSet& channels;
  StreamReader& reader;
  Connections& connections;
  Credits& credits;
  LinkCounters& of_link;
  AgentCounters& counters;
  CallTrace& trace;
  const AgentDrivers& drivers;
  const PeerInfo& self;
  Pool& pool;
  const Clock& clock;
};

class OutgoingCalls final : public ConnectionCalls, private RingCallsOwner {
 public:
  explicit OutgoingCalls(const CallSurroundings& around);

  /// Adds the call that carries `message`. From now on its deadline ends it, also while it waits for a connection.
  void add(const std::shared_ptr<Call::State>& call, const Message& message);
  /// Sends the request of a call that has been added: now, or when a probe that it needs has ended, or behind the
  /// earlier request of its order key that waits for a probe.
  void send(const std::shared_ptr<FrameStream>& stream, const std::shared_ptr<Call::State>& call,
            Message message) override;
  /// Tells the callee if the call, whose request has been sent, was cancelled or has expired. The thread that ends a
  /// call tells it by the link's stream, and does not if the link has none yet.
  void tell_if_given_up(const std::shared_ptr<FrameStream>& stream, const Call::State& call) override;
  /// Waits until the call has ended; see Call::wait. False: `until` has passed, or `interrupted` returned true.
  bool wait(Call::State& call, std::optional<Clock::time_point> until, const std::function<bool()>& interrupted);
  /// Learns from the peer's hello whether it answers status frames.
  void meet(const wire::Hello& hello) noexcept { answers_status_ = (hello.features & wire::feature::status) != 0; }
  /// Handles the callee's report on a call. An error closes the link.
  Status on_status(std::uint64_t call, ByteView payload);
  /// Handles a reply; `stream`: the one that it came by, null if it came by the ring. An error closes the link.
  Status on_reply(FrameStream* stream, const wire::Frame& frame) override;

  /// Ends a call with `why` and sends a cancel frame. Does nothing if the call has ended, or if its reply is landing in
  /// the caller's own memory.
  void cancel(const std::shared_ptr<Call::State>& call, const Status& why);
  /// cancel() with DeadlineExceeded.
  void expire(const std::shared_ptr<Call::State>& call);
  /// Ends a call with the link's error `why`. Does nothing in the cases of cancel().
  void fail(const std::shared_ptr<Call::State>& call, const Status& why) override;
  /// fail(), for a call whose request was not sent: also gives its credit and its arguments back.
  void drop(const UnsentCall& unsent, const Status& why) override;
  /// The link has ended: fails all calls but those that end elsewhere.
  void fail_all(const Status& why);

  /// Makes the pool take this call's reply out of the ring: its caller waits for a completion, so perhaps no thread
  /// does.
  void expect_reply(Call::State& call);
  /// The same for every reply of the link, for a caller that waits for acknowledgements or other calls' replies.
  void expect_replies();
  /// The stream has appeared, or the link has ended: the threads that wait for calls look again.
  void wake_waiting();

  /// Runs on the reactor thread while the link is active: makes lazy completions prompt, and expires calls. Shortly
  /// before the deadline of a call, asks the callee how far the call has come.
  Pace tick(Clock::time_point now);

  [[nodiscard]] bool contains(const Call::State& call) const override {
    return pending_.find(call.place.id) != nullptr;
  }
  [[nodiscard]] std::size_t count() const { return pending_.size(); }
  [[nodiscard]] std::vector<std::shared_ptr<Call::State>> all() const override { return pending_.all(); }
  [[nodiscard]] RingCalls& ring() noexcept { return ring_; }
  [[nodiscard]] LazyCompletions& lazy() noexcept { return lazy_; }
  /// Describes each call for people; see Link::state_text.
  [[nodiscard]] std::string state_text() const;

 private:
  bool queued_behind(const std::shared_ptr<Call::State>& call, Message& message, bool waits);
  void send_when_probed(std::uint64_t known, const std::shared_ptr<FrameStream>& stream, UnsentCall request);
  void send_held(const std::shared_ptr<FrameStream>& stream, UnsentCall request);
  void send_now(const std::shared_ptr<FrameStream>& stream, const std::shared_ptr<Call::State>& call, Message message,
                bool by_ring);
  Status name_function(const Call::State& call, wire::Header& header, Bytes& extensions);
  void tell_given_up(const std::shared_ptr<FrameStream>& stream, std::uint64_t call);
  Clock::time_point watch_deadline(const std::shared_ptr<Call::State>& call, Clock::time_point now);
  void ask(Call::State& call);
  void record(const Call::State& call, Code code);
  void count(const Call::State& call, Code code);
  [[nodiscard]] Status explained(const Call::State& call, const Status& why) const;
  [[nodiscard]] Status not_landed(const Call::State& call, const Status& why) const;
  void finish(const std::shared_ptr<Call::State>& call, Result<Received> result);
  [[nodiscard]] Status expired(const Call::State& call) const;
  [[nodiscard]] bool link_closed() const noexcept override { return around_.link.closed(); }
  Status end_link(const Status& why) override;
  void acknowledged(const std::vector<std::uint64_t>& releases) override;

  const CallSurroundings around_;
  PendingCalls pending_;
  RingCalls ring_;
  LazyCompletions lazy_;
  Mutex waiting_mutex_;
  /// By order key: the requests behind one that waits for a probe.
  std::unordered_map<std::uint32_t, std::deque<UnsentCall>> waiting_by_order_;
  Mutex numbers_mutex_;
  std::unordered_map<std::string, std::uint32_t> numbers_;  // the callee's function numbers, by name
  std::atomic<Clock::rep> last_flush_{0};
  /// The last tick that looked at each call: what it wanted, and how many calls had been made by then.
  struct Look {
    Clock::time_point at;
    std::uint64_t added = 0;
    Pace pace = Pace::walk;
  } look_;
  std::atomic<bool> answers_status_{false};        // the peer does
  std::atomic<std::uint64_t> replies_at_tick_{0};  // pending_.replies() at the last tick, to notice new ones
  std::atomic<Clock::rep> last_reply_{0};          // the last tick that noticed one
};

}  // namespace tensorferry
