/// Regions: host memory of one agent that its peers read and write, without a call of the owner's program.
///
///     auto cache = server->region(mappable_tensor({1024, 16}, DType::float32), {.name = "kv", .write = true});
///
///     auto kv = reader->find_region("server", "kv");
///     kv.write_blocks(std::array<std::int64_t, 2>{3, 1}, blocks, {.notify = 7});  // blocks: float32 [2, 16]
///     Tensor rows = kv.rows(0, 8).read();
///
///     cache.await_notification(7);  // all bytes of the write are there
///
/// Nothing makes a transfer atomic: a read that overlaps a write may see a part of it. docs/regions.md says which way
/// the bytes take, and what each failure does.
///
/// Threads: every function here may be called from any thread at once. Each blocks until its transfer has ended, and
/// none may be called from a completion. The memory of a tensor that is passed in is used until the function returns;
/// after DeadlineExceeded, until its owner (Tensor::owner) has been released.
///
/// Errors, thrown as the exceptions of errors.h:
///
/// - NotFound: the owner has dropped or replaced the region, perhaps while the bytes were copied.
/// - PermissionDenied: the owner does not let this agent do it.
/// - InvalidArgument: out of bounds, another dtype or shape, or a tensor that is not contiguous host memory.
/// - ConnectionLost: the owner has died or left, or the link was lost; a later call opens the region again.
/// - DeadlineExceeded: the owner did not answer in time.
///
/// After an error of a read the contents of its target are undefined; of a write, any part may have landed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tensorferry/tensor.h"
#include "tensorferry/values.h"

namespace tensorferry {

class Agent;
namespace detail {
class AgentCore;
struct SharedRegion;
struct OpenedRegion;
}  // namespace detail

/// What peers may do with a region.
struct RegionOptions {
  /// The name by which peers find the region: up to 256 bytes. "": peers need its handle. A region that had the name
  /// before loses it.
  std::string name{};
  /// Whether peers may read it, and write it.
  bool read = true;
  bool write = false;
  /// The names of the agents that may. Empty: all agents of the job.
  std::vector<std::string> peers{};
};

/// Names a region of any agent. It can be an argument or a result of a call; Python sees a tuple.
struct RegionHandle {
  std::string owner{};
  std::uint64_t incarnation = 0;  // of the owner: a restarted one is another; 0: any
  std::uint64_t id = 0;           // never used again by the owner
};
template <>
struct Value<RegionHandle>
    : Fields<"RegionHandle", &RegionHandle::owner, &RegionHandle::incarnation, &RegionHandle::id> {};

/// Options of one transfer.
struct TransferOptions {
  /// The time for each answer of the owner; copies within this host are not timed. 0: none. Negative:
  /// AgentOptions::timeout.
  std::chrono::milliseconds timeout{-1};
  /// Of a write: a number that the owner gets by await_notification() when all bytes of the write are there.
  std::optional<std::uint64_t> notify{};
};

/// What a peer told with its write.
struct RegionNotification {
  std::string peer;
  std::uint64_t number = 0;
};

/// A region of this agent. Copies share it; the last one drops it when it is destroyed.
class OwnRegion {
 public:
  /// Makes one that is empty. Any use but destruction and assignment throws InvalidArgument.
  OwnRegion() = default;

  /// Returns what names the region at peers.
  [[nodiscard]] RegionHandle handle() const;
  /// Returns the tensor, whose memory the region is.
  [[nodiscard]] const Tensor& tensor() const;
  /// Ends the region: reads and writes of peers fail with NotFound from now on, also those under way. A write that is
  /// under way in mapped memory may land until its writer notices. The second time it does nothing.
  void drop() const;
  /// Waits until a peer has written and notified, takes the oldest notification, and returns it; `number`: the oldest
  /// with this number. `timeout` as in TransferOptions. Throws DeadlineExceeded; NotFound if the region is dropped,
  /// perhaps meanwhile.
  [[nodiscard]] RegionNotification await_notification(
      std::optional<std::uint64_t> number = {},
      std::chrono::milliseconds timeout = std::chrono::milliseconds(-1)) const;

 private:
  friend class Agent;
  [[nodiscard]] const detail::SharedRegion& shared() const;

  std::shared_ptr<const detail::SharedRegion> shared_;
};

/// A region of a peer, or some rows of one. Copies share the owner's grant, which ends with the last of them.
class PeerRegion {
 public:
  /// Makes one that is empty. Any use but destruction and assignment throws InvalidArgument.
  PeerRegion() = default;

  [[nodiscard]] DType dtype() const;
  [[nodiscard]] const Tensor::Shape& shape() const;
  /// Returns what names the whole region.
  [[nodiscard]] RegionHandle handle() const;
  /// Returns `count` rows from `first` on: a part along the first dimension. Throws InvalidArgument.
  [[nodiscard]] PeerRegion rows(std::int64_t first, std::int64_t count) const;

  /// Reads into `into`, a contiguous tensor of this dtype and shape; or into a new one.
  void read_into(const Tensor& into, const TransferOptions& options = {}) const;
  [[nodiscard]] Tensor read(const TransferOptions& options = {}) const;
  /// Writes `from`, a tensor of this dtype and shape. One with gaps is copied first.
  void write(const Tensor& from, const TransferOptions& options = {}) const;

  /// Reads the rows of these indices, in their order, into a contiguous tensor of shape [indices.size(), shape()[1..]];
  /// or into a new one. An index may come more than once.
  void read_blocks_into(std::span<const std::int64_t> indices, const Tensor& into,
                        const TransferOptions& options = {}) const;
  [[nodiscard]] Tensor read_blocks(std::span<const std::int64_t> indices, const TransferOptions& options = {}) const;
  /// Writes the rows of `from`, a tensor of that shape, to the rows of these indices.
  void write_blocks(std::span<const std::int64_t> indices, const Tensor& from,
                    const TransferOptions& options = {}) const;

  /// Returns how reads go: "mapped", "in place" (the kernel copies), "by card" (a network card does, by RDMA), or
  /// "served" (the owner's agent sends).
  [[nodiscard]] std::string carried() const;

 private:
  friend class Agent;
  [[nodiscard]] const detail::OpenedRegion& opened() const;

  std::shared_ptr<const detail::OpenedRegion> opened_;
};

/// Makes a tensor in host memory that peers of this host map, so that a region of it is copied in user space. The bytes
/// are undefined. Throws InvalidArgument as Tensor::empty does, and ResourceExhausted if the system has no memory.
Tensor mappable_tensor(Tensor::Shape shape, DType dtype);

}  // namespace tensorferry
