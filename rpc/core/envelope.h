/// Envelopes of calls: the names of functions, and the payloads of requests and replies around their values.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "rpc/core/decoder.h"
#include "rpc/core/encoder.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

template <>
inline constexpr std::tuple fields_of<Creation>{&Creation::object, &Creation::fork};

// ---- Names of functions (Request::function)
//
//   py:<module>:<qualname>          a module-level Python callable, found by import
//   op:<namespace>::<name>[.<overload>]   a torch operator
//   tf:<name>                       internal ("tf:ref", "tf:shutdown"); users cannot serve these
//   anything else                   served by name, from C++ or by rpc.expose

enum class FunctionKind : std::uint8_t { served, python, torch_operator, internal };

struct FunctionName {
  FunctionKind kind = FunctionKind::served;
  std::string_view scope;  // python: module; torch_operator: namespace
  // python: qualname; torch_operator: name with overload; internal: without "tf:"; served: the whole name
  std::string_view name;
};

/// Splits a function's name; the result views into `name`. nullopt: the name is empty, or what follows the prefix
/// `py:`, `op:` or `tf:` is malformed.
std::optional<FunctionName> parse_function(std::string_view name);
/// Returns "py:<module>:<qualname>".
std::string python_function(std::string_view module, std::string_view qualname);

// ---- Requests
//
//   u8 kind | numbered: varint call | create: object id, fork id | count, that many values | count, that many (name,
//   value)
//
// If the kind has the bit `packed`, because the arguments must be pickled together (an object that appears in two of
// them stays one object):
//
//   u8 kind | numbered: varint call | create: object id, fork id | one value: a tuple (positional tuple, keyword dict
//   or None)

enum class RequestKind : std::uint8_t {
  call = 0,      // the reply carries the result
  create = 1,    // the result becomes a remote object at the callee; the reply carries no value
  packed = 2,    // bit beside call or create: one value follows
  numbered = 4,  // bit beside the others: the call's number follows
  timed = 8,     // bit beside the others: the caller set the call's deadline; else its time-out is a default
};

/// Writes kind and ids. `call` is the number that References::begin_call() returned, so that the reply may bring
/// references; 0: the reply must bring none. `timed`: as RequestHead::timed.
inline void begin_request_head(Encoder& out, bool packed, const std::optional<Creation>& creation, std::uint64_t call,
                               bool timed) {
  const auto bit = [](bool set, RequestKind kind) { return set ? static_cast<int>(kind) : 0; };
  out.raw_u8(static_cast<std::uint8_t>(bit(creation.has_value(), RequestKind::create) |
                                       bit(packed, RequestKind::packed) | bit(call != 0, RequestKind::numbered) |
                                       bit(timed, RequestKind::timed)));
  if (call != 0) out.raw_varint(call);
  if (creation) out.raw(*creation);
}
/// Begins a request. The caller then writes `positional` values and calls begin_keywords().
inline void begin_request(Encoder& out, std::size_t positional, const std::optional<Creation>& creation = {},
                          std::uint64_t call = 0, bool timed = false) {
  begin_request_head(out, false, creation, call, timed);
  out.raw_varint(positional);
}
/// Begins a packed request. The caller then writes the one value.
inline void begin_packed_request(Encoder& out, const std::optional<Creation>& creation = {}, std::uint64_t call = 0,
                                 bool timed = false) {
  begin_request_head(out, true, creation, call, timed);
}
/// Begins the keyword arguments. The caller then writes raw_text(name) and a value, `keywords` times.
inline void begin_keywords(Encoder& out, std::size_t keywords) { out.raw_varint(keywords); }

struct RequestHead {
  std::uint64_t call =
      0;  // the caller's number of the call (ReferenceTransfer::replied); 0: the reply must bring no references
  std::optional<Creation> creation;
  bool timed = false;          // the caller set the deadline: calls that the function makes inherit it
  bool packed = false;         // one value follows, and nothing else
  std::size_t positional = 0;  // if not packed: so many values follow, then read_keywords()
};
/// Reads the head of a request. If the bytes are not a request, `in` has failed afterwards.
inline RequestHead read_request(Decoder& in) {
  RequestHead head;
  const auto kind = in.raw_u8();
  constexpr auto create = static_cast<std::uint8_t>(RequestKind::create);
  constexpr auto packed = static_cast<std::uint8_t>(RequestKind::packed);
  constexpr auto numbered = static_cast<std::uint8_t>(RequestKind::numbered);
  constexpr auto timed = static_cast<std::uint8_t>(RequestKind::timed);
  if ((kind & ~(create | packed | numbered | timed)) != 0) in.fail("is a request of an unknown kind");
  if ((kind & numbered) != 0) head.call = in.raw_varint();
  if ((kind & create) != 0) head.creation = in.raw<Creation>();
  head.timed = (kind & timed) != 0;
  head.packed = (kind & packed) != 0;
  if (!head.packed) head.positional = static_cast<std::size_t>(in.raw_count());
  return head;
}
/// Reads the number of (raw_text, value) pairs that follow.
inline std::size_t read_keywords(Decoder& in) { return static_cast<std::size_t>(in.raw_count(2)); }

// ---- Fetches: the value of a remote object ("tf:fetch")

inline constexpr std::string_view fetch_function = "tf:fetch";

/// The payload of a fetch.
struct Fetch {
  std::uint64_t owner = 0;  // incarnation; another incarnation of the owner answers ConnectionLost
  RRefId object;
  ForkId fork;             // the caller's hold on the object (References::may_use)
  std::uint64_t call = 0;  // as RequestHead::call
  static constexpr std::tuple fields{&Fetch::owner, &Fetch::object, &Fetch::fork, varint(&Fetch::call)};
  bool operator==(const Fetch&) const = default;
};
/// Reads the payload of a fetch. If the bytes are not one, `in` has failed afterwards.
inline Fetch read_fetch(Decoder& in) { return in.raw<Fetch>(); }

// ---- Replies
//
//   u8 kind | value: one value | exception: see exception.h

enum class ReplyKind : std::uint8_t { value = 0, exception = 1 };

/// Begins a reply. The caller then writes one value, or the exception (write_exception).
inline void begin_reply(Encoder& out, ReplyKind kind) { out.raw_u8(static_cast<std::uint8_t>(kind)); }

/// Reads the kind of a reply. If it is unknown, `in` has failed afterwards.
inline ReplyKind read_reply(Decoder& in) {
  const auto kind = in.raw_u8();
  if (kind > static_cast<std::uint8_t>(ReplyKind::exception)) in.fail("is a reply of an unknown kind");
  return static_cast<ReplyKind>(kind);
}

}  // namespace tensorferry
