/// Visits: how an owner learns that a peer which holds something of it has gone, and the peer that the owner has.
///
/// A visitor makes one call to the owner that stays unanswered (Attend). When the visitor's process, its link or the
/// visit ends, the agent tells the owner so (Reply::on_cancelled), and the owner releases what it keeps for the visit.
/// When the owner or the link ends, the same call fails at the visitor. So neither side keeps anything for a peer that
/// has gone, and a kill is known as soon as the kernel has closed the process's sockets.
#pragma once

#include <atomic>
#include <chrono>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"

namespace tensorferry::regions {

/// One visit, as the owner names it.
struct VisitId {
  std::uint64_t incarnation = 0;  // of the visitor
  std::uint64_t number = 0;       // the visitor's
  auto operator<=>(const VisitId&) const = default;
};

/// The owner's side: the visits to this agent. Thread-safe. Serves `tf:attend`.
class Visitors final : public std::enable_shared_from_this<Visitors> {
 public:
  static std::shared_ptr<Visitors> serve(RawAgent& agent);
  ~Visitors();

  /// Runs when a visit has ended, on a thread of the agent, with no lock held. Registered before the first visit.
  void on_end(std::function<void(VisitId)> ended);
  /// Notes that a message of the visit has come. It may overtake the Attend: the visit then counts as ended unless
  /// that comes in time (sweep()). Returns ResourceExhausted if the peer has too many visits.
  Status note(VisitId visit);
  /// Ends the visits whose Attend has not come in time. Else they end when the next message of any visit comes.
  void sweep();
  /// Sets how long that may take; 10 s at first.
  void set_patience(Milliseconds patience);
  /// Ends all visits: their calls fail with `why` at the visitors. Later visits end at once.
  void close(const Status& why);
  [[nodiscard]] std::size_t size() const;
  /// Returns whether the visit has been noted, and has not ended.
  [[nodiscard]] bool has(VisitId visit) const;

 private:
  struct Visit {
    std::shared_ptr<Reply> attending;  // null: the Attend has not come
    Clock::time_point since{};
  };
  void attend(const PeerInfo& peer, std::uint64_t number, Reply reply);
  void end(VisitId visit);

  mutable std::mutex mutex_;
  std::map<VisitId, Visit> visits_;
  std::vector<std::function<void(VisitId)>> told_;
  Milliseconds patience_{10'000};
  Status closed_;
};

/// One visit, as the visitor has it. Thread-safe.
class Visit final {
 public:
  Visit(std::string owner, std::uint64_t number) : owner_(std::move(owner)), number_(number) {}
  [[nodiscard]] const std::string& owner() const noexcept { return owner_; }
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  [[nodiscard]] bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }
  /// Returns why the visit has ended: ConnectionLost with the owner's name; Ok while it goes on.
  [[nodiscard]] Status why() const;
  /// Runs `told` once the visit has ended, on a thread of the agent or, if it has ended already, on this one.
  void on_end(std::function<void()> told);

 private:
  friend class Visits;
  void end(const Status& why);

  const std::string owner_;
  const std::uint64_t number_;
  std::atomic<bool> ended_{false};
  mutable std::mutex mutex_;
  Status why_;
  std::vector<std::function<void()>> told_;
  Call attending_;
};

/// The visitor's side: at most one visit to each owner. Thread-safe.
class Visits final : public std::enable_shared_from_this<Visits> {
 public:
  explicit Visits(std::shared_ptr<RawAgent> agent) : agent_(std::move(agent)) {}
  ~Visits() { close(); }
  /// Returns the visit to `owner`; begins one if there is none, or the last has ended.
  std::shared_ptr<Visit> visit(const std::string& owner);
  /// Ends all visits: tells the owners, and waits for none. Later visits are ended from the start.
  void close();

 private:
  void leave(const Visit& visit, Call attending);

  const std::shared_ptr<RawAgent> agent_;
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Visit>, std::less<>> visits_;
  std::uint64_t last_number_ = 0;
  bool closed_ = false;
};

}  // namespace tensorferry::regions
