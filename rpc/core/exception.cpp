#include "rpc/core/exception.h"

#include "base/text.h"

namespace tensorferry {
namespace {

bool continues_character(char c) { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

std::string_view beginning_of(std::string_view text) {
  if (text.size() <= longest_text) return text;
  auto length = longest_text;
  while (length > 0 && continues_character(text[length])) --length;
  return text.substr(0, length);
}

/// Keeps the end of a traceback: the innermost frames come last.
std::string_view end_of(std::string_view text) {
  if (text.size() <= longest_text) return text;
  auto start = text.size() - longest_text;
  while (start < text.size() && continues_character(text[start])) ++start;
  return text.substr(start);
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

void write_exception(Encoder& out, const RemoteException& exception) {
  out.raw_text(beginning_of(exception.module));
  out.raw_text(beginning_of(exception.qualname));
  out.raw_text(beginning_of(exception.text));
  out.raw_text(end_of(exception.traceback));
  out.raw_text(beginning_of(exception.peer));
  out.raw_u8(exception.rebuildable ? 1 : 0);
}

RemoteException read_exception(Decoder& in) {
  RemoteException exception;
  exception.module = in.raw_text();
  exception.qualname = in.raw_text();
  exception.text = in.raw_text();
  exception.traceback = in.raw_text();
  exception.peer = in.raw_text();
  const auto rebuildable = in.raw_u8();
  if (rebuildable > 1) in.fail("holds an exception of an unknown kind");
  exception.rebuildable = rebuildable == 1;
  return exception;
}

}  // namespace tensorferry
