/// This process as a host with emulated cards: its ports, queue pairs and registrations, and the socket at which peers'
/// requests arrive.
///
/// Queue pair numbers are unique on the machine: the upper bits name the process, by the number of an abstract unix
/// socket that it has bound, so a requester finds its responder by the number alone. A thread serves each connection.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tests/emulated_verbs/event_queue.h"
#include "tests/emulated_verbs/memory.h"

namespace tensorferry::emulated_verbs {

class QueuePair;

/// One port of a card. Its table of GIDs has four rows: link-local as RoCE v1 and v2, then IPv4 as v1 and v2.
struct CardPort {
  std::atomic<bool> up{true};
  static constexpr int gids = 4;
};

struct Card final : ibv_device {
  int index = 0;
  int ports = 1;
  std::array<CardPort, 2> port;  // from 0
  /// Returns row `row` of a port's table. A row's address names the card and the port.
  [[nodiscard]] ibv_gid gid(int number, int row) const;
};

struct AsyncEvent {
  ibv_event_type type;
  const void* object;  // the queue pair or completion queue; null for a port
  int port;
};

struct Context final : ibv_context {
  [[nodiscard]] Card& card() const { return *static_cast<Card*>(device); }
  /// Returns the oldest event, which the program must acknowledge before the event's object can be destroyed.
  std::optional<AsyncEvent> take_event();
  void acknowledge(const void* object);
  /// Removes the events of a queue pair or completion queue, and waits for the acknowledgement of those taken.
  void forget(const void* object);

  EventQueue<AsyncEvent> events;

 private:
  std::mutex lock_;
  std::condition_variable acknowledged_;
  std::multiset<const void*> open_;  // the objects of the events that were taken and are not acknowledged
};

/// One per process. Lives until the process ends; a forked child has one of its own.
class Host {
 public:
  static Host& get();

  std::vector<Card*> cards();
  Memory memory;

  /// Opens and closes the contexts that get the ports' events.
  void add(Context* context);
  void remove(Context* context);
  bool set_port(const std::string& device, int port, bool up);

  /// Gives `pair` a number, by which requests find it until `remove`. False: too many queue pairs.
  bool add(const std::shared_ptr<QueuePair>& pair);
  void remove(const QueuePair& pair);
  std::shared_ptr<QueuePair> find(std::uint32_t number);
  std::size_t queue_pairs();
  [[nodiscard]] std::size_t queue_pairs_made() const { return made_; }
  /// Fails up to `most` of them. Returns how many.
  std::size_t fail_queue_pairs(std::size_t most);

  /// Connects to the process that has a queue pair of this number. -1: there is none.
  int connect(std::uint32_t number);

  void stall(bool on) { stalled_ = on; }
  [[nodiscard]] bool stalled() const { return stalled_; }
  /// How many transfers stall() holds now.
  std::atomic<std::size_t> held_up{0};
  /// How often programs have asked for the state of a port that was down.
  std::atomic<std::size_t> asked_while_down{0};

 private:
  Host();
  void listen();
  void accept();
  void serve(int fd);
  void forget_parent();

  std::mutex mutex_;
  std::vector<std::unique_ptr<Card>> cards_;
  std::set<Context*> contexts_;
  std::map<std::uint32_t, std::shared_ptr<QueuePair>> pairs_;
  std::set<int> sockets_;
  int listener_ = -1;
  std::uint32_t process_ = 0;  // the upper bits of the numbers
  std::uint32_t last_ = 0;     // the lower bits of the latest number
  std::atomic<std::size_t> made_{0};
  std::atomic<bool> stalled_{false};
};

}  // namespace tensorferry::emulated_verbs
