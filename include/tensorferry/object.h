/// References to objects that live in one agent and are used from others. Agent::share_object returns one, and an RRef
/// of Python's arrives as one.
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

/// Writes the arguments; `pack` points to a tuple of references to them.
using WriteArguments = void (*)(ValueWriter& out, const void* pack);
template <class... A>
void write_arguments(ValueWriter& out, const void* pack) {
  std::apply([&](const auto&... each) { (Value<std::decay_t<decltype(each)>>::write(out, each), ...); },
             *static_cast<const std::tuple<A...>*>(pack));
}

/// The reply of a call, for a future.
class PendingReply : public Pending {
 public:
  /// Returns a reader that stands before the result; called once, after done(). `wanted` returns the name of the
  /// expected type, for errors. If the call failed, throws its error.
  virtual ValueReader& open(std::string (*wanted)()) = 0;
  /// Ends the reply after the result has been read. Throws ProtocolError if bytes are left over.
  virtual void close() = 0;
  /// Ends the reply without reading the result; called once, after done(), instead of open(). If the call failed,
  /// throws its error.
  virtual void discard() = 0;
};

/// Takes the result out of a PendingReply, or throws the call's error.
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

/// Tells whether values of T may hold references to objects. If so, the call is counted until its reply has been read,
/// because the peer asks after references whose replies may be lost.
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

/// A reference to an object that lives in one agent, its owner. The object lives as long as any agent holds a reference
/// to it. Copies of an Object share one reference.
///
/// An Object may be passed to any agent as an argument or in a result. A Python peer receives an RRef, and a C++ peer
/// receives an Object for a Python peer's RRef.
class Object {
 public:
  /// Makes an empty Object, which refers to nothing.
  Object() = default;
  /// Returns whether the Object refers to an object.
  [[nodiscard]] explicit operator bool() const noexcept { return reference_ != nullptr; }

  /// Calls a method of the object at its owner, as Agent::call does. Throws at once InvalidArgument if the Object is
  /// empty, and ConnectionLost or AgentClosed if the object is known to be lost.
  template <class T = void, class... A>
  Future<T> call(std::string_view method, const A&... arguments) const;
  /// The same with options.
  template <class T = void, class... A>
  Future<T> call_with(const CallOptions& options, std::string_view method, const A&... arguments) const;

  /// Returns the name of the agent that the object lives in. Throws InvalidArgument if the Object is empty.
  [[nodiscard]] const std::string& owner() const;
  /// Returns the name of the object's type as its owner gives it; "" if the owner gives none. Throws InvalidArgument if
  /// the Object is empty.
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

/// A method of a shared object that peers may call; see Agent::share_object.
template <class M>
struct Method {
  std::string name;
  M member;
  std::vector<std::string> parameters;
};
/// Describes a method. `name` is the name that peers call it by. `member` is a pointer to a member function of the
/// object's class. `parameters` names the parameters, so that peers may pass them by keyword.
template <class M>
Method<M> method(std::string name, M member, std::vector<std::string> parameters = {}) {
  return {std::move(name), std::move(member), std::move(parameters)};
}

}  // namespace tensorferry
