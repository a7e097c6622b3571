#include "base/out_of_memory.h"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>

namespace tensorferry::out_of_memory {
namespace {

// Address space alone: no page of it is ever touched. It counts for RLIMIT_AS and for vm.overcommit_memory=2, which are
// what makes allocations fail; otherwise the kernel ends a process instead.
constexpr std::size_t reserve_bytes = std::size_t{4} << 20;

std::atomic<void*> reserve{nullptr};
std::atomic<std::uint64_t> released{0};

}  // namespace

const Status& status() noexcept {
  alignas(Status) static std::array<std::byte, sizeof(Status)> place;  // never destroyed: threads may end last
  static const auto& made = *::new (place.data()) Status(
      Code::resource_exhausted, "this process is out of memory: raise its limit (ulimit -v, cgroup), or send it less");
  return made;
}

void release_reserve() noexcept {
  released.fetch_add(1, std::memory_order_relaxed);
  if (auto* const memory = reserve.exchange(nullptr)) ::munmap(memory, reserve_bytes);
}

std::uint64_t releases() noexcept { return released.load(std::memory_order_relaxed); }

void take_reserve() noexcept {
  (void)status();  // is made while there is memory
  if (reserve.load() != nullptr) return;
  auto* const memory = ::mmap(nullptr, reserve_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return;
  void* none = nullptr;
  if (!reserve.compare_exchange_strong(none, memory)) ::munmap(memory, reserve_bytes);
}

}  // namespace tensorferry::out_of_memory
