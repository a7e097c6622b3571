/// Adapters that make C++ callables available to peers by name, with their types and signatures. Included by agent.h.
/// Only CallContext is part of the public interface.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tensorferry/future.h"
#include "tensorferry/values.h"

namespace tensorferry {

/// The caller and the deadline of the call that a served function is answering. If the function's first parameter is a
/// `const CallContext&`, it receives this. The context is valid until the function returns; a coroutine must not use it
/// after its first suspension.
class CallContext {
 public:
  virtual ~CallContext() = default;
  /// Returns the name of the caller.
  [[nodiscard]] virtual std::string_view peer() const = 0;
  /// Returns the caller's rank; -1: it has none.
  [[nodiscard]] virtual int rank() const = 0;
  /// Returns the time at which the caller gives up; nullopt: the call has no deadline.
  [[nodiscard]] virtual std::optional<std::chrono::steady_clock::time_point> deadline() const = 0;
  /// Returns whether the reply will be discarded: the caller has cancelled the call, has given up, or is gone.
  [[nodiscard]] virtual bool cancelled() const = 0;
};

namespace detail {

/// A call that is being served: reads its arguments and writes its result.
class Invocation : public CallContext {
 public:
  /// Returns a reader that stands before argument `index`; null if the caller left the argument out. Called once for
  /// each index, in order.
  virtual ValueReader* argument(std::size_t index) = 0;
  /// Ends the arguments; called after the last one. Throws if the caller sent more.
  virtual void end_arguments() = 0;
  /// Returns the writer of the result; the function writes exactly one value.
  virtual ValueWriter& result() = 0;
  /// Answers when `pending` completes: `write` takes its result by `take` and writes it. `take` is a `T (*)(Pending&)`.
  virtual void result_later(std::shared_ptr<Pending> pending, void (*write)(ValueWriter&, Pending&, void (*take)()),
                            void (*take)()) = 0;
};

/// A function or a method that peers call.
class Function {
 public:
  virtual ~Function() = default;
  /// Reads the arguments, runs the callable and writes its result. Called on several threads at once.
  virtual void run(Invocation& call) = 0;
  /// Returns the number of parameters, without the CallContext.
  [[nodiscard]] virtual std::size_t arguments() const = 0;
  /// Returns the signature: "(action: float32 tensor, n: int) -> float".
  [[nodiscard]] virtual std::string signature() const = 0;

  std::vector<std::string> parameters;  // their names; empty: the parameters have no names
};

template <class... T>
struct Types {};

template <class F>
struct Signature : Signature<decltype(&F::operator())> {};
template <class R, class... A>
struct Signature<R (*)(A...)> {
  using Result = R;
  using ArgumentTypes = Types<A...>;
};
template <class R, class... A>
struct Signature<R (*)(A...) noexcept> : Signature<R (*)(A...)> {};
template <class C, class R, class... A>
struct Signature<R (C::*)(A...)> : Signature<R (*)(A...)> {};
template <class C, class R, class... A>
struct Signature<R (C::*)(A...) const> : Signature<R (*)(A...)> {};
template <class C, class R, class... A>
struct Signature<R (C::*)(A...) noexcept> : Signature<R (*)(A...)> {};
template <class C, class R, class... A>
struct Signature<R (C::*)(A...) const noexcept> : Signature<R (*)(A...)> {};

/// The type that is read for a parameter of type A.
template <class A>
struct ArgumentOf {
  static_assert(!std::is_lvalue_reference_v<A> || std::is_const_v<std::remove_reference_t<A>>,
                "a served function takes its arguments by value or by const reference");
  using Type = std::remove_cvref_t<A>;
};
template <>
struct ArgumentOf<std::string_view> {
  using Type = std::string;
};
template <>
struct ArgumentOf<const std::string_view&> {
  using Type = std::string;
};

template <class T>
inline constexpr bool is_optional_v = false;
template <class T>
inline constexpr bool is_optional_v<std::optional<T>> = true;

[[noreturn]] void throw_missing_argument();

template <class T>
T read_argument(Invocation& call, std::size_t index) {
  static_assert(ReadableValue<T>, "an argument's type has no Value<T> that reads it: see tensorferry/values.h");
  auto* in = call.argument(index);
  if (in == nullptr) {
    if constexpr (is_optional_v<T>) return std::nullopt;
    throw_missing_argument();
  }
  return Value<T>::read(*in);
}

template <class T>
std::string result_name() {
  if constexpr (std::is_void_v<T>) {
    return "None";
  } else {
    return Value<T>::name();
  }
}

template <class T>
void write_pending(ValueWriter& out, Pending& pending, void (*take)()) {
  const auto typed = reinterpret_cast<T (*)(Pending&)>(take);
  if constexpr (std::is_void_v<T>) {
    typed(pending);
    out.none();
  } else {
    Value<T>::write(out, typed(pending));
  }
}

std::string signature_text(const std::vector<std::string>& parameters, const std::vector<std::string>& types,
                           const std::string& result);

/// Makes a Function of a callable F. Several threads call the same F at once.
template <class F, class R, class ArgumentTypes>
class FunctionOf;
template <class F, class R, class... A>
class FunctionOf<F, R, Types<A...>> final : public Function {
 public:
  explicit FunctionOf(F function) : function_(std::move(function)) {}
  void run(Invocation& call) override { run(call, std::index_sequence_for<A...>()); }
  [[nodiscard]] std::size_t arguments() const override { return sizeof...(A); }
  [[nodiscard]] std::string signature() const override {
    return signature_text(parameters, {Value<typename ArgumentOf<A>::Type>::name()...},
                          result_name<typename FutureValue<R>::Type>());
  }

 private:
  template <std::size_t... i>
  void run(Invocation& call, std::index_sequence<i...> /*indices*/) {
    std::tuple<typename ArgumentOf<A>::Type...> values{
        read_argument<typename ArgumentOf<A>::Type>(call, i)...};  // braces evaluate in order
    call.end_arguments();
    if constexpr (is_future_v<R>) {
      using T = typename FutureValue<R>::Type;
      R future = function_(call, std::get<i>(std::move(values))...);
      const auto take = future.taker();
      call.result_later(std::move(future).release(), &write_pending<T>, reinterpret_cast<void (*)()>(take));
    } else if constexpr (std::is_void_v<R>) {
      function_(call, std::get<i>(std::move(values))...);
      call.result().none();
    } else {
      static_assert(WritableValue<std::remove_cvref_t<R>>,
                    "a result's type has no Value<T> that writes it: see tensorferry/values.h");
      const std::remove_cvref_t<R> result = function_(call, std::get<i>(std::move(values))...);
      Value<std::remove_cvref_t<R>>::write(call.result(), result);
    }
  }

  F function_;
};

/// Drops the CallContext for a callable that does not take one; WithContext passes it on.
template <class F>
struct WithoutContext {
  F function;
  template <class... A>
  decltype(auto) operator()(const CallContext& /*context*/, A&&... arguments) {
    return std::invoke(function, std::forward<A>(arguments)...);
  }
};
template <class F>
struct WithContext {
  F function;
  template <class... A>
  decltype(auto) operator()(const CallContext& context, A&&... arguments) {
    return std::invoke(function, context, std::forward<A>(arguments)...);
  }
};
/// A method bound to an object, which it keeps alive.
template <class T, class M>
struct Bound {
  std::shared_ptr<T> object;
  M member;
  template <class... A>
  decltype(auto) operator()(A&&... arguments) const {
    return std::invoke(member, *object, std::forward<A>(arguments)...);
  }
};

template <class F, class R, class... A>
std::unique_ptr<Function> make_function(F function, Types<A...> /*arguments*/, R* /*result*/) {
  return std::make_unique<FunctionOf<WithoutContext<F>, R, Types<A...>>>(WithoutContext<F>{std::move(function)});
}
template <class F, class R, class... A>
std::unique_ptr<Function> make_function(F function, Types<const CallContext&, A...> /*arguments*/, R* /*result*/) {
  return std::make_unique<FunctionOf<WithContext<F>, R, Types<A...>>>(WithContext<F>{std::move(function)});
}
/// Makes a Function of `function`. Its parameters and its result are those of `Described`, F itself or a member
/// function.
template <class Described, class F>
std::unique_ptr<Function> function_of(F function, std::vector<std::string> parameters) {
  using S = Signature<Described>;
  using R = std::remove_cvref_t<typename S::Result>;
  auto out = make_function(std::move(function), typename S::ArgumentTypes(), static_cast<R*>(nullptr));
  out->parameters = std::move(parameters);
  return out;
}

}  // namespace detail
}  // namespace tensorferry
