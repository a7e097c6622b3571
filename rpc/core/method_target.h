/// Calls of methods of remote objects ("tf:method"): the first argument of such a call is bytes that name the object
/// and the method.
#pragma once

#include <string>
#include <string_view>

#include "base/record.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

inline constexpr std::string_view method_function = "tf:method";

/// The object and the method that a call of `tf:method` names.
struct MethodTarget {
  std::uint64_t owner = 0;  // incarnation; another incarnation of the owner answers ConnectionLost
  RRefId object;
  ForkId fork;  // the caller's hold on the object (References::may_use)
  std::string method;
  static constexpr std::tuple fields{&MethodTarget::owner, &MethodTarget::object, &MethodTarget::fork,
                                     rest(&MethodTarget::method)};
  [[nodiscard]] bool valid() const { return !method.empty(); }
};

}  // namespace tensorferry
