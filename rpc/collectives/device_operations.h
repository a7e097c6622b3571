/// The operations of a group on memory of a device, as the group calls them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "include/tensorferry/reduction.h"
#include "rpc/collectives/board.h"

namespace tensorferry::collectives {

/// What a rank contributes to the operations of a group on memory of a device. rpc/collectives/cuda implements it.
///
/// Each function performs one operation that RawGroup has started: on the thread that runs operations, in their order.
/// Arguments are as those of RawGroup's function, and in the memory of the device. `called` is what the ranks have to
/// agree on. A success means that the work has been enqueued on a stream of the device; the results are valid in the
/// order of that stream. Errors are as those of RawGroup.
class DeviceOperations {
 public:
  using InBytes = std::span<const std::byte>;
  using OutBytes = std::span<std::byte>;
  virtual ~DeviceOperations() = default;
  /// The number of the device among those that this rank uses in the group, from 1: Fingerprint::device.
  [[nodiscard]] virtual std::uint8_t number() const = 0;
  /// `root` is Mailbox::any_rank if every rank takes the result.
  virtual Status reduce(const Fingerprint& called, InBytes input, OutBytes output, const ReduceOp& op, std::size_t root,
                        const WaitLimits& limits) = 0;
  virtual Status broadcast(const Fingerprint& called, OutBytes data, std::size_t root, const WaitLimits& limits) = 0;
  /// `even`: all pieces have one size. Else the ranks must tell one another their sizes.
  virtual Status gather(const Fingerprint& called, InBytes input, const std::vector<OutBytes>& outputs,
                        std::size_t root, bool even, const WaitLimits& limits) = 0;
  virtual Status scatter(const Fingerprint& called, const std::vector<InBytes>& inputs, OutBytes output,
                         std::size_t root, const WaitLimits& limits) = 0;
  virtual Status reduce_scatter(const Fingerprint& called, const std::vector<InBytes>& inputs, OutBytes output,
                                const ReduceOp& op, bool even, const WaitLimits& limits) = 0;
  virtual Status all_to_all(const Fingerprint& called, const std::vector<InBytes>& inputs,
                            const std::vector<OutBytes>& outputs, bool even, const WaitLimits& limits) = 0;
};

}  // namespace tensorferry::collectives
