#include "base/status.h"

namespace tensorferry {

std::string_view name_of(Code code) noexcept {
  switch (code) {
    case Code::ok:
      return "Ok";
    case Code::cancelled:
      return "Cancelled";
    case Code::invalid_argument:
      return "InvalidArgument";
    case Code::deadline_exceeded:
      return "DeadlineExceeded";
    case Code::not_found:
      return "NotFound";
    case Code::permission_denied:
      return "PermissionDenied";
    case Code::resource_exhausted:
      return "ResourceExhausted";
    case Code::channel_unavailable:
      return "ChannelUnavailable";
    case Code::connection_lost:
      return "ConnectionLost";
    case Code::protocol_error:
      return "ProtocolError";
    case Code::unauthenticated:
      return "Unauthenticated";
    case Code::remote_error:
      return "RemoteError";
    case Code::agent_closed:
      return "AgentClosed";
    case Code::internal:
      return "Internal";
  }
  return "Unknown";  // a number that a newer peer sent
}

std::string Status::text() const {
  std::string text(name_of(code()));
  if (!what().empty()) text.append(": ").append(what());
  return text;
}

}  // namespace tensorferry
