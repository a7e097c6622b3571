#include "channels/rdma/registrations.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/environment.h"
#include "base/fork.h"
#include "base/text.h"
#include "channels/pinned_bytes.h"

namespace tensorferry::rdma {

namespace {

unsigned flags_of(Access access) {
  // A word that a peer reads after it has written must not overtake those bytes, so these have no relaxed ordering.
  if (access == Access::peers_write) return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  if (access == Access::peers_use) return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  if (access == Access::peers_read) return IBV_ACCESS_REMOTE_READ;
  unsigned flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING;
  if (access == Access::offered) flags |= IBV_ACCESS_REMOTE_READ;
  return flags;
}

/// Without the right to write: for memory that this process may only read, such as a file's mapping.
constexpr unsigned read_only = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;

}  // namespace

bool PinnedBudget::take(std::uint64_t bytes) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (most_ != 0 && (bytes > most_ || used_ > most_ - bytes)) return false;
    used_ += bytes;
  }
  pinned_bytes() += bytes;
  return true;
}

void PinnedBudget::give_back(std::uint64_t bytes) noexcept {
  {
    const std::lock_guard lock(mutex_);
    used_ -= bytes;
  }
  pinned_bytes() -= bytes;
}

std::uint64_t PinnedBudget::used() const noexcept {
  const std::lock_guard lock(mutex_);
  return used_;
}

Registration::~Registration() {
  if (born_in_ != forks()) return;
  on_cards_.clear();  // the pages stay pinned until then
  budget_->give_back(pinned_);
}

bool Registration::contains(const std::byte* data, std::size_t bytes) const noexcept {
  if (data < base_) return false;
  const auto offset = static_cast<std::size_t>(data - base_);
  return offset <= bytes_ && bytes <= bytes_ - offset;
}

bool Registration::is_on(std::size_t card) const {
  const std::lock_guard lock(mutex_);
  return static_cast<bool>(on_cards_[card]);
}

Registration::Keys Registration::keys(std::size_t card) const {
  const std::lock_guard lock(mutex_);
  return {on_cards_[card].local_key(), on_cards_[card].remote_key()};
}

Status Registration::add(std::size_t index, const std::shared_ptr<OpenCard>& card, const RegisterMemory& how) {
  const std::lock_guard lock(mutex_);
  auto& here = on_cards_[index];
  if (here) return {};
  if (!budget_->take(bytes_)) {
    return {Code::resource_exhausted,
            formatted("{} bytes are more than may be registered: {} of {} bytes are in use. Raise {}", bytes_,
                      budget_->used(), budget_->most(), environment::rdma_pinned.name)};
  }
  auto made = how(card, base_, bytes_, flags_of(access_));
  // Memory that cannot be written (a mapped file, a frozen region) can still be sent.
  if (!made.ok() && access_ == Access::offered && made.status().code() != Code::resource_exhausted) {
    if (auto readable = how(card, base_, bytes_, read_only); readable.ok()) made = std::move(readable);
  }
  if (!made.ok()) {
    budget_->give_back(bytes_);
    return made.status();
  }
  pinned_ += bytes_;
  here = std::move(*made);
  return {};
}

std::optional<Allocations::Allocation> Registrations::kept_allocation(const std::byte* data, std::size_t bytes,
                                                                      Access access) {
  auto found = Allocations::of_this_process().find(data, bytes);
  if (found && found->kind == Allocations::Kind::receives && access == Access::offered) found.reset();
  return found;
}

bool Registrations::keeps(const std::byte* data, std::size_t bytes, Access access) {
  return kept_allocation(data, bytes, access).has_value();
}

std::shared_ptr<Registration> Registrations::find(const std::byte* data, std::size_t bytes, Access access,
                                                  const std::vector<std::size_t>& cards) {
  const auto allocation = kept_allocation(data, bytes, access);
  return allocation ? find(*allocation, cards) : nullptr;
}

std::shared_ptr<Registration> Registrations::find(const Allocations::Allocation& allocation,
                                                  const std::vector<std::size_t>& cards) {
  std::shared_ptr<Registration> registration;
  {
    const std::lock_guard lock(mutex_);
    const auto found = kept_.find(allocation.generation);
    if (found == kept_.end()) return nullptr;
    by_use_.splice(by_use_.end(), by_use_, found->second.age);
    registration = found->second.registration;
  }
  const bool complete = std::all_of(cards.begin(), cards.end(), [&](auto card) { return registration->is_on(card); });
  return complete ? registration : nullptr;
}

Result<std::shared_ptr<Registration>> Registrations::make(std::byte* data, std::size_t bytes, Access access,
                                                          const std::vector<std::size_t>& cards) {
  if (const auto allocation = kept_allocation(data, bytes, access)) {
    auto made = make(*allocation, cards);
    if (made.ok() || allocation->bytes == bytes) return made;  // else a part may be registered where the whole may not
  }
  std::shared_ptr<Registration> registration;
  {
    const std::lock_guard lock(mutex_);
    auto& passing = passing_[Range{data, bytes, access}];
    registration = passing.lock();
    if (registration == nullptr) {
      registration = std::make_shared<Registration>(data, bytes, access, cards_.size(), budget_);
      passing = registration;
      if (passing_.size() % 64 == 0) std::erase_if(passing_, [](const auto& each) { return each.second.expired(); });
    }
  }
  return complete_on(std::move(registration), cards);
}

Result<std::shared_ptr<Registration>> Registrations::make(const Allocations::Allocation& allocation,
                                                          const std::vector<std::size_t>& cards) {
  const auto access = allocation.kind == Allocations::Kind::offers ? Access::offered : Access::lands;
  std::shared_ptr<Registration> registration;
  {
    const std::lock_guard lock(mutex_);
    auto& kept = kept_[allocation.generation];
    if (kept.registration == nullptr) {
      kept.registration =
          std::make_shared<Registration>(allocation.base, allocation.bytes, access, cards_.size(), budget_);
      kept.age = by_use_.insert(by_use_.end(), allocation.generation);
    }
    registration = kept.registration;
  }
  auto made = complete_on(std::move(registration), cards);
  // The allocation may have ended before this thread kept its registration; then nothing would ever drop it.
  if (!made.ok() || !Allocations::of_this_process().exists(allocation)) gone(allocation.generation);
  return made;
}

Result<std::shared_ptr<Registration>> Registrations::complete_on(std::shared_ptr<Registration> registration,
                                                                 const std::vector<std::size_t>& cards) {
  for (const auto card : cards) {
    auto added = registration->add(card, cards_[card], how_);
    while (added.code() == Code::resource_exhausted && drop_oldest())
      added = registration->add(card, cards_[card], how_);
    if (!added.ok()) return added;
  }
  return registration;
}

Result<std::shared_ptr<Registration>> Registrations::make_apart(std::byte* data, std::size_t bytes, Access access,
                                                                const std::vector<std::size_t>& cards,
                                                                std::shared_ptr<Registration> earlier) {
  if (earlier == nullptr) earlier = std::make_shared<Registration>(data, bytes, access, cards_.size(), budget_);
  return complete_on(std::move(earlier), cards);
}

bool Registrations::drop_oldest() {
  std::shared_ptr<Registration> dropped;  // deregistered with no lock held
  const std::lock_guard lock(mutex_);
  for (auto generation = by_use_.begin(); generation != by_use_.end(); ++generation) {
    const auto found = kept_.find(*generation);
    if (found->second.registration.use_count() > 1) continue;
    dropped = std::move(found->second.registration);
    kept_.erase(found);
    by_use_.erase(generation);
    break;
  }
  return dropped != nullptr;
}

void Registrations::held(std::byte* base, std::size_t bytes) noexcept {
  if (type_ != DeviceType::cpu) return;
  std::vector<std::size_t> all(cards_.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  (void)make(base, bytes, Access::offered, all);
}

void Registrations::gone(std::uint64_t generation) noexcept {
  std::shared_ptr<Registration> dropped;
  const std::lock_guard lock(mutex_);
  const auto found = kept_.find(generation);
  if (found == kept_.end()) return;
  by_use_.erase(found->second.age);
  dropped = std::move(found->second.registration);
  kept_.erase(found);
}

std::size_t Registrations::kept() const {
  const std::lock_guard lock(mutex_);
  return kept_.size();
}

}  // namespace tensorferry::rdma
