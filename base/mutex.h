/// `Mutex` and `Condition`: the standard ones in release builds. In debug builds they count the locks that each thread
/// holds, so that `assert_no_lock()` can show that no completion runs under a lock of this library.
#pragma once

#include <cassert>
#include <condition_variable>
#include <mutex>

namespace tensorferry {

#ifdef NDEBUG

using Mutex = std::mutex;
using Condition = std::condition_variable;

/// Asserts that this thread holds no Mutex. Does nothing in release builds.
inline void assert_no_lock() noexcept {}

#else

/// A std::mutex that counts the locks of each thread.
class Mutex final {
 public:
  void lock() {
    mutex_.lock();
    ++held;
  }
  bool try_lock() {
    const bool locked = mutex_.try_lock();
    if (locked) ++held;
    return locked;
  }
  void unlock() {
    --held;
    mutex_.unlock();
  }
  /// Returns how many of these locks this thread holds.
  [[nodiscard]] static int held_here() noexcept { return held; }

 private:
  static inline thread_local int held = 0;
  std::mutex mutex_;
};
using Condition = std::condition_variable_any;

inline void assert_no_lock() noexcept {
  assert(Mutex::held_here() == 0 && "a completion runs under a lock, which its owner's destructor may need");
}

#endif

}  // namespace tensorferry
