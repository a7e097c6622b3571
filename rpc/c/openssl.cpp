// Stands for OpenSSL in the shared library. The functions of TLS pass calls on to the libssl of the machine. What every
// agent needs, TLS or not, is here: HMAC-SHA256 over the static libcrypto's SHA-256, of which the linker takes that
// alone.

// SHA256_Init and its like are deprecated, because they leave out OpenSSL's providers; just so they are small.
#define OPENSSL_SUPPRESS_DEPRECATED

#include "rpc/c/openssl.h"

#include <dlfcn.h>
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/pem.h>
#include <openssl/sha.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <tuple>

// The functions that are passed on, by the number of their parameters. A function that the code of TLS begins to use
// and that is missing here is an unresolved symbol when the library is linked.
// clang-format finds no stable form for these lists.
// clang-format off
#define TENSORFERRY_OPENSSL_0(F) \
  F(BIO_get_new_index) F(ERR_clear_error) F(ERR_get_error) F(ERR_peek_error) F(SSL_SESSION_new) \
  F(SSL_get_ex_data_X509_STORE_CTX_idx) F(TLS_method)
#define TENSORFERRY_OPENSSL_1(F) \
  F(BIO_free) F(BIO_get_data) F(BIO_new) F(ERR_reason_error_string) F(EVP_MD_get_type) F(EVP_PKEY_free) \
  F(SSL_CIPHER_get_protocol_id) F(SSL_get_current_cipher) \
  F(SSL_CTX_check_private_key) F(SSL_CTX_free) F(SSL_CTX_new) F(SSL_SESSION_free) F(SSL_alert_desc_string_long) \
  F(SSL_do_handshake) F(SSL_free) F(SSL_get1_peer_certificate) F(SSL_get_SSL_CTX) F(SSL_get_state) \
  F(SSL_get_verify_result) F(SSL_new) F(SSL_pending) F(SSL_session_reused) F(SSL_set_accept_state) \
  F(SSL_set_connect_state) F(X509_STORE_CTX_get0_cert) F(X509_STORE_CTX_get_error) F(X509_free) \
  F(X509_get_subject_name) F(X509_verify_cert_error_string)
#define TENSORFERRY_OPENSSL_2(F) \
  F(BIO_clear_flags) F(BIO_meth_new) F(BIO_meth_set_create) F(BIO_meth_set_ctrl) F(BIO_meth_set_read) \
  F(BIO_meth_set_write) F(BIO_new_fd) F(BIO_set_data) F(BIO_set_flags) F(BIO_set_init) F(SSL_CIPHER_find) \
  F(SSL_CTX_get_ex_data) F(SSL_CTX_load_verify_file) F(SSL_CTX_set_ciphersuites) \
  F(SSL_CTX_set_default_passwd_cb) F(SSL_CTX_set_keylog_callback) F(SSL_CTX_set_num_tickets) F(SSL_CTX_set_options) \
  F(SSL_CTX_set_psk_find_session_callback) F(SSL_CTX_set_psk_use_session_callback) F(SSL_CTX_use_PrivateKey) \
  F(SSL_CTX_use_certificate_chain_file) F(SSL_SESSION_set_cipher) F(SSL_SESSION_set_protocol_version) \
  F(SSL_get_error) F(SSL_get_ex_data) F(X509_STORE_CTX_get_ex_data)
#define TENSORFERRY_OPENSSL_3(F) \
  F(SSL_CTX_set_ex_data) F(SSL_SESSION_set1_master_key) F(SSL_set_bio) F(SSL_set_ex_data) F(SSL_set_verify) \
  F(X509_NAME_oneline)
#define TENSORFERRY_OPENSSL_4(F) \
  F(PEM_read_bio_PrivateKey) F(SSL_CTX_ctrl) F(SSL_read_ex) F(SSL_write_ex)
// clang-format on

namespace tensorferry::c {
namespace {

/// The library of the process. Its functions are loaded once, as a linker would, and stay.
class OpenSsl final {
 public:
  static OpenSsl& instance() {
    static OpenSsl one;
    return one;
  }

  std::string load() {
    const std::lock_guard lock(mutex_);
    if (library_ != nullptr) return {};
    void* const library = ::dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return ::dlerror();
#define TENSORFERRY_CHECK(name) \
  if (::dlsym(library, #name) == nullptr) return std::string("libssl.so.3 lacks ") + #name;
    TENSORFERRY_OPENSSL_0(TENSORFERRY_CHECK)
    TENSORFERRY_OPENSSL_1(TENSORFERRY_CHECK)
    TENSORFERRY_OPENSSL_2(TENSORFERRY_CHECK)
    TENSORFERRY_OPENSSL_3(TENSORFERRY_CHECK)
    TENSORFERRY_OPENSSL_4(TENSORFERRY_CHECK)
#undef TENSORFERRY_CHECK
    library_ = library;
    return {};
  }

  /// Returns the function; null: the library is not loaded.
  void* find(const char* name) {
    const std::lock_guard lock(mutex_);
    return library_ == nullptr ? nullptr : ::dlsym(library_, name);
  }

 private:
  std::mutex mutex_;
  void* library_ = nullptr;
};

template <class F>
struct Forwarded;
template <class R, class... A>
struct Forwarded<R(A...)> {
  using Result = R;
  template <std::size_t i>
  using Argument = std::tuple_element_t<i, std::tuple<A...>>;
};

template <class F>
F* loaded(const char* name) {
  return reinterpret_cast<F*>(OpenSsl::instance().find(name));
}

}  // namespace

std::string load_openssl() { return OpenSsl::instance().load(); }

}  // namespace tensorferry::c

using tensorferry::c::Forwarded;  // NOLINT(google-build-using-namespace): the functions below are OpenSSL's

// Each finds its function at its first call, which comes after load_openssl().
#define RESULT(name) Forwarded<decltype(name)>::Result
#define ARGUMENT(name, i) Forwarded<decltype(name)>::Argument<i>
#define FOUND(name) static auto* const found = tensorferry::c::loaded<decltype(name)>(#name)
#define FORWARD_0(name) \
  RESULT(name) name() { \
    FOUND(name);        \
    return found();     \
  }
#define FORWARD_1(name)                    \
  RESULT(name) name(ARGUMENT(name, 0) a) { \
    FOUND(name);                           \
    return found(a);                       \
  }
#define FORWARD_2(name)                                         \
  RESULT(name) name(ARGUMENT(name, 0) a, ARGUMENT(name, 1) b) { \
    FOUND(name);                                                \
    return found(a, b);                                         \
  }
#define FORWARD_3(name)                                                              \
  RESULT(name) name(ARGUMENT(name, 0) a, ARGUMENT(name, 1) b, ARGUMENT(name, 2) c) { \
    FOUND(name);                                                                     \
    return found(a, b, c);                                                           \
  }
#define FORWARD_4(name)                                                                                   \
  RESULT(name) name(ARGUMENT(name, 0) a, ARGUMENT(name, 1) b, ARGUMENT(name, 2) c, ARGUMENT(name, 3) d) { \
    FOUND(name);                                                                                          \
    return found(a, b, c, d);                                                                             \
  }

extern "C" {
TENSORFERRY_OPENSSL_0(FORWARD_0)
TENSORFERRY_OPENSSL_1(FORWARD_1)
TENSORFERRY_OPENSSL_2(FORWARD_2)
TENSORFERRY_OPENSSL_3(FORWARD_3)
TENSORFERRY_OPENSSL_4(FORWARD_4)

// The end of a thread frees what OpenSSL keeps for it, if the process has loaded it.
void OPENSSL_thread_stop() {
  if (auto* const stop = tensorferry::c::loaded<decltype(OPENSSL_thread_stop)>("OPENSSL_thread_stop")) stop();
}

// ---- what agents use without TLS

// Named by HMAC's callers alone, which want no other hash.
const EVP_MD* EVP_sha256() { return nullptr; }

// RFC 2104 with SHA-256.
unsigned char* HMAC(const EVP_MD* /*sha256*/, const void* key, int key_bytes, const unsigned char* data,
                    std::size_t data_bytes, unsigned char* digest, unsigned int* digest_bytes) {
  std::array<unsigned char, SHA256_CBLOCK> block{};
  const auto length = static_cast<std::size_t>(key_bytes);
  SHA256_CTX hash;
  const auto begin = [&](unsigned char mask) {
    auto pad = block;
    for (auto& byte : pad) byte ^= mask;
    SHA256_Init(&hash);
    SHA256_Update(&hash, pad.data(), pad.size());
    OPENSSL_cleanse(pad.data(), pad.size());
  };
  if (length > block.size()) {
    SHA256_Init(&hash);
    SHA256_Update(&hash, key, length);
    SHA256_Final(block.data(), &hash);
  } else if (length != 0) {
    std::memcpy(block.data(), key, length);
  }
  std::array<unsigned char, SHA256_DIGEST_LENGTH> inner{};
  begin(0x36);
  SHA256_Update(&hash, data, data_bytes);
  SHA256_Final(inner.data(), &hash);
  begin(0x5c);
  SHA256_Update(&hash, inner.data(), inner.size());
  SHA256_Final(digest, &hash);
  *digest_bytes = SHA256_DIGEST_LENGTH;
  OPENSSL_cleanse(block.data(), block.size());
  OPENSSL_cleanse(inner.data(), inner.size());
  OPENSSL_cleanse(&hash, sizeof hash);
  return digest;
}
}
