/// A move-only `std::function` (std::move_only_function of C++23), for completions that own their operation.
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace tensorferry {

template <class Signature>
class UniqueFunction;

template <class R, class... Args>
class UniqueFunction<R(Args...)> {
 public:
  UniqueFunction() noexcept = default;
  UniqueFunction(std::nullptr_t) noexcept {}  // NOLINT(google-explicit-constructor)

  template <class F>
    requires(!std::is_same_v<std::remove_cvref_t<F>, UniqueFunction> && std::is_invocable_r_v<R, F&, Args...>)
  UniqueFunction(F&& function)  // NOLINT(google-explicit-constructor)
      : target_(std::make_unique<Holder<std::remove_cvref_t<F>>>(std::forward<F>(function))) {}

  explicit operator bool() const noexcept { return target_ != nullptr; }

  R operator()(Args... args) const { return target_->call(std::forward<Args>(args)...); }

 private:
  struct Target {
    virtual ~Target() = default;
    virtual R call(Args... args) = 0;
  };
  template <class F>
  struct Holder final : Target {
    template <class G>
    explicit Holder(G&& g) : f(std::forward<G>(g)) {}
    R call(Args... args) override { return f(std::forward<Args>(args)...); }
    F f;
  };
  std::unique_ptr<Target> target_;
};

}  // namespace tensorferry
