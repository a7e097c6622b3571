/// The exception that a handler raised, as a reply carries it: its type, its text, its traceback, and if it can be
/// rebuilt the pickled exception.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"

namespace tensorferry {

/// The description of an exception that a handler raised. Follows ReplyKind::exception in a reply.
struct RemoteException {
  std::string module;        // of the type: "builtins"; "" if C++ code raised it
  std::string qualname;      // "ValueError"
  std::string text;          // str(exception)
  std::string traceback;     // as formatted by the agent that raised it; may contain a remote traceback
  std::string peer;          // name of the agent that raised it
  bool rebuildable = false;  // one value follows: the exception (Tag::pickled), which the caller raises as its own type

  /// Returns the text of a RemoteError: "ValueError: text (raised on trainer3)", then the traceback, indented.
  [[nodiscard]] std::string describe() const;

  static constexpr std::tuple fields{&RemoteException::module, &RemoteException::qualname,
                                     &RemoteException::text,   &RemoteException::traceback,
                                     &RemoteException::peer,   &RemoteException::rebuildable};
  bool operator==(const RemoteException&) const = default;
};

/// write_exception() cuts each text to this many bytes, at a UTF-8 boundary; a traceback keeps its end. So an exception
/// with a large text can still be sent.
inline constexpr std::size_t longest_text = 64 * 1024;

/// Writes the description. If `rebuildable` is set, the caller then writes the pickled exception.
void write_exception(Encoder& out, RemoteException exception);
/// Reads a description. If `rebuildable` is set, the caller then reads one value. If the bytes are not a description,
/// `in` has failed afterwards.
inline RemoteException read_exception(Decoder& in) { return in.raw<RemoteException>(); }

}  // namespace tensorferry
