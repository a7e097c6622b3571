/// What the threads that run handlers have to do with the runtime of a language, and with waits for peers.
#pragma once

#include <chrono>

namespace tensorferry {

/// If entering the executor took longer than this, other threads of its runtime compute, and a thread that leaves the
/// executor waits as long again to re-enter it.
inline constexpr std::chrono::microseconds executor_is_dear_from{500};
/// A thread then keeps the executor for up to this long in case more work comes.
inline constexpr std::chrono::microseconds executor_patience{100};

/// The hooks by which a language runtime prepares the threads that run its handlers. Every function runs on a pool
/// thread. `thread` is the result of attach() on that thread.
class Executor {
 public:
  virtual ~Executor() = default;
  virtual void* attach() = 0;            // once per thread, before the first enter()
  virtual void enter(void* thread) = 0;  // before handlers; many handlers may run before leave()
  virtual void leave(void* thread) = 0;
  virtual void detach(void* thread) = 0;  // once per attached thread, before it ends
};

/// A wait of the calling thread for something that another call or a peer brings. If the thread runs a handler, the
/// handler holds no place (`RawAgentOptions::max_threads`) while this object lives, so the calls for which it waits can
/// run. Call::wait() does this by itself. Other waits inside handlers need it, for example those on a condition
/// variable. Does nothing on threads that belong to no agent.
class WaitInHandler {
 public:
  WaitInHandler();
  ~WaitInHandler();
  WaitInHandler(const WaitInHandler&) = delete;
  WaitInHandler& operator=(const WaitInHandler&) = delete;
};

}  // namespace tensorferry
