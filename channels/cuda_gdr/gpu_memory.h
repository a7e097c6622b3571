/// GPU memory that network cards reach: its allocations, and how a card registers it.
#pragma once

#include <cstddef>
#include <string>
#include <variant>

#include "base/status.h"
#include "channels/allocations.h"
#include "channels/channel.h"
#include "channels/rdma/open_card.h"

namespace tensorferry::cuda_gdr {

/// Returns why no network card reaches the memory of GPU `device`, as far as the driver says so; nullopt if one may.
/// Makes no context.
std::optional<Refusal> refusal_of_gpu(int device);

/// Returns the allocation that contains `bytes` bytes at `data`. Adjacent physical pieces of mapped memory, as in
/// torch's expandable segments, count as one. Refuses memory that lies across two allocations, or that the driver does
/// not know. Call inside DeviceGuard, with no lock that a user of Allocations needs.
std::variant<Allocations::Allocation, Refusal> allocation_of(const std::byte* data, std::size_t bytes);

/// Registers GPU memory with a card (rdma::RegisterMemory): as a dma-buf, else by the kernel module nvidia-peermem.
/// The keys reach these bytes alone. May take milliseconds. Fails with ResourceExhausted if the memory may not be
/// pinned (the GPU's window for other devices, BAR1, may be full), else with ChannelUnavailable; the text says why each
/// of the two does not work, and what to do.
Result<rdma::CardMemory> register_gpu_memory(std::shared_ptr<rdma::OpenCard> card, std::byte* data, std::size_t bytes,
                                             unsigned access);

/// Returns the address of a GPU on the PCI bus, "0000:3b:00.0"; "" if the driver does not say.
std::string bus_id_of(int device);

}  // namespace tensorferry::cuda_gdr
