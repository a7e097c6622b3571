#include "tests/simulation/scarce_memory.h"

#include <cstddef>
#include <cstdlib>
#include <exception>
#include <new>
#include <optional>
#include <utility>

#include "base/out_of_memory.h"

namespace tensorferry::testing {
namespace {

thread_local std::uint64_t* scarce_state = nullptr;  // null: there is plenty
thread_local std::uint64_t failed = 0;
thread_local std::uint32_t one_of = 0;
thread_local std::uint32_t spared = 0;                      // so many more succeed
thread_local bool lasts = false;                            // a failure lasts until the reserve is given back
thread_local std::optional<std::uint64_t> released_before;  // it has failed, and lasts

constexpr std::uint32_t of_reserve = 64;

bool fails_now() noexcept {
  if (scarce_state == nullptr) return false;
  if (released_before && *released_before == out_of_memory::releases()) return true;
  released_before.reset();
  if (spared != 0) return spared-- == 0;
  *scarce_state = *scarce_state * 6364136223846793005ULL + 1442695040888963407ULL;
  if ((*scarce_state >> 33U) % one_of != 0) return false;
  ++failed;
  spared = of_reserve;
  if (lasts) released_before = out_of_memory::releases();
  return true;
}

[[maybe_unused]] void* taken_or_null(std::size_t bytes) noexcept {
  return fails_now() ? nullptr : std::malloc(bytes == 0 ? 1 : bytes);
}

[[maybe_unused]] void* taken(std::size_t bytes) {
  auto* const memory = taken_or_null(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

[[maybe_unused]] void* taken(std::size_t bytes, std::align_val_t alignment) {
  const auto step = static_cast<std::size_t>(alignment);
  auto* const memory = fails_now() ? nullptr : std::aligned_alloc(step, (bytes + step) / step * step);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

ScarceMemory::ScarceMemory(std::uint64_t& state, std::uint32_t one_in, bool until_released) noexcept {
  one_of = one_in;
  lasts = until_released;
  scarce_state = &state;
}

ScarceMemory::~ScarceMemory() {
  scarce_state = nullptr;
  released_before.reset();
}

void ScarceMemory::begin() noexcept { spared = 0; }

std::uint64_t ScarceMemory::failures() noexcept { return failed; }

PlentyOfMemory::PlentyOfMemory() noexcept : state_(std::exchange(scarce_state, nullptr)) {}

PlentyOfMemory::~PlentyOfMemory() { scarce_state = state_; }

}  // namespace tensorferry::testing

#ifndef TENSORFERRY_UNDER_TSAN

void* operator new(std::size_t bytes) { return tensorferry::testing::taken(bytes); }
void* operator new[](std::size_t bytes) { return tensorferry::testing::taken(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return tensorferry::testing::taken(bytes, alignment);
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return tensorferry::testing::taken(bytes, alignment);
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return tensorferry::testing::taken_or_null(bytes);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return tensorferry::testing::taken_or_null(bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

#endif
