/// Two ends of a link in one process (or one in a forked child), joined by real sockets: what the conformance suite
/// runs channels on. Each end is a `Wire`, and as much of an agent as it takes to send buffers and to receive them.
#pragma once

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

/// A buffer that came, or is to come.
struct Arrival final : Sink {
  /// Which buffer of which of the sender's messages.
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
  bool has_memory = true;                 // false: reserve says that there is none
  bool may_adopt = true;                  // false: the caller wants the bytes in memory of its own
  std::function<void()> on_reserve = {};  // inside reserve
  Buffer buffer;                          // what reserve or adopt made of it
  int filled = 0;                         // how often
  Outcome landed, consumed;
};
using Arrivals = std::vector<std::shared_ptr<Arrival>>;

/// A message while it is written: buffers are offered, then it is sent or dropped.
class Letter final : public Outgoing {
 public:
  explicit Letter(WireEnd& end, bool appends = true) : end_(end), appends_(appends) {}
  ~Letter();  // drops it where it was not sent

  [[nodiscard]] bool appends() const override { return appends_; }
  void append(Buffer buffer, Completion written) override;
  [[nodiscard]] bool last_resort() const override { return only_channel; }

  /// Offers; false where the channel refused (`refusal` then says why). `then` runs inside the release.
  bool offer(Buffer buffer, Completion then = {}, Sharing sharing = Sharing::by_value);
  void send();
  /// It is never sent: withdraws every ticket.
  void drop();

  [[nodiscard]] std::size_t appended() const { return appended_.size(); }

  std::vector<Ticket> tickets;    // may be changed before send()
  std::vector<Outcome> released;  // one a ticket
  std::string refusal;
  bool only_channel = true;  // false: offers may be refused for a while

 private:
  WireEnd& end_;
  const bool appends_;
  bool gone_ = false;
  std::vector<Ticket> offered_;
  std::vector<Lane::Part> appended_;
};

/// One end. Three lanes: messages with the bytes appended to them, bulk data, control messages; each is read by a
/// thread of its own, so that between them any order can happen.
class WireEnd final : public Wire {
 public:
  struct Sockets {
    FileDescriptor messages, bulk, control;
  };
  WireEnd(std::string peer, Driver& driver, DevicePair pair, DeviceMemory& memory, Sockets sockets);
  ~WireEnd();

  /// Starts the threads. Once both ends exist, where they are in one process.
  void start();
  /// Waits for the probe to end.
  std::optional<Status> wait_ready();

  // Wire
  ControlId control(Bytes message, Descriptors descriptors) override;
  void read(Buffer destination, Completion landed) override;
  void send_bulk(std::uint64_t sequence, Buffer buffer, Completion written) override;
  void receive_bulk(std::uint64_t sequence, Buffer destination, Completion landed) override;
  void ready(Status probed) override;
  [[nodiscard]] std::string_view peer() const override { return peer_; }

  Channel& channel() { return *channel_; }
  DeviceMemory& memory() { return memory_; }

  /// A message of one buffer, from offer to send.
  Outcome send(const Buffer& buffer, Completion then = {});
  /// The next message's buffers, once all of them have completed; what a message that does not come lacks is empty.
  Arrivals receive(std::chrono::milliseconds limit = patience);

  /// What the end does with messages, other than to pull all buffers and to acknowledge.
  struct Behaviour {
    std::function<void(Arrivals&)> on_message = {};  // instead of pulling; on the reading thread
    std::function<void(Arrival&)> before_pull = {};  // to set how the sink behaves
    std::function<void(Arrival&)> on_landed = {};    // inside the completion
    bool acknowledges = true;                        // false: keeps acknowledgements back
  };
  void behave(Behaviour behaviour);

  void pull(const std::shared_ptr<Arrival>& arrival);
  void discard(const std::shared_ptr<Arrival>& arrival);

  Lane& messages() { return messages_; }
  Lane& bulk() { return bulk_; }
  /// Bulk data asked for that has not begun to come.
  std::size_t expected_bulk();

  /// The link ends here, and so at the other end: completes what the wire holds and closes the channel.
  void close(Status status);
  /// close(), and waits for the threads, and for the completions that use this end. Not from one of them.
  void finish();

 private:
  friend class Letter;
  /// The completions that channels hold, which may run after close() on threads of theirs.
  struct Held {
    std::mutex mutex;
    std::condition_variable changed;
    int completions = 0;
  };
  /// Counts as a completion until its last copy goes.
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
  std::map<std::uint64_t, Receive> expected_;  // bulk
  std::set<std::uint64_t> received_;           // bulk sequences that were asked for
  ControlId controls_seen_ = 0;

  std::mutex control_mutex_;  // numbers and queues control messages in one step
  ControlId controls_sent_ = 0;

  std::vector<Receive> behind_;  // the message thread's

  Lane messages_, bulk_, control_;
};

/// Both ends, started and ready.
struct WirePair {
  WirePair(Driver& a_driver, Driver& b_driver, DevicePair devices, DeviceMemory& a_memory, DeviceMemory& b_memory);
  ~WirePair();

  std::unique_ptr<WireEnd> a, b;
};

/// Three pairs of connected sockets: .first and .second are what the two ends are made of.
std::pair<WireEnd::Sockets, WireEnd::Sockets> connected_sockets();

}  // namespace tensorferry::conformance
