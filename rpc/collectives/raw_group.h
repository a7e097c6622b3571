/// A group of agents that reduce, gather and exchange bytes. It knows no torch and no Python.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "include/tensorferry/reduction.h"
#include "rpc/collectives/algorithms.h"
#include "rpc/collectives/choose.h"
#include "rpc/collectives/exchange.h"
#include "rpc/collectives/group_work.h"
#include "rpc/collectives/mailbox.h"
#include "rpc/collectives/membership.h"
#include "rpc/collectives/operation_queue.h"
#include "rpc/collectives/rank_watch.h"
#include "rpc/collectives/ways.h"

namespace tensorferry::collectives {

/// An ordered list of agents that perform operations together: every rank calls the same operations in the same order.
///
/// Memory is the host's, and must stay unchanged (inputs) or unused (outputs) until the work has ended. Inputs and
/// outputs may be the same memory. Operations run one after the other, in the order of their start. Two groups are
/// independent, also over the same agents.
///
/// Errors: InvalidArgument (at every rank) if the ranks do not call the same operation; the group can be used further.
/// All other errors fail the group at every rank, with an error that names the rank: ConnectionLost (a rank has died),
/// DeadlineExceeded (names the ranks that have not come), Cancelled (abort()). The survivors can form a new group. The
/// first reason counts: an error that another rank's ending can cause, such as data that it withdraws, waits until that
/// rank has told why.
///
/// If a rank leaves in order (close()), the operations of all ranks fail with Cancelled after those that it has ended.
/// Sends and receives among the other ranks go on, and what it has sent in small messages is still received.
///
/// Threads: any thread may start operations, but all ranks must start them in the same order.
class RawGroup final : public std::enable_shared_from_this<RawGroup> {
 public:
  struct Settings {
    std::string label;
    Milliseconds timeout{};
    Prescribed algorithms;
  };
  using InBytes = collectives::InBytes;
  using OutBytes = collectives::OutBytes;
  using Work = std::shared_ptr<GroupWork>;

  RawGroup(std::shared_ptr<RawAgent> agent, Membership membership, Settings settings);
  ~RawGroup();  // as close(), but waits for nothing

  [[nodiscard]] std::uint64_t id() const noexcept { return membership_->id; }
  [[nodiscard]] std::size_t rank() const noexcept { return membership_->rank; }
  [[nodiscard]] std::size_t size() const noexcept { return names_.size(); }
  [[nodiscard]] const std::vector<std::string>& names() const noexcept { return names_; }
  [[nodiscard]] const Settings& settings() const noexcept { return settings_; }
  [[nodiscard]] Links links() const noexcept;
  [[nodiscard]] const std::shared_ptr<RawAgent>& agent() const noexcept { return agent_; }
  /// Says which algorithm `operation` takes for `bytes` bytes and why, and how the ranks exchange bytes.
  [[nodiscard]] std::string explain(Operation operation, std::size_t bytes) const {
    return ways_.explain({operation, bytes, size(), links()});
  }
  /// Returns the error that has failed the group, or Ok.
  [[nodiscard]] Status failed() const { return queue_.stopped(); }
  /// Returns whether this rank has left the group.
  [[nodiscard]] bool closed() const noexcept { return closed_; }
  /// Returns whether the group failed because a rank, perhaps this one, has left it in order.
  [[nodiscard]] bool failed_by_leaving() const { return queue_.stopped_by_leaving(); }
  /// The numbers of the operation that was started last, and of the one that ended last.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> progress() const { return queue_.progress(); }
  /// Returns how many operations of all ranks have begun here, by the way that they took.
  [[nodiscard]] std::vector<CountedPath> paths() const { return ways_.counts().taken(); }
  /// Finds what a call asks for by StartOptions::algorithm: nullopt if that is "". InvalidArgument names the algorithms
  /// that fit. Fills in the ranks and links of `asked`.
  [[nodiscard]] Result<std::optional<Algorithm>> find_algorithm(std::string_view name, Asked asked) const;

  // With an algorithm that does not fit, the work has ended with InvalidArgument, at this rank alone.
  Work barrier(StartOptions options = {});
  /// `data` has the bytes at `root`, and gets them at the others.
  Work broadcast(OutBytes data, DType dtype, std::size_t root, StartOptions options = {});
  Work all_reduce(InBytes input, OutBytes output, DType dtype, ReduceOp op, StartOptions options = {});
  /// `output` is used at `root` alone.
  Work reduce(InBytes input, OutBytes output, DType dtype, ReduceOp op, std::size_t root, StartOptions options = {});
  /// The input of each rank goes to `outputs` of every rank. `even`: all inputs have the same size.
  Work all_gather(InBytes input, std::vector<OutBytes> outputs, DType dtype, bool even, StartOptions options = {});
  /// `outputs` is used at `root` alone. In host memory their sizes may differ; InvalidArgument fails the group if a
  /// rank then gives another size than the root takes.
  Work gather(InBytes input, std::vector<OutBytes> outputs, DType dtype, std::size_t root, StartOptions options = {});
  /// `inputs` is used at `root` alone. Sizes are as for gather().
  Work scatter(std::vector<InBytes> inputs, OutBytes output, DType dtype, std::size_t root, StartOptions options = {});
  /// The inputs of all ranks at index i are reduced into the output of rank i, and have its size.
  Work reduce_scatter(std::vector<InBytes> inputs, OutBytes output, DType dtype, ReduceOp op,
                      StartOptions options = {});
  /// The input at index i goes to rank i. `even`: all have the same size, at all ranks.
  Work all_to_all(std::vector<InBytes> inputs, std::vector<OutBytes> outputs, DType dtype, bool even,
                  StartOptions options = {});
  /// Ends when the receiver has the bytes, or has been told of them and they have been read. InvalidArgument: the
  /// receive that would read them has another dtype or size; a small send has ended well then.
  Work send(InBytes data, DType dtype, std::size_t to, std::uint64_t tag, StartOptions options = {});
  /// `from` may be Mailbox::any_rank; GroupWork::letter() says which it was. InvalidArgument: the next send has another
  /// dtype or size. It counts as received, and the group goes on.
  Work receive(OutBytes data, DType dtype, std::size_t from, std::uint64_t tag, StartOptions options = {});
  /// A barrier in which rank 0 names the ranks that have not come in time, all or the first of them. At the other ranks
  /// it fails if rank 0 does not let them go. Runs on the calling thread. A failure leaves the group as it is. With a
  /// time-out of 0 it fails at once.
  Status monitored_barrier(Milliseconds timeout, bool name_all);

  /// Fails the group at every rank with Cancelled.
  void abort(const std::string& why);
  /// Leaves the group: it fails with Cancelled, here at once. The others end the operations that have ended here first;
  /// their sends and receives among themselves go on. Waits up to a second until they have heard of it, because an
  /// agent that leaves next would take the message back.
  void close();
  /// Waits until the operations of all ranks that have been started here have ended, each at its time-out at the
  /// latest. False: `interrupted` ended the wait, and the operation that this thread ran.
  bool end_started(const std::function<bool()>& interrupted = {});

  // For transfers between two ranks by other ways than messages, such as a write to memory of the other.
  using BeginTransfer = std::function<std::shared_ptr<Delivery>(UniqueFunction<void(Status)> told)>;
  /// Starts a transfer that errors name `text`. `begin` starts it, and returns a delivery of `told` which completes at
  /// its end, perhaps before `begin` returns. If the work ends first (late, withdrawn), the delivery is completed then.
  Work transfer(StartOptions options, std::string text, const BeginTransfer& begin);
  /// Returns why sends and receives among the ranks do not go on; Ok while they do.
  [[nodiscard]] Status over() const { return queue_.all_stopped(); }

  // For operations on devices.
  /// Starts an operation that `run` performs, on the thread that runs operations and in their order.
  Work perform(StartOptions options, UniqueFunction<Status(const WaitLimits&)> run);
  /// Within an operation: returns Ok if all ranks called the same, as `called` says; else their disagreement.
  Status agree_on(const Fingerprint& called, const WaitLimits& limits);
  /// Within an operation of ranks on a board: Exchange::announce(). compare_announced() may be called at any time.
  Status announce(const Fingerprint& called, std::function<void(const Status&)> differ, const WaitLimits& limits) {
    return exchange_.announce(called, std::move(differ), limits);
  }
  Status compare_announced() { return exchange_.compare_announced(); }
  [[nodiscard]] bool has_announced() const { return exchange_.has_announced(); }
  /// Within an operation: as agree_on(), and writes what each rank has told to `all`, in the order of the ranks. All
  /// tell as many bytes.
  Status tell_each_other(const Fingerprint& called, InBytes own, OutBytes all, const WaitLimits& limits);
  /// Within an operation, after tell_each_other(): gives `own` to all ranks, and takes what each gives.
  Status give_to_all(const Fingerprint& called, InBytes own, const std::vector<OutBytes>& all,
                     const WaitLimits& limits);
  /// Within an operation: `why` is an error that all ranks have found alike. The group can be used further.
  Status disagree(Status why) {
    exchange_.disagree();
    return why;
  }
  /// The error of an operation whose time is over while it waits for the ranks `missing`.
  [[nodiscard]] Status late(const Fingerprint& called, const std::vector<std::size_t>& missing) const {
    return exchange_.late(called, missing);
  }
  /// Fails the group if a rank has died; asks at most every 50 ms. Never blocks.
  void look_for_the_dead() { ranks_->look(); }
  /// Returns whether the process of the rank, on this host, has ended.
  [[nodiscard]] bool has_ended(std::size_t rank) const { return ranks_->has_ended(rank); }
  /// Returns why the agent of the rank counts as dead; empty if nothing is known of its end.
  [[nodiscard]] std::string why_dead(std::size_t rank) const { return ranks_->why_dead(rank); }
  /// Returns the words for streams on the board; empty without a board, or if there are too many ranks.
  [[nodiscard]] Buffer stream_words() const { return exchange_.stream_words(); }
  [[nodiscard]] Ways& ways() noexcept { return ways_; }
  /// Returns the key of the crossings on GPUs; nullopt before the first operation there that needs no host memory.
  [[nodiscard]] std::optional<TuningKey> gpu_tuning_key() const { return ways_.gpu_tuning_key(); }
  /// Returns the agent's clock, by which operations reach their time-outs.
  [[nodiscard]] const Clock& clock() const noexcept { return agent_->clock(); }
  /// Returns the name of a rank in errors: `rank 1 ("worker1")`.
  [[nodiscard]] std::string named(std::size_t rank) const { return mailbox_->named(rank); }

  // For Groups, which forms groups and brings their messages.
  void use_levels(Levels levels);
  /// Errors name the group `label`, and the ranks by these numbers: those of the group above. Called before any
  /// operation.
  void show_as(std::string label, std::vector<std::size_t> ranks);
  /// Prepares to notice the death of ranks of this host. Called once, before any operation.
  void watch_processes(HostProcesses& processes);
  [[nodiscard]] Mailbox& mailbox() noexcept { return *mailbox_; }
  [[nodiscard]] Exchange& exchange() noexcept { return exchange_; }
  /// Returns the rank of the agent of that name; nullopt if it is no member.
  [[nodiscard]] std::optional<std::size_t> rank_of(std::string_view name) const;
  /// Ends this send or receive when it is late, and looks for the dead until it has ended.
  void look_after(const std::shared_ptr<GroupWork>& transfer);
  /// Fails the group here; `tell`: at the other ranks too.
  void fail(const Status& why, bool tell);
  /// The group has failed at `rank`.
  void rank_failed(std::size_t rank, const Status& why);
  /// `rank` has left after it has ended `after` operations: ends, when this rank has ended them too, what needs it.
  void rank_left(std::size_t rank, std::uint64_t after, const Status& why);
  void run_queue();

 private:
  friend class GroupWork;
  using Run = UniqueFunction<Status(const WaitLimits&)>;

  Work start(StartOptions options, Run run);
  void look_after_transfers();
  void run_in_background();
  bool run_for(const GroupWork& work, const std::function<bool()>& interrupted);
  void run_one(const std::shared_ptr<GroupWork>& work, const std::function<bool()>& interrupted);
  Status await_inputs(const std::function<bool()>& arrived, const WaitLimits& limits) const;
  /// Fails the group here and returns how many operations have ended; nullopt: it has failed before. `by_leaving`: this
  /// rank leaves. That other ranks have left is no failure before.
  std::optional<std::uint64_t> fail_here(const Status& why, bool by_leaving = false);
  /// Another rank has left: ends here what needs it.
  void end_without(std::size_t rank, const Status& why);
  /// Returns the reason of an operation's error: the group's, or else `status`.
  Status first_reason(Status status);
  /// As close(), and waits for nothing. Returns the calls that tell the others.
  std::vector<Call> leave();
  /// Returns the groups that perform parts of this one's operations; null if there are none.
  [[nodiscard]] std::array<std::shared_ptr<RawGroup>, 2> groups_below();
  std::vector<Call> tell_others(const Status& why, std::uint64_t after);
  void rank_died(std::size_t rank, std::string_view why);
  [[nodiscard]] WaitLimits limits_of(GroupWork::Deadline until, std::function<bool()> interrupted);
  Work refuse(Status why);
  /// Chooses the algorithm in host memory, and counts the operation.
  Algorithm choose(const Asked& asked, std::optional<Algorithm> wanted, bool staged);

  [[nodiscard]] Performing performing(const Fingerprint& called, const WaitLimits& limits) {
    return {exchange_, called, limits};
  }
  Status reduce_by(Algorithm algorithm, const Performing& now, InBytes input, OutBytes output, const ReduceOp& op,
                   std::size_t root) const;

  const std::shared_ptr<RawAgent> agent_;
  const std::shared_ptr<const Membership> membership_;
  Settings settings_;
  const std::vector<std::string> names_;
  const std::shared_ptr<Mailbox> mailbox_;
  Exchange exchange_;
  Ways ways_;
  std::shared_ptr<RankWatch> ranks_;  // set before any operation

  std::atomic<bool> closed_{false};
  OperationQueue queue_;
  std::atomic<std::uint64_t> barriers_{0};  // monitored ones
  std::mutex mutex_;
  Levels levels_;                                    // set before any operation
  std::vector<std::weak_ptr<GroupWork>> transfers_;  // to be looked after; if there are any, a job does it
};

}  // namespace tensorferry::collectives
