/// The operations of all ranks that were started at one rank: their order, which one runs, and why none goes on.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace tensorferry::collectives {

class GroupWork;

/// One operation runs at a time, in the order in which they were added. What ends them all is kept beside them, because
/// a rank tells the others how many it had ended by then.
///
/// Threads: any.
class OperationQueue final {
 public:
  using Work = std::shared_ptr<GroupWork>;
  /// A rank that has left after it had done its part in `after` operations.
  struct Leaver {
    std::size_t rank;
    std::uint64_t after;
    Status why;
  };
  struct Ended {
    std::vector<Leaver> leavers;  // those that have been kept for the operation
    bool more;                    // whether operations wait
  };

  explicit OperationQueue(Clock clock) : clock_(std::move(clock)) {}

  /// Adds an operation and gives it its number, from 1.
  void add(const Work& work);
  /// Returns the next operation, which runs from now on until end(); null if one runs, or if none waits whose number is
  /// at most `last`.
  Work begin(std::uint64_t last = std::numeric_limits<std::uint64_t>::max());
  /// Waits until no operation runs or operation `number` has ended, for `longest` at most. Returns whether a thread
  /// that waits for this operation may begin() those up to it: none runs, and it has not ended.
  bool wait_for_turn(std::uint64_t number, std::chrono::milliseconds longest);
  /// The operation that runs has ended.
  Ended end(const GroupWork& work);

  /// Returns the operation that was added last, or null if nobody has it any more.
  [[nodiscard]] Work last() const;
  /// Returns the numbers of the operations that were added last and that ended last.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> progress() const;

  /// Nothing goes on, sends and receives neither. Returns how many operations have ended; nullopt: nothing went on
  /// before. The first reason counts.
  std::optional<std::uint64_t> stop_all(const Status& why, bool by_leaving);
  /// No operation goes on, because a rank has left.
  void stop(const Status& why);
  /// Keeps a rank for the end of the operation that it has left after. False: that one has ended.
  bool keep(Leaver leaver);
  /// Returns whether so many operations have ended.
  [[nodiscard]] bool has_ended(std::uint64_t count) const;

  /// Returns why no operation goes on; Ok while they do.
  [[nodiscard]] Status stopped() const;
  /// Returns whether the reason is that a rank, perhaps this one, has left.
  [[nodiscard]] bool stopped_by_leaving() const;
  /// Returns why nothing goes on, sends and receives neither.
  [[nodiscard]] Status all_stopped() const;
  /// Waits until no operation goes on, for `longest` at most.
  void wait_for_stop(std::chrono::milliseconds longest) const;

 private:
  /// The lock is held.
  void stop_operations(const Status& why, bool by_leaving);

  const Clock clock_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::deque<Work> waiting_;
  std::weak_ptr<GroupWork> last_;
  bool running_ = false;
  std::uint64_t started_ = 0, ended_ = 0;
  std::vector<Leaver> leavers_;
  Status stopped_, all_stopped_;
  bool by_leaving_ = false;
};

}  // namespace tensorferry::collectives
