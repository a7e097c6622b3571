#include "agent/transport/tls.h"

#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <sys/stat.h>

#include <memory>
#include <span>

#include "agent/transport/secret_file.h"
#include "base/environment.h"
#include "base/log.h"
#include "base/text.h"

namespace tensorferry {
namespace {

constexpr std::string_view forms =
    "tls is \"key\", \"off\" or \"certificate=FILE,private_key=FILE,ca=FILE\" with the names of PEM files";
constexpr std::string_view identity = "tensorferry";
constexpr const char* suites = "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256";
constexpr std::array<unsigned char, 2> first_suite{0x13, 0x01};  // TLS_AES_128_GCM_SHA256: a PSK is bound to its hash

/// Returns why OpenSSL has failed, and forgets it.
std::string openssl_error() {
  const auto code = ERR_get_error();
  const char* reason = ERR_reason_error_string(code);
  ERR_clear_error();
  return reason != nullptr ? reason : formatted("OpenSSL error {}", code);
}

const Tls& tls_of(const SSL* ssl) {
  return *static_cast<const Tls*>(SSL_CTX_get_app_data(SSL_get_SSL_CTX(const_cast<SSL*>(ssl))));
}

/// Makes the session that stands for the pre-shared key; null: no memory.
SSL_SESSION* session_of_key(SSL* ssl) {
  const auto& key = tls_of(ssl).shared_key();
  SSL_SESSION* const session = SSL_SESSION_new();
  const auto* const suite = SSL_CIPHER_find(ssl, first_suite.data());
  if (session != nullptr && suite != nullptr &&
      SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(key.data()), key.size()) == 1 &&
      SSL_SESSION_set_cipher(session, suite) == 1 && SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1)
    return session;
  SSL_SESSION_free(session);
  return nullptr;
}

int offer_key(SSL* ssl, const EVP_MD* hash, const unsigned char** id, std::size_t* id_bytes, SSL_SESSION** session) {
  *session = nullptr;
  if (hash != nullptr && EVP_MD_get_type(hash) != NID_sha256) return 1;  // another hash: this key does not fit
  *session = session_of_key(ssl);
  *id = reinterpret_cast<const unsigned char*>(identity.data());
  *id_bytes = identity.size();
  return *session != nullptr ? 1 : 0;
}

int find_key(SSL* ssl, const unsigned char* id, std::size_t id_bytes, SSL_SESSION** session) {
  *session = nullptr;
  if (std::string_view(reinterpret_cast<const char*>(id), id_bytes) != identity) return 1;
  *session = session_of_key(ssl);
  return *session != nullptr ? 1 : 0;
}

void note_secret(const SSL* ssl, const char* line) {
  static_cast<TlsNotes*>(SSL_get_app_data(ssl))->secrets.note(line);
}

/// Refuses to ask a person for the password of a private key.
int no_password(char*, int, int, void*) { return -1; }

/// Reads a private key. Errors: those of open_secret_file(), and InvalidArgument.
Result<std::shared_ptr<EVP_PKEY>> read_private_key(const std::string& path) {
  auto file = open_secret_file(path, SecretReaders::group_of_root);
  if (!file.ok()) return file.status();
  const std::unique_ptr<BIO, decltype(&BIO_free)> from(BIO_new_fd(file->get(), BIO_NOCLOSE), BIO_free);
  std::shared_ptr<EVP_PKEY> key(from ? PEM_read_bio_PrivateKey(from.get(), nullptr, no_password, nullptr) : nullptr,
                                EVP_PKEY_free);
  if (!key) return Status(Code::invalid_argument, openssl_error());
  return key;
}

/// Splits "certificate=FILE,private_key=FILE,ca=FILE". False: another text.
bool parse_files(std::string_view option, std::string& certificate, std::string& private_key, std::string& ca) {
  while (!option.empty()) {
    const auto end = std::min(option.find(','), option.size());
    const auto item = option.substr(0, end);
    option.remove_prefix(std::min(end + 1, option.size()));
    const auto equals = item.find('=');
    if (equals == std::string_view::npos) return false;
    const auto name = item.substr(0, equals);
    auto* const file = name == "certificate" ? &certificate : name == "private_key" ? &private_key : &ca;
    if ((file == &ca && name != "ca") || !file->empty()) return false;
    *file = item.substr(equals + 1);
  }
  return !certificate.empty() && !private_key.empty() && !ca.empty();
}

}  // namespace

Result<std::shared_ptr<Tls>> Tls::make(std::string_view option, const Key& key) {
  if (option.empty()) option = environment::tls.value();
  if (option.empty() || option == "off") return std::shared_ptr<Tls>();
  std::shared_ptr<Tls> tls(new Tls(option == "key" ? Form::key : Form::certificates));
  if (tls->form_ == Form::key) {
    if (key.empty())
      return Status(Code::invalid_argument, formatted("tls=\"key\" needs a cluster key. {}", how_to_set_a_key()));
    tls->shared_key_ = derive(key, "tls 1.3 external psk");
  } else if (!parse_files(option, tls->certificate_, tls->private_key_, tls->ca_)) {
    return Status(Code::invalid_argument, formatted("tls=\"{}\": {}", option, forms));
  }
  tls->read_ = tls->stamps();
  auto context = tls->load();
  if (!context) return context.status();
  tls->context_ = std::move(*context);
  return tls;
}

Tls::~Tls() { OPENSSL_cleanse(shared_key_.data(), shared_key_.size()); }

Result<std::shared_ptr<SSL_CTX>> Tls::load() const {
  ERR_clear_error();
  const std::shared_ptr<SSL_CTX> context(SSL_CTX_new(TLS_method()), SSL_CTX_free);
  if (!context) return Status(Code::internal, "tls: " + openssl_error());
  auto* const raw = context.get();
  SSL_CTX_set_min_proto_version(raw, TLS1_3_VERSION);
  SSL_CTX_set_max_proto_version(raw, TLS1_3_VERSION);
  SSL_CTX_set_options(raw, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION);
  SSL_CTX_set_num_tickets(raw, 0);
  SSL_CTX_set_session_cache_mode(raw, SSL_SESS_CACHE_OFF);
  SSL_CTX_set_default_passwd_cb(raw, no_password);
  SSL_CTX_set_app_data(raw, const_cast<Tls*>(this));
  SSL_CTX_set_keylog_callback(raw, note_secret);
  if (SSL_CTX_set_ciphersuites(raw, suites) != 1) return Status(Code::internal, "tls: " + openssl_error());
  if (form_ == Form::key) {
    SSL_CTX_set_psk_use_session_callback(raw, offer_key);
    SSL_CTX_set_psk_find_session_callback(raw, find_key);
    return context;
  }
  const auto unusable = [](const char* what, const std::string& file, std::string_view why = {}) {
    return Status(Code::invalid_argument, formatted("tls: the {} in {} cannot be used: {}", what, file,
                                                    why.empty() ? openssl_error() : std::string(why)));
  };
  if (SSL_CTX_use_certificate_chain_file(raw, certificate_.c_str()) != 1) return unusable("certificate", certificate_);
  const auto key = read_private_key(private_key_);
  if (!key.ok()) return unusable("private key", private_key_, key.status().what());
  if (SSL_CTX_use_PrivateKey(raw, key->get()) != 1) return unusable("private key", private_key_);
  if (SSL_CTX_check_private_key(raw) != 1) return unusable("private key", private_key_);
  if (SSL_CTX_load_verify_file(raw, ca_.c_str()) != 1) return unusable("CA", ca_);
  return context;
}

Tls::FileStamps Tls::stamps() const {
  FileStamps all{};
  if (form_ == Form::key) return all;
  const std::array files{&certificate_, &private_key_, &ca_};
  for (std::size_t i = 0; i < files.size(); ++i) {
    struct stat about {};
    if (::stat(files[i]->c_str(), &about) != 0) continue;
    all[i] = {about.st_dev, about.st_ino, about.st_mtim.tv_sec, about.st_mtim.tv_nsec, about.st_size};
  }
  return all;
}

std::shared_ptr<SSL_CTX> Tls::context() {
  const std::lock_guard lock(mutex_);
  if (form_ == Form::key) return context_;
  if (const auto now = stamps(); now != read_) {
    read_ = now;
    if (auto fresh = load())
      context_ = std::move(*fresh);
    else
      log_warning("the files of TLS have changed, and the earlier ones stay in use: " + fresh.status().text());
  }
  return context_;
}

bool is_tls(ByteView first_bytes) noexcept {
  const auto at = [&](std::size_t i) { return std::to_integer<int>(first_bytes[i]); };
  return first_bytes.size() >= 2 && (at(0) == 0x15 || at(0) == 0x16) && at(1) == 3;  // alert or handshake, TLS 1.x
}

Status only_peer_uses_tls() {
  return {Code::unauthenticated,
          "the peer uses TLS, and this process does not: set the same tls= (TENSORFERRY_TLS) at both ends"};
}

Status peer_uses_no_tls() {
  return {Code::unauthenticated,
          "this process uses TLS, and the peer does not: set the same tls= (TENSORFERRY_TLS) at both ends"};
}

}  // namespace tensorferry
