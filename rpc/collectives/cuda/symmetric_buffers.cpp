#include "rpc/collectives/cuda/symmetric_buffers.h"

#include "base/host.h"
#include "channels/cuda/copy_timer.h"
#include "channels/cuda/event_poller.h"

namespace tensorferry::collectives::cuda {

namespace driver = tensorferry::cuda;
using driver::api;

Result<std::shared_ptr<SymmetricBuffers>> SymmetricBuffers::allocate(int device, std::size_t rank, std::size_t ranks) {
  const driver::DeviceGuard here(device);
  if (!here.status().ok()) return here.status();
  std::shared_ptr<SymmetricBuffers> out(new SymmetricBuffers(device, rank, ranks));
  const auto result = api()->mem_alloc(&out->addresses_[rank], all_bytes);
  if (result != CUDA_SUCCESS) return driver::status_of(result, "allocating the group's buffer on the GPU");
  out->nonce_ = random_word();
  driver::CopyTimer timer;
  timer.copy(out->addresses_[rank], driver::address_of(&out->nonce_), sizeof out->nonce_);
  const std::vector<std::byte> zeros(words_bytes);
  timer.copy(driver::address_of(out->flags(rank)), driver::address_of(zeros.data()), zeros.size());
  if (auto status = timer.wait("writing to the group's buffer"); !status.ok()) return status;
  return out;
}

SymmetricBuffers::~SymmetricBuffers() {
  driver::background().submit([device = device_, own = addresses_[rank_]] {
    const driver::DeviceGuard here(device);
    if (here.status().ok() && own != 0) api()->mem_free(own);
  });
}

Result<driver::BufferOffer> SymmetricBuffers::offer() const {
  const driver::DeviceGuard here(device_);
  if (!here.status().ok()) return here.status();
  auto out = driver::offer_of(addresses_[rank_], device_);
  if (out.ok()) out->nonce = nonce_;
  return out;
}

Status SymmetricBuffers::open(std::size_t rank, const driver::BufferOffer& theirs) {
  const driver::DeviceGuard here(device_);
  if (!here.status().ok()) return here.status();
  auto opened = driver::PeerMemory::open(theirs, device_, all_bytes);
  if (!opened.ok()) return opened.status();
  others_[rank] = *std::move(opened);
  addresses_[rank] = others_[rank]->address();
  std::uint64_t found = 0;
  driver::CopyTimer timer;
  timer.copy(driver::address_of(&found), addresses_[rank], sizeof found);
  if (auto status = timer.wait("reading the buffer of another rank"); !status.ok()) return status;
  if (found == theirs.nonce) return {};
  return {Code::channel_unavailable, "the bytes in the buffer of another rank are not those that the rank wrote"};
}

}  // namespace tensorferry::collectives::cuda
