#include "rpc/core/exception.h"

#include "base/text.h"

namespace tensorferry {
namespace {

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

void cut_end(std::string& text) {
  if (text.size() <= longest_text) return;
  auto length = longest_text;
  while (length > 0 && continues_character(text[length])) --length;
  text.resize(length);
}

/// Keeps the end of a traceback: the innermost frames come last.
void cut_beginning(std::string& text) {
  if (text.size() <= longest_text) return;
  auto start = text.size() - longest_text;
  while (start < text.size() && continues_character(text[start])) ++start;
  text.erase(0, start);
}

}  // namespace

std::string RemoteException::describe() const {
  const bool plain = module.empty() || module == "builtins";
  auto out = formatted("{}{}{}{}{} (raised on {})", plain ? "" : module, plain ? "" : ".", qualname,
                       text.empty() ? "" : ": ", text, peer);
  std::string_view rest = traceback;
  while (!rest.empty()) {
    const auto line = rest.substr(0, rest.find('\n'));
    rest.remove_prefix(std::min(line.size() + 1, rest.size()));
    out.append("\n  ").append(line);
  }
  return out;
}

void write_exception(Encoder& out, RemoteException exception) {
  for (auto* text : {&exception.module, &exception.qualname, &exception.text, &exception.peer}) cut_end(*text);
  cut_beginning(exception.traceback);
  out.raw(exception);
}

}  // namespace tensorferry
