/// The codec of arguments and results: values as a compact stream of bytes. docs/codec.md describes it byte by byte.
///
/// `Encoder` (encoder.h) and `Decoder` (decoder.h) know the stream, not the language. The layer above walks its own
/// objects (Python's or C++'s) and calls one function for each value. A value arrives with the type that it had. So the
/// caller maps exact types alone (a bool is not an int, an instance of a subclass of dict is not a dict), and sends all
/// others as `pickled` or `record`.
///
/// Large bytes travel as buffers beside the stream: tensors, and above `inline_limit` arrays, strings, pickles and
/// pickle's out-of-band buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>

#include "base/record.h"
#include "rpc/core/reference_id.h"

namespace tensorferry {

template <>
inline constexpr std::tuple fields_of<ReferenceRecord>{&ReferenceRecord::owner,    &ReferenceRecord::object,
                                                       &ReferenceRecord::fork,     &ReferenceRecord::parent,
                                                       &ReferenceRecord::receiver, &ReferenceRecord::type_hint};

/// The kind of a value. The numbers travel: never renumber. First bytes from 0x40 on are short forms (docs/codec.md);
/// the Decoder reports them by these tags too.
enum class Tag : std::uint8_t {
  none = 0x00,
  false_ = 0x01,
  true_ = 0x02,
  integer = 0x03,      // 64 bits, signed
  big_integer = 0x04,  // beyond 64 bits
  real = 0x05,
  complex = 0x06,
  text = 0x07,  // UTF-8, opaque here (Python: surrogatepass)
  bytes = 0x08,
  bytearray = 0x09,
  tuple = 0x0a,
  list = 0x0b,
  dict = 0x0c,
  set = 0x0d,
  frozenset = 0x0e,
  tensor = 0x0f,  // strided
  sparse = 0x10,
  array = 0x11,  // numpy
  pickled = 0x12,
  reference = 0x13,      // a remote object
  record = 0x14,         // named tuple, dataclass, registered struct
  dtype = 0x15,          // torch.float32
  device = 0x16,         // torch.device("cuda:1")
  size = 0x17,           // torch.Size
  layout = 0x18,         // torch.strided, ...
  memory_format = 0x19,  // torch.channels_last, ...
  again = 0x1a,          // a back-reference to an earlier value of the message
  published = 0x1b,      // a value that was encoded once for many messages (published.h)
  invalid = 0x3f,        // never on the wire: the Decoder failed
};

/// Longer strings, byte strings and arrays travel as buffers. Beyond this size the two copies through the stream cost
/// more than a buffer's record in the frame and its acknowledgement.
inline constexpr std::size_t inline_limit = 8 * 1024;
/// Payloads are shorter than this, because the numbers of values have 32 bits.
inline constexpr std::size_t longest_payload = 0xffffffff;
/// Both ends refuse values that are nested deeper, because the layers above recurse.
inline constexpr std::size_t max_depth = 200;

enum class RecordKind : std::uint8_t { named_tuple = 0, dataclass = 1, structure = 2 };

/// The part of the region of a published value that holds one of the value's buffers.
struct PublishedPart {
  static constexpr std::size_t alignment = 64;  // of `offset`
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

/// The numbers by which torch.layout and torch.memory_format travel.
enum class LayoutNumber : std::uint8_t {
  strided = 0,
  coo = 1,
  csr = 2,
  csc = 3,
  bsr = 4,
  bsc = 5,
  mkldnn = 6,
  jagged = 7
};
enum class MemoryFormatNumber : std::uint8_t { contiguous = 0, preserve = 1, channels_last = 2, channels_last_3d = 3 };

/// The first bytes of short forms. The value's length or count, or the integer, is in the byte too.
namespace short_form {
inline constexpr std::uint8_t text = 0x40;   // .. 0x5f: length
inline constexpr std::uint8_t tuple = 0x60;  // .. 0x6f: count
inline constexpr std::uint8_t list = 0x70;   // .. 0x7f: count
inline constexpr std::uint8_t integer = 0x80;
inline constexpr std::int64_t integer_zero = 0xa0;
inline constexpr std::size_t most_text = 31;
inline constexpr std::size_t most_count = 15;
inline constexpr std::int64_t least_integer = -32;
inline constexpr std::int64_t most_integer = 95;
}  // namespace short_form

/// Bits of a tensor's flags on the wire, beside those of TensorLayout::Flag.
namespace tensor_has {
inline constexpr std::uint8_t offset = 0x20;
inline constexpr std::uint8_t device = 0x40;
inline constexpr std::uint8_t strides = 0x80;
}  // namespace tensor_has

/// A container around the next value.
struct OpenContainer {
  std::uint32_t number;
  bool may_hold_itself;  // true for a list and a dict, which the receiver makes before their values
};

}  // namespace tensorferry
