/// Groups of agents that reduce, gather and exchange tensors.
///
///     auto group = tensorferry::Group::form(*agent, {"sim0", "sim1"});
///     group->all_reduce(gradients, tensorferry::Reduction::average).get();
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tensorferry/future.h"
#include "tensorferry/reduction.h"
#include "tensorferry/tensor.h"

namespace tensorferry {

class Agent;

/// Options of Group::form. They mean the same as in Python's tensorferry.collectives.form_group. Every rank gives the
/// same, except for `host`.
struct GroupOptions {
  /// Tells groups of the same agents apart while they are formed, and names the group in errors.
  std::string label = "default";
  /// The time-out of the formation, and of each operation that gives none.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// Algorithms that are prescribed, as "all_reduce=two_shot". "": TENSORFERRY_COLLECTIVES.
  std::string algorithms{};
  /// False: the ranks exchange messages even on one host.
  bool board = true;
  /// False: the ranks do not read one another's memory.
  bool memory = true;
  /// Ranks that give the same text share a host. "": those that run on one boot of a kernel do.
  std::string host{};
};

/// An ordered list of agents, in C++ or Python, that perform operations together.
///
/// Every rank calls the same operations in the same order. They run one after the other. Two groups are independent,
/// also over the same agents.
///
/// Tensors are in host memory and may be strided. An input must not be written, and an output not be used, until the
/// future has completed. Futures give the outputs. If a thread waits for the future, it runs the operation itself;
/// otherwise a thread of the agent's pool does. An operation cannot be cancelled alone: Future::cancel has no effect.
/// `timeout` 0: the group's. `algorithm`: how this call is done, such as "two_shot", the same at every rank; "": as the
/// group's options say.
///
/// Errors: a tensor or a rank that makes no sense, and an algorithm that does not fit, throw InvalidArgument here, at
/// this rank alone. All other errors come through the future:
///
/// - InvalidArgument, at every rank: the ranks called different operations. The text names the rank that differs. The
///   group can be used further.
/// - ConnectionLost (a rank has died), DeadlineExceeded (names the ranks that have not come) or Cancelled (a rank has
///   left or aborted): the group has failed at every rank. The survivors can form a new one.
///
/// Threads: any thread may start operations, but all ranks must start them in the same order.
class Group {
 public:
  using Tensors = std::vector<Tensor>;
  using Timeout = std::chrono::milliseconds;

  /// Forms a group of the agents `names`, in the order of their ranks. Each of them calls this with the same names and
  /// options; blocks until all have. Throws:
  ///
  /// - InvalidArgument: `agent` is not among the names, a name is there twice, or an option makes no sense.
  /// - DeadlineExceeded: not all have come; rank 0's text names them.
  /// - ConnectionLost: one of them cannot be reached.
  static std::shared_ptr<Group> form(const Agent& agent, std::vector<std::string> names, GroupOptions options = {});
  /// Calls close().
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  /// Returns this agent's place in the group.
  [[nodiscard]] std::size_t rank() const;
  /// Returns the number of ranks.
  [[nodiscard]] std::size_t size() const;
  /// Returns the names of the agents, in the order of their ranks.
  [[nodiscard]] const std::vector<std::string>& names() const;
  [[nodiscard]] const std::string& label() const;

  /// Completes when all ranks have called it.
  Future<void> barrier(Timeout timeout = {});
  /// Copies the tensor of rank `root` into that of every other rank.
  Future<Tensor> broadcast(const Tensor& tensor, std::size_t root = 0, Timeout timeout = {},
                           std::string_view algorithm = {});
  /// Reduces the tensors of all ranks into each of them. Every rank gets the same bits.
  Future<Tensor> all_reduce(const Tensor& tensor, ReduceOp op = {}, Timeout timeout = {},
                            std::string_view algorithm = {});
  /// The same into `output`, which has the size and dtype of `input`.
  Future<Tensor> all_reduce(const Tensor& input, const Tensor& output, ReduceOp op = {}, Timeout timeout = {},
                            std::string_view algorithm = {});
  /// Reduces several tensors of one dtype in place, as if they were one.
  Future<Tensors> all_reduce_coalesced(Tensors tensors, ReduceOp op = {}, Timeout timeout = {},
                                       std::string_view algorithm = {});
  /// Reduces the tensors of all ranks into that of rank `root`.
  Future<Tensor> reduce(const Tensor& tensor, std::size_t root = 0, ReduceOp op = {}, Timeout timeout = {},
                        std::string_view algorithm = {});
  /// The same into `output`, which is used at rank `root` alone.
  Future<Tensor> reduce(const Tensor& input, const Tensor& output, std::size_t root = 0, ReduceOp op = {},
                        Timeout timeout = {}, std::string_view algorithm = {});
  /// Gives every rank the tensors of all ranks, as new tensors of the shape of `input`.
  Future<Tensors> all_gather(const Tensor& input, Timeout timeout = {}, std::string_view algorithm = {});
  /// The same into `outputs`, one for each rank. Their sizes may differ if each rank knows all.
  Future<Tensors> all_gather(const Tensor& input, Tensors outputs, Timeout timeout = {},
                             std::string_view algorithm = {});
  /// Gives rank `root` the tensors of all ranks, as new tensors of the shape of `input`. The others get no tensor.
  Future<Tensors> gather(const Tensor& input, std::size_t root = 0, Timeout timeout = {});
  /// The same into `outputs`, which is used at rank `root` alone.
  Future<Tensors> gather(const Tensor& input, Tensors outputs, std::size_t root = 0, Timeout timeout = {});
  /// Gives each rank one of the `inputs` of rank `root`, in `output`. The other ranks' `inputs` are not used.
  Future<Tensor> scatter(const Tensors& inputs, const Tensor& output, std::size_t root = 0, Timeout timeout = {});
  /// Reduces the inputs of all ranks at each index into `output` of the rank of that index.
  Future<Tensor> reduce_scatter(const Tensors& inputs, const Tensor& output, ReduceOp op = {}, Timeout timeout = {},
                                std::string_view algorithm = {});
  /// Gives the input at each index to the rank of that index, which gets it at the index of this rank.
  Future<Tensors> all_to_all(const Tensors& inputs, Tensors outputs, Timeout timeout = {});
  /// Sends a tensor to rank `to`. Completes when the receiver has the elements, or a copy of them waits there.
  Future<void> send(const Tensor& tensor, std::size_t to, std::uint64_t tag = 0, Timeout timeout = {});
  /// Receives a tensor of the same tag from rank `from`; nullopt: from any rank. Gives the rank that it came from. A
  /// receive that is late fails alone, and so does one of another dtype or number of elements than the send
  /// (InvalidArgument).
  Future<std::size_t> receive(const Tensor& tensor, std::optional<std::size_t> from = {}, std::uint64_t tag = 0,
                              Timeout timeout = {});
  /// A barrier in which rank 0 names the ranks that have not come in time: the first, or all if `name_all`. Blocks.
  /// Throws DeadlineExceeded, and the group can be used further.
  void monitored_barrier(Timeout timeout, bool name_all = false);

  /// Forms a group of the ranks with the same `color`, ordered by `key` and then by rank. All ranks call it. Returns
  /// null if `color` is nullopt.
  std::shared_ptr<Group> split(std::optional<std::int64_t> color, std::int64_t key = 0);
  /// Forms a group of these ranks and of the agents `names` behind them. All of them call it, or form() with the same
  /// names and the label "LABEL/merged".
  std::shared_ptr<Group> merge(const std::vector<std::string>& names);

  /// Says which algorithm an operation such as "all_reduce" takes for so many bytes, and why. Throws InvalidArgument.
  [[nodiscard]] std::string explain(std::string_view operation, std::size_t bytes) const;
  /// Returns the numbers of the operation that was started last, and of the one that ended last. They count from 1.
  [[nodiscard]] std::pair<std::uint64_t, std::uint64_t> progress() const;
  /// Fails the group at every rank with Cancelled.
  void abort(const std::string& why = "the program asked for it");
  /// Leaves the group. Operations of the others that need this rank fail with Cancelled. Idempotent.
  void close();

 private:
  class State;
  explicit Group(std::unique_ptr<State> state);

  const std::unique_ptr<State> state_;
};

}  // namespace tensorferry
