#include "channels/rdma/staging_area.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "base/fork.h"
#include "base/text.h"

namespace tensorferry::rdma {

/// The hold on one piece.
class StagingArea::Held final {
 public:
  Held(std::shared_ptr<StagingArea> area, std::size_t offset, std::size_t bytes)
      : area_(std::move(area)), offset_(offset), bytes_(bytes) {}
  ~Held() {
    if (born_in_ == forks()) area_->give_back(offset_, bytes_);
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  const std::shared_ptr<StagingArea> area_;
  const std::size_t offset_, bytes_;
  const std::uint32_t born_in_ = forks();
};

StagingArea::~StagingArea() {
  if (born_in_ != forks()) return;
  registration_.reset();
  if (base_ != nullptr) ::munmap(base_, bytes_);
}

Result<StagingArea::Piece> StagingArea::take(std::size_t bytes, const std::vector<std::size_t>& cards) {
  bytes = FreeRanges::rounded(bytes);
  const std::lock_guard lock(mutex_);
  if (auto prepared = prepare(cards); !prepared.ok()) return prepared;
  const auto offset = free_.take(bytes);
  if (!offset) {
    return Status(
        Code::resource_exhausted,
        formatted("the staging memory has no piece of {} bytes free: {} of {} are in use", bytes, used_, bytes_));
  }
  used_ += bytes;
  return Piece{base_ + *offset, registration_, std::make_shared<Held>(shared_from_this(), *offset, bytes)};
}

Status StagingArea::prepare(const std::vector<std::size_t>& cards) {
  if (!failed_.ok()) return failed_;
  if (registration_ != nullptr &&
      std::all_of(cards.begin(), cards.end(), [&](auto card) { return registration_->is_on(card); }))
    return {};
  if (registration_ != nullptr) {  // one card more
    auto more = registrations_->make(base_, bytes_, Access::offered, cards);
    return more.status();
  }
  for (auto bytes = wanted_; bytes >= least; bytes /= 2) {
    void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) continue;
    auto made = registrations_->make(static_cast<std::byte*>(mapped), bytes, Access::offered, cards);
    if (made.ok()) {
      base_ = static_cast<std::byte*>(mapped);
      bytes_ = bytes;
      registration_ = std::move(*made);
      free_ = FreeRanges(bytes);
      return {};
    }
    ::munmap(mapped, bytes);
    failed_ = made.status();
    if (failed_.code() != Code::resource_exhausted) return failed_;  // less memory would not help
    if (bytes / 2 >= least) failed_ = {};
  }
  if (failed_.ok()) failed_ = Status(Code::resource_exhausted, "the system has no memory for the staging area");
  return failed_;
}

void StagingArea::give_back(std::size_t offset, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  used_ -= bytes;
  free_.give_back(offset, bytes);
}

std::size_t StagingArea::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

}  // namespace tensorferry::rdma
