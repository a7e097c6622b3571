#include "agent/transport/kernel_tls.h"

#include <linux/tls.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/environment.h"

namespace tensorferry {
namespace {

constexpr std::array<std::string_view, 2> labels{"CLIENT_TRAFFIC_SECRET_0 ", "SERVER_TRAFFIC_SECRET_0 "};
constexpr std::uint16_t tls_1_3 = 0x0304;           // older headers do not know it
constexpr int alert_record = 21, data_record = 23;  // RFC 8446, 5.1

/// Returns the value of a hexadecimal digit; -1: it is none.
int digit(char c) noexcept {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

bool parse(std::string_view hex, Digest& into) noexcept {
  if (hex.size() != 2 * into.size()) return false;
  for (std::size_t i = 0; i < into.size(); ++i) {
    const int high = digit(hex[2 * i]), low = digit(hex[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    into[i] = static_cast<std::byte>(high * 16 + low);
  }
  return true;
}

/// HKDF-Expand-Label(secret, label, "", into.size()) of RFC 8446, 7.1, for at most one block of SHA-256.
bool expand(const Digest& secret, std::string_view label, std::span<unsigned char> into) noexcept {
  constexpr std::string_view prefix = "tls13 ";
  std::array<unsigned char, 32> info{};
  auto* at = info.data();
  *at++ = 0;
  *at++ = static_cast<unsigned char>(into.size());
  *at++ = static_cast<unsigned char>(prefix.size() + label.size());
  at = std::copy(prefix.begin(), prefix.end(), at);
  at = std::copy(label.begin(), label.end(), at);
  *at++ = 0;  // no context
  *at++ = 1;  // the first block
  Digest block{};
  unsigned int length = 0;
  const bool made = HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()), info.data(),
                         static_cast<std::size_t>(at - info.data()), reinterpret_cast<unsigned char*>(block.data()),
                         &length) != nullptr &&
                    length == block.size();
  std::memcpy(into.data(), block.data(), into.size());
  OPENSSL_cleanse(block.data(), block.size());
  return made;
}

/// Sets a direction: TLS_TX or TLS_RX.
bool set(int socket, int direction, const Digest& secret) noexcept {
  tls12_crypto_info_aes_gcm_128 about{};  // its name is older than TLS 1.3, which uses it too
  about.info.version = tls_1_3;
  about.info.cipher_type = TLS_CIPHER_AES_GCM_128;
  std::array<unsigned char, TLS_CIPHER_AES_GCM_128_SALT_SIZE + TLS_CIPHER_AES_GCM_128_IV_SIZE> vector{};
  bool done = expand(secret, "key", about.key) && expand(secret, "iv", vector);
  std::memcpy(about.salt, vector.data(), sizeof about.salt);
  std::memcpy(about.iv, vector.data() + sizeof about.salt, sizeof about.iv);
  done = done && ::setsockopt(socket, SOL_TLS, direction, &about, sizeof about) == 0;
  OPENSSL_cleanse(&about, sizeof about);
  OPENSSL_cleanse(vector.data(), vector.size());
  return done;
}

/// As recvmsg(2), without waiting. `type`: set to that of the record out of which the bytes are.
std::ptrdiff_t receive(int socket, std::span<iovec> into, int& type) noexcept {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(unsigned char))> about{};
  msghdr message{};
  message.msg_iov = into.data();
  message.msg_iovlen = into.size();
  message.msg_control = about.data();
  message.msg_controllen = about.size();
  const auto got = ::recvmsg(socket, &message, MSG_DONTWAIT);
  const auto* const header = got > 0 ? CMSG_FIRSTHDR(&message) : nullptr;
  if (header != nullptr && header->cmsg_level == SOL_TLS && header->cmsg_type == TLS_GET_RECORD_TYPE)
    type = *CMSG_DATA(header);
  return got;
}

}  // namespace

void TrafficSecrets::note(std::string_view line) noexcept {
  for (std::size_t i = 0; i < labels.size(); ++i) {
    if (line.substr(0, labels[i].size()) != labels[i]) continue;
    // The client's random number stands between the label and the secret.
    noted_[i] = parse(line.substr(line.rfind(' ') + 1), secrets_[i]);
  }
}

void TrafficSecrets::forget() noexcept {
  OPENSSL_cleanse(secrets_.data(), sizeof secrets_);
  noted_ = {};
}

namespace kernel_tls {

Taken take(int socket, const TrafficSecrets& secrets, Side mine) {
  if (!secrets.complete() || environment::kernel_tls.value() == "0") return Taken::none;
  constexpr std::string_view name = "tls";
  // Without a direction, such a socket is as any other.
  if (::setsockopt(socket, SOL_TCP, TCP_ULP, name.data(), name.size()) != 0) return Taken::none;
  const auto theirs = mine == Side::dialler ? Side::acceptor : Side::dialler;
  if (!set(socket, TLS_TX, secrets.of(mine))) return Taken::none;
  return set(socket, TLS_RX, secrets.of(theirs)) ? Taken::both : Taken::one;
}

std::ptrdiff_t read(int socket, std::span<iovec> into, Aside& aside) {
  int type = data_record;
  const auto got = receive(socket, into, type);
  if (got <= 0 || type == data_record) return got;
  aside.present = true;
  if (type == alert_record) {  // a level and a description
    std::array<unsigned char, 2> alert{};
    std::size_t at = 0;
    for (const auto& part : into)
      for (std::size_t i = 0; i < part.iov_len && at < alert.size() && static_cast<std::ptrdiff_t>(at) < got; ++i)
        alert[at++] = static_cast<const unsigned char*>(part.iov_base)[i];
    iovec rest{&alert[1], 1};
    if (at == 1 && receive(socket, {&rest, 1}, type) == 1 && type == alert_record) ++at;
    if (at == alert.size()) aside.alert = alert[1];
  }
  errno = EPROTO;
  return -1;
}

}  // namespace kernel_tls
}  // namespace tensorferry
