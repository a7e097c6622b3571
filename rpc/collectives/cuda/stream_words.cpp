#include "rpc/collectives/cuda/stream_words.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "channels/cuda/event_poller.h"
#include "rpc/collectives/board.h"

namespace tensorferry::collectives::cuda {

namespace driver = tensorferry::cuda;
using driver::api;

class LockedPage final {
 public:
  static Result<std::shared_ptr<LockedPage>> lock(Buffer memory, int device) {
    static auto& mutex = *new std::mutex;
    static auto& pages = *new std::map<const void*, std::weak_ptr<LockedPage>>;
    const std::lock_guard lock(mutex);
    auto& known = pages[memory.data];
    if (auto same = known.lock()) return same;
    const driver::DeviceGuard here(device);
    if (!here.status().ok()) return here.status();
    auto result =
        api()->host_register(memory.data, memory.bytes, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if (result != CUDA_SUCCESS) return driver::status_of(result, "page-locking the words of streams");
    const std::shared_ptr<LockedPage> page(new LockedPage(std::move(memory), device));
    result = api()->host_get_device_pointer(&page->address_, page->memory_.data, 0);
    if (result != CUDA_SUCCESS) return driver::status_of(result, "finding the device's address of the words");
    known = page;
    return page;
  }
  /// To unlock a page the driver waits until the GPU is idle.
  ~LockedPage() {
    driver::background().submit([memory = memory_, device = device_] {
      const driver::DeviceGuard here(device);
      if (here.status().ok()) api()->host_unregister(memory.data);
    });
  }
  LockedPage(const LockedPage&) = delete;
  LockedPage& operator=(const LockedPage&) = delete;

  [[nodiscard]] std::byte* data(std::size_t offset) const { return memory_.data + offset; }
  [[nodiscard]] CUdeviceptr on_device(std::size_t offset) const { return address_ + offset; }
  [[nodiscard]] Word word(std::size_t index) const {
    const auto offset = index * sizeof(std::uint32_t);
    return {reinterpret_cast<std::atomic<std::uint32_t>*>(memory_.data + offset), address_ + offset};
  }

 private:
  LockedPage(Buffer memory, int device) : memory_(std::move(memory)), device_(device) {}
  const Buffer memory_;
  const int device_;
  CUdeviceptr address_ = 0;
};

Result<std::shared_ptr<StreamWords>> StreamWords::lock(Buffer page, std::size_t rank, std::size_t ranks, int device) {
  constexpr std::uintptr_t alignment = 4096;
  if (page.bytes < Board::words_bytes + ranks * Board::gpu_slots * Board::gpu_slot_bytes ||
      reinterpret_cast<std::uintptr_t>(page.data) % alignment != 0) {
    return Status(Code::channel_unavailable, "the board of the group has no page of words for streams");
  }
  auto locked = LockedPage::lock(std::move(page), device);
  if (!locked.ok()) return locked.status();
  return std::shared_ptr<StreamWords>(new StreamWords(*std::move(locked), rank, ranks));
}

Word StreamWords::word(std::size_t index) const { return page_->word(index); }

/// Appends what tells each other rank that this one has come to `meeting`.
void StreamWords::append_coming(std::uint32_t meeting, std::vector<CUstreamBatchMemOpParams>& batch) const {
  for (std::size_t other = 0; other < ranks_; ++other) {
    if (other == rank_) continue;
    auto& next = batch.emplace_back();
    next.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    next.writeValue.address = to(other, rank_).device;
    next.writeValue.value = meeting;
    next.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  }
}

CUresult StreamWords::come(CUstream stream, std::uint32_t meeting) const {
  std::vector<CUstreamBatchMemOpParams> batch;
  append_coming(meeting, batch);
  return api()->stream_batch_values(stream, static_cast<unsigned int>(batch.size()), batch.data(), 0);
}

CUresult StreamWords::meet(CUstream stream, std::uint32_t meeting) const {
  std::vector<CUstreamBatchMemOpParams> batch;
  batch.reserve(2 * (ranks_ - 1));
  append_coming(meeting, batch);
  for (std::size_t other = 0; other < ranks_; ++other) {
    if (other == rank_) continue;
    auto& next = batch.emplace_back();
    next.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
    next.waitValue.address = to(rank_, other).device;
    next.waitValue.value = meeting;
    next.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  }
  return api()->stream_batch_values(stream, static_cast<unsigned int>(batch.size()), batch.data(), 0);
}

CUresult StreamWords::meet_by_host(CUstream stream, std::uint32_t meeting) const {
  std::vector<CUstreamBatchMemOpParams> batch(ranks_ + 1);
  for (std::size_t other = 0; other < ranks_; ++other) {
    batch[other].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    batch[other].writeValue.address = to(other, rank_).device;
    batch[other].writeValue.value = meeting;
    batch[other].writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  }
  batch[ranks_].operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  batch[ranks_].waitValue.address = parts_done().device;
  batch[ranks_].waitValue.value = meeting;
  batch[ranks_].waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  return api()->stream_batch_values(stream, static_cast<unsigned int>(batch.size()), batch.data(), 0);
}

bool StreamWords::all_have_come(std::uint32_t meeting) const {
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    if (!to(rank_, rank).reached(meeting)) return false;
  }
  return true;
}

void StreamWords::does_its_part(std::uint32_t meeting) const {
  if (!parts_done().reached(meeting)) parts_done().set(meeting);
}

namespace {
std::size_t offset_of(std::size_t rank, std::size_t which) {
  return Board::words_bytes + (rank * Board::gpu_slots + which) * Board::gpu_slot_bytes;
}
}  // namespace

std::byte* StreamWords::slot(std::size_t rank, std::size_t which) const { return page_->data(offset_of(rank, which)); }
CUdeviceptr StreamWords::slot_on_device(std::size_t rank, std::size_t which) const {
  return page_->on_device(offset_of(rank, which));
}

CUresult StreamWords::end(CUstream stream, std::uint32_t operation) const {
  return ended_by(rank_).write_on(stream, operation);
}

}  // namespace tensorferry::collectives::cuda
