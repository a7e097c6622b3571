/// The lock of a language runtime, such as Python's GIL.
#pragma once

namespace tensorferry {

/// How a member releases the lock of the runtime that it works for. Thread-safe.
class RuntimeLock {
 public:
  virtual ~RuntimeLock() = default;
  /// Releases the lock, which the calling thread holds. Returns the thread's state for the other functions.
  virtual void* release() = 0;
  /// Takes the lock again.
  virtual void acquire(void* released) = 0;
  /// Runs the program's pending signal handlers, and returns whether one of them ends the wait of this thread. The
  /// thread has released the lock, and has released it again on return.
  virtual bool interrupted(void* released) = 0;
};

/// Releases a runtime's lock while it lives. Does nothing if `lock` is null: a program in C++ has none.
class Unlocked final {
 public:
  explicit Unlocked(RuntimeLock* lock) : lock_(lock), state_(lock != nullptr ? lock->release() : nullptr) {}
  ~Unlocked() {
    if (lock_ != nullptr) lock_->acquire(state_);
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  /// Returns whether a signal ends the wait of this thread.
  [[nodiscard]] bool interrupted() const { return lock_ != nullptr && lock_->interrupted(state_); }

 private:
  RuntimeLock* lock_;
  void* state_;
};

}  // namespace tensorferry
