/// Memory of this process that its cards may reach: the cache of registrations of one driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fork.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channels/allocations.h"
#include "channels/rdma/open_card.h"

namespace tensorferry::rdma {

/// What a registration lets the card do with the memory.
enum class Access : std::uint8_t {
  lands,    // this process's queue pairs write it; no peer reaches it
  offered,  // peers read it, and this process's queue pairs write it
  // Of make_apart() alone: what peers do with it.
  peers_read,
  peers_write,
  peers_use,  // both
};

/// Counts registered bytes against a bound. Memory that is registered with several cards counts once for each, because
/// the kernel counts it so. Adds to pinned_bytes(). Thread-safe.
class PinnedBudget final {
 public:
  /// `most`: 0 for no bound.
  explicit PinnedBudget(std::uint64_t most) : most_(most) {}

  /// Takes `bytes` out of the budget; returns false if it has less.
  bool take(std::uint64_t bytes) noexcept;
  void give_back(std::uint64_t bytes) noexcept;
  [[nodiscard]] std::uint64_t used() const noexcept;
  [[nodiscard]] std::uint64_t most() const noexcept { return most_; }

 private:
  const std::uint64_t most_;
  mutable Mutex mutex_;
  std::uint64_t used_ = 0;
};

/// Registers memory with a card, with the flags `access` (IBV_ACCESS_...). May block. CardMemory::make is one, for host
/// memory.
using RegisterMemory = std::function<Result<CardMemory>(std::shared_ptr<OpenCard> card, std::byte* data,
                                                        std::size_t bytes, unsigned access)>;

/// A range of memory that is registered with one or more cards, until its last holder drops it. Each holder keeps the
/// memory allocated for as long as it holds this. Thread-safe.
class Registration final {
 public:
  Registration(std::byte* base, std::size_t bytes, Access access, std::size_t cards,
               std::shared_ptr<PinnedBudget> budget)
      : base_(base), bytes_(bytes), access_(access), on_cards_(cards), budget_(std::move(budget)) {}
  ~Registration();
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;

  [[nodiscard]] bool contains(const std::byte* data, std::size_t bytes) const noexcept;
  [[nodiscard]] bool is_on(std::size_t card) const;
  /// Returns the keys of the memory on a card, on which it is registered.
  struct Keys {
    std::uint32_t local = 0;
    std::uint32_t remote = 0;
  };
  [[nodiscard]] Keys keys(std::size_t card) const;

 private:
  friend class Registrations;
  /// Registers the memory with one card more; does nothing if it is.
  Status add(std::size_t index, const std::shared_ptr<OpenCard>& card, const RegisterMemory& how);

  std::byte* const base_;
  const std::size_t bytes_;
  const Access access_;
  const std::uint32_t born_in_ = forks();
  mutable Mutex mutex_;
  std::vector<CardMemory> on_cards_;  // by the index of the card in the driver; empty: not registered there
  std::uint64_t pinned_ = 0;
  const std::shared_ptr<PinnedBudget> budget_;
};

/// Registers memory, and keeps the registrations that may be used again.
///
/// Which registrations are kept, and why that is safe:
/// - Memory in `Allocations` is registered as a whole, if that much may be pinned, and stays so until the allocation
///   ends, which Allocations announces before the memory is freed. The registration is kept under the allocation's
///   generation, so later memory at the same address never finds it. A block of a receive pool (`Kind::receives`) is
///   kept for landing alone. Memory whose owner means to send it (`Kind::offers`) is kept readable for peers.
/// - The same holds of a device's memory, which the caller finds by Allocations::find_on_device.
/// - Every other range is registered as it is, byte by byte, and is deregistered when its last holder drops it. Its
///   allocator does not tell when it frees such memory, so nothing is kept. Transfers of the same range that overlap in
///   time share it.
///
/// If the budget is used up, kept registrations that no transfer holds are dropped, those used longest ago first.
///
/// Thread-safe. `Registrations` is held by a shared_ptr.
class Registrations final : public AllocationUser, public std::enable_shared_from_this<Registrations> {
 public:
  /// Of host memory.
  Registrations(std::vector<std::shared_ptr<OpenCard>> cards, std::shared_ptr<PinnedBudget> budget)
      : Registrations(std::move(cards), std::move(budget), DeviceType::cpu, CardMemory::make) {}
  /// Of the memory of devices of a type, which `how` registers.
  Registrations(std::vector<std::shared_ptr<OpenCard>> cards, std::shared_ptr<PinnedBudget> budget, DeviceType type,
                RegisterMemory how)
      : cards_(std::move(cards)), budget_(std::move(budget)), type_(type), how_(std::move(how)) {}

  /// Returns the kept registration of these bytes if it is on all of `cards`; null if there is none. Never blocks for
  /// long.
  std::shared_ptr<Registration> find(const std::byte* data, std::size_t bytes, Access access,
                                     const std::vector<std::size_t>& cards);

  /// Returns a registration of these bytes on all of `cards` (indices into the driver's cards), and makes it if there
  /// is none. Blocks while the kernel pins pages, up to some milliseconds for 100 MB. Fails with ResourceExhausted if
  /// no more memory may be pinned, and with ChannelUnavailable if the card cannot reach this memory.
  Result<std::shared_ptr<Registration>> make(std::byte* data, std::size_t bytes, Access access,
                                             const std::vector<std::size_t>& cards);

  /// The same for a whole allocation, whose registration is kept.
  std::shared_ptr<Registration> find(const Allocations::Allocation& allocation, const std::vector<std::size_t>& cards);
  Result<std::shared_ptr<Registration>> make(const Allocations::Allocation& allocation,
                                             const std::vector<std::size_t>& cards);

  /// Returns a registration of exactly these bytes, which nothing else shares and which is not kept: when its last
  /// holder drops it, its keys are invalid. `earlier`: one of the same bytes to which the cards are added, or null.
  Result<std::shared_ptr<Registration>> make_apart(std::byte* data, std::size_t bytes, Access access,
                                                   const std::vector<std::size_t>& cards,
                                                   std::shared_ptr<Registration> earlier = nullptr);

  /// Returns whether make() would keep the registration of these bytes.
  [[nodiscard]] static bool keeps(const std::byte* data, std::size_t bytes, Access access);

  /// Registers announced host memory with all cards. If that fails, its first use says why.
  void held(std::byte* base, std::size_t bytes) noexcept override;
  /// Drops what is kept of an allocation that ends.
  void gone(std::uint64_t generation) noexcept override;

  /// Returns how many registrations are kept, for tests.
  [[nodiscard]] std::size_t kept() const;

 private:
  struct Kept {
    std::shared_ptr<Registration> registration;
    std::list<std::uint64_t>::iterator age;
  };
  using Range = std::tuple<const std::byte*, std::size_t, Access>;

  static std::optional<Allocations::Allocation> kept_allocation(const std::byte* data, std::size_t bytes,
                                                                Access access);
  Result<std::shared_ptr<Registration>> complete_on(std::shared_ptr<Registration> registration,
                                                    const std::vector<std::size_t>& cards);
  bool drop_oldest();

  const std::vector<std::shared_ptr<OpenCard>> cards_;
  const std::shared_ptr<PinnedBudget> budget_;
  const DeviceType type_;
  const RegisterMemory how_;

  mutable Mutex mutex_;
  std::unordered_map<std::uint64_t, Kept> kept_;  // by generation
  std::list<std::uint64_t> by_use_;               // generations, the one used last at the end
  std::map<Range, std::weak_ptr<Registration>> passing_;
};

}  // namespace tensorferry::rdma
