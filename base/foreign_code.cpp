#include "base/foreign_code.h"

#include <unistd.h>

#include <exception>
#include <string>

#include "base/log.h"

namespace tensorferry {

void log_thrown(std::string_view what) noexcept {
  if (!std::current_exception()) sleep_until_exit();  // no exception of C++, but a thread that ends: see ForcedUnwind
  try {
    std::string line(what);
    line += " threw: ";
    try {
      throw;
    } catch (const std::exception& error) {
      const std::string_view text(error.what());
      line += text.substr(0, text.find('\n'));  // torch appends a C++ backtrace
    } catch (...) {
      line += "an exception that is not a std::exception";
    }
    log_warning(line);
  } catch (...) {  // no memory for the line: drop it
  }
}

void sleep_until_exit() noexcept {
  for (;;) ::pause();
}

}  // namespace tensorferry
