/// Published versions: a set of named tensors in host memory that one agent updates, and many read. No reader sees
/// bytes of two versions.
///
///     auto policy = trainer->publish("policy", {{"weight", weight}, {"bias", bias}});  // version 1
///     policy.update({{"weight", weight}, {"bias", bias}});                             // version 2
///
///     auto source = sampler->subscribe("trainer", "policy");
///     Tensor newest = source.latest().tensor("weight");  // read in place, and kept from being written
///     auto loader = source.into({{"weight", mine}});
///     loader.wait();  // copies the blocks that have changed into `mine`
///
/// It is the same as rpc.publish and rpc.subscribe of Python, and each language reads what the other publishes.
/// docs/regions.md says how versions travel, and what each failure does.
///
/// Threads: every function here may be called from any thread at once, except that one thread at a time uses a
/// VersionLoader. Each blocks until it is done, and none may be called from a completion.
///
/// Errors, thrown as the exceptions of errors.h:
///
/// - NotFound: there is no version yet, or the publication has ended.
/// - ConnectionLost: the publisher has died or left. Versions that are held stay good; a later call subscribes again.
/// - ResourceExhausted: readers hold all images, or this agent holds 64 versions of the publication.
/// - InvalidArgument: other names, dtypes or shapes than those of the publication.
/// - ProtocolError: a checksum is wrong.
/// - DeadlineExceeded.
///
/// A time-out is in milliseconds. 0: none. Negative: AgentOptions::timeout.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tensorferry/tensor.h"

namespace tensorferry {

class Agent;
namespace detail {
struct SharedPublication;
struct SharedSubscription;
struct SharedVersion;
struct LoadPlan;
}  // namespace detail

/// A tensor of a publication.
struct NamedTensor {
  std::string name;
  Tensor tensor;
};

/// Options of a publication.
struct PublicationOptions {
  /// How many images it has, at least 2: with `kept`, readers may hold `kept - 1` versions while the next is written.
  std::size_t kept = 3;
  /// The bytes of the blocks in which versions are compared: a power of two, 4096 to 65536.
  std::uint32_t block = 64 << 10;
  /// Whether each subscriber compares the checksum of each version that it gets.
  bool checksums = false;
};

/// A publication of this agent. Copies share it; the last one withdraws it when it is destroyed.
class OwnPublication {
 public:
  /// Makes one that is empty. Any use but destruction and assignment throws InvalidArgument.
  OwnPublication() = default;

  /// Publishes the next version, and returns its number. Copies the blocks that have changed; readers of older versions
  /// go on. The tensors are contiguous host memory with the names, dtypes and shapes of the first version, in any
  /// order, and must not be written meanwhile. If readers hold all images, waits for them until `timeout`, and then
  /// throws ResourceExhausted with their names.
  std::uint64_t update(const std::vector<NamedTensor>& tensors,
                       std::chrono::milliseconds timeout = std::chrono::milliseconds(-1)) const;
  /// Publishes the next version, in which only these tensors may differ. The others are as in the last version, and
  /// their memory is not read: so the time grows with these tensors alone. Otherwise as update().
  std::uint64_t update_only(const std::vector<NamedTensor>& tensors,
                            std::chrono::milliseconds timeout = std::chrono::milliseconds(-1)) const;
  /// Returns the number of the newest version.
  [[nodiscard]] std::uint64_t version() const;
  /// Returns how many versions subscribers hold now.
  [[nodiscard]] std::size_t leases() const;
  /// Ends the publication. Subscribers keep the versions that they hold; those that wait get NotFound. The second time
  /// it does nothing.
  void withdraw() const;

 private:
  friend class Agent;
  [[nodiscard]] const detail::SharedPublication& shared() const;

  std::shared_ptr<const detail::SharedPublication> shared_;
};

/// One version of a peer's publication. Its tensors stay as they are while this object, a copy of it or one of the
/// tensors lives. It keeps one of the publication's images, so drop it soon.
class PublishedVersion {
 public:
  /// Makes one that is empty. Any use but destruction and assignment throws InvalidArgument.
  PublishedVersion() = default;

  [[nodiscard]] std::uint64_t number() const;
  [[nodiscard]] std::vector<std::string> names() const;
  /// Returns a tensor. On the publisher's host it lies in memory that other readers share, so it must not be written.
  /// Throws InvalidArgument: there is no such tensor.
  [[nodiscard]] Tensor tensor(std::string_view name) const;

 private:
  friend class PeerPublication;
  [[nodiscard]] const detail::SharedVersion& shared() const;

  std::shared_ptr<const detail::SharedVersion> shared_;
};

/// Where a reader wants a tensor of a publication: in contiguous host memory of the same dtype and shape.
struct LoadTarget {
  std::string name;
  Tensor into;
  /// If set, `into` gets the rows from this one on, as many as it has: a part along the first dimension.
  std::optional<std::int64_t> first_row{};
};

/// Planned copies of versions into a reader's own tensors. Copies share the plan. The program does not write the
/// tensors between loads, because a load copies only blocks that have changed since the last one.
class VersionLoader {
 public:
  /// Makes one that is empty. Any use but destruction and assignment throws InvalidArgument.
  VersionLoader() = default;

  /// Brings the tensors to the newest version, and returns its number. After an error they have the version before.
  std::uint64_t load(std::chrono::milliseconds timeout = std::chrono::milliseconds(-1)) const;
  /// Waits for a version newer than the last one loaded, then does as load().
  std::uint64_t wait(std::chrono::milliseconds timeout = std::chrono::milliseconds(-1)) const;
  /// Returns the number of the version that the tensors have; 0 before the first.
  [[nodiscard]] std::uint64_t version() const;

 private:
  friend class PeerPublication;
  [[nodiscard]] detail::LoadPlan& plan() const;

  std::shared_ptr<detail::LoadPlan> plan_;
};

/// A subscription to a peer's publication. Copies share it.
class PeerPublication {
 public:
  /// Makes one that is empty. Any use but destruction and assignment throws InvalidArgument.
  PeerPublication() = default;

  /// Returns the newest version.
  [[nodiscard]] PublishedVersion latest(std::chrono::milliseconds timeout = std::chrono::milliseconds(-1)) const;
  /// Waits for a version above `newer_than`, and returns the newest. If the publisher has restarted since the last
  /// version, any of its versions is newer.
  [[nodiscard]] PublishedVersion wait(std::uint64_t newer_than = 0,
                                      std::chrono::milliseconds timeout = std::chrono::milliseconds(-1)) const;
  /// Plans copies of each version into tensors of this program. Throws InvalidArgument: a target is not contiguous host
  /// memory, or does not fit the publication.
  [[nodiscard]] VersionLoader into(std::vector<LoadTarget> targets) const;
  /// Returns how versions come: "mapped", "mapped from" another subscriber of the host, or "copied".
  [[nodiscard]] std::string carried() const;
  /// Returns the bytes that this subscription has fetched over links.
  [[nodiscard]] std::uint64_t fetched() const;

 private:
  friend class Agent;
  [[nodiscard]] const detail::SharedSubscription& shared() const;

  std::shared_ptr<const detail::SharedSubscription> shared_;
};

}  // namespace tensorferry
