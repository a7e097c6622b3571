#include "rpc/collectives/torch/returning.h"

#include <atomic>

namespace tensorferry::collectives {
namespace {
std::atomic<void (*)()> before_return{nullptr};
}  // namespace

void call_before_return(void (*hook)()) { before_return.store(hook, std::memory_order_release); }

Returning::~Returning() {
  if (auto* const hook = before_return.load(std::memory_order_acquire)) hook();
}

}  // namespace tensorferry::collectives
