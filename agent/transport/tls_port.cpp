#include "agent/transport/tls_port.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <openssl/x509_vfy.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "base/environment.h"
#include "base/out_of_memory.h"
#include "base/text.h"

namespace tensorferry {
namespace {

constexpr std::size_t fetched_at_once = std::size_t{128} << 10;
constexpr std::size_t encrypted_at_once = std::size_t{256} << 10;
constexpr std::size_t record_bytes = 16384;      // TLS's longest record
constexpr std::uint16_t kernel_cipher = 0x1301;  // TLS_AES_128_GCM_SHA256, which kernel_tls::take() knows
constexpr int alert_offset = SSL_AD_REASON_OFFSET;

/// Returns whether a peer sends this alert if it refuses a certificate.
bool is_of_certificates(int alert) {
  constexpr std::array all{SSL_AD_UNKNOWN_CA,          SSL_AD_BAD_CERTIFICATE,     SSL_AD_CERTIFICATE_EXPIRED,
                           SSL_AD_CERTIFICATE_REVOKED, SSL_AD_CERTIFICATE_UNKNOWN, SSL_AD_UNSUPPORTED_CERTIFICATE,
                           SSL_AD_CERTIFICATE_REQUIRED};
  return std::find(all.begin(), all.end(), alert) != all.end();
}

constexpr auto both_need_certificates =
    "Each end needs a valid certificate of the CA that the other one has in tls= (TENSORFERRY_TLS)";

Status refused_here(std::string_view why) {
  return {Code::unauthenticated,
          formatted("the peer refused this process's certificate: {}. {}", why, both_need_certificates)};
}

Status refused_peer(std::string_view certificate_and_why) {
  return {Code::unauthenticated,
          formatted("the peer's certificate was refused: {}. {}", certificate_and_why, both_need_certificates)};
}

Status another_form(std::string_view theirs, std::string_view mine) {
  return {Code::unauthenticated, formatted("the peer's TLS is by {}, and this process's is by {}: set the same tls= "
                                           "(TENSORFERRY_TLS) at both ends",
                                           theirs, mine)};
}

/// The alert handshake_failure, not encrypted: tells a dialler without TLS that this end has TLS.
constexpr std::array<unsigned char, 7> plain_alert{0x15, 3, 3, 0, 2, 2, 40};

}  // namespace

/// The functions by which OpenSSL reaches the buffers. None throws into OpenSSL.
struct TlsPort::Bio {
  static TlsPort& port(BIO* bio) { return *static_cast<TlsPort*>(BIO_get_data(bio)); }
  static int read(BIO* bio, char* into, int most) {
    auto& self = port(bio);
    BIO_clear_retry_flags(bio);
    const auto bytes = std::min(self.in_.end - self.in_.begin, static_cast<std::size_t>(most));
    if (bytes == 0) {
      BIO_set_retry_read(bio);
      return -1;
    }
    std::memcpy(into, self.in_.bytes.data() + self.in_.begin, bytes);
    self.in_.begin += bytes;
    return static_cast<int>(bytes);
  }
  static int write(BIO* bio, const char* from, int bytes) {
    auto& out = port(bio).out_;
    BIO_clear_retry_flags(bio);
    try {
      const auto* const begin = reinterpret_cast<const std::byte*>(from);
      out.insert(out.end(), begin, begin + bytes);
      return bytes;
    } catch (const std::bad_alloc&) {
      out_of_memory::release_reserve();
      return -1;
    }
  }
  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }
  static int create(BIO* bio) {
    BIO_set_init(bio, 1);
    return 1;
  }
  static const BIO_METHOD* method() {
    static BIO_METHOD* const made = [] {
      auto* const fresh = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "tensorferry");
      if (fresh == nullptr) return fresh;
      BIO_meth_set_read(fresh, read);
      BIO_meth_set_write(fresh, write);
      BIO_meth_set_ctrl(fresh, control);
      BIO_meth_set_create(fresh, create);
      return fresh;
    }();
    return made;
  }
  /// Notes why a certificate is refused.
  static int verify(int accepted, X509_STORE_CTX* chain) {
    if (accepted == 1) return 1;
    const auto* const ssl = static_cast<SSL*>(X509_STORE_CTX_get_ex_data(chain, SSL_get_ex_data_X509_STORE_CTX_idx()));
    auto& notes = *static_cast<TlsNotes*>(SSL_get_app_data(ssl));
    std::array<char, 256> subject{};
    if (const auto* const certificate = X509_STORE_CTX_get0_cert(chain))
      X509_NAME_oneline(X509_get_subject_name(certificate), subject.data(), static_cast<int>(subject.size()));
    try {
      notes.refused = formatted("\"{}\": {}", std::string_view(subject.data()),
                                X509_verify_cert_error_string(X509_STORE_CTX_get_error(chain)));
    } catch (const std::bad_alloc&) {
      out_of_memory::release_reserve();
    }
    return 0;
  }
};

void TlsPort::SslFree::operator()(SSL* ssl) const noexcept { SSL_free(ssl); }

TlsPort::TlsPort(std::shared_ptr<Tls> tls, Side side, std::unique_ptr<StreamPort> under)
    : tls_(std::move(tls)), side_(side), under_(std::move(under)) {}

TlsPort::~TlsPort() = default;

Result<std::unique_ptr<TlsPort>> TlsPort::make(std::shared_ptr<Tls> tls, Side side, std::unique_ptr<StreamPort> under) {
  const auto context = tls->context();
  const bool certificates = tls->form() == Tls::Form::certificates;
  std::unique_ptr<TlsPort> port(new TlsPort(std::move(tls), side, std::move(under)));
  ERR_clear_error();
  port->ssl_.reset(SSL_new(context.get()));
  auto* const ssl = port->ssl_.get();
  auto* const bio = ssl != nullptr && Bio::method() != nullptr ? BIO_new(Bio::method()) : nullptr;
  if (bio == nullptr) return Status(Code::resource_exhausted, "no memory for a TLS connection");
  BIO_set_data(bio, port.get());
  SSL_set_bio(ssl, bio, bio);
  SSL_set_app_data(ssl, &port->notes_);
  // A dialler with the cluster key trusts no CA, so it refuses every certificate.
  const int refuse_none = SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT;
  const bool verifies = certificates || side == Side::dialler;
  SSL_set_verify(ssl, verifies ? refuse_none : SSL_VERIFY_NONE, Bio::verify);
  if (side == Side::dialler)
    SSL_set_connect_state(ssl);
  else
    SSL_set_accept_state(ssl);
  return port;
}

// ---- The socket

/// Receives encrypted bytes. Call it if OpenSSL has taken all that came before. Returns as recv(2).
std::ptrdiff_t TlsPort::fetch() {
  release_fetched();
  if (in_.bytes.empty()) in_.bytes.resize(fetched_at_once);
  const auto got = ::recv(descriptor(), in_.bytes.data(), in_.bytes.size(), MSG_PEEK | MSG_DONTWAIT);
  in_.begin = 0;
  in_.end = in_.in_socket = got > 0 ? static_cast<std::size_t>(got) : 0;
  return got;
}

/// Takes the bytes that were fetched out of the socket: all but one while any of them waits to be read.
void TlsPort::release_fetched() {
  if (by_kernel_) return;
  const bool waits = in_.begin != in_.end || SSL_pending(ssl_.get()) > 0;
  const std::size_t keep = waits ? 1 : 0;
  while (in_.in_socket > keep) {
    const auto gone = ::recv(descriptor(), nullptr, in_.in_socket - keep, MSG_TRUNC | MSG_DONTWAIT);
    if (gone < 0 && errno == EINTR) continue;
    if (gone <= 0) return;  // the connection has failed
    in_.in_socket -= static_cast<std::size_t>(gone);
  }
}

/// Sends encrypted bytes. False: some are left, and errno says why.
bool TlsPort::flush() {
  while (out_begin_ != out_.size()) {
    const auto sent =
        ::send(descriptor(), out_.data() + out_begin_, out_.size() - out_begin_, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    out_begin_ += static_cast<std::size_t>(sent);
  }
  out_.clear();
  out_begin_ = 0;
  return true;
}

std::size_t TlsPort::unread() const noexcept {
  const auto there = under_->unread();
  if (by_kernel_) return there;
  const std::lock_guard lock(mutex_);
  return static_cast<std::size_t>(SSL_pending(ssl_.get())) + (in_.end - in_.begin) + there -
         std::min(there, in_.in_socket);
}

// ---- Reading and writing

std::ptrdiff_t TlsPort::read_by_kernel(std::span<iovec> into) {
  kernel_tls::Aside aside;
  const auto got = kernel_tls::read(descriptor(), into, aside);
  const int error = errno;
  const std::lock_guard lock(mutex_);
  if (failure_.ok() && aside.present) {
    if (aside.alert == SSL_AD_CLOSE_NOTIFY) return 0;
    if (tls_->form() == Tls::Form::certificates && is_of_certificates(aside.alert))
      fail(refused_here(SSL_alert_desc_string_long(aside.alert)));
    else if (aside.alert >= 0)
      fail({Code::connection_lost, formatted("TLS: alert {}", SSL_alert_desc_string_long(aside.alert))});
    else
      fail({Code::connection_lost,
            formatted("TLS: the peer changes keys, which the kernel's TLS does not: set {}=0 here",
                      environment::kernel_tls.name)});
  } else if (failure_.ok() && got < 0 && (error == EBADMSG || error == EMSGSIZE || error == EINVAL || error == EIO)) {
    fail({Code::connection_lost, formatted("TLS: the kernel refused a record: {}", std::strerror(error))});
  }
  errno = failure_.ok() ? error : EPROTO;
  return failure_.ok() ? got : -1;
}

std::ptrdiff_t TlsPort::read(std::span<iovec> into, Descriptors& /*none*/, std::size_t /*most*/) {
  if (by_kernel_) return read_by_kernel(into);
  const std::lock_guard lock(mutex_);
  std::size_t total = 0;
  std::ptrdiff_t result = -1;
  int error = EPROTO;
  auto part = into.begin();
  std::size_t done = 0;
  while (failure_.ok() && part != into.end()) {
    if (done == part->iov_len) {
      ++part;
      done = 0;
      continue;
    }
    std::size_t some = 0;
    ERR_clear_error();
    if (SSL_read_ex(ssl_.get(), static_cast<char*>(part->iov_base) + done, part->iov_len - done, &some) == 1) {
      done += some;
      total += some;
      continue;
    }
    const int why = SSL_get_error(ssl_.get(), 0);
    if (why == SSL_ERROR_ZERO_RETURN) {
      result = 0;
      break;
    }
    if (why != SSL_ERROR_WANT_READ) {
      fail(describe_failure());
      break;
    }
    if (total != 0) break;
    result = fetch();
    error = errno;
    if (result <= 0) break;
  }
  release_fetched();
  (void)flush();  // an alert; OpenSSL answers changes of keys, however many, once in the next write
  if (total != 0) return static_cast<std::ptrdiff_t>(total);
  errno = failure_.ok() ? error : EPROTO;
  return failure_.ok() ? result : -1;
}

/// Encrypts a part of the bytes into out_ and returns how many.
std::size_t TlsPort::encrypt(std::span<iovec> from) {
  record_.clear();
  std::size_t total = 0;
  const auto put = [&](const void* bytes, std::size_t count) {
    std::size_t written = 0;
    ERR_clear_error();
    if (count != 0 && SSL_write_ex(ssl_.get(), bytes, count, &written) != 1) fail(describe_failure());
    total += written;
  };
  for (const auto& part : from) {
    const auto room = encrypted_at_once - std::min(encrypted_at_once, total + record_.size());
    const auto* const data = static_cast<const std::byte*>(part.iov_base);
    const auto bytes = std::min(part.iov_len, room);
    if (record_.size() + bytes <= record_bytes) {
      record_.insert(record_.end(), data, data + bytes);
    } else {
      put(record_.data(), record_.size());
      record_.clear();
      put(data, bytes);
    }
    if (!failure_.ok() || bytes < part.iov_len) break;
  }
  if (failure_.ok()) put(record_.data(), record_.size());
  return total;
}

std::ptrdiff_t TlsPort::write(std::span<iovec> from, std::span<const FileDescriptor> /*none*/) {
  if (by_kernel_) {
    if (failure().ok()) return under_->write(from, {});
    errno = EPROTO;
    return -1;
  }
  const std::lock_guard lock(mutex_);
  if (failure_.ok()) {
    if (!flush()) return -1;
    if (owed_ == 0) owed_ = encrypt(from);
  }
  if (!failure_.ok()) {
    errno = EPROTO;
    return -1;
  }
  if (!flush()) return -1;
  return static_cast<std::ptrdiff_t>(std::exchange(owed_, 0));
}

// ---- The handshake

TlsPort::Awaits TlsPort::advance() {
  const std::lock_guard lock(mutex_);
  while (failure_.ok()) {
    ERR_clear_error();
    const int done = SSL_do_handshake(ssl_.get());
    const int why = done == 1 ? SSL_ERROR_NONE : SSL_get_error(ssl_.get(), done);
    const bool failed = done != 1 && why != SSL_ERROR_WANT_READ;
    if (failed) fail(describe_failure());
    const bool flushed = flush();
    if (failed) {
      fail_handshake();
      break;
    }
    // If the peer has ended the connection, what it said before stands in the socket.
    if (!flushed && errno == EAGAIN) return Awaits::writable;
    if (done == 1) {
      conclude();
      break;
    }
    const auto got = fetch();
    if (got < 0 && errno == EAGAIN) return Awaits::readable;
    if (got < 0 && errno != EINTR)
      fail({Code::connection_lost, std::string("the TLS handshake failed: ") + std::strerror(errno)});
    if (got == 0)
      fail({Code::connection_lost, "the peer closed the connection in the TLS handshake: it may not use TLS"});
    if (got > 0 && !speaks_tls()) break;
  }
  release_fetched();
  return Awaits::nothing;
}

/// Checks the first byte of the peer. If it is not one of TLS, says so to the peer, and fails.
bool TlsPort::speaks_tls() {
  const auto first = std::to_integer<int>(in_.bytes[0]);
  if (SSL_get_state(ssl_.get()) != (side_ == Side::dialler ? TLS_ST_CW_CLNT_HELLO : TLS_ST_BEFORE)) return true;
  if (first >= 0x14 && first <= 0x17) return true;
  const bool ours = first == 'T';
  fail(ours ? peer_uses_no_tls()
            : Status(Code::protocol_error, "the peer speaks neither TLS nor the tensorferry protocol"));
  if (side_ == Side::acceptor)
    (void)::send(descriptor(), plain_alert.data(), plain_alert.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  drain();
  return false;
}

/// The handshake has ended well, as OpenSSL sees it.
void TlsPort::conclude() {
  auto* const ssl = ssl_.get();
  const bool by_key = SSL_session_reused(ssl) == 1;
  if (tls_->form() == Tls::Form::key) {
    open_ = by_key;
    if (!open_) fail({Code::unauthenticated, "the TLS handshake did not use the cluster key"});
  } else {
    X509* const certificate = SSL_get1_peer_certificate(ssl);
    open_ = certificate != nullptr && !by_key && SSL_get_verify_result(ssl) == X509_V_OK;
    X509_free(certificate);
    if (!open_) fail({Code::unauthenticated, "the peer has no certificate"});
  }
  if (open_) hand_to_kernel();
  notes_.secrets.forget();
}

/// Lets the kernel go on after the last record of the handshake, if it can.
void TlsPort::hand_to_kernel() {
  const auto not_taken = in_.end - in_.begin;  // by OpenSSL, which reads one record after the other
  const bool between_records = SSL_pending(ssl_.get()) == 0 && in_.in_socket >= not_taken && out_.empty();
  if (!between_records || SSL_CIPHER_get_protocol_id(SSL_get_current_cipher(ssl_.get())) != kernel_cipher) return;
  while (in_.in_socket > not_taken) {
    const auto gone = ::recv(descriptor(), nullptr, in_.in_socket - not_taken, MSG_TRUNC | MSG_DONTWAIT);
    if (gone < 0 && errno == EINTR) continue;
    if (gone <= 0) return;  // the connection has failed
    in_.in_socket -= static_cast<std::size_t>(gone);
  }
  const auto taken = kernel_tls::take(descriptor(), notes_.secrets, side_);
  by_kernel_ = taken == kernel_tls::Taken::both;
  if (by_kernel_) {
    in_ = {};
    ssl_.reset();
  } else if (taken == kernel_tls::Taken::one) {
    open_ = false;
    fail({Code::connection_lost, formatted("the kernel took one direction of TLS only: {}. Set {}=0 to do without it",
                                           std::strerror(errno), environment::kernel_tls.name)});
  }
}

/// Lets the peer read the alert that says why: closing a socket with unread bytes could take it away.
void TlsPort::fail_handshake() {
  ::shutdown(descriptor(), SHUT_WR);
  drain();
}

void TlsPort::drain() noexcept {
  for (int i = 0; i < 16 && ::recv(descriptor(), nullptr, fetched_at_once, MSG_TRUNC | MSG_DONTWAIT) > 0; ++i) {
  }
  in_.begin = in_.end = in_.in_socket = 0;
}

void TlsPort::fail(Status why) {
  if (failure_.ok()) failure_ = std::move(why);
}

bool TlsPort::heard() const { return under_->moved().received != 0; }

Status TlsPort::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

/// Says why OpenSSL has failed.
Status TlsPort::describe_failure() {
  const bool by_key = tls_->form() == Tls::Form::key;
  const auto code = ERR_peek_error();
  const int reason = ERR_GET_REASON(code);
  const char* const text = ERR_reason_error_string(code);
  const std::string shown = text != nullptr ? text : "OpenSSL failed";
  ERR_clear_error();
  const int alert = reason > alert_offset && reason < alert_offset + 256 ? reason - alert_offset : -1;
  // A dialler's handshake ends before the acceptor has looked at its certificate.
  if (!by_key && is_of_certificates(alert)) return refused_here(SSL_alert_desc_string_long(alert));
  if (open_) return {Code::connection_lost, "TLS: " + shown};
  if (!notes_.refused.empty())
    return by_key ? another_form("certificates", "the cluster key") : refused_peer(notes_.refused);
  const bool other_key = alert == SSL_AD_ILLEGAL_PARAMETER || alert == SSL_AD_DECRYPT_ERROR;
  if (reason == SSL_R_BINDER_DOES_NOT_VERIFY || (by_key && other_key))
    return {Code::unauthenticated,
            formatted("the peer has another cluster key than this process (TLS). {}", how_to_set_a_key())};
  if (alert == SSL_AD_HANDSHAKE_FAILURE)
    return by_key ? another_form("no cluster key", "the cluster key") : another_form("the cluster key", "certificates");
  if (side_ == Side::acceptor && by_key && alert < 0) return another_form("certificates", "the cluster key");
  return {Code::protocol_error, "the TLS handshake failed: " + shown};
}

}  // namespace tensorferry
