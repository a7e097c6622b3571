#include "channels/cuda_basic/detour.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "channels/completion.h"
#include "channels/cuda/event_poller.h"

namespace tensorferry::cuda_basic {

using cuda::api;
using cuda::DeviceGuard;

Detour::~Detour() {
  if (stream_ == nullptr) return;
  const DeviceGuard here(device_.index);
  if (here.status().ok()) api()->stream_destroy(stream_);
}

bool Detour::divert(Transfer& transfer) {
  auto bytes = host_memory_.allocate(transfer.memory.bytes, Device{});
  if (bytes.data == nullptr) return false;
  Transfer first;
  first.memory = bytes;
  first.carried = transfer.carried;
  first.done = [self = shared_from_this(), bytes = std::move(bytes),
                to = std::make_unique<Transfer>(std::move(transfer))](const Status& status) mutable {
    self->arrived(std::move(bytes), std::move(*to), status);
  };
  transfer = std::move(first);
  return true;
}

void Detour::arrived(Buffer bytes, Transfer to, const Status& status) {
  if (!status.ok()) return to.finish(status);
  const auto kept = busy_->add(
      to, [self = shared_from_this(), bytes = std::move(bytes)](std::uint64_t, Transfer free, const Status& passed) {
        if (!passed.ok()) return free.finish(passed);
        self->advance(std::make_unique<Copy>(Copy{bytes, std::move(free)}));
      });
  if (!kept.ok()) to.finish(kept.status());
}

/// Copies one chunk after another. The driver copies memory that is not page-locked on the calling thread, so the job
/// gives way to others after each chunk.
void Detour::advance(std::unique_ptr<Copy> copy) {
  cuda::background().submit([self = shared_from_this(), copy = std::move(copy)]() mutable {
    const DeviceGuard here(self->device_.index);
    auto status = here.status().ok() ? self->copy_chunk(*copy) : here.status();
    if (status.ok() && copy->begun < copy->from.bytes) return self->advance(std::move(copy));
    // After an error too, the chunks before may still be written.
    const auto device = self->device_.index;
    auto* const stream = self->stream_;
    auto over = [copy = std::move(copy), status = std::move(status)](const Status& copied) {
      copy->to.finish(status.ok() ? copied : status);
    };
    if (stream == nullptr) return complete(std::move(over), {});
    cuda::EventPoller::of_this_process().when_done(cuda::Watch::closely, device, stream, std::move(over));
  });
}

Status Detour::copy_chunk(Copy& copy) {
  auto result = CUDA_SUCCESS;
  if (stream_ == nullptr) result = api()->stream_create(&stream_, CU_STREAM_NON_BLOCKING);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "making a stream");
  const auto bytes = std::min(most_chunk_bytes, copy.from.bytes - copy.begun);
  result = api()->memcpy_async(cuda::address_of(copy.to.memory.data + copy.begun),
                               cuda::address_of(copy.from.data + copy.begun), bytes, stream_);
  copy.begun += bytes;
  return cuda::status_of(result, "cuda_basic's copy");
}

}  // namespace tensorferry::cuda_basic
