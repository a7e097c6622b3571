/// Looks up the functions of a library that is loaded at run time, so that one build starts on machines with and
/// without the library.
#pragma once

#include <dlfcn.h>

#include <functional>
#include <string>
#include <utility>

#include "base/text.h"

namespace tensorferry {

class Symbols final {
 public:
  /// Returns the address of a function, or null if there is none of that name.
  using Lookup = std::function<void*(const char* name)>;

  /// `library` is the library's name in missing().
  Symbols(std::string library, Lookup lookup) : library_(std::move(library)), lookup_(std::move(lookup)) {}
  /// Of a library that dlopen() has opened, and that stays open until the process ends.
  Symbols(std::string library, void* handle)
      : Symbols(std::move(library), [handle](const char* name) { return ::dlsym(handle, name); }) {}

  /// Sets `function`. If the library has none of that name, `function` becomes null, and missing() says so.
  template <class Function>
  void operator()(Function*& function, const char* name) {
    optional(function, name);
    if (function == nullptr && missing_.empty()) missing_ = formatted("{} has no {}", library_, name);
  }
  /// Sets `function`, to null if the library has none of that name.
  template <class Function>
  void optional(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(lookup_(name));
  }

  /// Names the library and the first function that it lacks; empty if it lacks none.
  [[nodiscard]] const std::string& missing() const noexcept { return missing_; }

 private:
  std::string library_;
  Lookup lookup_;
  std::string missing_;
};

}  // namespace tensorferry
