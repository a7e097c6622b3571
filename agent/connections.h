/// The connections of a link: which of the four there are, what waits for one that is not up yet, and whether the peer
/// gives signs of life on them.
///
/// States of one connection, drawn in docs/architecture.md: *absent*, *dialling* (the reactor of this side tries to
/// make it), *attaching* (it has been made, and what waited for it is being sent), *up*. No connection goes back from
/// up: when one ends, the link ends with all of them, and the session's next link starts from absent. A connection that
/// cannot be dialled ends nothing: the peer is asked to dial it.
///
/// Threads: any, unless a function says otherwise. Completions run under no lock of the link's.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "agent/liveness.h"
#include "agent/other_end.h"
#include "agent/outgoing_calls.h"
#include "agent/session.h"
#include "agent/transport/bulk_streams.h"
#include "agent/transport/frame_stream.h"
#include "agent/unsent_messages.h"
#include "agent/wire/frame.h"
#include "base/mutex.h"

namespace tensorferry {

/// What a connection is for, seen from this side.
enum class ConnectionRole : std::uint8_t { calls_out, calls_in, bulk_out, bulk_in };
constexpr bool is_bulk(ConnectionRole role) {
  return role == ConnectionRole::bulk_out || role == ConnectionRole::bulk_in;
}
/// Returns whether this side sends requests, or bulk data, on the connection.
constexpr bool is_out(ConnectionRole role) {
  return role == ConnectionRole::calls_out || role == ConnectionRole::bulk_out;
}
/// Returns the role of a connection with this purpose in the dialler's hello. `dialled`: this side is the dialler.
ConnectionRole role_of(wire::Hello::Purpose purpose, bool dialled);
/// Returns the role of the connection that this side would dial for this purpose.
inline ConnectionRole dialled_role(wire::Hello::Purpose purpose) { return role_of(purpose, true); }

class Connections final {
 public:
  using Stream = std::shared_ptr<FrameStream>;

  /// Belongs to `link`, which outlives it. `number`: the link's.
  Connections(Link& link, PeerInfo peer, std::uint64_t number, std::shared_ptr<Session> session);

  // --- who is at the other end ---------------------------------------------------------------------------------------
  /// See OtherEnd. The peer tells its number of the link when it dials, and when it has taken a connection for calls.
  [[nodiscard]] const PeerInfo& peer() const noexcept { return other_.peer(); }  // incarnation 0 until connected
  [[nodiscard]] std::uint64_t incarnation() const noexcept { return other_.incarnation(); }
  [[nodiscard]] std::uint64_t number() const noexcept { return other_.number(); }
  [[nodiscard]] std::uint64_t other_number() const noexcept { return other_.other_number(); }
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
  /// Returns the stream of a connection for calls if it is up, else null.
  [[nodiscard]] Stream stream(ConnectionRole role) const;
  /// Returns whether this is a bulk connection on which the peer sends.
  [[nodiscard]] bool reads_bulk(const FrameStream& stream) const;
  /// Returns how many bulk connections there are on which the peer sends.
  [[nodiscard]] std::size_t bulk_connections_in() const;
  /// Returns the stream of the peer's requests if this side has not dialled one of its own, else null.
  [[nodiscard]] Stream only_incoming() const;
  /// Returns the streams that are up.
  [[nodiscard]] std::vector<Stream> streams() const;
  /// Returns whether a connection for calls, in either direction, is up.
  [[nodiscard]] bool connected() const;
  /// Returns whether the peer is connected by unix socket, so that descriptors can travel.
  [[nodiscard]] bool local() const;
  /// Returns the number of calls that wait for a connection, and whether it is being dialled.
  [[nodiscard]] std::pair<std::size_t, bool> waiting() const;

  // --- sending -------------------------------------------------------------------------------------------------------
  /// Sends the request of a call that is in OutgoingCalls: now, or when the connection is up; dials if needed.
  void send_call(const std::shared_ptr<Call::State>& call, Message message);
  /// Sends a control or release frame on the calls connection of this side. The peer reads that stream at all times,
  /// but the stream of its own calls only while it waits for a reply. Dials if needed. The two halves of it:
  /// queue_control() only queues the frame, and write_controls() writes what is queued. Neither runs a completion on
  /// this thread, because channels send messages while they hold locks.
  void send_control(Bytes frame, Descriptors descriptors);
  void queue_control(Bytes frame, Descriptors descriptors);
  void write_controls();
  /// Sends a bulk frame and its buffer on a bulk connection of this side's; dials one if there is none, and another one
  /// if all are busy.
  void send_bulk(Bytes frame, FrameStream::Part part);
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
  /// Sends goodbye on the calls connections.
  void say_goodbye();

  // --- receiving bulk data -------------------------------------------------------------------------------------------
  /// Reads a bulk connection of the peer's. Runs on a pool thread that does not lead, so it may take long. Reads until
  /// no bytes have come for 2 ms (the stream is then armed again), or until a frame has no destination yet
  /// (resume_bulk() continues then).
  void read_bulk(const Stream& stream);
  /// Continues to read the peer's bulk connections: a destination for bulk bytes has been registered.
  void resume_bulk();

  // --- making connections (Engine::dial, the acceptor)
  // -----------------------------------------------------------------
  /// Takes a connection after its handshake and hello: absent or dialling -> attaching, and for one on which the peer
  /// sends, -> up. `user`: at its other end, as the kernel tells. Null: refused, because the link has ended, has such a
  /// connection already, or belongs to another incarnation or user; `port` is then left as it was.
  Stream attach(std::unique_ptr<StreamPort>& port, bool dialled, const wire::Hello& hello,
                const std::shared_ptr<Session>& session, std::optional<uid_t> user);
  /// Learns which link of the peer took the connection that this side dialled. ConnectionLost: it is not the link that
  /// has dialled this one. Then the peer has given one of the two up.
  Status on_link(std::uint64_t number);
  /// Sends everything that waited for the connection: attaching -> up. New messages queue behind until then.
  void send_waiting(ConnectionRole role, const Stream& stream, const wire::Hello& hello);
  /// Begins to dial the calls connection of this side, if it is absent.
  void dial();
  /// Asks before each attempt to dial. False: the attempt is not needed any more, because there is such a connection,
  /// or because the peer has dialled and nothing waits for this connection: dialling -> absent. Then the next message
  /// dials again.
  bool keep_dialling(wire::Hello::Purpose purpose);
  /// Asks the peer to dial the connection that this side cannot dial. False: no connection can carry the question.
  bool ask_to_dial(wire::Hello::Purpose purpose);
  /// Handles the peer's question to dial: absent -> dialling.
  Status on_dial(ByteView payload);
  /// The attempt to answer that question has ended: dialling -> absent, unless it succeeded.
  void dialled_back(wire::Hello::Purpose purpose);
  /// Returns whether the peer has dialled the connection of its calls, so that it has no reason to dial it again.
  [[nodiscard]] bool peer_has_dialled() const;
  /// Returns whether there is no bulk connection yet, and it is being dialled. False: the peer has dialled one at this
  /// moment.
  [[nodiscard]] bool awaits_bulk() const;
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

  // --- the end
  // ---------------------------------------------------------------------------------------------------------
  /// What a link had when it ended.
  struct Remains {
    std::vector<Stream> streams;
    std::deque<UnsentCall> calls;
    std::deque<std::pair<Bytes, FrameStream::Part>> buffers;
  };
  /// Marks the link as ended, and hands out what it had. Nullopt: it has ended before, or `unless_awaited` and calls
  /// wait for a connection, or the peer has dialled one.
  std::optional<Remains> end(const Status& why, bool unless_awaited);
  /// Runs on the reactor thread at least once a second. Sends heartbeats to a peer on another host. Returns why the
  /// link must be closed, or Ok: three intervals were silent.
  Status keep_alive(Clock::time_point now);

 private:
  enum class State : std::uint8_t { absent, dialling, attaching, up };
  struct Slot {
    State state = State::absent;
    Stream stream;         // null unless it is up; the streams for bulk data are in bulk_
    bool dialled = false;  // by this side
  };
  [[nodiscard]] Slot& slot(ConnectionRole role) { return slots_[static_cast<std::size_t>(role)]; }
  [[nodiscard]] const Slot& slot(ConnectionRole role) const { return slots_[static_cast<std::size_t>(role)]; }
  bool begin_dialling(ConnectionRole role);
  void send_within_bound(const Stream& stream, const std::shared_ptr<Call::State>& call, Message message);
  bool begin_another_bulk_dial();
  enum class NextBuffer : std::uint8_t { none, written, unfinished };
  NextBuffer go_on_writing(const Stream& stream, std::vector<FrameStream::Written>* apart);
  void write_waiting_bulk(std::size_t count);
  void write_rest(const Stream& stream);
  void changed_state();
  void write_when_writable(const Stream& stream);
  void bound_controls(const Stream& stream);
  void complete_apart(std::vector<FrameStream::Written> written);

  Link& link_;
  OtherEnd other_;
  std::atomic<bool> closed_{false};

  mutable Mutex mutex_;  // guards the members down to writing_, and the changes of those above
  std::array<Slot, 4> slots_;
  BulkStreams bulk_;
  UnsentMessages unsent_;
  int connecting_ = 0;  // threads in connect()
  /// Tells those who wait for the next change of state.
  struct Changes {
    std::uint64_t count = 0;
    Condition changed;
    std::array<std::function<void()>, 4> wakes;  // of the dialling of each role
  } changes_;
  std::string dial_progress_;
  Status status_;
  std::vector<Stream> writing_;  // streams whose writes a pool thread finishes
  bool refused_controls_ = false;

  Liveness liveness_;  // used by the reactor thread alone
};

}  // namespace tensorferry
