#include "python/csrc/errors.h"

#include <map>
#include <string>
#include <utility>

namespace tensorferry::python {
namespace {

const char* class_of(Code code) {
  switch (code) {
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
    case Code::ok:
    case Code::internal:
      break;
  }
  return "InternalError";
}

}  // namespace

py::object attribute_of(const char* module, const char* name) {
  static auto& found = *new std::map<std::pair<std::string, std::string>, py::object>;  // outlives the interpreter
  auto& object = found[{module, name}];
  if (!object) object = py::module_::import(module).attr(name);
  return object;
}

void set_error(const Status& status) {
  try {
    const auto type = attribute_of("tensorferry.errors", class_of(status.code()));
    const auto text = status.what();
    const py::str message(text.data(), text.size());
    PyErr_SetObject(type.ptr(), message.ptr());
  } catch (py::error_already_set& error) {
    error.restore();  // tensorferry.errors cannot be imported
  }
}

void raise(const Status& status) {
  set_error(status);
  throw py::error_already_set();
}

}  // namespace tensorferry::python
