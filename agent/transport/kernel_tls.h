/// Hands the two directions of a TLS 1.3 connection to the kernel (kTLS), where the kernel has that: then one system
/// call encrypts and sends, or receives and decrypts, and the bytes are copied once less.
///
/// OpenSSL makes the handshake in its own buffers, and its key log tells the secrets of both directions. Out of a
/// secret come the key and the initialisation vector of its direction (RFC 8446, 7.3), and both go to the kernel
/// (Linux, Documentation/networking/tls.rst). AES-128-GCM alone; a connection with another cipher stays with OpenSSL.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "agent/transport/cluster_key.h"

namespace tensorferry {

/// The two traffic secrets of one connection. Wipes them when it is destroyed.
class TrafficSecrets final {
 public:
  TrafficSecrets() = default;
  ~TrafficSecrets() { forget(); }
  TrafficSecrets(const TrafficSecrets&) = delete;
  TrafficSecrets& operator=(const TrafficSecrets&) = delete;

  /// Takes a line of OpenSSL's key log. Other lines than the two of application data change nothing.
  void note(std::string_view line) noexcept;
  /// Returns whether both are known.
  [[nodiscard]] bool complete() const noexcept { return noted_[0] && noted_[1]; }
  /// Returns the secret by which `sender` encrypts.
  [[nodiscard]] const Digest& of(Side sender) const noexcept { return secrets_[sender == Side::dialler ? 0 : 1]; }
  void forget() noexcept;

 private:
  std::array<Digest, 2> secrets_{};  // the dialler's, the acceptor's
  std::array<bool, 2> noted_{};
};

namespace kernel_tls {

enum class Taken : std::uint8_t {
  both,  ///< The kernel encrypts and decrypts.
  none,  ///< The kernel cannot. The socket is as it was.
  one,   ///< The kernel has taken one direction only. The connection is lost.
};

/// Gives the kernel both directions of a connected TCP socket. Call it between two records: everything that this end
/// has encrypted is in the socket, the next byte to receive begins a record, and neither end has sent application data
/// that was decrypted or encrypted elsewhere.
Taken take(int socket, const TrafficSecrets& secrets, Side mine);

/// What an alert says, or another record that carries no data.
struct Aside {
  bool present = false;
  int alert = -1;  // its description; -1: no alert
};

/// Reads data as recvmsg(2) does, without waiting. If the peer has sent something else than data, returns -1 with
/// EPROTO and says what.
std::ptrdiff_t read(int socket, std::span<iovec> into, Aside& aside);

}  // namespace kernel_tls
}  // namespace tensorferry
