/// Futures of the results of calls, promises, and coroutines that return futures.
#pragma once

#include <chrono>
#include <coroutine>
#include <exception>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include "tensorferry/errors.h"

namespace tensorferry {

template <class T>
class Future;
template <class T>
class Promise;

namespace detail {

using TimePoint = std::chrono::steady_clock::time_point;

/// A function that runs once, when a Pending completes.
class Continuation {
 public:
  virtual ~Continuation() = default;
  virtual void run() = 0;
};

/// The state that a future waits for, without the type of its result.
class Pending {
 public:
  virtual ~Pending() = default;
  /// Waits. Returns false if it has not completed by `until`; nullopt: no limit.
  virtual bool wait(std::optional<TimePoint> until) = 0;
  [[nodiscard]] virtual bool done() = 0;
  /// See Future::cancel.
  virtual void cancel() = 0;
  /// Runs `next` once, on the thread that completes this; at once, on the calling thread, if it has completed already.
  /// Logs an exception that `next` throws.
  virtual void on_done(std::unique_ptr<Continuation> next) = 0;
};

/// Runs `next`, and logs an exception that it throws.
void run_guarded(Continuation& next) noexcept;
/// Logs one line about an exception of the user's function that no future can report any more.
void log_unheard(const char* where, const std::exception_ptr& exception) noexcept;
/// Throws InvalidArgument: the future is empty.
[[noreturn]] void throw_used_future();
/// Makes the exception of a promise that was dropped without a result.
std::exception_ptr broken_promise();

/// A flag, set once, that threads wait for and that runs one continuation. Thread-safe.
class Event final {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  /// Sets the flag, wakes all waiting threads, and runs the continuation on this thread.
  void set();
  [[nodiscard]] bool is_set() const;
  /// Waits. Returns false if the flag is not set by `until`; nullopt: no limit.
  bool wait(std::optional<TimePoint> until);
  /// Runs `next` when the flag is set; at once, on the calling thread, if it is set already.
  void on_set(std::unique_ptr<Continuation> next);

 private:
  class State;
  std::unique_ptr<State> state_;
};

/// Stands for void where a value is stored.
struct Nothing {};
template <class T>
using Stored = std::conditional_t<std::is_void_v<T>, Nothing, T>;

/// The state of a future whose result this process makes itself: of ready(), then(), a Promise or a coroutine.
/// Completed once.
template <class T>
class Settled final : public Pending {
 public:
  Settled() = default;
  Settled(const Settled&) = delete;
  Settled& operator=(const Settled&) = delete;
  ~Settled() override {
    if (unheard_) log_unheard(unheard_, error_);
  }
  void set(Stored<T> value) {
    value_.emplace(std::move(value));
    event_.set();
  }
  void fail(std::exception_ptr error) {
    error_ = std::move(error);
    event_.set();
  }
  /// Stores a result or an error; complete() completes the future later.
  void keep(Stored<T> value) { value_.emplace(std::move(value)); }
  void keep(std::exception_ptr error) { error_ = std::move(error); }
  /// Marks the error as thrown by the user's own code in `where`. It is logged if this is destroyed before take().
  void mark_own_error(const char* where) { unheard_ = where; }
  void complete() { event_.set(); }
  /// Sets the state that cancel() cancels.
  void follow(std::weak_ptr<Pending> source) { source_ = std::move(source); }

  bool wait(std::optional<TimePoint> until) override { return event_.wait(until); }
  bool done() override { return event_.is_set(); }
  void cancel() override {
    if (const auto source = source_.lock()) source->cancel();
  }
  void on_done(std::unique_ptr<Continuation> next) override { event_.on_set(std::move(next)); }
  /// Returns the result, or throws the error; called once, after completion.
  T take() {
    unheard_ = nullptr;
    if (error_) std::rethrow_exception(error_);
    if constexpr (!std::is_void_v<T>) return std::move(*value_);
  }

 private:
  Event event_;
  std::optional<Stored<T>> value_;
  std::exception_ptr error_;
  const char* unheard_ = nullptr;
  std::weak_ptr<Pending> source_;
};

template <class T>
class CoroutineBase;
template <class T>
class Coroutine;

/// Resumes a coroutine.
class Resume final : public Continuation {
 public:
  explicit Resume(std::coroutine_handle<> coroutine) : coroutine_(coroutine) {}
  void run() override { coroutine_.resume(); }

 private:
  std::coroutine_handle<> coroutine_;
};

}  // namespace detail

/// A result of type T that comes later, or the exception in its place.
///
/// The result is taken once, by get, then or co_await; each leaves the future empty. An empty future throws
/// InvalidArgument. Futures can only be moved.
///
/// Threads: one thread at a time may use a future, except for cancel(). A thread that waits for a call reads the reply
/// and completes the call itself, which is fastest. If no thread waits, a thread of the agent's pool completes the call
/// and runs its continuation (then, co_await).
///
/// Dropping a future discards its result. The call goes on, and a function passed to then() still runs. When the agent
/// leaves or is destroyed, its calls in flight complete with AgentClosed.
template <class T>
class Future {
 public:
  using Duration = std::chrono::milliseconds;

  Future() = default;
  Future(Future&&) noexcept = default;
  Future& operator=(Future&&) noexcept = default;

  /// Returns a future that has completed with `value`.
  static Future ready(detail::Stored<T> value = {}) {
    auto state = std::make_shared<detail::Settled<T>>();
    state->set(std::move(value));
    return Future(std::move(state));
  }

  /// Returns whether the future has a result to take; false: it is empty, or the result was taken.
  [[nodiscard]] bool valid() const noexcept { return pending_ != nullptr; }
  /// Returns whether the result, or the exception in its place, is there.
  [[nodiscard]] bool done() const { return checked().done(); }
  /// Waits for completion. Returns false if the future has not completed after `timeout`; the call goes on.
  [[nodiscard]] bool wait_for(Duration timeout) const {
    return checked().wait(std::chrono::steady_clock::now() + timeout);
  }
  /// Waits for completion without a limit.
  void wait() const { static_cast<void>(checked().wait(std::nullopt)); }
  /// Waits, then returns the result or throws the exception in its place (see errors.h).
  T get() {
    wait();
    const auto pending = std::move(pending_);
    return take_(*pending);
  }
  /// Cancels the call: completes it with Cancelled and tells the peer, whose function may poll
  /// CallContext::cancelled(). For a future that then() returned, cancels the call that it depends on. Has no effect on
  /// a future that has completed, or that comes from a Promise or a coroutine. May be called from any thread.
  void cancel() const { checked().cancel(); }

  /// Calls `function(result)` when this future completes, and returns a future of the value that `function` returns.
  ///
  /// `function` runs on the thread that completes this future: a thread of the agent's pool for a call, the calling
  /// thread of Promise::set for a promise, or at once on this thread if the future has completed already. If this
  /// future completes with an exception, the returned future completes with it and `function` is not called. An
  /// exception that `function` throws goes into the returned future too, or into the log if that future was dropped.
  template <class F>
  auto then(F function);

  /// Suspends the coroutine until this future completes, and resumes it on the thread that completes it. Does not
  /// suspend if it has completed already. Gives the result, or throws the exception in its place.
  auto operator co_await() { return awaiter(); }

  /// Makes a function a coroutine if it returns a Future and uses co_await or co_return. It runs at once, on the
  /// caller's thread, up to its first suspension. Pass its arguments by value, and write it as a named function.
  ///
  /// g++ 12 miscompiles coroutines that are lambdas with captures, and options in braces inside a co_await expression,
  /// as in `co_await agent->call_with({.timeout = 1s}, ...)`. Make the options, or the future, a variable of its own.
  using promise_type = detail::Coroutine<T>;

  /// For the library only.
  Future(std::shared_ptr<detail::Pending> pending, T (*take)(detail::Pending&))
      : pending_(std::move(pending)), take_(take) {}
  explicit Future(std::shared_ptr<detail::Settled<T>> state)
      : pending_(std::move(state)),
        take_([](detail::Pending& pending) -> T { return static_cast<detail::Settled<T>&>(pending).take(); }) {}
  [[nodiscard]] std::shared_ptr<detail::Pending> release() && { return std::move(pending_); }
  [[nodiscard]] auto taker() const noexcept { return take_; }

 private:
  struct Awaiter {
    std::shared_ptr<detail::Pending> pending;
    T (*take)(detail::Pending&);
    bool await_ready() const { return pending->done(); }
    void await_suspend(std::coroutine_handle<> coroutine) const {
      const auto keep = pending;  // the coroutine, which owns this awaiter, may have ended when on_done returns
      keep->on_done(std::make_unique<detail::Resume>(coroutine));
    }
    T await_resume() const { return take(*pending); }
  };
  Awaiter awaiter() {
    static_cast<void>(checked());
    return Awaiter{std::move(pending_), take_};
  }
  [[nodiscard]] detail::Pending& checked() const {
    if (!pending_) detail::throw_used_future();
    return *pending_;
  }

  std::shared_ptr<detail::Pending> pending_;
  T (*take_)(detail::Pending&) = nullptr;
};

/// Completes a future of the program's own, for served functions that answer later from another thread. Dropping a
/// promise without a result completes its future with Cancelled. The thread that sets, fails or drops the promise runs
/// the future's continuation.
template <class T>
class Promise {
 public:
  Promise() = default;
  Promise(Promise&&) noexcept = default;
  Promise& operator=(Promise&& other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~Promise() {
    if (state_ && !state_->done()) state_->fail(detail::broken_promise());
  }
  /// Returns the future; called once.
  [[nodiscard]] Future<T> future() const { return Future<T>(state_); }
  /// Completes the future with a result. Exactly one of set() and fail() may be called, once.
  void set(detail::Stored<T> value = {}) { state_->set(std::move(value)); }
  /// Completes the future with an exception.
  void fail(std::exception_ptr error) { state_->fail(std::move(error)); }

 private:
  std::shared_ptr<detail::Settled<T>> state_ = std::make_shared<detail::Settled<T>>();
};

// ---- not part of the public interface from here on

namespace detail {

template <class T>
struct FutureValue {
  using Type = T;
};
template <class T>
struct FutureValue<Future<T>> {
  using Type = T;
};
template <class T>
inline constexpr bool is_future_v = false;
template <class T>
inline constexpr bool is_future_v<Future<T>> = true;

template <class T, class F>
struct ResultOf {
  using Type = std::invoke_result_t<F&, T>;
};
template <class F>
struct ResultOf<void, F> {
  using Type = std::invoke_result_t<F&>;
};

/// Runs the function that was passed to then().
template <class T, class F, class U>
class Then final : public Continuation {
 public:
  Then(std::shared_ptr<Pending> source, T (*take)(Pending&), F function, std::shared_ptr<Settled<U>> result)
      : source_(std::move(source)), take_(take), function_(std::move(function)), result_(std::move(result)) {}

  void run() override {
    bool called = false;
    try {
      if constexpr (std::is_void_v<T>) {
        take_(*source_);
        called = true;
        if constexpr (std::is_void_v<U>) {
          function_();
          result_->set({});
        } else {
          result_->set(function_());
        }
      } else {
        auto value = take_(*source_);
        called = true;
        if constexpr (std::is_void_v<U>) {
          function_(std::move(value));
          result_->set({});
        } else {
          result_->set(function_(std::move(value)));
        }
      }
    } catch (...) {
      if (called) result_->mark_own_error("a function that was passed to then()");
      result_->fail(std::current_exception());
    }
  }

 private:
  std::shared_ptr<Pending> source_;
  T (*take_)(Pending&);
  F function_;
  std::shared_ptr<Settled<U>> result_;
};

/// The promise type of coroutines that return a Future.
template <class T>
class CoroutineBase {
 public:
  Future<T> get_return_object() { return Future<T>(state_); }
  std::suspend_never initial_suspend() const noexcept { return {}; }
  /// Completes the future here, because the coroutine's variables are destroyed by now.
  std::suspend_never final_suspend() const noexcept {
    const auto state = state_;
    state->complete();
    return {};
  }
  void unhandled_exception() {
    state_->keep(std::current_exception());
    state_->mark_own_error("a coroutine");
  }

 protected:
  std::shared_ptr<Settled<T>> state_ = std::make_shared<Settled<T>>();
};
template <class T>
class Coroutine final : public CoroutineBase<T> {
 public:
  void return_value(T value) { this->state_->keep(std::move(value)); }
};
template <>
class Coroutine<void> final : public CoroutineBase<void> {
 public:
  void return_void() { state_->keep(Nothing{}); }
};

}  // namespace detail

template <class T>
template <class F>
auto Future<T>::then(F function) {
  using U = typename detail::ResultOf<T, F>::Type;
  static_cast<void>(checked());
  auto result = std::make_shared<detail::Settled<U>>();
  auto source = std::move(pending_);
  result->follow(source);
  Future<U> out(result);
  auto next = std::make_unique<detail::Then<T, F, U>>(source, take_, std::move(function), std::move(result));
  source->on_done(std::move(next));
  return out;
}

}  // namespace tensorferry
