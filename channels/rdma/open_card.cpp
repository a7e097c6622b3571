#include "channels/rdma/open_card.h"

#include <fcntl.h>

#include <cerrno>

#include "base/text.h"

namespace tensorferry::rdma {

namespace {

bool set_nonblocking(int descriptor) {
  const int flags = ::fcntl(descriptor, F_GETFL);
  return flags >= 0 && ::fcntl(descriptor, F_SETFL, flags | O_NONBLOCK) == 0;
}

}  // namespace

Result<std::shared_ptr<OpenCard>> OpenCard::open(const Verbs& verbs, const std::string& name) {
  std::shared_ptr<OpenCard> card(new OpenCard(verbs, name));
  int count = 0;
  auto** const devices = verbs.get_device_list(&count);
  if (devices == nullptr) return status_of(errno, "listing the RDMA devices");
  int failed = ENODEV;
  for (int i = 0; i < count; ++i) {
    if (name != verbs.get_device_name(devices[i])) continue;
    card->context_ = verbs.open_device(devices[i]);
    failed = card->context_ == nullptr ? errno : 0;
  }
  verbs.free_device_list(devices);
  if (failed != 0) return status_of(failed, formatted("opening the RDMA device {}", name));

  if (const int error = verbs.query_device(card->context_, &card->limits_); error != 0)
    return status_of(error, formatted("querying the RDMA device {}", name));
  card->domain_ = verbs.alloc_pd(card->context_);
  if (card->domain_ == nullptr) return status_of(errno, formatted("making a protection domain on {}", name));
  card->events_ = verbs.create_comp_channel(card->context_);
  if (card->events_ == nullptr) return status_of(errno, formatted("making a completion channel on {}", name));
  if (!set_nonblocking(card->events_->fd) || !set_nonblocking(card->context_->async_fd))
    return status_of(errno, formatted("setting up the descriptors of {}", name));
  return card;
}

OpenCard::~OpenCard() {
  if (!ours()) return;
  if (events_ != nullptr) verbs_.destroy_comp_channel(events_);
  if (domain_ != nullptr) verbs_.dealloc_pd(domain_);
  if (context_ != nullptr) verbs_.close_device(context_);
}

Result<CardMemory> CardMemory::make(std::shared_ptr<OpenCard> card, std::byte* data, std::size_t bytes,
                                    unsigned access) {
  auto* const region = register_memory(card->verbs(), card->domain(), data, bytes, access);
  if (region == nullptr) return status_of(errno, formatted("registering {} bytes with {}", bytes, card->name()));
  return CardMemory(std::move(card), region);
}

Result<CardMemory> CardMemory::make_of_dma_buf(std::shared_ptr<OpenCard> card, const FileDescriptor& buffer,
                                               std::uint64_t offset, std::uint64_t address, std::size_t bytes,
                                               unsigned access) {
  const auto& verbs = card->verbs();
  if (verbs.reg_dmabuf_mr == nullptr)
    return Status(Code::channel_unavailable, "libibverbs takes no dma-buf (rdma-core 34 or newer does)");
  auto* const region =
      verbs.reg_dmabuf_mr(card->domain(), offset, bytes, address, buffer.get(), static_cast<int>(access));
  if (region == nullptr)
    return status_of(errno, formatted("registering a dma-buf of {} bytes with {}", bytes, card->name()));
  return CardMemory(std::move(card), region);
}

void CardMemory::reset() noexcept {
  auto* const region = std::exchange(region_, nullptr);
  if (region != nullptr && card_->ours()) card_->verbs().dereg_mr(region);
  card_.reset();
}

}  // namespace tensorferry::rdma
