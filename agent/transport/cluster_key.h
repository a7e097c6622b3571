/// The cluster key, and what is made with it: signatures of the records in a store, secrets derived from it. All use
/// HMAC-SHA256. agent/handshake/auth.h proves on each connection that both ends know it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/bytes.h"
#include "base/status.h"

namespace tensorferry {

/// The cluster key: a secret that the agents of a job share. It is never logged, and is wiped when destroyed.
class Key {
 public:
  static constexpr std::size_t least_bytes = 16;  // a proof can be attacked offline, so a short key would be found
  static constexpr std::size_t most_bytes = 64 << 10;

  /// Makes no key: `empty()` is true.
  Key() noexcept = default;
  Key(const Key&) = default;
  Key(Key&&) noexcept = default;
  Key& operator=(const Key&) = default;
  Key& operator=(Key&&) noexcept = default;
  ~Key();

  /// Makes a key of `text` without the white space at both ends, so that a file and a variable of the same text give
  /// the same key. InvalidArgument: shorter than least_bytes, or longer than most_bytes.
  static Result<Key> from_text(std::string_view text);
  /// Reads a key from a regular file. PermissionDenied: the file belongs to neither this user nor root, group or others
  /// have any access to it, or it cannot be opened; NotFound; InvalidArgument: not a regular file, or as from_text().
  static Result<Key> from_file(const std::string& path);
  /// Returns the first key that is given: `option` unless it is "", the file that TENSORFERRY_KEY_FILE names, the text
  /// of TENSORFERRY_KEY. Returns no key if none of them is set.
  static Result<Key> load(std::string_view option);
  /// Draws a key of 32 random bytes.
  static Key random();

  [[nodiscard]] bool empty() const noexcept { return bytes_.empty(); }
  [[nodiscard]] ByteView bytes() const noexcept { return bytes_; }

 private:
  explicit Key(Bytes bytes) : bytes_(std::move(bytes)) {}
  Bytes bytes_;
};

/// Returns the shell lines that give every host the same key. Errors quote them.
std::string_view how_to_set_a_key() noexcept;

using Nonce = std::array<std::byte, 32>;
using Digest = std::array<std::byte, 32>;

/// Fills `bytes` from the kernel's random source. Aborts the process if that fails, because no secret would be safe.
void fill_random(std::span<std::byte> bytes) noexcept;

/// Returns HMAC-SHA256 of the bytes under the key. Aborts the process if OpenSSL cannot compute it.
Digest hmac(const Key& key, ByteView bytes);
/// Compares two secrets of the same length in constant time.
[[nodiscard]] bool equal_in_constant_time(ByteView a, ByteView b) noexcept;

/// Signs `bytes` with the key. `context` says what the bytes are (kind and name of the record): a signature is valid in
/// its own context alone.
Digest sign(const Key& key, std::string_view context, ByteView bytes);
/// Returns whether `signature` is sign()'s for these arguments. The comparison takes constant time.
[[nodiscard]] bool verify(const Key& key, std::string_view context, ByteView bytes, ByteView signature);

/// Derives a secret for `purpose` from the key. It tells nothing of the key, nor of the secrets for other purposes.
Digest derive(const Key& key, std::string_view purpose);

/// The two ends of a connection.
enum class Side : std::uint8_t { dialler = 1, acceptor = 2 };

}  // namespace tensorferry
