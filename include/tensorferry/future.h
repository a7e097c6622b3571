/// Results that are still to come.
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

/// What runs when something has completed, once.
class Continuation {
 public:
  virtual ~Continuation() = default;
  virtual void run() = 0;
};

/// What a future waits for, whatever its type.
class Pending {
 public:
  virtual ~Pending() = default;
  /// False: not done by `until`.
  virtual bool wait(std::optional<TimePoint> until) = 0;
  [[nodiscard]] virtual bool done() = 0;
  virtual void cancel() = 0;
  /// Runs `next` once, on the thread that completes; at once where it is done. What it throws is logged.
  virtual void on_done(std::unique_ptr<Continuation> next) = 0;
};

/// Runs `next`; what it throws ends in the log.
void run_guarded(Continuation& next) noexcept;
/// One line: nobody is left to be told of this exception.
void log_unheard(const char* where, const std::exception_ptr& exception) noexcept;
[[noreturn]] void throw_used_future();
std::exception_ptr broken_promise();

/// A flag that threads wait for, and one continuation.
class Event final {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void set();
  [[nodiscard]] bool is_set() const;
  bool wait(std::optional<TimePoint> until);
  void on_set(std::unique_ptr<Continuation> next);

 private:
  class State;
  std::unique_ptr<State> state_;
};

/// void as a value.
struct Nothing {};
template <class T>
using Stored = std::conditional_t<std::is_void_v<T>, Nothing, T>;

/// A result that this process makes itself. Completed once.
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
  /// For one that is completed later, by complete().
  void keep(Stored<T> value) { value_.emplace(std::move(value)); }
  void keep(std::exception_ptr error) { error_ = std::move(error); }
  /// The error is the user's own, of `where`: it goes to the log where nobody takes it.
  void mark_own_error(const char* where) { unheard_ = where; }
  void complete() { event_.set(); }
  /// What cancel() cancels.
  void follow(std::weak_ptr<Pending> source) { source_ = std::move(source); }

  bool wait(std::optional<TimePoint> until) override { return event_.wait(until); }
  bool done() override { return event_.is_set(); }
  void cancel() override {
    if (const auto source = source_.lock()) source->cancel();
  }
  void on_done(std::unique_ptr<Continuation> next) override { event_.on_set(std::move(next)); }
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

class Resume final : public Continuation {
 public:
  explicit Resume(std::coroutine_handle<> coroutine) : coroutine_(coroutine) {}
  void run() override { coroutine_.resume(); }

 private:
  std::coroutine_handle<> coroutine_;
};

}  // namespace detail

/// A result of type T that is still to come, or the exception in its place. Taken once, by one of get, then and
/// co_await, which leave an empty future. Move-only; different threads may not use one future at once, but for
/// cancel().
///
/// Dropping a future abandons its result; the call itself goes on, and what was passed to `then` runs. A call that
/// nobody waits for is completed by a thread of the agent's pool; one that is waited for by the waiting thread itself,
/// which is faster. When its agent is destroyed or leaves, a call completes with AgentClosed.
template <class T>
class Future {
 public:
  using Duration = std::chrono::milliseconds;

  Future() = default;
  Future(Future&&) noexcept = default;
  Future& operator=(Future&&) noexcept = default;

  /// Completed already.
  static Future ready(detail::Stored<T> value = {}) {
    auto state = std::make_shared<detail::Settled<T>>();
    state->set(std::move(value));
    return Future(std::move(state));
  }

  /// Holds a result to come; false: empty, or taken.
  [[nodiscard]] bool valid() const noexcept { return pending_ != nullptr; }
  [[nodiscard]] bool done() const { return checked().done(); }
  /// Waits; false: not completed after `timeout`.
  [[nodiscard]] bool wait_for(Duration timeout) const {
    return checked().wait(std::chrono::steady_clock::now() + timeout);
  }
  void wait() const { static_cast<void>(checked().wait(std::nullopt)); }
  /// Waits and gives the result; throws what came in its place (see errors.h).
  T get() {
    wait();
    const auto pending = std::move(pending_);
    return take_(*pending);
  }
  /// Completes a call with Cancelled, and tells the peer, whose function may ask CallContext::cancelled(). Of a future
  /// that `then` gave: cancels what that one waits for. Nothing where it is done already. Any thread.
  void cancel() const { checked().cancel(); }

  /// Calls `function(result)` on the thread that completes this future (of the agent's pool, or this one where it is
  /// done) and gives a future of what it returns. An exception in the result's place goes there without the call; what
  /// `function` throws goes there too, or into the log where that future was dropped.
  template <class F>
  auto then(F function);

  /// Suspends until it is done; goes on, on the thread that completes it. What came in the result's place is thrown.
  auto operator co_await() { return awaiter(); }

  /// A function that returns a Future and uses co_await or co_return is a coroutine: it runs at once, on the caller's
  /// thread, up to its first suspension. Give it its arguments by value, and let it be a named function. g++ 12
  /// miscompiles lambdas with captures there, and `co_await agent->call_with({.timeout = 1s}, ...)`: make the options,
  /// or the future, a variable of its own.
  using promise_type = detail::Coroutine<T>;

  /// For the library.
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
      const auto keep = pending;  // the coroutine, and this in it, may have ended when on_done returns
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

/// The other end of a future of one's own: for functions that answer later, from another thread. One that is dropped
/// without a result fails its future with Cancelled.
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
  /// Once.
  [[nodiscard]] Future<T> future() const { return Future<T>(state_); }
  /// One of the two, once.
  void set(detail::Stored<T> value = {}) { state_->set(std::move(value)); }
  void fail(std::exception_ptr error) { state_->fail(std::move(error)); }

 private:
  std::shared_ptr<detail::Settled<T>> state_ = std::make_shared<detail::Settled<T>>();
};

// ---- no part of the interface from here on

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

template <class T>
class CoroutineBase {
 public:
  Future<T> get_return_object() { return Future<T>(state_); }
  std::suspend_never initial_suspend() const noexcept { return {}; }
  /// Completes only now, when the coroutine's variables are gone.
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
