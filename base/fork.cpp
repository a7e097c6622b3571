#include "base/fork.h"

#include <pthread.h>

#include <atomic>

namespace tensorferry {

namespace {

// Globals, because a fork copies the whole process.
std::atomic<std::uint32_t> ancestors{0};
std::atomic<std::uint32_t> branches{0};

void count_branch() { branches.fetch_add(1, std::memory_order_seq_cst); }

void watch_forks() {
  // Counts before and after the fork. Memory that another thread acquires in between has a number of its own, and the
  // child may see that memory.
  [[maybe_unused]] static const int registered =
      ::pthread_atfork(count_branch, count_branch, [] { ancestors.fetch_add(1, std::memory_order_relaxed); });
}

}  // namespace

std::uint32_t forks() noexcept {
  watch_forks();
  return ancestors.load(std::memory_order_relaxed);
}

std::uint32_t children() noexcept {
  watch_forks();
  return branches.load(std::memory_order_seq_cst);
}

}  // namespace tensorferry
