/// TLS 1.3 on TCP connections: the option, what proves the two ends to each other, and the reading of its files.
///
/// Two forms, which do not mix:
/// - "key": an external pre-shared key, which both ends derive from the cluster key. No certificates.
/// - certificates: each end sends a certificate, and verifies the other's against one CA. There is no check of a host's
///   name: each holder of a certificate of the CA is a peer, so the CA must be the job's own.
///
/// Both forms exchange ephemeral keys, so that a secret that leaks later opens no recorded connection. There are no
/// session tickets, no early data and no earlier version of TLS. Inside, the handshake of auth.h follows as ever.
#pragma once

#include <openssl/types.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "agent/transport/cluster_key.h"
#include "agent/transport/kernel_tls.h"
#include "base/status.h"

namespace tensorferry {

/// What OpenSSL's callbacks note of a connection. The application data of its SSL is the address.
struct TlsNotes {
  TrafficSecrets secrets;
  std::string refused;  ///< the peer's certificate, and why it was refused
};

/// The TLS of one agent, or of one end of a store. Threads: any.
class Tls final {
 public:
  enum class Form : std::uint8_t { key, certificates };

  /// Reads the option: "key", "off", or "certificate=FILE,private_key=FILE,ca=FILE" with the names of PEM files. "":
  /// TENSORFERRY_TLS. Returns null if TLS is off. InvalidArgument: another text, no key for "key", or a file that
  /// cannot be used.
  static Result<std::shared_ptr<Tls>> make(std::string_view option, const Key& key);
  ~Tls();
  Tls(const Tls&) = delete;
  Tls& operator=(const Tls&) = delete;

  [[nodiscard]] Form form() const noexcept { return form_; }
  /// Returns the pre-shared key of Form::key.
  [[nodiscard]] const Digest& shared_key() const noexcept { return shared_key_; }
  /// Returns what a new connection is made with. If a file has changed since the last call, reads all of them again;
  /// if they cannot be used, keeps the earlier ones and logs that once.
  std::shared_ptr<SSL_CTX> context();

 private:
  /// Tells whether a file is the one that was read.
  struct FileStamp {
    std::uint64_t device = 0, inode = 0;
    std::int64_t seconds = 0, nanoseconds = 0, bytes = 0;
    bool operator==(const FileStamp&) const = default;
  };
  using FileStamps = std::array<FileStamp, 3>;

  explicit Tls(Form form) : form_(form) {}
  Result<std::shared_ptr<SSL_CTX>> load() const;
  [[nodiscard]] FileStamps stamps() const;

  const Form form_;
  Digest shared_key_{};                         // Form::key
  std::string certificate_, private_key_, ca_;  // Form::certificates: files
  std::mutex mutex_;
  std::shared_ptr<SSL_CTX> context_;  // under mutex_
  FileStamps read_{};                 // of the files at the last attempt to read them; under mutex_
};

/// Returns whether these are the first bytes of a TLS connection, or of the alert by which one ends.
[[nodiscard]] bool is_tls(ByteView first_bytes) noexcept;
/// The error of an end without TLS whose peer has sent such bytes.
Status only_peer_uses_tls();
/// The error of an end with TLS whose peer speaks the protocol without it.
Status peer_uses_no_tls();

}  // namespace tensorferry
