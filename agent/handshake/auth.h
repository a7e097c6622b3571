/// Authentication: the handshake that proves knowledge of the cluster key on every connection. docs/security.md says
/// what this protects and what it does not.
///
/// The handshake precedes all other bytes of a connection (docs/protocol.md, "Life of a connection"):
///
///     dialler  -> acceptor   preamble (48 bytes: magic, versions, features, flags, nonce)
///     acceptor -> dialler    preamble (48 bytes), proof (32 bytes; zero if neither side demands one)
///     dialler  -> acceptor   proof (32 bytes; zero if neither side demands one)
///
/// Every part has a fixed size, so until the peer has proved itself nothing of it is parsed beyond fixed offsets.
/// A proof is HMAC(key, side, purpose, both preambles):
/// - no reflection: it signs the proving side, so an acceptor's proof is not valid for a dialler;
/// - no replay: it signs both nonces, and each side draws one of them for this connection alone;
/// - no downgrade: it signs versions, features and the flags that demand a proof;
/// - no transfer: it signs the purpose (a link, a store), so it opens no connection of another purpose.
///
/// A proof shows that the other end of the handshake knows the key. The bytes that follow are not signed: an attacker
/// who can change packets on the way can take over the open connection, unless TLS protects it (agent/transport/tls.h).
///
/// A handshake without proofs ends well only if the kernel says that the other end belongs to this user
/// (check_same_user()). So a process without a key is reached by its own user on its own host, and by nothing else.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "agent/transport/cluster_key.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/status.h"

namespace tensorferry {

class StreamPort;

/// The first bytes that each side of a connection sends.
struct Preamble {
  static constexpr std::size_t size = 48;
  using Encoded = std::array<std::byte, size>;

  std::uint16_t version_min = 1, version_max = 1;  // of the protocol that follows
  std::uint32_t features = 0;                      // bits: optional features of this side
  bool demands_proof = false;                      // this side requires a proof
  bool has_key = false;                            // for a clearer error only
  Nonce nonce{};

  [[nodiscard]] Encoded encode() const;
  /// Parses a preamble; skips unknown flags and the padding. ProtocolError: not 48 bytes, another magic, or an empty
  /// range of versions.
  static Result<Preamble> decode(ByteView bytes);
};

/// Computes the proof by which `side` shows that it knows `key`, on the connection that the two preambles opened.
Digest proof(const Key& key, Side side, std::string_view purpose, const Preamble::Encoded& dialler,
             const Preamble::Encoded& acceptor);

/// Returns the uid at the other end of a unix socket (SO_PEERCRED); nullopt for any other socket.
std::optional<uid_t> unix_peer_uid(int fd) noexcept;
/// Returns a pidfd of the process at the other end of a unix socket; it becomes readable when that process ends. If the
/// kernel has SO_PEERPIDFD (Linux 6.5), this also works for a process in another pid namespace, and never returns a
/// later process with the same pid. Empty: the kernel does not know the process, or the process has ended.
FileDescriptor unix_peer_process(int fd) noexcept;
/// Returns that process's pid in this pid namespace; 0: the process is not in it.
std::int32_t unix_peer_pid(int fd) noexcept;
/// Returns whether a peer of that uid, which the kernel has told, must prove the key. Only the same user needs no
/// proof. A user without a name in this user namespace (the overflow uid) never counts as the same user.
[[nodiscard]] bool key_needed(std::optional<uid_t> peer, uid_t mine);
/// Ok if the kernel says that the other end of a connected socket belongs to this process's user: by SO_PEERCRED for a
/// unix socket, else by the owner of the TCP socket (tcp_peer_uid()). Unauthenticated: another user, another host, or
/// the kernel does not know; the text says which. ConnectionLost: the other end has closed the connection. A dialler
/// calls it after the acceptor's first bytes have come.
Status check_same_user(int fd);
/// Returns whether the acceptor of a connection must demand a proof. The same user needs none over a unix socket. Over
/// TCP, each peer needs one if this process has a key; if not, the same user needs none, and the others get in no way.
/// ConnectionLost: without a key, the dialler has closed the connection, so the kernel knows its user no more.
Result<bool> acceptor_demands_proof(int fd, const Key& key);
/// Returns `verdict`, that of an acceptor's answer; or if the other end would have needed a key and this process has
/// none, check_same_user()'s error, which names the user.
Status why_refused(int fd, const Key& key, const Status& verdict);
/// Returns whether the dialler of a connection must demand a proof. As acceptor_demands_proof(), but false over TCP
/// without a key: handshake_as_dialler() then asks the kernel, which knows the acceptor's user only after its answer.
[[nodiscard]] bool dialler_demands_proof(int fd, const Key& key);

/// One side's input to a handshake.
struct Terms {
  const Key* key = nullptr;  // null or empty: no key. Must outlive the handshake
  bool demands_proof = true;
  std::string purpose{};  // the same at both ends: "link", "store", ...
  std::uint16_t version_min = 1, version_max = 1;
  std::uint32_t features = 0;
};

/// The result of a handshake, the same at both ends.
struct Agreement {
  std::uint16_t version = 0;   // the highest that both speak
  std::uint32_t features = 0;  // the features that both have
  bool proven = false;         // both sides prove that they know the key, because one of them demands it
};

/// The dialling side of a handshake, without I/O. The caller sends hello(), reads answer_bytes, passes them to answer()
/// and sends the result. Not thread-safe.
class DiallerHandshake {
 public:
  static constexpr std::size_t answer_bytes = Preamble::size + sizeof(Digest);

  explicit DiallerHandshake(Terms terms);
  [[nodiscard]] const Preamble::Encoded& hello() const { return hello_; }
  /// Checks the acceptor's answer and returns this side's proof. Unauthenticated: a key is missing, or the keys differ;
  /// ProtocolError: no common version, or the peer speaks another protocol. After an error the caller must close the
  /// connection.
  Result<Digest> answer(ByteView bytes);
  [[nodiscard]] const Agreement& agreement() const { return agreement_; }  // valid after answer()

 private:
  Terms terms_;
  Preamble mine_;
  Preamble::Encoded hello_;
  Agreement agreement_;
};

/// The accepting side of a handshake, without I/O. The caller reads hello_bytes, passes them to answer(), sends the
/// result, reads a Digest and passes it to check(). Not thread-safe.
class AcceptorHandshake {
 public:
  static constexpr std::size_t hello_bytes = Preamble::size;
  struct AcceptorReply {
    std::array<std::byte, DiallerHandshake::answer_bytes> bytes;  // send it even on failure: the dialler learns why
    Status verdict;                                               // not ok: close the connection after sending
  };

  explicit AcceptorHandshake(Terms terms);
  /// Checks the dialler's preamble and returns the bytes to send. ProtocolError: `hello` is not a preamble; close
  /// without an answer. The answer's verdict is ProtocolError if no version is common, Unauthenticated if a proof is
  /// needed and one side has no key, or if the dialler uses TLS.
  Result<AcceptorReply> answer(ByteView hello);
  /// Checks the dialler's proof. Unauthenticated: the dialler does not know the key.
  Status check(ByteView proof) const;
  [[nodiscard]] const Agreement& agreement() const { return agreement_; }  // valid after check()

 private:
  Terms terms_;
  Digest expected_{};
  Agreement agreement_;
};

/// Performs the dialling side of the handshake over a connected stream socket; blocks until `deadline` at most. If
/// neither side demands a proof, the acceptor must be this user's (check_same_user()). On an error (DeadlineExceeded,
/// ConnectionLost, ProtocolError, Unauthenticated) the caller closes the socket.
Result<Agreement> handshake_as_dialler(int fd, Terms terms, Clock::time_point deadline, const Clock& clock = {});
/// The same over a port; `tls`: one with TLS, whose handshake is done.
Result<Agreement> handshake_as_dialler(StreamPort& port, bool tls, Terms terms, Clock::time_point deadline,
                                       const Clock& clock = {});
/// Performs the accepting side. Demands what `terms` say: the caller knows the dialler's user before it begins
/// (acceptor_demands_proof()). Otherwise like handshake_as_dialler().
Result<Agreement> handshake_as_acceptor(int fd, Terms terms, Clock::time_point deadline, const Clock& clock = {});

}  // namespace tensorferry
