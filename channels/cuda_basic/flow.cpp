#include "channels/cuda_basic/flow.h"

#include <memory>
#include <utility>

namespace tensorferry::cuda_basic {

using cuda::api;
using cuda::DeviceGuard;

Flow::~Flow() {
  if (stream_ == nullptr) return;
  const DeviceGuard here(device_.index);
  if (here.status().ok()) api()->stream_destroy(stream_);
}

std::uint64_t Flow::send(Transfer transfer) {
  std::unique_lock lock(mutex_);
  return send(std::move(transfer), lock);
}

std::uint64_t Flow::send(Transfer transfer, std::unique_lock<Mutex>& lock) {
  const auto driven = std::make_shared<Driven>(std::move(transfer));
  const auto first = queue_.append(driven);
  lock.unlock();
  start(driven, first.status());
  return first.ok() ? *first : 0;
}

void Flow::receive(std::uint64_t first, Transfer transfer) {
  const auto driven = std::make_shared<Driven>(std::move(transfer));
  std::unique_lock lock(mutex_);
  const auto taken = queue_.insert(first, driven);
  lock.unlock();
  start(driven, taken);
}

void Flow::start(const DrivenPtr& driven, const Status& taken) {
  if (taken.ok()) return advance();
  driven->fail(taken);
  driven->finish();
}

void Flow::close(const Status& status) {
  std::unique_lock lock(mutex_);
  const auto over = queue_.close(status);
  lock.unlock();
  finish(over);
}

bool Flow::busy(Driven& driven) {
  auto& ready = driven.transfer.ready;
  if (!ready) return false;
  auto passed = ready.done();
  if (!passed) return true;
  driven.fail(*passed);
  ready = {};
  return false;
}

Status Flow::prepare(Driven& driven) {
  auto& transfer = driven.transfer;
  if (busy(driven) && detour_ && detour_->divert(transfer)) driven.diverted = true;
  if (!driven.status.ok() || driven.diverted) return driven.status;
  auto result = CUDA_SUCCESS;
  if (stream_ == nullptr) result = api()->stream_create(&stream_, CU_STREAM_NON_BLOCKING);
  if (result != CUDA_SUCCESS) return cuda::status_of(result, "making a stream");
  if (transfer.ready) result = api()->stream_wait_event(stream_, transfer.ready.get(), 0);
  return cuda::status_of(result, "ordering a copy behind what uses its memory");
}

}  // namespace tensorferry::cuda_basic
