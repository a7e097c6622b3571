/// The bytes of the protocol, written from docs/protocol.md alone. No code is shared with the agents: what the page
/// says, and nothing else, is what they are tested with.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace hostile {

/// Appends numbers, little-endian.
class Out {
 public:
  Out& u8(std::uint64_t value) { return number(value, 1); }
  Out& u16(std::uint64_t value) { return number(value, 2); }
  Out& u32(std::uint64_t value) { return number(value, 4); }
  Out& u64(std::uint64_t value) { return number(value, 8); }
  Out& varint(std::uint64_t value);
  Out& text(std::string_view value) { return varint(value.size()).raw(value); }
  Out& raw(std::string_view value) {
    bytes_ += value;
    return *this;
  }
  [[nodiscard]] const std::string& bytes() const { return bytes_; }
  operator std::string() const { return bytes_; }  // NOLINT(google-explicit-constructor): it is a string being made

 private:
  Out& number(std::uint64_t value, int bytes);
  std::string bytes_;
};

/// Reads numbers; zeros once the bytes are over.
class In {
 public:
  explicit In(std::string_view bytes) : rest_(bytes) {}
  std::uint64_t number(std::size_t bytes);
  std::uint64_t varint();
  std::string_view text() { return raw(varint()); }
  std::string_view raw(std::size_t bytes);

 private:
  std::string_view rest_;
};

enum Kind : std::uint8_t {
  hello = 1,
  request,
  reply,
  cancel,
  release,
  control_kind,
  ping,
  pong,
  goodbye,
  bulk,
  ring,
  want_bulk,
  status,
  go,
};
inline constexpr std::uint8_t last_kind = go;

inline constexpr std::uint8_t flag_error = 1, flag_spilled = 2;
inline constexpr std::size_t header_bytes = 40, longest_body = 65536;

/// The header of a frame, and its body in three parts.
struct Frame {
  std::uint8_t kind = 0, flags = 0;
  std::uint16_t buffers = 0;
  std::uint8_t descriptors = 0;
  std::uint32_t function = 0;
  std::uint64_t word = 0;  // call, control, sequence or connection
  std::uint32_t remaining = 0, order = 0;
  std::string extensions, records, payload;
  std::string trailing;

  [[nodiscard]] std::string bytes() const;
};

/// A header that has come.
struct Header {
  std::uint8_t kind = 0;
  std::uint16_t extensions = 0;
  std::uint8_t descriptors = 0;
  std::uint32_t length = 0;
  std::uint64_t word = 0, trailing = 0;
};
Header header_of(std::string_view bytes);

std::string extension(std::uint16_t id, std::string_view bytes);

struct Record {
  std::uint8_t channel = 0, form = 0;
  std::uint64_t bytes = 0, release = 0, after = 0;
  std::string ticket, behind;  // behind the ticket: inline bytes, or the parts of a bundle
  [[nodiscard]] std::string encoded() const;
};

// ---- The handshake
inline constexpr std::size_t preamble_bytes = 48, proof_bytes = 32;
std::string preamble(std::string_view random_bytes);  // of a side that has a key and demands a proof
std::string proof(std::string_view key, bool dialler, std::string_view diallers, std::string_view acceptors);

// ---- Hello
struct Channel {
  std::string name;
  std::string descriptor;
};
struct Greeting {
  std::uint8_t purpose = 1;
  std::string name;
  std::uint64_t incarnation = 0, expected = 0, connection = 0;
  std::uint32_t features = 0;
  std::vector<Channel> channels;  // for the CPU
  [[nodiscard]] std::string encoded() const;
};

}  // namespace hostile
