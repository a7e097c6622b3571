/// Objects that live in one agent and are used from others. What agent.h's share_object gives, and what an RRef of
/// Python's is here.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "tensorferry/function.h"
#include "tensorferry/future.h"
#include "tensorferry/values.h"

namespace tensorferry {

class Reference;
struct CallOptions;

namespace detail {

class AgentCore;

/// Writes the arguments that `pack` points to.
using WriteArguments = void (*)(ValueWriter& out, const void* pack);
template <class... A>
void write_arguments(ValueWriter& out, const void* pack) {
  std::apply([&](const auto&... each) { (Value<std::decay_t<decltype(each)>>::write(out, each), ...); },
             *static_cast<const std::tuple<A...>*>(pack));
}

/// A reply that a future waits for.
class PendingReply : public Pending {
 public:
  /// Once, after done(): stands before the result, which is to be a `wanted`. Throws what came in its place.
  virtual ValueReader& open(std::string (*wanted)()) = 0;
  /// The result has been read.
  virtual void close() = 0;
  /// For a result that is not looked at.
  virtual void discard() = 0;
};

template <class T>
T take_reply(Pending& pending) {
  auto& reply = static_cast<PendingReply&>(pending);
  if constexpr (std::is_void_v<T>) {
    reply.discard();
  } else {
    static_assert(ReadableValue<T>, "the result's type has no Value<T> that reads it: see tensorferry/values.h");
    T value = Value<T>::read(reply.open(&Value<T>::name));
    reply.close();
    return value;
  }
}

/// Whether values of T may hold references to objects, so that a reply with one must be accounted for.
template <class T>
struct MayHoldObject : std::true_type {};
template <class T>
  requires(std::is_void_v<T> || std::is_arithmetic_v<T>)
struct MayHoldObject<T> : std::false_type {};
template <>
struct MayHoldObject<std::string> : std::false_type {};
template <>
struct MayHoldObject<Tensor> : std::false_type {};
template <class T>
struct MayHoldObject<TensorOf<T>> : std::false_type {};

}  // namespace detail

/// A hold on an object of some agent's, its owner: the object lives until nobody holds it. Copies share the hold. May
/// be passed to any agent among arguments and results; a Python peer gets an RRef, and C++ gets an Object for a Python
/// peer's RRef.
class Object {
 public:
  /// Holds nothing.
  Object() = default;
  [[nodiscard]] explicit operator bool() const noexcept { return reference_ != nullptr; }

  /// Calls a method of it at its owner; as Agent::call.
  template <class T = void, class... A>
  Future<T> call(std::string_view method, const A&... arguments) const;
  template <class T = void, class... A>
  Future<T> call_with(const CallOptions& options, std::string_view method, const A&... arguments) const;

  /// The name of the agent that it lives in.
  [[nodiscard]] const std::string& owner() const;
  /// The name of its type, as its owner tells it; "" where it does not.
  [[nodiscard]] const std::string& type_name() const;

  /// For the library.
  Object(std::shared_ptr<detail::AgentCore> agent, std::shared_ptr<Reference> reference)
      : agent_(std::move(agent)), reference_(std::move(reference)) {}
  [[nodiscard]] const std::shared_ptr<Reference>& reference() const noexcept { return reference_; }

 private:
  std::shared_ptr<detail::Pending> start(const CallOptions& options, std::string_view method, std::size_t arguments,
                                         detail::WriteArguments write, const void* pack, bool may_hold_object) const;

  std::shared_ptr<detail::AgentCore> agent_;
  std::shared_ptr<Reference> reference_;
};

template <>
struct Value<Object> {
  static std::string name() { return "reference"; }
  static void write(ValueWriter& out, const Object& value) { out.object(value); }
  static Object read(ValueReader& in) { return in.object(); }
};

/// A method that peers may call of an object: a member function (or another callable that takes the object first), by
/// the name that they call it by, with the names of its parameters where they are to be passed by keyword.
template <class M>
struct Method {
  std::string name;
  M member;
  std::vector<std::string> parameters;
};
template <class M>
Method<M> method(std::string name, M member, std::vector<std::string> parameters = {}) {
  return {std::move(name), std::move(member), std::move(parameters)};
}

}  // namespace tensorferry
