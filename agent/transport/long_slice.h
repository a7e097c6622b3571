/// Lets threads that wake up for a call run before a thread that moves the bytes of a large buffer.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace tensorferry {

/// Gives the calling thread a longer time slice while it lives. The scheduler (EEVDF, from Linux 6.12 on) then lets a
/// thread with an ordinary slice run as soon as it wakes up, instead of after some milliseconds; each gets as much time
/// as before. On an older kernel this does nothing.
class LongSlice final {
 public:
  LongSlice() {
    if (::syscall(SYS_sched_getattr, 0, &before_, sizeof before_, 0) != 0) return;
    auto attributes = before_;
    attributes.sched_runtime = slice_ns;
    changed_ = before_.sched_policy == ordinary && ::syscall(SYS_sched_setattr, 0, &attributes, 0) == 0;
  }
  ~LongSlice() {
    if (changed_) ::syscall(SYS_sched_setattr, 0, &before_, 0);
  }
  LongSlice(const LongSlice&) = delete;
  LongSlice& operator=(const LongSlice&) = delete;

 private:
  static constexpr std::uint64_t slice_ns = 50'000'000;
  static constexpr std::uint32_t ordinary = 0;  // SCHED_OTHER
  /// sched_attr of <linux/sched/types.h>, which cannot be included beside <sched.h>.
  struct Attributes {
    std::uint32_t size = sizeof(Attributes), sched_policy = 0;
    std::uint64_t sched_flags = 0;
    std::int32_t sched_nice = 0;
    std::uint32_t sched_priority = 0;
    std::uint64_t sched_runtime = 0, sched_deadline = 0, sched_period = 0;
  };
  Attributes before_;
  bool changed_ = false;
};

}  // namespace tensorferry
