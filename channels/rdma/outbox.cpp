#include "channels/rdma/outbox.h"

#include <algorithm>
#include <utility>

namespace tensorferry::rdma {

/// The hold on a part of the inbox and on one receive request.
class Outbox::Credit final {
 public:
  Credit(std::shared_ptr<Outbox> box, std::size_t offset, std::size_t bytes)
      : box_(std::move(box)), offset_(offset), bytes_(bytes) {}
  ~Credit() { box_->give_back(offset_, bytes_); }
  Credit(const Credit&) = delete;
  Credit& operator=(const Credit&) = delete;

 private:
  const std::shared_ptr<Outbox> box_;
  const std::size_t offset_, bytes_;
};

std::optional<Outbox::Written> Outbox::write(const std::byte* from, std::uint32_t local_key, std::size_t bytes,
                                             Owner kept) {
  const auto room = FreeRanges::rounded(bytes);
  std::optional<std::size_t> offset;
  {
    const std::lock_guard lock(mutex_);
    if (open_ >= theirs_.receives) return std::nullopt;
    offset = free_.take(room);
    if (!offset) return std::nullopt;
    ++open_;
  }
  Owner credit = std::make_shared<Credit>(shared_from_this(), *offset, room);
  // Every fourth part of the peer's receive requests wakes the peer, so that it posts new ones.
  const auto number = pair_->write({.from = from,
                                    .local_key = local_key,
                                    .to = theirs_.address + *offset,
                                    .remote_key = theirs_.key,
                                    .bytes = static_cast<std::uint32_t>(bytes),
                                    .wakes_every = std::max<std::uint32_t>(1, theirs_.receives / 4U)},
                                   [kept = std::move(kept)](const Status&) {});
  if (!number) return std::nullopt;
  return Written{*number, *offset, std::move(credit)};
}

void Outbox::give_back(std::size_t offset, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  free_.give_back(offset, bytes);
  --open_;
}

}  // namespace tensorferry::rdma
