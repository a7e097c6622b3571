#include "rpc/c/error.h"

#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "rpc/cpp/failures.h"
#include "tensorferry/errors.h"

namespace tensorferry::c {
namespace {

/// An error with the texts that it points to.
struct OwnedError {
  tferry_error shown{};  // first, so that a pointer to it is a pointer to this
  std::string text, type_name, message, traceback, peer;

  tferry_error* show(Code code) {
    shown = {static_cast<std::int32_t>(code),
             name_of(code).data(),
             text.c_str(),
             type_name.c_str(),
             message.c_str(),
             traceback.c_str(),
             peer.c_str()};
    return &shown;
  }
};

tferry_error* no_memory() {
  static tferry_error error{
      static_cast<std::int32_t>(Code::resource_exhausted), "ResourceExhausted", "there is no memory", "", "", "", ""};
  return &error;
}

}  // namespace

tferry_error* error_of(const std::exception_ptr& thrown) noexcept {
  try {
    auto error = std::make_unique<OwnedError>();
    auto code = Code::internal;
    try {
      std::rethrow_exception(thrown);
    } catch (const RemoteError& remote) {
      code = Code::remote_error;
      error->text = remote.what();
      error->type_name = remote.type_name();
      error->message = remote.message();
      error->traceback = remote.traceback();
      error->peer = remote.peer();
    } catch (const std::bad_alloc&) {
      return no_memory();
    } catch (const std::exception& other) {
      RemoteException described;
      const auto status = detail::describe_thrown(thrown, {}, described);
      if (!status.ok()) code = status.code();
      error->text = other.what();
    }
    return error.release()->show(code);
  } catch (...) {
    return no_memory();
  }
}

}  // namespace tensorferry::c

void tferry_error_free(tferry_error* error) {
  if (error != nullptr && error != tensorferry::c::no_memory()) {
    delete reinterpret_cast<tensorferry::c::OwnedError*>(error);
  }
}

int32_t tferry_error_code(const char* name) {
#define TENSORFERRY_NUMBER(number, code, Class, ...) \
  if (std::string_view(name) == #Class) return number;
  TENSORFERRY_ERRORS(TENSORFERRY_NUMBER)
#undef TENSORFERRY_NUMBER
  return 0;
}
