/// Two ends of a test link, joined by real sockets. The conformance suite runs channels on them. Both ends are in one
/// process, or one is in a forked child. Each end is a `Wire`, plus the parts of an agent that send and receive
/// buffers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "channels/channel.h"
#include "tests/conformance/device_memory.h"
#include "tests/conformance/lane.h"
#include "tests/conformance/outcome.h"

namespace tensorferry::conformance {

class WireEnd;

/// One buffer at the receiver: its ticket, its sink, and the outcome of its pull.
struct Arrival final : Sink {
  /// Names the sender's message, counted from 1, and the buffer's index in it.
  struct Number {
    std::uint64_t message, index;
    auto operator<=>(const Number&) const = default;
  };
  Arrival(Ticket t, Number n, DeviceMemory& m) : ticket(std::move(t)), number(n), memory(m) {}

  std::optional<Buffer> reserve(std::size_t bytes) override;
  bool adopt(Buffer buffer) override;

  const Ticket ticket;
  const Number number;
  DeviceMemory& memory;
  bool has_memory = true;                 // false: reserve() returns nullopt
  bool may_adopt = true;                  // false: adopt() returns false
  std::function<void()> on_reserve = {};  // runs inside reserve()
  Buffer buffer;                          // the memory that reserve() returned or adopt() took
  int filled = 0;                         // how often one of the two succeeded
  Outcome landed, consumed;
};
using Arrivals = std::vector<std::shared_ptr<Arrival>>;

/// Returns the buffer of a received message without another owner. The thread that has read it owns it too, until a
/// little after its pull has completed. Null: the message has another number of buffers, or another owner stays.
std::shared_ptr<Arrival> sole_owner(Arrivals arrivals);

/// A message under construction. The test offers its buffers, then sends or drops it. One thread at a time.
class Letter final : public Outgoing {
 public:
  explicit Letter(WireEnd& end, bool appends = true) : end_(end), appends_(appends) {}
  ~Letter();  // drops the message if it was not sent

  [[nodiscard]] bool appends() const override { return appends_; }
  void append(Buffer buffer, Completion written) override;
  [[nodiscard]] bool last_resort() const override { return only_channel; }

  /// Offers a buffer. Returns false if the channel refuses; `refusal` then gives the reason. `then` runs inside the
  /// release.
  bool offer(Buffer buffer, Completion then = {}, Sharing sharing = Sharing::by_value);
  void send();
  /// Withdraws every ticket, unless the message was sent. The appended parts complete with Cancelled.
  void drop();

  [[nodiscard]] std::size_t appended() const { return appended_.size(); }

  std::vector<Ticket> tickets;    // a test may change them before send()
  std::vector<Outcome> released;  // one for each ticket
  std::string refusal;
  bool only_channel = true;  // the result of last_resort(); if false, the channel may refuse an offer for a while

 private:
  WireEnd& end_;
  const bool appends_;
  bool gone_ = false;
  std::vector<Ticket> offered_;
  std::vector<Lane::Part> appended_;
};

/// One end of the link.
///
/// It has three lanes: messages with the bytes appended to them, bulk data, and control messages. Each lane has its own
/// reading thread, so no order holds between lanes. Thread-safe, except `start`, `finish` and `read`.
class WireEnd final : public Wire {
 public:
  struct Sockets {
    FileDescriptor messages, bulk, control;
  };
  /// `shared`: what it shares with the other channels of its end of a link, if there are any.
  WireEnd(std::string peer, Driver& driver, DevicePair pair, DeviceMemory& memory, Sockets sockets,
          SharedState* shared = nullptr);
  ~WireEnd();

  std::atomic<bool> splits = false;  // the result of splits_bulk()

  /// Starts the threads. If both ends are in one process, call it when both exist.
  void start();
  /// Waits for the probe to end. Returns its last status, or nullopt if that takes longer than `patience`.
  std::optional<Status> wait_ready();

  // Implement Wire.
  ControlId control(Bytes message, Descriptors descriptors) override;
  void read(Buffer destination, Completion landed) override;
  void send_bulk(std::uint64_t sequence, Buffer buffer, Completion written) override;
  void receive_bulk(std::uint64_t sequence, Buffer destination, Completion landed) override;
  void ready(Status probed) override;
  [[nodiscard]] std::string_view peer() const override { return peer_; }
  [[nodiscard]] SharedState* shared() override { return shared_; }
  [[nodiscard]] bool splits_bulk() const override { return splits; }

  Channel& channel() { return *channel_; }
  DeviceMemory& memory() { return memory_; }

  /// Offers one buffer and sends it as a message. Returns the outcome of the release, which never completes if the
  /// channel refuses.
  Outcome send(const Buffer& buffer, Completion then = {});
  /// Returns the next message's buffers when all of their pulls have completed. Returns none if the message does not
  /// come within `limit`, or if one of its pulls does not complete.
  Arrivals receive(std::chrono::milliseconds limit = patience);

  /// How the end treats a message. By default it pulls all buffers and acknowledges them.
  struct Behaviour {
    std::function<void(Arrivals&)> on_message = {};  // runs on the reading thread in place of the pulls
    std::function<void(Arrival&)> before_pull = {};  // sets up the sink
    std::function<void(Arrival&)> on_landed = {};    // runs inside the completion
    bool acknowledges = true;                        // false: pulls send no acknowledgements
  };
  void behave(Behaviour behaviour);

  void pull(const std::shared_ptr<Arrival>& arrival);
  void discard(const std::shared_ptr<Arrival>& arrival);

  Lane& messages() { return messages_; }
  Lane& bulk() { return bulk_; }
  /// Returns the number of sent tickets that the other end has not acknowledged.
  std::size_t unacknowledged();
  /// Returns the number of bulk transfers that the channel expects and whose bytes have not begun to arrive.
  std::size_t expected_bulk();

  /// Ends the link here, and so at the other end. Completes the operations that the wire holds, and closes the channel.
  void close(Status status);
  /// Closes the end, then waits for its threads and for the completions that use it; aborts if one of these has not
  /// ended within `patience`. Do not call it from one of these threads or completions.
  void finish();

 private:
  friend class Letter;
  /// Counts the completions that the channel holds. They may run after close(), on the channel's threads.
  struct Held {
    std::mutex mutex;
    std::condition_variable changed;
    int completions = 0;
  };
  /// Returns a token that counts as one held completion until its last copy is destroyed.
  std::shared_ptr<void> hold();

  struct Receive {
    Buffer destination;
    Completion landed;
  };

  void send_message(const std::vector<Ticket>& tickets, const std::vector<Ticket>& offered,
                    std::vector<Lane::Part> parts);
  void acknowledge(const Arrival& arrival);
  void acknowledged(Arrival::Number number);
  bool read_message();
  bool take_message(Reader& in);
  bool take_behind(std::uint64_t bytes);
  bool read_bulk();
  bool read_control();

  const std::string peer_;
  SharedState* const shared_;
  DeviceMemory& memory_;
  const std::shared_ptr<Held> held_ = std::make_shared<Held>();
  std::unique_ptr<Channel> channel_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Status> probed_;
  std::optional<Status> closed_;
  std::uint64_t messages_sent_ = 0;
  std::map<Arrival::Number, Ticket> unacknowledged_;
  std::shared_ptr<const Behaviour> behaviour_ = std::make_shared<const Behaviour>();
  std::deque<Arrivals> arrived_;
  std::map<std::uint64_t, Receive> expected_;  // bulk transfers, by sequence
  std::set<std::uint64_t> received_;           // all bulk sequences that receive_bulk() was called with
  ControlId controls_seen_ = 0;

  std::mutex control_mutex_;  // makes numbering and queueing of a control message one step
  ControlId controls_sent_ = 0;

  std::vector<Receive> behind_;  // used by the messages lane's reading thread alone

  Lane messages_, bulk_, control_;
};

/// Both ends in this process, started. Their probes may still be under way.
struct WirePair {
  WirePair(Driver& a_driver, Driver& b_driver, DevicePair devices, DeviceMemory& a_memory, DeviceMemory& b_memory);
  ~WirePair();

  std::unique_ptr<WireEnd> a, b;
};

/// Returns three pairs of connected sockets: `first` for one end, `second` for the other.
std::pair<WireEnd::Sockets, WireEnd::Sockets> connected_sockets();

}  // namespace tensorferry::conformance
