/// What the channels of a cuda_gdr driver share: the registrations of GPU memory, and for each GPU its place, its probe
/// page and how it is flushed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "channels/allocations.h"
#include "channels/buffer.h"
#include "channels/channel.h"
#include "channels/cuda_gdr/flush.h"
#include "channels/cuda_gdr/probe_page.h"
#include "channels/rdma/registrations.h"
#include "channels/rdma/shared_cards.h"

namespace tensorferry::cuda_gdr {

/// Thread-safe. Held by a shared_ptr.
class GpuCards final : public std::enable_shared_from_this<GpuCards> {
 public:
  GpuCards(std::shared_ptr<rdma::SharedCards> cards, std::string sysfs)
      : cards_(std::move(cards)), sysfs_(std::move(sysfs)) {}

  [[nodiscard]] rdma::SharedCards& cards() const noexcept { return *cards_; }

  /// Returns those of `ports` (indices in LocalCards::ports) that are nearest to the GPU.
  std::vector<std::size_t> near(int device, const rdma::LocalCards& local, const std::vector<std::size_t>& ports);

  /// What registration() does if a buffer's memory is not registered.
  enum class Unregistered : std::uint8_t {
    refuse,
    register_now,    // blocks while the driver maps the memory for the card
    register_later,  // if the registration will be kept: in the background, and refuses the buffer in passing
  };
  /// Returns a registration of the buffer's memory on `cards`: of its allocation if that may be kept, else of the
  /// buffer alone. Call inside DeviceGuard.
  std::variant<std::shared_ptr<rdma::Registration>, Refusal> registration(rdma::LocalCards& local, const Buffer& buffer,
                                                                          const std::vector<std::size_t>& cards,
                                                                          Unregistered unregistered);
  /// Registers exactly these bytes for peers, apart from all else (rdma::Registrations::make_apart). Call inside
  /// DeviceGuard.
  Result<std::shared_ptr<rdma::Registration>> expose(rdma::LocalCards& local, const Buffer& buffer, rdma::Access access,
                                                     const std::vector<std::size_t>& cards,
                                                     std::shared_ptr<rdma::Registration> earlier) {
    return registrations(local)->make_apart(buffer.data, buffer.bytes, access, cards, std::move(earlier));
  }
  /// Returns the page by which the GPU is probed; the first call makes it. Blocks.
  Result<std::shared_ptr<ProbePage>> probe_page(rdma::LocalCards& local, int device);
  std::shared_ptr<Flush> flush(rdma::LocalCards& local, int device);

 private:
  struct Gpu {
    std::optional<std::string> pci_path;
    std::vector<std::size_t> ports, near;  // the last answer of near()
    std::shared_ptr<ProbePage> page;
    std::shared_ptr<Flush> flush;
  };
  std::shared_ptr<rdma::Registrations> registrations(rdma::LocalCards& local);
  [[nodiscard]] bool may_be_kept(const Allocations::Allocation& allocation);
  void register_later(const Allocations::Allocation& allocation, const Buffer& buffer,
                      const std::vector<std::size_t>& cards, std::shared_ptr<rdma::Registrations> all);

  const std::shared_ptr<rdma::SharedCards> cards_;
  const std::string sysfs_;
  Mutex making_;  // held while a probe page is made; taken before mutex_
  Mutex mutex_;   // guards the members below
  std::shared_ptr<rdma::Registrations> registrations_;
  std::map<int, Gpu> gpus_;
  std::set<std::uint64_t> unregistrable_;  // generations of allocations that could not be registered as a whole
};

}  // namespace tensorferry::cuda_gdr
