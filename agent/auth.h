/// Who may speak to whom: the cluster key, the proof of it that opens every connection, and signatures of records that
/// are kept in a store. HMAC-SHA256 throughout; docs/security.md says what this protects and what it does not.
///
/// The greeting, before any other byte of a connection (docs/protocol.md, "Life of a connection"):
///
///     dialler  -> acceptor   preamble (48 bytes: magic, versions, features, flags, nonce)
///     acceptor -> dialler    preamble (48 bytes), proof (32 bytes; zero where none is needed)
///     dialler  -> acceptor   proof (32 bytes; zero where none is needed)
///
/// Everything has a fixed size, so nothing that a stranger sends is parsed beyond fixed offsets before its proof.
/// A proof is HMAC(key, side, purpose, both preambles):
/// - no reflection: the side that proves is part of what is signed, so an acceptor's proof is no dialler's;
/// - no replay: both nonces are part of it, and each side made one of them for this connection alone;
/// - no downgrade: versions, features and the flags that ask for a proof are part of it;
/// - no transfer: a proof made for one purpose (a link, a store) opens no connection of another.
/// It proves that the other end of the handshake knows the key. The bytes that follow are not signed: whoever can
/// change packets on the way can take the connection over once it is open (no TLS yet).
#pragma once

#include <sys/types.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "channels/bytes.h"
#include "channels/file_descriptor.h"
#include "channels/status.h"

namespace tensorferry {

/// The cluster key: what every agent of a job knows and nobody else. Never logged; wiped when destroyed.
class Key {
 public:
  static constexpr std::size_t kLeastBytes = 16;  // a proof lets strangers guess offline: a short key would not last
  static constexpr std::size_t kMostBytes = 64 << 10;

  /// No key: `empty()`.
  Key() noexcept = default;
  Key(const Key&) = default;
  Key(Key&&) noexcept = default;
  Key& operator=(const Key&) = default;
  Key& operator=(Key&&) noexcept = default;
  ~Key();

  /// White space at both ends does not count, so that a file and a variable of the same text are the same key.
  /// InvalidArgument: shorter than kLeastBytes, longer than kMostBytes.
  static Result<Key> from_text(std::string_view text);
  /// A regular file that nobody else can read or write: PermissionDenied for one that group or others can.
  static Result<Key> from_file(const std::string& path);
  /// `option` where it is not "", else the file that TENSORFERRY_KEY_FILE names, else TENSORFERRY_KEY, else no key.
  static Result<Key> load(std::string_view option);
  static Key random();

  [[nodiscard]] bool empty() const noexcept { return bytes_.empty(); }
  [[nodiscard]] ByteView bytes() const noexcept { return bytes_; }

 private:
  explicit Key(Bytes bytes) : bytes_(std::move(bytes)) {}
  Bytes bytes_;
};

/// The lines that a user types to give every host the same key: part of errors.
std::string_view how_to_set_a_key() noexcept;

using Nonce = std::array<std::byte, 32>;
using Digest = std::array<std::byte, 32>;

/// Fills `bytes` from the kernel's random source; ends the process where there is none (nothing could be trusted then).
void fill_random(std::span<std::byte> bytes) noexcept;

/// A signature over `bytes` for whoever shares the key. `context` says what the bytes are (kind and name of the
/// record): a signature made in one context is worthless in every other.
Digest sign(const Key& key, std::string_view context, ByteView bytes);
/// In constant time.
[[nodiscard]] bool verify(const Key& key, std::string_view context, ByteView bytes, ByteView signature);

/// The first bytes of each side of a connection.
struct Preamble {
  static constexpr std::size_t kBytes = 48;
  using Encoded = std::array<std::byte, kBytes>;

  std::uint16_t version_min = 1, version_max = 1;  // of the protocol that follows
  std::uint32_t features = 0;                      // bits: what this side can do beyond `version_max`'s least
  bool demands_proof = false;                      // this side will not go on without one
  bool has_key = false;                            // for a clearer error only
  Nonce nonce{};

  [[nodiscard]] Encoded encode() const;
  /// ProtocolError: not 48 bytes, another magic, an empty version range. Unknown flags and the padding are skipped.
  static Result<Preamble> decode(ByteView bytes);
};

enum class Side : std::uint8_t { dialler = 1, acceptor = 2 };

/// The proof of `side` that it knows `key`, on a connection that both preambles opened.
Digest proof(const Key& key, Side side, std::string_view purpose, const Preamble::Encoded& dialler,
             const Preamble::Encoded& acceptor);

/// The uid at the other end of a unix socket (SO_PEERCRED); nullopt for any other socket.
std::optional<uid_t> unix_peer_uid(int fd) noexcept;
/// A pidfd of the process at the other end of a unix socket: readable when that process has ended. Where the kernel has
/// SO_PEERPIDFD (Linux 6.5), also of a process in another pid namespace, and never of a later one that was given the
/// same pid. Empty: the kernel does not say, or it has ended.
FileDescriptor unix_peer_process(int fd) noexcept;
/// Whether this side must ask for a proof: only the same user, over a unix socket of this host, needs none. A user that
/// this user namespace cannot name (the overflow uid) is never the same one.
[[nodiscard]] bool key_needed(std::optional<uid_t> unix_peer, uid_t mine) noexcept;

/// What one side brings to a greeting.
struct Terms {
  const Key* key = nullptr;  // null or empty: none. Outlives the greeting
  bool demands_proof = true;
  std::string purpose{};  // the same at both ends: "link", "store", ...
  std::uint16_t version_min = 1, version_max = 1;
  std::uint32_t features = 0;
};

/// What both sides have in common once they have greeted.
struct Agreement {
  std::uint16_t version = 0;  // the highest that both speak
  std::uint32_t features = 0;
  bool proven = false;  // both proved that they know the key
};

/// The dialling side's part, as bytes: send hello(), read kAnswerBytes, send what answer() returns. Not thread-safe.
class DiallerGreeting {
 public:
  static constexpr std::size_t kAnswerBytes = Preamble::kBytes + sizeof(Digest);

  explicit DiallerGreeting(Terms terms);
  [[nodiscard]] const Preamble::Encoded& hello() const { return hello_; }
  /// Checks the acceptor. Unauthenticated: a key is missing or differs; ProtocolError: no common version, not one of
  /// us. The connection must then be closed.
  Result<Digest> answer(ByteView bytes);
  [[nodiscard]] const Agreement& agreement() const { return agreement_; }  // after answer()

 private:
  Terms terms_;
  Preamble mine_;
  Preamble::Encoded hello_;
  Agreement agreement_;
};

/// The accepting side's part: read kHelloBytes, send what answer() returns, read a Digest, check() it.
class AcceptorGreeting {
 public:
  static constexpr std::size_t kHelloBytes = Preamble::kBytes;
  struct Answer {
    std::array<std::byte, DiallerGreeting::kAnswerBytes> bytes;  // to be sent in either case: it tells the dialler why
    Status verdict;                                              // not ok: then close
  };

  explicit AcceptorGreeting(Terms terms);
  /// ProtocolError: what came is no preamble; close without an answer.
  Result<Answer> answer(ByteView hello);
  /// Unauthenticated: the dialler does not know the key.
  Status check(ByteView proof) const;
  [[nodiscard]] const Agreement& agreement() const { return agreement_; }  // after check()

 private:
  Terms terms_;
  Digest expected_{};
  Agreement agreement_;
};

/// The greeting over a connected stream socket, for callers that may block. DeadlineExceeded, ConnectionLost,
/// ProtocolError, Unauthenticated: the caller closes the socket.
Result<Agreement> greet_dialler(int fd, Terms terms, std::chrono::steady_clock::time_point deadline);
Result<Agreement> greet_acceptor(int fd, Terms terms, std::chrono::steady_clock::time_point deadline);

}  // namespace tensorferry
