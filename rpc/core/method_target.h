/// Calls of methods of remote objects ("tf:method"): the first argument of such a call is bytes that name the object
/// and the method.
///
///   u64 owner's incarnation | object id | the method's name
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/bytes.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

inline constexpr std::string_view method_function = "tf:method";

/// The object and the method that a call of `tf:method` names.
struct MethodTarget {
  std::uint64_t owner = 0;  // incarnation; another incarnation of the owner answers ConnectionLost
  RRefId object;
  std::string method;

  [[nodiscard]] Bytes encode() const {
    Bytes out;
    Writer writer(out);
    writer.put(owner);
    writer.put(object.incarnation);
    writer.put(object.counter);
    writer.raw(view_of(method));
    return out;
  }
  /// Undoes encode(). nullopt: malformed.
  static std::optional<MethodTarget> decode(ByteView bytes) {
    MethodTarget target;
    Reader reader(bytes);
    target.owner = reader.get<std::uint64_t>();
    target.object.incarnation = reader.get<std::uint64_t>();
    target.object.counter = reader.get<std::uint64_t>();
    target.method = text_of(reader.rest());
    if (reader.failed() || target.method.empty()) return std::nullopt;
    return target;
  }
};

}  // namespace tensorferry
