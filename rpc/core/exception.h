/// How an exception travels back from a handler: what it is, what it says, where it was raised, and, where it can be
/// rebuilt, the exception itself.
#pragma once

#include <string>
#include <vector>

#include "channels/status.h"
#include "rpc/core/codec.h"

namespace tensorferry {

/// The text of an exception raised by a handler. Follows ReplyKind::exception in a reply.
struct RemoteException {
  std::string module;        // of the type: "builtins"; "" for one raised by C++
  std::string qualname;      // "ValueError"
  std::string text;          // str(exception)
  std::string traceback;     // as formatted where it was raised; may itself hold a remote one
  std::string peer;          // the agent that raised it, by name
  bool rebuildable = false;  // one value follows: the exception pickled (Tag::pickled), to be raised as its own type

  /// "ValueError: text (raised on trainer3)", then the traceback indented: what RemoteError says.
  [[nodiscard]] std::string describe() const;

  bool operator==(const RemoteException&) const = default;
};

/// Texts are cut to `longest_text` bytes each (at a UTF-8 boundary; a traceback keeps its end): an error must fit
/// where its call's result would have.
inline constexpr std::size_t longest_text = 64 * 1024;

/// The caller then writes the pickled exception where `rebuildable`.
void write_exception(Encoder& out, const RemoteException& exception);
/// On bytes that are none `in` has failed. The caller then reads one value where `rebuildable`.
RemoteException read_exception(Decoder& in);

}  // namespace tensorferry
