/// A group of agents that reduce, gather and exchange bytes. It knows no torch and no Python.
#pragma once

#include <atomic>
#include <condition_variable>
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
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "channels/cma/process.h"
#include "include/tensorferry/reduction.h"
#include "rpc/collectives/board.h"
#include "rpc/collectives/choose.h"
#include "rpc/collectives/mailbox.h"
#include "rpc/collectives/step.h"

namespace tensorferry::collectives {

class RawGroup;
class HandedRegions;
struct RingPass;

/// An operation of a group that has been started. Thread-safe.
class GroupWork final : public std::enable_shared_from_this<GroupWork> {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  /// A collective operation: a thread of the group's calls `run`.
  GroupWork(std::shared_ptr<RawGroup> group, UniqueFunction<Status(const WaitLimits&)> run, Deadline deadline);
  /// A send or a receive. The owner sets `delivery_` before it hands the work out.
  GroupWork(std::shared_ptr<RawGroup> group, Deadline deadline, std::string text);

  /// Waits until the operation has ended and returns true; or returns false after `until` or an interruption, and the
  /// operation goes on. Without `until`, the calling thread runs the group's operations if no other thread does; an
  /// interruption then ends the operation that it runs, and fails the group. A send or receive that is late ends here.
  bool wait(std::optional<Deadline> until = std::nullopt, const std::function<bool()>& interrupted = {});
  [[nodiscard]] bool done() const;
  /// Returns the result; Ok before done().
  [[nodiscard]] Status status() const;
  /// What a receive has received; valid once done() and Ok.
  [[nodiscard]] Letter letter() const { return delivery_ ? delivery_->letter() : Letter{}; }
  /// Runs `told` once the operation has ended: on the thread that ends it, or now if it has ended.
  void on_done(UniqueFunction<void(const Status&)> told);
  /// Runs `run` before the operation counts as ended, so before any wait() returns: on the thread that ends it, or now
  /// if it is ending. `run` must not use the operation.
  void before_end(UniqueFunction<void()> run);
  /// The number of the operation among those of its group, from 1, in the order of their start.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }

 private:
  friend class RawGroup;
  void end(Status status);

  const std::shared_ptr<RawGroup> group_;
  UniqueFunction<Status(const WaitLimits&)> run_;  // used by the thread that runs the operation
  std::function<bool()> arrived_;
  std::function<void()> finish_;
  std::shared_ptr<Delivery> delivery_;
  const Deadline deadline_;
  const std::string text_;
  std::uint64_t number_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false, done_ = false;
  Status status_;
  std::vector<UniqueFunction<void()>> before_;
  std::vector<UniqueFunction<void(const Status&)>> told_;
};

/// How an operation starts.
struct StartOptions {
  Milliseconds timeout{0};  // 0: the group's
  bool background = true;   // false: the operation runs only while a thread waits for it
  Owner keep;               // of the memory that the operation uses, until it has ended
  // Runs after a success, before the work ends, on the thread that ends it. What it throws fails the work alone.
  std::function<void()> finish{};
  // Whether the inputs are in host memory: the operation waits for it. Polled by the thread that runs the operation; a
  // send's by its caller. What it throws fails the operation, and the group.
  std::function<bool()> arrived{};
};

/// An ordered list of agents that perform operations together: every rank calls the same operations in the same order.
///
/// Memory is the host's, and must stay unchanged (inputs) or unused (outputs) until the work has ended. Inputs and
/// outputs may be the same memory. Operations run one after the other, in the order of their start. Two groups are
/// independent, also over the same agents.
///
/// Errors: InvalidArgument (at every rank) if the ranks do not call the same operation; the group can be used further.
/// All other errors fail the group at every rank, with an error that names the rank: ConnectionLost (a rank has died),
/// DeadlineExceeded (names the ranks that have not come), Cancelled (abort(), or a rank has left the group). The
/// survivors can form a new group.
///
/// Threads: any thread may start operations, but all ranks must start them in the same order.
class RawGroup final : public std::enable_shared_from_this<RawGroup> {
 public:
  struct Settings {
    std::string label;
    Milliseconds timeout{};
    Prescribed algorithms;
  };
  struct Membership {  // what the formation of a group finds out: its id, its members, and the rank of this one
    std::uint64_t id = 0;
    std::size_t rank = 0;
    std::vector<MemberRecord> members;
  };
  /// The groups below a group whose ranks are on several hosts, if a host has several of them.
  struct Levels {
    std::shared_ptr<RawGroup> host;  // the ranks of this rank's host; the first of them leads
    std::shared_ptr<RawGroup>
        leaders;  // one rank of each host, in the order of the hosts; null: this rank does not lead
    std::vector<std::size_t> host_of;  // by rank: the number of its host
  };
  using InBytes = std::span<const std::byte>;
  using OutBytes = std::span<std::byte>;
  using Work = std::shared_ptr<GroupWork>;

  RawGroup(std::shared_ptr<RawAgent> agent, Membership membership, Settings settings);
  ~RawGroup();  // close()

  [[nodiscard]] std::uint64_t id() const noexcept { return membership_.id; }
  [[nodiscard]] std::size_t rank() const noexcept { return membership_.rank; }
  [[nodiscard]] std::size_t size() const noexcept { return names_.size(); }
  [[nodiscard]] const std::vector<std::string>& names() const noexcept { return names_; }
  [[nodiscard]] const Settings& settings() const noexcept { return settings_; }
  [[nodiscard]] Links links() const noexcept { return links_; }
  [[nodiscard]] const std::shared_ptr<RawAgent>& agent() const noexcept { return agent_; }
  /// Says which algorithm `operation` takes for `bytes` bytes and why, and how the ranks exchange bytes.
  [[nodiscard]] std::string explain(Operation operation, std::size_t bytes) const;
  /// Returns the error that has failed the group, or Ok.
  [[nodiscard]] Status failed() const;
  /// The numbers of the operation that was started last, and of the one that ended last.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> progress() const;

  Work barrier(StartOptions options = {});
  /// `data` has the bytes at `root`, and gets them at the others.
  Work broadcast(OutBytes data, DType dtype, std::size_t root, StartOptions options = {});
  Work all_reduce(InBytes input, OutBytes output, DType dtype, ReduceOp op, StartOptions options = {});
  /// `output` is used at `root` alone.
  Work reduce(InBytes input, OutBytes output, DType dtype, ReduceOp op, std::size_t root, StartOptions options = {});
  /// The input of each rank goes to `outputs` of every rank. `even`: all inputs have the same size.
  Work all_gather(InBytes input, std::vector<OutBytes> outputs, DType dtype, bool even, StartOptions options = {});
  /// `outputs` is used at `root` alone.
  Work gather(InBytes input, std::vector<OutBytes> outputs, DType dtype, std::size_t root, StartOptions options = {});
  /// `inputs` is used at `root` alone.
  Work scatter(std::vector<InBytes> inputs, OutBytes output, DType dtype, std::size_t root, StartOptions options = {});
  /// The inputs of all ranks at index i are reduced into the output of rank i.
  Work reduce_scatter(std::vector<InBytes> inputs, OutBytes output, DType dtype, ReduceOp op,
                      StartOptions options = {});
  /// The input at index i goes to rank i. `even`: all have the same size, at all ranks.
  Work all_to_all(std::vector<InBytes> inputs, std::vector<OutBytes> outputs, DType dtype, bool even,
                  StartOptions options = {});
  /// Ends when the receiver has the bytes, or has been told of them and they have been read.
  Work send(InBytes data, std::size_t to, std::uint64_t tag, StartOptions options = {});
  /// `from` may be Mailbox::any_rank; GroupWork::letter() says which it was.
  Work receive(OutBytes data, std::size_t from, std::uint64_t tag, StartOptions options = {});
  /// A barrier in which rank 0 names the ranks that have not come in time, all or the first of them. At the other ranks
  /// it fails if rank 0 does not let them go. Runs on the calling thread. A failure leaves the group as it is. With a
  /// time-out of 0 it fails at once.
  Status monitored_barrier(Milliseconds timeout, bool name_all);

  /// Fails the group at every rank with Cancelled.
  void abort(const std::string& why);
  /// Leaves the group: it fails with Cancelled, here and, for operations that this rank takes no part in, at the
  /// others.
  void close();

  // For Groups, which forms groups and brings their messages.
  void use_board(Buffer memory, bool memory_readable);
  void use_levels(Levels levels);
  /// Errors name the group `label`, and the ranks by these numbers: those of the group above. Called before any
  /// operation.
  void show_as(std::string label, std::vector<std::size_t> ranks);
  /// Prepares to notice the death of ranks of this host. Called once, before any operation.
  void watch_processes();
  /// Keeps the reasons for explain().
  void say_why(std::string no_board, std::string no_memory);
  [[nodiscard]] Mailbox& mailbox() noexcept { return *mailbox_; }
  /// Returns the number of the last step that this rank has begun.
  [[nodiscard]] std::uint64_t step() const noexcept { return step_; }
  /// Returns the rank of the agent of that name; nullopt if it is no member.
  [[nodiscard]] std::optional<std::size_t> rank_of(std::string_view name) const;
  void map_region(std::size_t rank, std::uint64_t region, Buffer memory);
  void unmap_region(std::size_t rank, std::uint64_t region);
  /// Fails the group here; `tell`: at the other ranks too.
  void fail(const Status& why, bool tell);
  void run_queue();

 private:
  friend class GroupWork;
  using Run = UniqueFunction<Status(const WaitLimits&)>;

  Work start(StartOptions options, Run run);
  Work transfer(StartOptions options, std::string text,
                const std::function<std::shared_ptr<Delivery>(UniqueFunction<void(Status)>)>& begin);
  void run_in_background();
  bool run_for(const GroupWork& work, const std::function<bool()>& interrupted);
  void run_one(const std::shared_ptr<GroupWork>& work, const std::function<bool()>& interrupted);
  Status await_inputs(const std::function<bool()>& arrived, const WaitLimits& limits) const;
  void look_for_the_dead();
  void rank_died(std::size_t rank, std::string_view why);
  [[nodiscard]] WaitLimits limits_of(GroupWork::Deadline until, std::function<bool()> interrupted);
  [[nodiscard]] Algorithm choose(Operation operation, std::size_t bytes, bool in_turn) const;

  // The algorithms, each in a file of its name. A root is Mailbox::any_rank if every rank takes the result.
  Status reduce_by(Algorithm algorithm, const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op,
                   std::size_t root, const WaitLimits& limits);
  Status reduce_one_shot(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op,
                         std::size_t root, const WaitLimits& limits);
  Status reduce_two_shot(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op,
                         std::size_t root, const WaitLimits& limits);
  Status reduce_by_ring(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op, std::size_t root,
                        const WaitLimits& limits);
  Status reduce_scatter_by_ring(const Fingerprint& called, const std::vector<InBytes>& inputs, OutBytes output,
                                const ReduceOp& op, const WaitLimits& limits);
  Status all_gather_by_ring(const Fingerprint& called, InBytes input, const std::vector<OutBytes>& outputs,
                            const WaitLimits& limits);
  Status reduce_two_level(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op,
                          std::size_t root, const WaitLimits& limits);
  Status broadcast_two_level(const Fingerprint& called, OutBytes data, std::size_t root, const WaitLimits& limits);
  Status broadcast_by_ring(const Fingerprint& called, OutBytes data, std::size_t root, const WaitLimits& limits);
  Status scatter_around(const Fingerprint& called, const std::vector<InBytes>& inputs,
                        const std::vector<std::byte*>& sums, const ReduceOp& op, const WaitLimits& limits);
  Status gather_around(const Fingerprint& called, const std::vector<OutBytes>& blocks, const WaitLimits& limits);
  Status pass_around(const Fingerprint& called, const RingPass& pass, const WaitLimits& limits);
  Status collect_shares(const Fingerprint& called, InBytes share, OutBytes output, std::size_t root,
                        const WaitLimits& limits);

  Status exchange(const Fingerprint& called, ExchangeStep step, const WaitLimits& limits);
  Status exchange_on_board(const Fingerprint& called, ExchangeStep& step, const WaitLimits& limits);
  Status exchange_by_messages(const Fingerprint& called, ExchangeStep& step, const WaitLimits& limits);
  Result<std::vector<Told>> tell_all(const Fingerprint& called, const Told& own, std::deque<Bytes>& memory,
                                     const WaitLimits& limits);
  Status take_posted(const Fingerprint& called, const ExchangeStep& step, const std::vector<std::size_t>& from,
                     std::vector<const std::byte*>& inputs, std::vector<Buffer>& memory, const WaitLimits& limits);
  /// Waits until all posts have ended, unless `status` is an error; withdraws what is left after one. Returns the first
  /// error. One of a time that is over names `receivers`.
  Status settle(const std::vector<std::shared_ptr<Delivery>>& posts, Status status, const Fingerprint& called,
                const std::vector<std::size_t>& receivers, const WaitLimits& limits);
  Status take_own(const ExchangeStep& step) const;
  /// Returns memory that this rank uses within an operation; ResourceExhausted.
  [[nodiscard]] Result<Buffer> working_memory(std::size_t bytes) const;
  std::vector<std::size_t> behind(std::uint64_t step);
  Result<Announcement> place(ExchangeStep& step, std::byte* slot, std::vector<Part>& parts,
                             std::vector<std::byte>& copy);
  Status agree(const std::vector<Fingerprint>& called);
  Status take_parts(ExchangeStep& step, const std::vector<Announcement>& announced, const WaitLimits& limits);
  Result<const std::byte*> find_part(std::size_t rank, const Announcement& announced, const Part& part) const;
  Status read_memory(std::size_t rank, std::byte* to, std::uint64_t from, std::size_t bytes) const;
  Status reduce_parts(ExchangeStep& step, const std::vector<const std::byte*>& here, const std::vector<Part>& parts);
  [[nodiscard]] std::string not_come(const std::vector<std::size_t>& missing) const;
  [[nodiscard]] Status late(std::string_view what, const std::vector<std::size_t>& missing) const;
  [[nodiscard]] Status late(const Fingerprint& called, const std::vector<std::size_t>& missing) const;
  [[nodiscard]] std::string named(std::size_t rank) const;

  const std::shared_ptr<RawAgent> agent_;
  const Membership membership_;
  Settings settings_;
  std::vector<std::string> names_;
  Links links_;
  std::string no_board_, no_memory_;  // why `links_` lacks them
  const std::shared_ptr<Mailbox> mailbox_;
  std::shared_ptr<HandedRegions> handed_over_;  // regions of this process that the other ranks have mapped
  std::unique_ptr<Board> board_;
  Levels levels_;                                       // set before any operation
  std::vector<std::optional<cma::Process>> processes_;  // by rank; nullopt: this process, or one of another host
  std::atomic<std::int64_t> looked_at_{0};              // when this rank last looked for dead ones, on the steady clock
  std::vector<std::uint8_t> probed_;  // by rank: a call is to find out whether it is alive; guarded by mutex_

  // Used by the thread that runs operations.
  std::atomic<std::uint64_t> step_{0};  // the last that this rank has begun; any thread reads it
  std::uint64_t passed_ = 0;            // messages of rings, counted by the rank that sends most
  bool disagreed_ = false;              // the ranks called different operations, which all of them know
  std::vector<std::byte> scratch_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> queue_;
  bool running_ = false;
  std::uint64_t started_ = 0, ended_ = 0;
  std::uint64_t barriers_ = 0;  // monitored ones
  Status failed_;
  std::map<std::pair<std::size_t, std::uint64_t>, Buffer> regions_;  // of other ranks
};

}  // namespace tensorferry::collectives
