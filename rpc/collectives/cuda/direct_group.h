/// Operations of a group on GPUs without the host: the ranks of one host map one another's buffers on the GPUs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "channels/buffer.h"
#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives::cuda {

/// One operation on a GPU: what StartOptions::device takes. Thread-safe, but for the functions of DeviceOperations.
///
/// The operation's GroupWork ends when its work has been enqueued on the stream. This says how it went on.
class DeviceRun : public DeviceOperations {
 public:
  /// Returns whether the device has ended the operation, also after a failure. False before the operation is enqueued.
  [[nodiscard]] virtual bool ended() const = 0;
  /// Returns why the device has not done the operation although it was enqueued: the error that failed the group
  /// meanwhile. The results are then arbitrary. Ok before ended().
  [[nodiscard]] virtual Status status() const = 0;
};

/// The GPUs of a group at this rank. Thread-safe.
///
/// On each GPU, the ranks find out once whether all of them can reach one another's memory; if not, their tensors are
/// copied through host memory. A direct operation goes like this:
///
/// 1. The ranks agree on the call, as for tensors of the host. So a stream never waits for a rank whose thread has not
///    come to the operation, and a mismatch is named before anything is enqueued. Not so for an operation of a single
///    kernel on 64 KiB or less, among processes: its rank announces the call and goes on. The calls are compared before
///    the next operation, or within some 20 ms; if they differ, the group fails with InvalidArgument. Until the others
///    have come, its kernel keeps the GPU busy, as one of NCCL does: what waits for an idle GPU waits for them.
/// 2. Each rank enqueues on its stream: a copy of its bytes into its buffer, a meeting of the streams (stream_words.h),
///    and kernels or copies that read the buffers of the others.
///
/// No host waits for a device. Operations of a group follow one another on the device, also on different streams.
///
/// Up to some megabytes, an operation among GPUs of which each rank has one is a single kernel, which meets the others
/// by flags in the memory of the GPUs (flag_kernels.h). So it can also be captured into a CUDA graph and replayed. In a
/// graph the program orders the operations of a group: a stream of the capture waits for the one of the operation
/// before.
///
/// If a rank dies, or an operation reaches its time-out on the device, the group fails with an error that names the
/// ranks, and the streams of this process are released. What they write then is arbitrary: DeviceRun::status() tells,
/// and so does each later operation of the group.
class DirectGroup {
 public:
  /// Whether ranks that are threads of one process may share a GPU. A process has few queues for its streams of one
  /// GPU, so a stream that waits for another rank's can hold that one up.
  enum class Threads : std::uint8_t { need_gpus_of_their_own, may_share_a_gpu };
  /// Returns the GPUs of `group`. A build without CUDA has them too: there, prepare() says why not.
  static std::shared_ptr<DirectGroup> of(std::shared_ptr<RawGroup> group,
                                         Threads threads = Threads::need_gpus_of_their_own);
  virtual ~DirectGroup() = default;

  /// Finds out with all ranks whether operations on this rank's GPU `device` are direct; at once if they have found out
  /// before. Returns the empty text if they are, or why not. Every rank calls it, in the order of its operations.
  /// Blocks. InvalidArgument: another rank has called an operation on memory of the host. Else the errors of RawGroup.
  virtual Result<std::string> prepare(int device, StartOptions options) = 0;
  /// Returns the next operation on that GPU, in the order of `stream` (a CUstream). prepare() has returned the empty
  /// text. The stream must stay valid until the operation has ended.
  ///
  /// If a CUDA graph is being captured on the stream, the operation becomes a part of the graph, and ends when it has
  /// been recorded. why_not_captured() has returned the empty text. All ranks capture the same operations in the same
  /// order. They launch their graphs as often, and in the same order among all operations of the group; at each rank, a
  /// launch comes after the group's earlier operations and before its later ones in the order of streams. If a kernel
  /// of a graph waits for a rank longer than the time-out of the group, or that of the captured operation if it is
  /// longer, the group fails with DeadlineExceeded, which names the rank. A graph uses the group's buffers, so it must
  /// not run after the group has ended.
  virtual std::shared_ptr<DeviceRun> run_on(int device, Stream stream) = 0;
  /// Returns why operations on the GPU cannot be captured into CUDA graphs; empty if they can: all ranks have had an
  /// operation there, each has a GPU of its own, and operations are direct.
  [[nodiscard]] virtual std::string why_not_captured(int device) const = 0;
  /// Waits until all operations that this rank has started have ended on the devices of all ranks, or the group has
  /// failed. A rank that leaves the group does so before, because its leaving fails the group at the others.
  /// `interrupted` ends the wait.
  virtual void drain(const std::function<bool()>& interrupted = {}) = 0;
};

}  // namespace tensorferry::collectives::cuda
