#include "channels/cuda_gdr/gpu_cards.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "channels/cuda/invalidate.h"
#include "channels/cuda_gdr/gpu_memory.h"

namespace tensorferry::cuda_gdr {

using rdma::Access;
using rdma::Registration;

std::vector<std::size_t> GpuCards::near(int device, const rdma::LocalCards& local,
                                        const std::vector<std::size_t>& ports) {
  const std::lock_guard lock(mutex_);
  auto& gpu = gpus_[device];
  if (gpu.ports == ports) return gpu.near;
  if (!gpu.pci_path) gpu.pci_path = rdma::pci_path_of(bus_id_of(device), sysfs_);
  gpu.ports = gpu.near = ports;
  if (gpu.pci_path->empty()) return gpu.near;
  gpu.near.clear();
  int least = std::numeric_limits<int>::max();
  for (const auto port : ports) {
    const int far = rdma::distance(*gpu.pci_path, local.ports[port].port.pci_path);
    if (far < least) gpu.near.clear();
    least = std::min(least, far);
    if (far == least) gpu.near.push_back(port);
  }
  return gpu.near;
}

std::shared_ptr<rdma::Registrations> GpuCards::registrations(rdma::LocalCards& local) {
  const std::lock_guard lock(mutex_);
  if (registrations_ == nullptr) {
    registrations_ =
        std::make_shared<rdma::Registrations>(local.cards, local.budget, DeviceType::cuda, register_gpu_memory);
    Allocations::of_this_process().tell(registrations_);
  }
  return registrations_;
}

std::variant<std::shared_ptr<Registration>, Refusal> GpuCards::registration(rdma::LocalCards& local,
                                                                            const Buffer& buffer,
                                                                            const std::vector<std::size_t>& cards,
                                                                            Unregistered unregistered) {
  const auto all = registrations(local);
  if (!cuda_memory_is_untracked()) {
    auto found = allocation_of(buffer.data, buffer.bytes);
    if (auto* refusal = std::get_if<Refusal>(&found)) return std::move(*refusal);
    const auto& allocation = std::get<Allocations::Allocation>(found);
    if (auto kept = all->find(allocation, cards)) return kept;
    if (may_be_kept(allocation)) {
      if (unregistered == Unregistered::register_later) {
        register_later(allocation, buffer, cards, all);
        return Refusal{"its memory is being registered with the network card", true};
      }
      if (unregistered == Unregistered::register_now) {
        auto made = all->make(allocation, cards);
        if (made.ok()) return std::move(*made);
        if (allocation.bytes == buffer.bytes) return Refusal{std::string(made.status().what())};
      }
    }
  }
  if (unregistered == Unregistered::refuse) return Refusal{"its memory is not registered", true};
  auto made = all->make(buffer.data, buffer.bytes, Access::offered, cards);
  if (!made.ok()) return Refusal{std::string(made.status().what())};
  return std::move(*made);
}

bool GpuCards::may_be_kept(const Allocations::Allocation& allocation) {
  const std::lock_guard lock(mutex_);
  return !unregistrable_.contains(allocation.generation);
}

void GpuCards::register_later(const Allocations::Allocation& allocation, const Buffer& buffer,
                              const std::vector<std::size_t>& cards, std::shared_ptr<rdma::Registrations> all) {
  cards_->registering().submit(
      [weak = weak_from_this(), allocation, owner = buffer.owner, cards, all = std::move(all)] {
        if (all->find(allocation, cards) != nullptr || all->make(allocation, cards).ok()) return;
        const auto self = weak.lock();
        if (self == nullptr) return;
        const std::lock_guard lock(self->mutex_);
        constexpr std::size_t most = 4096;
        if (self->unregistrable_.size() >= most) self->unregistrable_.clear();  // they are tried again
        self->unregistrable_.insert(allocation.generation);
      });
}

Result<std::shared_ptr<ProbePage>> GpuCards::probe_page(rdma::LocalCards& local, int device) {
  const std::lock_guard making(making_);
  {
    const std::lock_guard lock(mutex_);
    if (gpus_[device].page != nullptr) return gpus_[device].page;
  }
  auto made = ProbePage::make(device, registrations(local));
  const std::lock_guard lock(mutex_);
  if (made.ok()) gpus_[device].page = *made;
  return made;
}

std::shared_ptr<Flush> GpuCards::flush(rdma::LocalCards& local, int device) {
  const std::lock_guard lock(mutex_);
  auto& known = gpus_[device].flush;
  if (known == nullptr) known = std::make_shared<Flush>(local, device);
  return known;
}

}  // namespace tensorferry::cuda_gdr
