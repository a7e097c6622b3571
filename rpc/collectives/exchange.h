/// How the ranks of a group exchange bytes: on a board in shared memory, else by messages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "rpc/collectives/board.h"
#include "rpc/collectives/choose.h"
#include "rpc/collectives/mailbox.h"
#include "rpc/collectives/membership.h"
#include "rpc/collectives/rank_watch.h"
#include "rpc/collectives/ring_pass.h"
#include "rpc/collectives/step.h"

namespace tensorferry::collectives {

class HandedRegions;

/// One rank's part in the exchanges of its group. Operations are made of steps, and of passes around the ring; all
/// ranks make the same ones in the same order.
///
/// An error leaves the ranks out of step, so it fails the group; except that all ranks of an operation on which they
/// disagree notice it (disagreed()).
///
/// Threads: that which runs the group's operations; functions that say so may be called by any.
class Exchange final {
 public:
  /// The regions of one rank that this process keeps mapped.
  static constexpr std::size_t most_regions = 4096;

  Exchange(std::shared_ptr<RawAgent> agent, std::shared_ptr<const Membership> group, std::shared_ptr<Mailbox> mailbox,
           std::string label);
  ~Exchange();
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;

  [[nodiscard]] std::size_t rank() const noexcept { return group_->rank; }
  [[nodiscard]] std::size_t size() const noexcept { return group_->size(); }

  // Called before any operation.
  void use_watch(std::shared_ptr<const RankWatch> watch) { watch_ = std::move(watch); }
  /// The ranks share this host. `memory_readable`: each can read the memory of the others.
  void use_board(Buffer memory, bool memory_readable);
  /// Errors name the group so.
  void show_as(std::string label) { label_ = std::move(label); }

  /// Begins an operation.
  void begin() noexcept { disagreed_ = false; }
  /// Gives and takes bytes. If it is the first step of an operation, InvalidArgument if the ranks do not call the same,
  /// as `called` says. DeadlineExceeded names the ranks that have not come.
  Status step(const Fingerprint& called, ExchangeStep step, const WaitLimits& limits);
  /// A step without bytes in which this rank waits for no other, on a board: the ranks' devices meet instead. The calls
  /// are compared before the next step, or by compare_announced(); if they differ, `differ` hears why, on any thread.
  /// So a rank is at most one such step ahead of the others, and the board keeps each announcement until all ranks have
  /// compared it.
  Status announce(const Fingerprint& called, std::function<void(const Status&)> differ, const WaitLimits& limits);
  /// Passes blocks around the ring, by messages. The ranks have made a step in the same operation before.
  Status pass_around(const Fingerprint& called, const RingPass& pass, const WaitLimits& limits);
  /// Returns whether the ranks called different operations since begin(), which all of them know.
  [[nodiscard]] bool disagreed() const noexcept { return disagreed_; }
  /// The operation ends with an error that all ranks have found alike.
  void disagree() noexcept { disagreed_ = true; }
  /// Returns memory that this rank uses within an operation; ResourceExhausted.
  [[nodiscard]] Result<Buffer> working_memory(std::size_t bytes) const;

  // For any thread.
  [[nodiscard]] Links links() const noexcept { return links_; }
  /// Returns the number of the last step that this rank has begun.
  [[nodiscard]] std::uint64_t steps() const noexcept { return step_; }
  /// Compares the calls of the last announce() once all ranks have come to it. InvalidArgument: they differed, now or
  /// before, which fails the group.
  Status compare_announced();
  /// Returns whether the calls of the last announce() have not been compared yet.
  [[nodiscard]] bool has_announced() const;
  /// Returns the words for streams on the board; empty without a board, or if there are too many ranks.
  [[nodiscard]] Buffer stream_words() const { return board_ ? board_->stream_words() : Buffer(); }
  /// Keeps, or drops, a region of `rank` that this process has mapped. ResourceExhausted: most_regions of that rank are
  /// kept.
  Status map_region(std::size_t rank, std::uint64_t region, Buffer memory);
  void unmap_region(std::size_t rank, std::uint64_t region);
  /// Ends a sleep in a step, so that it asks WaitLimits::failed.
  void wake();
  /// The error of an operation whose time is over while it waits for the ranks `missing`.
  [[nodiscard]] Status late(const Fingerprint& called, const std::vector<std::size_t>& missing) const;
  /// Says that these ranks have not come, and what to do.
  [[nodiscard]] std::string not_come(const std::vector<std::size_t>& missing) const;

 private:
  /// Returns InvalidArgument, which names the ranks that differ, unless all ranks have called the same.
  [[nodiscard]] Status compare(std::vector<Fingerprint> called) const;
  /// The same for the first step of an operation, whose ranks all notice it.
  Status agree(std::vector<Fingerprint> called) {
    auto status = compare(std::move(called));
    disagreed_ = disagreed_ || !status.ok();
    return status;
  }
  static void leave_sizes_to_the_root(std::vector<Fingerprint>& called);

  // A step on a board (exchange.cpp).
  Status step_on_board(const Fingerprint& called, ExchangeStep& step, const WaitLimits& limits);
  /// Waits until all ranks have come to the step that announce() made before, and compares their calls.
  Status settle_announced(const WaitLimits& limits);
  /// Gives an error of a time that is over its text: the ranks that have not come to `step`.
  [[nodiscard]] Status missing(const Status& status, const Fingerprint& called, std::uint64_t step) const;
  Announcement place(ExchangeStep& step, std::byte* slot, std::vector<Part>& parts, std::vector<std::byte>& copy);
  Status take_parts(const ExchangeStep& step, const std::vector<Announcement>& announced, const WaitLimits& limits);
  /// Returns where the part is, and the owner of that memory; null data: in a process, for read_memory().
  Result<Buffer> find_part(std::size_t rank, const Announcement& announced, const Part& part) const;
  Status read_memory(std::size_t rank, std::byte* to, std::uint64_t from, std::size_t bytes) const;
  /// The error of a rank that gave up while this one read its memory.
  [[nodiscard]] Status withdrawn_by(std::size_t rank) const;
  Status reduce_parts(const ExchangeStep& step, const std::vector<const std::byte*>& here,
                      const std::vector<Part>& parts);

  // A step by messages (doubling.cpp).
  Status step_by_messages(const Fingerprint& called, ExchangeStep& step, const WaitLimits& limits);
  Result<std::vector<Told>> tell_all(const Fingerprint& called, const Told& own, std::deque<Bytes>& memory,
                                     const WaitLimits& limits);
  struct Arriving {  // by rank
    std::vector<std::shared_ptr<Delivery>> receives;
    std::vector<const std::byte*> at;
    std::vector<Buffer> memory;       // of what is reduced
    std::deque<Bytes> told;           // what `at` points into, if the bytes came with what a rank told
    std::vector<std::size_t> posted;  // the ranks whose bytes come as messages
  };
  /// Begins to receive what `from` gives in the step of this number.
  Status receive_into(const ExchangeStep& step, std::size_t from, std::uint64_t number, Arriving& arriving);
  /// Lets the ranks tell each other what they call and give, and compares it. Notes in `arriving` what has come with
  /// that, and who has posted the rest.
  Status learn(const Fingerprint& called, const ExchangeStep& step, const Told& own, std::uint64_t rounds,
               Arriving& arriving, const WaitLimits& limits);
  Status take_posted(const Fingerprint& called, const ExchangeStep& step, Arriving& arriving, const WaitLimits& limits);
  std::vector<std::size_t> behind(std::uint64_t step);
  /// Waits until all posts have ended, unless `status` is an error; withdraws what is left after one. Returns the first
  /// error. One of a time that is over names `receivers`.
  Status settle(const std::vector<std::shared_ptr<Delivery>>& posts, Status status, const Fingerprint& called,
                const std::vector<std::size_t>& receivers, const WaitLimits& limits);

  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<const Membership> group_;
  const std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<const RankWatch> watch_;
  std::string label_;
  Links links_;
  std::shared_ptr<HandedRegions> handed_over_;  // regions of this process that the other ranks have mapped

  std::atomic<std::uint64_t> step_{0};  // the last that this rank has begun
  std::uint64_t passed_ = 0;            // messages of rings, counted by the rank that sends most
  bool disagreed_ = false;
  std::vector<std::byte> scratch_;

  struct Announced {
    std::uint64_t step;
    Fingerprint called;
    std::function<void(const Status&)> differ;
  };
  struct Announcements {
    std::optional<Announced> last;  // not compared yet
    Status mismatch;
  };
  mutable std::mutex mutex_;                                         // guards the next three
  std::unique_ptr<Board> board_;                                     // set once; the thread of operations needs no lock
  std::map<std::pair<std::size_t, std::uint64_t>, Buffer> regions_;  // of other ranks
  Announcements announced_;
};

}  // namespace tensorferry::collectives
