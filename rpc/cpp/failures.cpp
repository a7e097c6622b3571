#include "rpc/cpp/failures.h"

#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <typeinfo>

#include "tensorferry/errors.h"

namespace tensorferry::detail {
namespace {

std::string name_of_type(const std::type_info& type) {
  int failed = 0;
  const std::unique_ptr<char, decltype(&std::free)> text(abi::__cxa_demangle(type.name(), nullptr, nullptr, &failed),
                                                         &std::free);
  return failed == 0 && text ? text.get() : type.name();
}

Code code_of(const Error& error) {
#define TENSORFERRY_CODE(number, code, Class, ...) \
  if (dynamic_cast<const Class*>(&error) != nullptr) return Code::code;
  TENSORFERRY_ERRORS(TENSORFERRY_CODE)
#undef TENSORFERRY_CODE
  return Code::ok;
}

}  // namespace

void throw_status(const Status& status) {
  const std::string what(status.what());
  switch (status.code()) {
#define TENSORFERRY_THROW(number, code, Class, ...) \
  case Code::code:                                  \
    throw Class(what);
    TENSORFERRY_PLAIN_ERRORS(TENSORFERRY_THROW)
#undef TENSORFERRY_THROW
    case Code::remote_error:
      throw RemoteError(what, "", what, "", "");
    case Code::ok:
      break;
  }
  throw InternalError(what);
}

void throw_remote(const RemoteException& exception) {
  const auto type = exception.module.empty() ? exception.qualname : exception.module + "." + exception.qualname;
  throw RemoteError(exception.describe(), type, exception.text, exception.traceback, exception.peer);
}

Status describe_thrown(const std::exception_ptr& thrown, const std::string& self, RemoteException& described) {
  described.peer = self;
  try {
    std::rethrow_exception(thrown);
  } catch (const RemoteError& error) {  // from a call that the function made: passed on unchanged
    const auto dot = error.type_name().rfind('.');
    described.module = dot == std::string::npos ? "" : error.type_name().substr(0, dot);
    described.qualname = dot == std::string::npos ? error.type_name() : error.type_name().substr(dot + 1);
    if (described.qualname.empty()) described.qualname = "RemoteError";
    described.text = error.message();
    described.traceback = error.traceback();
    if (!error.peer().empty()) described.peer = error.peer();
  } catch (const Error& error) {
    if (const auto code = code_of(error); code != Code::ok) return {code, error.what()};
    described.qualname = name_of_type(typeid(error));
    described.text = error.what();
  } catch (const std::exception& error) {
    described.qualname = name_of_type(typeid(error));
    described.text = error.what();
  } catch (...) {
    const auto* type = abi::__cxa_current_exception_type();
    described.qualname = type != nullptr ? name_of_type(*type) : "unknown";
    described.text = "an exception that is not a std::exception";
  }
  return {};
}

}  // namespace tensorferry::detail
