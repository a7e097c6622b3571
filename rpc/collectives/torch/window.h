/// Windows of torch.distributed (torch 2.15): tensors of the CPU that the ranks of a process group write to without a
/// call of their owners.
#pragma once

#include "rpc/collectives/torch/process_group.h"

#ifdef C10D_BACKEND_HAS_WINDOW

#include <memory>
#include <mutex>
#include <optional>
#include <torch/csrc/distributed/c10d/Window.hpp>
#include <vector>

#include "rpc/collectives/torch/transfer_lane.h"
#include "rpc/collectives/torch/window_memory.h"

namespace tensorferry::collectives {

/// A window over the regions of the ranks' agents (rpc/regions), and the messages of their group. All ranks make it,
/// register and deregister together, in the same order; the rest concerns two ranks.
///
/// Order: what this rank puts to another one, and then signals to it, comes in that order. When wait_signal() has ended
/// at the other rank, the bytes of these puts are in its tensor. Nothing else is ordered, and no put is atomic.
///
/// With `asyncOp` false a call returns when the operation has ended here, throws its error, and hears Ctrl-C. Else its
/// work has the error, and the tensor of a put must stay unchanged until the work has ended. A put ends when the bytes
/// are in the tensor of the other rank, a signal when that rank's agent has it. A signal counts: each wait_signal()
/// takes one, also one that came before. A put sends none.
///
/// Errors: ValueError (a bad argument; nothing was sent), and DistBackendError: ConnectionLost names the rank that has
/// died; DeadlineExceeded after the time-out of the options, or else of the group; NotFound: the rank has deregistered;
/// Cancelled: the group was aborted or reconfigured. A put or signal that fails leaves the group as it is. After an
/// error of a put any part of it may have landed.
///
/// Thread-safe. Keeps neither the process group nor its agent.
class TorchWindow final : public c10d::Window {
 public:
  /// `group` is the group that `of` has now.
  TorchWindow(TorchProcessGroup& of, const std::shared_ptr<DeviceGroup>& group);
  /// Waits for nothing. Puts of other ranks fail from now on.
  ~TorchWindow() override;

  /// The ranks agree on the window; `tensor`: each registers one. All pass one, or none does.
  void meet(const std::optional<at::Tensor>& tensor);
  /// Registers a contiguous tensor, whose dtype and size may be another at each rank. If one rank's tensor is refused,
  /// the call fails at every rank, and the group goes on. Its storage is kept until tensor_deregister(), also if
  /// `owning` is false: peers might still write.
  void tensor_register(const at::Tensor& tensor, bool owning) override;
  /// Waits for this rank's puts, and for the other ranks. After an error too, peers write no more.
  void tensor_deregister() override;

  c10::intrusive_ptr<c10d::Work> put(const at::Tensor& tensor, int64_t to, int64_t element, bool async_op,
                                     const c10d::PutOptions& opts) override;
  /// Returns a view of a rank's tensor: the memory itself, which stays mapped while the view lives, also if the rank
  /// dies. Other ranks' memory is mapped if it is of tensorferry.empty(), on this host, and the agents have the channel
  /// shm; else throws ChannelUnavailable.
  at::Tensor map_remote_tensor(int64_t rank) override;
  c10::intrusive_ptr<c10d::Work> signal(int64_t to, bool async_op, const c10d::SignalOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> wait_signal(int64_t from, bool async_op, const c10d::WaitSignalOptions& opts) override;
  /// Returns UNIFIED: a window has no copy besides the tensor.
  c10d::WindowAttr get_attr(int64_t rank) override;

 private:
  /// The process group, its group, and what this window's operations on a rank need; kept while the operation starts.
  struct Place;
  [[nodiscard]] Place place() const;
  [[nodiscard]] std::shared_ptr<WindowMemory> registered() const;
  std::size_t check_rank_of(std::int64_t given) const;
  /// Gathers what each rank tells, and returns it with the number of the operation. `own` null: no tensor.
  std::vector<RegisteredTensor> gather(const Place& place, const RegisteredTensor& own, std::uint64_t& number) const;
  void register_at_all(const std::optional<at::Tensor>& tensor, bool first);

  const c10::weak_intrusive_ptr<TorchProcessGroup> process_group_;
  const std::weak_ptr<DeviceGroup> group_;
  const std::vector<std::shared_ptr<TransferLane>> lanes_;  // by rank
  std::uint64_t tag_ = 0;                                   // of the signals; set by meet()
  mutable std::mutex mutex_;
  std::shared_ptr<WindowMemory> memory_;  // null: no tensor is registered; guarded by mutex_
};

}  // namespace tensorferry::collectives

#endif
