/// The algorithms by which a group performs operations on memory of the host, each in a file of its name (choose.h says
/// which is taken when).
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "rpc/collectives/exchange.h"

namespace tensorferry::collectives {

class RawGroup;

/// An operation that this rank performs now: what it does of it, beside the others.
struct Performing {
  Exchange& exchange;
  const Fingerprint& called;  // what all ranks call
  const WaitLimits& limits;

  [[nodiscard]] std::size_t rank() const noexcept { return exchange.rank(); }
  [[nodiscard]] std::size_t size() const noexcept { return exchange.size(); }
  [[nodiscard]] DType dtype() const noexcept { return static_cast<DType>(called.dtype); }
  Status step(ExchangeStep step) const { return exchange.step(called, std::move(step), limits); }
  /// A step without bytes: all ranks have come, and call the same.
  Status meet() const { return step(ExchangeStep(size())); }
  Status pass_around(const RingPass& pass) const { return exchange.pass_around(called, pass, limits); }
  [[nodiscard]] Result<Buffer> working_memory(std::size_t bytes) const { return exchange.working_memory(bytes); }
};

/// The groups below a group whose ranks are on several hosts, if a host has several of them.
struct Levels {
  std::shared_ptr<RawGroup> host;     // the ranks of this rank's host; the first of them leads
  std::shared_ptr<RawGroup> leaders;  // one rank of each host, in the order of the hosts; null: this one does not lead
  std::vector<std::size_t> host_of;   // by rank: the number of its host
};

// Inputs and outputs are as those of RawGroup's functions. A root is Mailbox::any_rank if every rank takes the result.
using InBytes = std::span<const std::byte>;
using OutBytes = std::span<std::byte>;

Status reduce_one_shot(const Performing& now, InBytes input, OutBytes output, const ReduceOp& op, std::size_t root);

Status reduce_two_shot(const Performing& now, InBytes input, OutBytes output, const ReduceOp& op, std::size_t root);
/// Its second step: each rank has reduced its share (share_of) of the elements, and the root takes all of them.
Status collect_shares(const Performing& now, InBytes share, OutBytes output, std::size_t root);

Status reduce_by_ring(const Performing& now, InBytes input, OutBytes output, const ReduceOp& op, std::size_t root);
Status reduce_scatter_by_ring(const Performing& now, const std::vector<InBytes>& inputs, OutBytes output,
                              const ReduceOp& op);
Status all_gather_by_ring(const Performing& now, InBytes input, const std::vector<OutBytes>& outputs);
Status broadcast_by_ring(const Performing& now, OutBytes data, std::size_t root);

Status reduce_two_level(const Performing& now, const Levels& levels, InBytes input, OutBytes output, const ReduceOp& op,
                        std::size_t root);
Status broadcast_two_level(const Performing& now, const Levels& levels, OutBytes data, std::size_t root);

}  // namespace tensorferry::collectives
