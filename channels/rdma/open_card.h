/// An open card: its context, and what all queue pairs on the card share. And memory that is registered with a card.
#pragma once

#include <infiniband/verbs.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "base/file_descriptor.h"
#include "base/fork.h"
#include "base/status.h"
#include "channels/rdma/verbs.h"

namespace tensorferry::rdma {

/// Closes the card at its end. The objects made on the card (memory, queue pairs) hold it. Thread-safe.
///
/// All memory and queue pairs of one driver on one card share a protection domain: see "Trust" in docs/rdma.md.
class OpenCard final {
 public:
  /// Opens the card with this name ("mlx5_0"). ChannelUnavailable if it has gone, or if this process may not open it.
  static Result<std::shared_ptr<OpenCard>> open(const Verbs& verbs, const std::string& name);
  ~OpenCard();
  OpenCard(const OpenCard&) = delete;
  OpenCard& operator=(const OpenCard&) = delete;

  [[nodiscard]] const Verbs& verbs() const noexcept { return verbs_; }
  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] ibv_context* context() const noexcept { return context_; }
  [[nodiscard]] ibv_pd* domain() const noexcept { return domain_; }
  /// Completion queues announce here that they are no longer empty. Its descriptor and that of the context's
  /// asynchronous events do not block.
  [[nodiscard]] ibv_comp_channel* events() const noexcept { return events_; }
  [[nodiscard]] const ibv_device_attr& limits() const noexcept { return limits_; }
  /// Returns false in a forked child, where the card and all that was made on it are the parent's.
  [[nodiscard]] bool ours() const noexcept { return born_in_ == forks(); }

 private:
  OpenCard(const Verbs& verbs, std::string name) : verbs_(verbs), name_(std::move(name)) {}

  const Verbs& verbs_;
  const std::string name_;
  const std::uint32_t born_in_ = forks();
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_comp_channel* events_ = nullptr;
  ibv_device_attr limits_{};
};

/// Memory that is registered with one card, until this object is destroyed. The memory outlives it. Movable.
class CardMemory final {
 public:
  /// Registers memory with the flags `access` (IBV_ACCESS_...). Fails as rdma::status_of says. Blocks while the kernel
  /// pins the pages.
  static Result<CardMemory> make(std::shared_ptr<OpenCard> card, std::byte* data, std::size_t bytes, unsigned access);
  /// Registers a device's memory that a driver has exported as a dma-buf: `bytes` bytes from `offset` on. Work requests
  /// and peers name them by their addresses from `address` on, which lies as far behind a page's begin. Fails likewise,
  /// also if libibverbs is older than 34.
  static Result<CardMemory> make_of_dma_buf(std::shared_ptr<OpenCard> card, const FileDescriptor& buffer,
                                            std::uint64_t offset, std::uint64_t address, std::size_t bytes,
                                            unsigned access);
  ~CardMemory() { reset(); }
  CardMemory() = default;
  /// Takes over what ibv_reg_mr has returned.
  CardMemory(std::shared_ptr<OpenCard> card, ibv_mr* region) : card_(std::move(card)), region_(region) {}
  CardMemory(CardMemory&& other) noexcept
      : card_(std::move(other.card_)), region_(std::exchange(other.region_, nullptr)) {}
  CardMemory& operator=(CardMemory&& other) noexcept {
    reset();
    card_ = std::move(other.card_);
    region_ = std::exchange(other.region_, nullptr);
    return *this;
  }

  [[nodiscard]] explicit operator bool() const noexcept { return region_ != nullptr; }
  /// The key by which this process's queue pairs on the card use the memory.
  [[nodiscard]] std::uint32_t local_key() const noexcept { return region_->lkey; }
  /// The key by which peers use it, if `access` lets them.
  [[nodiscard]] std::uint32_t remote_key() const noexcept { return region_->rkey; }

 private:
  void reset() noexcept;

  std::shared_ptr<OpenCard> card_;
  ibv_mr* region_ = nullptr;
};

}  // namespace tensorferry::rdma
