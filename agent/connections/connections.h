/// The connections of a link: one for the calls of both directions, and those for bulk data. What waits for one that is
/// not up yet, and whether the peer gives signs of life on them.
///
/// States of one connection, drawn in docs/architecture.md: *absent*, *dialling* (the reactor of this side tries to
/// make it, or the peer was asked to), *attaching* (it has been made, and what waited for it is being sent), *up*. When
/// one ends, the link ends with all of them, and the session's next link starts from absent.
///
/// Either side may dial the connection for calls; Peers::admit decides which one is taken. The side that dialled it
/// dials the link's bulk connections too, because it can reach the other one.
///
/// Threads: any, unless a function says otherwise. Completions run under no lock of the link's.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/connections/liveness.h"
#include "agent/connections/other_end.h"
#include "agent/connections/session.h"
#include "agent/connections/unsent_messages.h"
#include "agent/transport/bulk_streams.h"
#include "agent/transport/frame_stream.h"
#include "agent/wire/frame.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/out_of_memory.h"

namespace tensorferry {

class Pool;
class Reactor;
struct RawAgentOptions;

/// What a connection is for, seen from this side.
enum class ConnectionRole : std::uint8_t { calls, bulk_out, bulk_in };
constexpr bool is_bulk(ConnectionRole role) { return role != ConnectionRole::calls; }
/// Returns the role of a connection with this purpose in the dialler's hello. `dialled`: this side is the dialler.
ConnectionRole role_of(wire::Hello::Purpose purpose, bool dialled);
/// Returns the role of the connection that this side would dial for this purpose.
inline ConnectionRole dialled_role(wire::Hello::Purpose purpose) { return role_of(purpose, true); }

/// A connection that has completed the handshake.
struct Connected {
  std::unique_ptr<StreamPort> port;
  wire::Hello hello;  // the peer's; its purpose is the connection's
  bool dialled = false;
  std::uint64_t go = 0;  // the number in the peer's `go` frame; 0: this side decides, and sends one
};
/// Returns whether this side decides on a connection, and says `go`. About one for calls: the side with the lower
/// incarnation, and the dialler of an agent that calls itself. About one for bulk data: its acceptor.
inline bool decides(const PeerInfo& self, std::uint64_t peers_incarnation, wire::Hello::Purpose purpose, bool dialled) {
  if (purpose != wire::Hello::Purpose::calls) return !dialled;
  return dialled ? self.incarnation <= peers_incarnation : self.incarnation < peers_incarnation;
}

/// The calls of a link, as its connections see them: they bring the requests that waited. Threads: any.
class ConnectionCalls {
 public:
  /// Returns whether the call has not ended.
  [[nodiscard]] virtual bool contains(const Call::State& call) const = 0;
  /// Sends the request of a call by `stream`.
  virtual void send(const std::shared_ptr<FrameStream>& stream, const std::shared_ptr<Call::State>& call,
                    Message message) = 0;
  /// Tells the callee if the call was given up before its connection was up.
  virtual void tell_if_given_up(const std::shared_ptr<FrameStream>& stream, const Call::State& call) = 0;
  /// Fails a call whose request was not sent.
  virtual void drop(const UnsentCall& unsent, const Status& why) = 0;

 protected:
  ~ConnectionCalls() = default;
};

/// A link, as its connections see it. Threads: any.
class ConnectedLink {
 public:
  /// Returns what takes the frames that are read.
  virtual FrameSink& sink() = 0;
  virtual ConnectionCalls& calls() = 0;
  /// Begins to dial a connection of this purpose. It comes by Connections::attach().
  virtual void start_dial(wire::Hello::Purpose purpose) = 0;
  /// Returns the number of a connection for calls that this side takes; see wire::Hello::connection.
  virtual std::uint64_t next_connection() = 0;
  /// Makes the reactor tick the link.
  virtual void activate() = 0;
  /// Ends the link.
  virtual void fail(const Status& why) = 0;
  /// Ends the link, because the peer has closed a connection.
  virtual void close_after_peer(const Status& why) noexcept = 0;
  /// Returns what keeps the link, and so its connections, as long as it is held.
  virtual std::shared_ptr<void> hold() = 0;

 protected:
  ~ConnectedLink() = default;
};

/// The parts of a link and of its agent that its connections use. What it names outlives them.
struct ConnectionSurroundings {
  ConnectedLink& link;
  Pool& pool;
  Reactor& reactor;
  const Clock& clock;
  const PeerInfo& self;
  const RawAgentOptions& options;
};

class Connections final {
 public:
  using Stream = std::shared_ptr<FrameStream>;

  Connections(const ConnectionSurroundings& around, PeerInfo peer, std::shared_ptr<Session> session);

  // --- who is at the other end ---------------------------------------------------------------------------------------
  /// See OtherEnd.
  [[nodiscard]] const PeerInfo& peer() const noexcept { return other_.peer(); }  // incarnation 0 until connected
  [[nodiscard]] std::uint64_t incarnation() const noexcept { return other_.incarnation(); }
  /// Returns the number of the connection for calls; see wire::Hello::connection. 0: there is none yet.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_.load(std::memory_order_acquire); }
  [[nodiscard]] std::optional<uid_t> user() const;
  [[nodiscard]] bool may_be_of(std::optional<uid_t> user) const;
  /// Returns the session; null if no incarnation of the peer is known yet.
  [[nodiscard]] std::shared_ptr<Session> session() const;
  /// Parts with a session whose peer is dead, unless the link has a connection already. What waits then goes to the
  /// peer's next incarnation. False: the link has a connection, whose end closes it.
  bool leave_session(const Session& dead);

  // --- state ---------------------------------------------------------------------------------------------------------
  [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }
  /// Returns Ok, or why the link has ended.
  [[nodiscard]] Status status() const;
  /// Returns the stream of the connection for calls; null until it has been made. Until it is up, requests and control
  /// frames go by way of the functions below.
  [[nodiscard]] Stream call_stream() const;
  /// Returns that stream if the connection is up, else null.
  [[nodiscard]] Stream call_stream_if_up() const;
  /// Returns whether this is a bulk connection on which the peer sends.
  [[nodiscard]] bool reads_bulk(const FrameStream& stream) const;
  /// Returns how many bulk connections there are on which the peer sends.
  [[nodiscard]] std::size_t bulk_connections_in() const;
  /// Returns of each bulk connection of this role which address of this host it has (local_host()).
  [[nodiscard]] std::vector<std::string> networks(ConnectionRole role) const;
  /// Returns all streams.
  [[nodiscard]] std::vector<Stream> streams() const;
  /// Returns whether the connection for calls has been made.
  [[nodiscard]] bool connected() const { return call_stream() != nullptr; }
  /// Returns whether the peer is connected by unix socket, so that descriptors can travel.
  [[nodiscard]] bool local() const;
  /// Returns the number of calls that wait for a connection, and whether it is being dialled.
  [[nodiscard]] std::pair<std::size_t, bool> waiting() const;

  // --- sending -------------------------------------------------------------------------------------------------------
  /// Sends the request of a call that is in OutgoingCalls: now, or when the connection is up; dials if needed.
  void send_call(const std::shared_ptr<Call::State>& call, Message message);
  /// Sends a control or release frame on the connection for calls; dials it if needed. The two halves of it:
  /// queue_control() only queues the frame, and write_controls() writes what is queued. Neither runs a completion on
  /// this thread, because channels send messages while they hold locks.
  void send_control(Bytes frame, Descriptors descriptors);
  void queue_control(Bytes frame, Descriptors descriptors);
  void write_controls();
  /// Sends a bulk frame and its buffer on a bulk connection of this side's. If there is none, dials one or has the peer
  /// dial it; if all are busy, another one.
  void send_bulk(Bytes frame, FrameStream::Part part);
  /// Returns whether a large buffer should go in pieces: the bulk connections on which this side sends go over several
  /// networks, or will when buffers wait for them.
  [[nodiscard]] bool splits_bulk() const;
  /// While this object exists, bulk data that its thread sends on these connections waits: the frame that announces it
  /// goes first, unless another thread is still writing an earlier buffer and takes this one too. The receiver then
  /// knows the destination when the bytes come. On one thread, the objects nest.
  class FrameFirst {
   public:
    explicit FrameFirst(Connections& connections);
    ~FrameFirst();
    FrameFirst(const FrameFirst&) = delete;
    FrameFirst& operator=(const FrameFirst&) = delete;
    /// Returns whether bulk data waits, so that the frame must not.
    [[nodiscard]] bool holds_bulk() const noexcept { return held_ != 0; }

   private:
    friend class Connections;
    Connections& connections_;
    FrameFirst* const outer_;
    std::size_t held_ = 0;  // buffers
    static thread_local FrameFirst* innermost;
  };
  /// Sends a frame on `stream`; `flush` false: the tick, or a later frame, may do it. False: the socket is full, and a
  /// pool thread writes the rest.
  bool transmit(const Stream& stream, Bytes frame, std::vector<FrameStream::Part> trailing, bool flush,
                Descriptors descriptors = {});
  /// Runs on the reactor thread: writes what is queued. Returns whether anything was.
  bool flush();
  /// Makes pool threads write the rest after the socket was full, so that no caller waits for a slow peer. Between the
  /// writes the reactor waits until the socket has room. On a bulk connection, which the caller has taken, the threads
  /// then write the buffers that wait.
  void finish_writes(const Stream& stream);
  /// Sends goodbye on the connection for calls.
  void say_goodbye();

  // --- receiving bulk data -------------------------------------------------------------------------------------------
  /// Reads a bulk connection of the peer's. Runs on a pool thread that does not lead, so it may take long. Reads until
  /// no bytes have come for 2 ms (the stream is then armed again), or until a frame has no destination yet
  /// (resume_bulk() continues then).
  void read_bulk(const Stream& stream);
  /// Continues to read the peer's bulk connections: a destination for bulk bytes has been registered.
  void resume_bulk();

  // --- making connections (Engine::dial, Peers::admit) ---------------------------------------------------------------
  /// Takes a connection: absent or dialling -> attaching, and for one on which the peer alone sends, -> up. Queues the
  /// `go` frame if this side decides. `user`: at its other end, as the kernel tells. Null: refused, because the link
  /// has ended, has such a connection already, or belongs to another incarnation or user, or because the connection is
  /// of an earlier link; `connection` is then left as it was.
  Stream attach(Connected& connection, const std::shared_ptr<Session>& session, std::optional<uid_t> user);
  /// Sends everything that waited for the connection: attaching -> up. New messages queue behind until then.
  void send_waiting(ConnectionRole role, const Stream& stream, const wire::Hello& hello);
  /// Begins to dial the connection for calls, if it is absent.
  void dial();
  /// Asks before each attempt to dial. False: the attempt is not needed any more, because there is such a connection,
  /// or because nothing waits for this one: dialling -> absent. Then the next message dials again.
  bool keep_dialling(wire::Hello::Purpose purpose);
  /// Returns what this side says in its hello as Hello::connection, when it dials for this purpose; nullopt: there is a
  /// connection for calls by now, or the link has ended, so none is dialled. A number that was read later would tell
  /// the peer that this side has lost the connection.
  [[nodiscard]] std::optional<std::uint64_t> number_for_hello(wire::Hello::Purpose purpose) const;
  /// Handles the peer's wish for a bulk connection on which it sends, and dials it. ProtocolError: the peer has dialled
  /// the connection for calls, so it dials the others too.
  Status on_want_bulk();
  /// Returns whether there is no connection for this purpose yet, and it is being dialled.
  [[nodiscard]] bool awaits(wire::Hello::Purpose purpose) const;
  /// Fails the calls that wait for the connection, except those that may wait longer: all if `may_answer` (the peer may
  /// answer the next attempt), else those with `wait_for_ready`.
  void fail_impatient(const Status& why, bool may_answer);
  /// Returns whether a thread waits in connect().
  [[nodiscard]] bool is_awaited() const;
  /// Returns how long the calls with `wait_for_ready` that wait may still wait for the peer; 0: none does.
  [[nodiscard]] Milliseconds patience() const;
  /// Keeps what the current attempt to dial does, or why the last one has failed.
  void note_dial(std::string what);
  /// Returns ": " and that text, for the errors of calls that wait for a connection; "": no attempt was made.
  [[nodiscard]] std::string dial_progress() const;
  /// Runs `wake` under the lock here whenever a connection is made or the link ends, for the dialling of a role; empty:
  /// no more.
  void wake_at_change(ConnectionRole role, std::function<void()> wake);
  /// Tells connect() that what it waits for may have come.
  void notice_change();
  /// Dials the calls connection if needed. Returns when it is up and `settled()`, the link has ended, or `until` has
  /// passed: DeadlineExceeded.
  Status connect(Clock::time_point until, const std::function<bool()>& settled);

  // --- the end -------------------------------------------------------------------------------------------------------
  /// What a link had when it ended.
  struct Remains {
    std::array<Stream, 1 + 2 * BulkStreams::most> streams;  // null behind the last one
    std::list<UnsentCall> calls;
    std::list<std::pair<Bytes, FrameStream::Part>> buffers;
  };
  /// Marks the link as ended, and hands out what it had. False: it has ended before, or `unless_awaited` and calls wait
  /// for a connection, or there is one. Takes no memory.
  bool end(const Status& why, bool unless_awaited, Remains& remains) noexcept;
  /// Runs on the reactor thread at least once a second. Sends heartbeats to a peer on another host. Returns why the
  /// link must be closed (three intervals were silent), or Ok.
  Status keep_alive(Clock::time_point now);

 private:
  /// Runs `step`. If it has no memory, breaks the stream off, and so the link: nothing else would go on with the
  /// stream.
  template <class Step>
  static void or_break_off(const Stream& stream, const Step& step) noexcept {
    out_of_memory::run_or(step, [&] { stream->break_off(); });
  }
  void write_while_writable(const Stream& stream);
  void read_while_readable(const Stream& stream);
  enum class State : std::uint8_t { absent, dialling, attaching, up };
  struct Slot {
    State state = State::absent;
    bool once = false;   // dialling: there is such a connection, so another one is tried once, and that is due
    bool again = false;  // dialling for the peer, which has asked for another one meanwhile
  };
  [[nodiscard]] Slot& slot(ConnectionRole role) { return slots_[static_cast<std::size_t>(role)]; }
  [[nodiscard]] const Slot& slot(ConnectionRole role) const { return slots_[static_cast<std::size_t>(role)]; }
  [[nodiscard]] const std::vector<Stream>& bulk(ConnectionRole role) const;
  void add_bulk_out(const Stream& stream, const wire::Hello& hello);
  bool begin_dialling(ConnectionRole role);
  void start_dial(wire::Hello::Purpose purpose);
  void begin_no_dial(ConnectionRole role);
  bool begin_another(ConnectionRole role);
  void send_within_bound(const Stream& stream, const std::shared_ptr<Call::State>& call, Message message);
  bool begin_another_bulk_dial();
  void get_bulk();
  void dial_again_for_peer();
  enum class NextBuffer : std::uint8_t { none, written, unfinished };
  NextBuffer go_on_writing(const Stream& stream, std::vector<FrameStream::Written>* apart);
  void write_waiting_bulk(std::size_t count);
  void write_rest(const Stream& stream);
  void changed_state() noexcept;
  void write_when_writable(const Stream& stream);
  void bound_controls(const Stream& stream);
  void complete_apart(std::vector<FrameStream::Written> written);

  const ConnectionSurroundings around_;
  OtherEnd other_;
  std::atomic<bool> closed_{false};
  std::atomic<std::uint64_t> number_{0};

  mutable Mutex mutex_;  // guards the members down to writing_, and the changes of those above
  std::array<Slot, 3> slots_;
  Stream calls_;          // null until it has been made
  bool dialled_ = false;  // by this side
  BulkStreams bulk_;
  UnsentMessages unsent_;
  int connecting_ = 0;  // threads in connect()
  /// Tells those who wait for the next change of state.
  struct Changes {
    std::uint64_t count = 0;
    Condition changed;
    std::array<std::function<void()>, 3> wakes;  // of the dialling of each role
  } changes_;
  std::string dial_progress_;
  Status status_;
  std::vector<Stream> writing_;  // streams whose writes a pool thread finishes

  Liveness liveness_;  // used by the reactor thread alone
};

}  // namespace tensorferry
