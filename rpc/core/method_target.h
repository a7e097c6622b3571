/// Methods of remote objects ("tf:method"): a call whose first argument, bytes, says which method of which object.
///
///   u64 owner's incarnation | object id | the method's name
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "channels/bytes.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

inline constexpr std::string_view method_function = "tf:method";

struct MethodTarget {
  std::uint64_t owner = 0;  // its incarnation: another life of it answers ConnectionLost
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
  /// nullopt: bytes that are none.
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
