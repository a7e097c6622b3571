/// The queue pairs between this process and one peer: connects them by messages over the link, tests them, and connects
/// them anew when they have failed.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/background.h"
#include "base/fork.h"
#include "base/function.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channels/rdma/local_cards.h"
#include "channels/rdma/messages.h"
#include "channels/rdma/queue_pair.h"

namespace tensorferry::rdma {

/// One connection for all channels of a link that use RDMA, so queue pairs do not multiply by pairs of devices: one
/// queue pair for each pair of ports. A queue pair that works is a lane.
///
/// An attempt to connect:
/// 1. Each end makes a queue pair on each of its active ports that has no lane, and offers them (`ConnectPorts`).
/// 2. Each end pairs the ports of both (`pair_ports`; the end with the smaller challenge is the first), connects the
///    queue pairs, writes the answer to the challenge into its memory, and says so (`PortsConnected`).
/// 3. Each end reads that word by each queue pair. It keeps the queue pairs that read the right one, as lanes, and says
///    which it drops (`PortLost`).
///
/// If a lane fails, it alone ends: its reads under way complete with the error, and the other lanes go on. The end that
/// notices says `PortLost`, so that the peer drops its end of the lane too. Both begin the next attempt for the ports
/// without a lane after a pause, which grows from 50 ms to 30 s while attempts fail or leave out a port that had a
/// lane. An end follows each later attempt of the other. An end that cannot take part in an attempt of the peer's,
/// because its port is down, begins the next one. The connection is up while it has a lane.
///
/// Threads: any. Messages are handled, and the listener runs, on the thread of `background`, one at a time.
class PeerConnection final : public std::enable_shared_from_this<PeerConnection> {
 public:
  /// Tells the channel. Runs on the background thread, or not at all after close().
  struct Listener {
    UniqueFunction<void(Bytes)> send;      // sends a control message to the other end
    UniqueFunction<void(Status)> changed;  // Ok: the connection is up; else why it is down
  };
  /// A queue pair that works.
  struct Lane {
    std::size_t my_port = 0;     // index in LocalCards::ports
    std::size_t their_port = 0;  // the peer's index
    std::uint32_t attempt = 0;   // in which it was made; names it together with a port
    std::shared_ptr<QueuePair> pair;
  };
  using Lanes = std::shared_ptr<const std::vector<Lane>>;
  using Ports = std::shared_ptr<const std::vector<std::size_t>>;

  PeerConnection(Background& background, Listener listener) : background_(background), listener_(std::move(listener)) {}
  ~PeerConnection() { close(); }
  PeerConnection(const PeerConnection&) = delete;
  PeerConnection& operator=(const PeerConnection&) = delete;

  /// Begins the first attempt. `open` makes or finds the driver's cards; it runs on the background thread.
  using OpenCards = UniqueFunction<Result<std::shared_ptr<LocalCards>>()>;
  void begin(OpenCards open);

  /// Handles messages of the other end; never blocks.
  void on(ConnectPorts message);
  void on(PortsConnected message);
  void on(const PortLost& message);

  /// Returns the lanes by which this end can read and write, or null while there are none.
  [[nodiscard]] Lanes lanes() const;
  /// Returns the ports (indices in LocalCards::ports) through which the peer can read, or null while there are none.
  /// The first ones are known a little earlier than the lanes: before this end says that its queue pairs are
  /// connected.
  [[nodiscard]] Ports ports() const;
  /// Returns whether reads of this end are under way.
  [[nodiscard]] bool awaits() const;
  /// Runs the completions of those that are done by now. Never waits.
  void poll();
  /// Returns why it is down, for a refusal.
  [[nodiscard]] std::string why_down() const;
  /// Returns the cards; null before the first attempt has begun.
  [[nodiscard]] std::shared_ptr<LocalCards> cards() const;

  /// Ends the connection. When it returns, the peer reads nothing of this process by it any more. Reads of this process
  /// complete with an error, later. A second call does nothing.
  void close() noexcept;

 private:
  struct Pair {  // of the present attempt
    Lane lane;
    bool connected = false;
  };
  struct Probe;
  class ProbeWords;

  using Clock = std::chrono::steady_clock;

  /// What the peer has told since the background thread looked.
  struct Inbox {
    bool queued = false;  // the job that handles it
    std::optional<ConnectPorts> connect;
    std::optional<PortsConnected> connected;
    std::array<std::uint32_t, most_ports> lost{};  // the attempts of lanes that the peer has lost, by its port
  };
  struct Attempt {
    std::uint32_t number = 0;  // from 1
    std::uint64_t challenge = 0;
    std::shared_ptr<ProbeWords> words{};  // of the last attempt that has joined: a peer may still read them
    bool joined = false;                  // the queue pairs of this attempt are connected
    bool probing = false;
    bool over = false;  // it has made lanes, or has failed
  };
  struct Retries {
    std::set<std::size_t> missing;  // ports that had a lane and shall have one again
    int failures = 0;               // in a row
    Clock::time_point up_since;
  };

  /// Runs `job(*this)` on the background thread, unless the connection has been closed by then.
  template <class Job>
  void submit(Job job, Clock::time_point at = Clock::time_point::min());
  [[nodiscard]] bool closed() const;
  void submit_handling();
  void handle();
  void start(std::uint32_t attempt, bool follows);
  Result<std::shared_ptr<QueuePair>> make_pair(std::size_t port, std::uint32_t attempt);
  void connect(const ConnectPorts& theirs);
  void probe(const PortsConnected& theirs);
  void probed(const Probe& probe);
  void lane_failed(std::uint32_t attempt, std::size_t my_port, const Status& why);
  void lost(const Lane& lane, const Status& why);
  void tell_lost(const Lane& lane);
  void attempt_failed(const Status& why);
  void begin_later();
  void update_ports();
  /// Fails these queue pairs, and hands them over to be destroyed.
  void drop(const std::vector<Lane>& lanes, const Status& why) noexcept;
  /// Drops those that leave. Until they have failed, close() finds them, because the peer can read by them.
  void drop_leaving(const Status& why);

  Background& background_;
  const std::uint32_t born_in_ = forks();
  const Listener listener_;
  OpenCards open_;

  mutable Mutex mutex_;  // guards the members below
  bool closed_ = false;
  Inbox inbox_;
  std::shared_ptr<LocalCards> cards_;
  std::vector<Pair> pairs_;    // of the present attempt, until its probe is done
  std::vector<Lane> leaving_;  // were in `pairs_`, and have not failed yet
  Lanes lanes_;
  Ports ports_;
  std::string why_down_ = "its probe is under way";

  // Only for jobs on the background thread:
  Attempt attempt_;
  Retries retries_;
};

}  // namespace tensorferry::rdma
