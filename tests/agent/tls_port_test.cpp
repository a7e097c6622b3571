#include "agent/transport/tls_port.h"

#include <gmock/gmock.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include "agent/transport/address.h"
#include "agent/transport/blocking_io.h"
#include "agent/transport/socket_port.h"
#include "base/environment.h"
#include "tests/agent/certificates.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;
using ::testing::HasSubstr;

const Key cluster_key = *Key::from_text("the cluster key of these tests");

Bytes patterned_bytes(std::size_t count, unsigned seed = 1) {
  Bytes bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 31 + seed + i / 4096);
  return bytes;
}

constexpr int long_enough_ms = 60'000;

Deadline soon() { return deadline_after(long_enough); }

/// The two ends of a TCP connection: the dialler's, and the acceptor's.
std::array<FileDescriptor, 2> connection() {
  const auto listener = listen_tcp("127.0.0.1", {});
  auto dialler = start_connect_tcp("127.0.0.1", listener->port);
  EXPECT_TRUE(wait_for_socket(listener->socket.get(), POLLIN, soon()).ok());
  FileDescriptor acceptor(::accept4(listener->socket.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  EXPECT_TRUE(wait_for_socket(dialler->get(), POLLOUT, soon()).ok());
  return {std::move(*dialler), std::move(acceptor)};
}

std::unique_ptr<TlsPort> port_over(FileDescriptor socket, const std::string& option, Side side,
                                   const Key& key = cluster_key) {
  const auto tls = Tls::make(option, key);
  EXPECT_TRUE(tls.ok()) << tls.status().text();
  auto port = TlsPort::make(*tls, side, std::make_unique<SocketPort>(std::move(socket), false));
  EXPECT_TRUE(port.ok()) << port.status().text();
  return std::move(*port);
}

/// Returns whether this run must find a kernel that has TLS: scripts/rdma-tests.sh says so where one has.
bool kernel_must_have_tls() { return environment::value_of("TENSORFERRY_TEST_KERNEL_TLS") == "1"; }

/// Completes the handshakes of both ends, and returns how each has ended.
std::pair<Status, Status> shake_hands(TlsPort& a, TlsPort& b) {
  auto other = std::async(std::launch::async, [&] {
    auto status = secure(b, soon());
    if (!status.ok()) b.shutdown();
    return status;
  });
  auto one = secure(a, soon());
  if (one.ok()) {  // a dialler learns only with the first bytes whether the acceptor took its certificate
    std::byte none{};
    iovec part{&none, 1};
    Descriptors descriptors;
    pollfd refused{a.descriptor(), POLLIN, 0};
    if (other.get().ok()) return {one, {}};
    ::poll(&refused, 1, long_enough_ms);
    EXPECT_EQ(a.read({&part, 1}, descriptors, 0), -1);
    return {a.failure(), b.failure()};
  }
  a.shutdown();
  return {one, other.get()};
}

std::ptrdiff_t read_into(StreamPort& port, std::span<std::byte> into) {
  iovec part{into.data(), into.size()};
  Descriptors none;
  return port.read({&part, 1}, none, 0);
}

bool is_readable(const StreamPort& port, int patience_ms = 0) {
  pollfd state{port.descriptor(), POLLIN, 0};
  return ::poll(&state, 1, patience_ms) > 0;
}

class TlsPorts : public ::testing::Test {
 protected:
  TlsPorts() {
    auto [dialler, acceptor] = connection();
    a = port_over(std::move(dialler), "key", Side::dialler);
    b = port_over(std::move(acceptor), "key", Side::acceptor);
    const auto [one, other] = shake_hands(*a, *b);
    EXPECT_TRUE(one.ok()) << one.text();
    EXPECT_TRUE(other.ok()) << other.text();
    EXPECT_EQ(a->by_kernel(), b->by_kernel());
    EXPECT_TRUE(a->by_kernel() || !kernel_must_have_tls());
  }
  std::unique_ptr<TlsPort> a, b;
};

TEST_F(TlsPorts, CarryBytesBothWaysThatNobodyOnTheWayCanRead) {
  const std::string secret(1000, 's');
  ASSERT_TRUE(write_all(*a, view_of(secret), soon()).ok());
  ASSERT_TRUE(is_readable(*b, long_enough_ms));
  if (b->by_kernel()) GTEST_SKIP() << "the kernel shows nobody what travels";
  std::string raw(4000, '\0');
  const auto seen = ::recv(b->descriptor(), raw.data(), raw.size(), MSG_PEEK);
  ASSERT_GT(seen, 1000);
  EXPECT_EQ(raw.find("ssss"), std::string::npos);
  Bytes got(secret.size());
  ASSERT_TRUE(read_exactly(*b, got, soon()).ok());
  EXPECT_EQ(text_of(got), secret);
  ASSERT_TRUE(write_all(*b, view_of("back"), soon()).ok());
  Bytes back(4);
  ASSERT_TRUE(read_exactly(*a, back, soon()).ok());
  EXPECT_EQ(text_of(back), "back");
}

TEST_F(TlsPorts, AreReadableAsLongAsDecryptedBytesWait) {
  const auto sent = patterned_bytes(40'000);  // three records, which one system call receives
  ASSERT_TRUE(write_all(*a, sent, soon()).ok());
  const auto has_all = [&] {
    int waiting = 0;
    return ::ioctl(b->descriptor(), FIONREAD, &waiting) == 0 && static_cast<std::size_t>(waiting) > sent.size();
  };
  ASSERT_TRUE(eventually(has_all));
  Bytes got(sent.size());
  std::size_t at = 0;
  for (const std::size_t count : {10UL, 16'374UL, 1UL, 16'383UL, 7'000UL, 231UL}) {
    ASSERT_TRUE(read_exactly(*b, std::span(got).subspan(at, count), soon()).ok());
    at += count;
    EXPECT_TRUE(b->by_kernel() || b->unread() >= sent.size() - at) << at;
    EXPECT_TRUE(is_readable(*b)) << "although all bytes have left the socket but one, " << at;
  }
  ASSERT_TRUE(read_exactly(*b, std::span(got).subspan(at), soon()).ok());
  EXPECT_EQ(got, sent);
  EXPECT_EQ(b->unread(), 0U);
  EXPECT_FALSE(is_readable(*b));
  std::byte more{};
  EXPECT_EQ(read_into(*b, {&more, 1}), -1);
  EXPECT_EQ(errno, EAGAIN);
}

TEST_F(TlsPorts, OfWhichOneDoesNotReadHoldTheWriterUpAndLoseNothing) {
  const auto sent = patterned_bytes(32 << 20);
  std::size_t written = 0;
  for (;;) {
    iovec part{const_cast<std::byte*>(sent.data()) + written, sent.size() - written};
    const auto put = a->write({&part, 1}, {});
    if (put < 0) break;
    written += static_cast<std::size_t>(put);
    ASSERT_LT(written, sent.size()) << "the socket takes everything";
  }
  ASSERT_EQ(errno, EAGAIN);
  auto rest = std::async(std::launch::async, [&] { return write_all(*a, ByteView(sent).subspan(written), soon()); });
  Bytes got(sent.size());
  ASSERT_TRUE(read_exactly(*b, got, soon()).ok());
  EXPECT_TRUE(rest.get().ok());
  EXPECT_TRUE(got == sent);
}

TEST_F(TlsPorts, ReadAndWriteAtOnce) {
  const auto there = patterned_bytes(8 << 20, 1), back = patterned_bytes(8 << 20, 2);
  Bytes got_there(there.size()), got_back(back.size());
  std::vector<std::future<Status>> all;
  const auto run = [&](auto work) { all.push_back(std::async(std::launch::async, work)); };
  run([&] { return write_all(*a, there, soon()); });
  run([&] { return write_all(*b, back, soon()); });
  run([&] { return read_exactly(*a, got_back, soon()); });
  run([&] { return read_exactly(*b, got_there, soon()); });
  for (auto& one : all) EXPECT_TRUE(one.get().ok());
  EXPECT_TRUE(got_there == there);
  EXPECT_TRUE(got_back == back);
}

TEST_F(TlsPorts, EndAtACorruptRecordByName) {
  if (a->by_kernel()) GTEST_SKIP() << "the kernel would encrypt what this test forges";
  const std::string forged("\x17\x03\x03\x00\x20 these bytes were not encrypted.", 37);
  ASSERT_EQ(::send(a->descriptor(), forged.data(), forged.size(), 0), static_cast<ssize_t>(forged.size()));
  Bytes got(10);
  const auto status = read_exactly(*b, got, soon());
  EXPECT_EQ(status.code(), Code::connection_lost);
  EXPECT_THAT(std::string(status.what()), HasSubstr("TLS: "));
  EXPECT_EQ(read_into(*b, got), -1) << "and stay ended";
  EXPECT_FALSE(write_all(*b, view_of("x"), soon()).ok());
}

TEST_F(TlsPorts, TellTheEndOfTheConnection) {
  ASSERT_TRUE(write_all(*a, view_of("last"), soon()).ok());
  a->shutdown();
  Bytes got(4);
  ASSERT_TRUE(read_exactly(*b, got, soon()).ok());
  EXPECT_EQ(text_of(got), "last");
  ASSERT_TRUE(is_readable(*b, long_enough_ms));
  EXPECT_EQ(read_into(*b, got), 0);
  EXPECT_TRUE(b->ended());
}

// ---- A peer that changes its keys: OpenSSL's own client

class OpenSslClient {
 public:
  OpenSslClient(FileDescriptor socket, const Authority& authority, const std::string& base)
      : socket_(std::move(socket)), context_(SSL_CTX_new(TLS_client_method())) {
    EXPECT_EQ(SSL_CTX_use_certificate_chain_file(context_, (base + ".crt").c_str()), 1);
    EXPECT_EQ(SSL_CTX_use_PrivateKey_file(context_, (base + ".key").c_str(), SSL_FILETYPE_PEM), 1);
    EXPECT_EQ(SSL_CTX_load_verify_file(context_, authority.file().c_str()), 1);
    SSL_CTX_set_verify(context_, SSL_VERIFY_PEER, nullptr);
    EXPECT_EQ(SSL_CTX_set_ciphersuites(context_, "TLS_AES_128_GCM_SHA256"), 1);  // two agents use it
    ssl = SSL_new(context_);
    SSL_set_fd(ssl, socket_.get());
  }
  ~OpenSslClient() {
    SSL_free(ssl);
    SSL_CTX_free(context_);
  }
  OpenSslClient(const OpenSslClient&) = delete;
  OpenSslClient& operator=(const OpenSslClient&) = delete;

  /// Runs a function of OpenSSL until the socket is ready for it.
  template <class Step>
  int until_done(Step step) const {
    for (;;) {
      const int done = step();
      const int why = SSL_get_error(ssl, done);
      if (why != SSL_ERROR_WANT_READ && why != SSL_ERROR_WANT_WRITE) return done;
      if (!wait_for_socket(socket_.get(), why == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT, soon()).ok()) return -1;
    }
  }

 private:
  FileDescriptor socket_;
  SSL_CTX* const context_;

 public:
  SSL* ssl;
};

class TlsPortAndItsPeer : public ::testing::Test {
 protected:
  TlsPortAndItsPeer() {
    auto [dialler, acceptor] = connection();
    client = std::make_unique<OpenSslClient>(std::move(dialler), authority, folder.path() + "/client");
    port = port_over(std::move(acceptor), tls, Side::acceptor);
    auto accepted = std::async(std::launch::async, [&] { return secure(*port, soon()); });
    EXPECT_EQ(client->until_done([&] { return SSL_connect(client->ssl); }), 1);
    const auto status = accepted.get();
    EXPECT_TRUE(status.ok()) << status.text();
  }
  /// The peer asks for new keys, and sends a word by its own.
  void change_keys_and_say(const char* word) {
    ASSERT_EQ(SSL_key_update(client->ssl, SSL_KEY_UPDATE_REQUESTED), 1);
    const auto bytes = static_cast<int>(std::strlen(word));
    ASSERT_EQ(client->until_done([&] { return SSL_write(client->ssl, word, bytes); }), bytes);
  }
  TemporaryFolder folder;
  Authority authority{folder.path(), "authority"};
  std::string tls = authority.issue("client");
  std::unique_ptr<OpenSslClient> client;
  std::unique_ptr<TlsPort> port;
};

TEST_F(TlsPortAndItsPeer, AnswerAChangeOfKeysAndGoOn) {
  if (port->by_kernel()) GTEST_SKIP() << "the kernel's TLS changes no keys";
  for (int round = 0; round < 3; ++round) {
    change_keys_and_say("ping");
    Bytes got(4);
    ASSERT_TRUE(read_exactly(*port, got, soon()).ok());
    EXPECT_EQ(text_of(got), "ping");
    ASSERT_TRUE(write_all(*port, view_of("pong"), soon()).ok());
    std::string back(4, '\0');
    ASSERT_EQ(client->until_done([&] { return SSL_read(client->ssl, back.data(), 4); }), 4);
    EXPECT_EQ(back, "pong");
  }
}

TEST_F(TlsPortAndItsPeer, EndByNameAtAChangeOfKeysIfTheKernelHasTls) {
  if (!port->by_kernel()) GTEST_SKIP() << "the kernel has no TLS";
  change_keys_and_say("ping");
  Bytes got(4);
  const auto status = read_exactly(*port, got, soon());
  EXPECT_EQ(status.code(), Code::connection_lost);
  EXPECT_THAT(std::string(status.what()), HasSubstr("TENSORFERRY_KERNEL_TLS=0"));
}

TEST_F(TlsPortAndItsPeer, TellsTheEndIfThePeerSaysIt) {
  ASSERT_EQ(client->until_done([&] { return SSL_write(client->ssl, "last", 4); }), 4);
  ASSERT_EQ(SSL_shutdown(client->ssl), 0) << "which sends an alert, and no end of the stream";
  Bytes got(4);
  ASSERT_TRUE(read_exactly(*port, got, soon()).ok());
  EXPECT_EQ(text_of(got), "last");
  ASSERT_TRUE(is_readable(*port, long_enough_ms));
  EXPECT_EQ(read_into(*port, got), 0);
}

TEST_F(TlsPortAndItsPeer, ReadOnAfterAChangeOfKeysWhileTheSocketIsFull) {
  if (port->by_kernel()) GTEST_SKIP() << "the kernel's TLS changes no keys";
  const auto sent = patterned_bytes(32 << 20);
  std::size_t written = 0;
  for (std::ptrdiff_t put = 0; put >= 0; written += static_cast<std::size_t>(put)) {
    iovec part{const_cast<std::byte*>(sent.data()) + written, sent.size() - written};
    put = port->write({&part, 1}, {});
    if (put < 0) break;
  }
  ASSERT_EQ(errno, EAGAIN);
  change_keys_and_say("ping");
  Bytes got(4);
  ASSERT_TRUE(read_exactly(*port, got, soon()).ok()) << "reading needs no room to write";
  auto rest = std::async(std::launch::async, [&] { return write_all(*port, ByteView(sent).subspan(written), soon()); });
  Bytes back(sent.size());
  for (std::size_t at = 0; at < back.size();) {
    const auto some = client->until_done([&] {
      return SSL_read(client->ssl, back.data() + at,
                      static_cast<int>(std::min<std::size_t>(back.size() - at, 1 << 20)));
    });
    ASSERT_GT(some, 0);
    at += static_cast<std::size_t>(some);
  }
  EXPECT_TRUE(rest.get().ok());
  EXPECT_TRUE(back == sent);
}

// ---- Peers that do not match

struct Ended {
  Status dialler, acceptor;
};

Ended shake(const std::string& dialler_tls, const std::string& acceptor_tls, const Key& acceptor_key = cluster_key) {
  auto [dialler, acceptor] = connection();
  const auto a = port_over(std::move(dialler), dialler_tls, Side::dialler);
  const auto b = port_over(std::move(acceptor), acceptor_tls, Side::acceptor, acceptor_key);
  const auto [one, other] = shake_hands(*a, *b);
  return {one, other};
}

void expect_refused(const Ended& ended, const std::string& at_dialler, const std::string& at_acceptor) {
  EXPECT_EQ(ended.dialler.code(), Code::unauthenticated) << ended.dialler.text();
  EXPECT_EQ(ended.acceptor.code(), Code::unauthenticated) << ended.acceptor.text();
  EXPECT_THAT(std::string(ended.dialler.what()), HasSubstr(at_dialler));
  EXPECT_THAT(std::string(ended.acceptor.what()), HasSubstr(at_acceptor));
}

class TlsHandshakes : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  Authority ours{folder.path(), "ours"}, foreign{folder.path(), "foreign"};
};

TEST_F(TlsHandshakes, WithCertificatesOfOneAuthoritySucceed) {
  const auto ended = shake(ours.issue("one"), ours.issue("two"));
  EXPECT_TRUE(ended.dialler.ok()) << ended.dialler.text();
  EXPECT_TRUE(ended.acceptor.ok()) << ended.acceptor.text();
}

TEST_F(TlsHandshakes, WithAnotherKeyAreRefusedByNameAtBothEnds) {
  expect_refused(shake("key", "key", *Key::from_text("another cluster key, long enough")), "another cluster key",
                 "another cluster key");
}

TEST_F(TlsHandshakes, OfTheTwoFormsAreRefusedByNameAtBothEnds) {
  const auto files = ours.issue("one");
  const std::string at_key = "the peer's TLS is by certificates, and this process's is by the cluster key";
  expect_refused(shake("key", files), at_key, "the peer refused this process's certificate");
  expect_refused(shake(files, "key"), "the peer's TLS is by the cluster key, and this process's is by certificates",
                 at_key);
}

TEST_F(TlsHandshakes, WithAForeignCertificateAreRefusedByNameAtBothEnds) {
  // Each end trusts its own authority alone.
  const auto both = shake(ours.issue("one"), foreign.issue("two"));
  expect_refused(both, "the peer's certificate was refused: \"/CN=two\"", "refused this process's certificate");
  // The acceptor's certificate is good, and the dialler's is not.
  (void)foreign.issue("three");
  const auto tls =
      "certificate=" + folder.path() + "/three.crt,private_key=" + folder.path() + "/three.key,ca=" + ours.file();
  expect_refused(shake(tls, ours.issue("four")), "refused this process's certificate: unknown CA",
                 "the peer's certificate was refused: \"/CN=three\"");
}

TEST_F(TlsHandshakes, WithAnExpiredCertificateAreRefusedByNameAtBothEnds) {
  expect_refused(shake(ours.issue("one"), ours.issue("two", -60)), "certificate has expired",
                 "refused this process's certificate: certificate expired");
  expect_refused(shake(ours.issue("one", -60), ours.issue("two")),
                 "refused this process's certificate: certificate expired", "certificate has expired");
}

TEST_F(TlsHandshakes, WithAnEndThatSpeaksWithoutTlsEndByName) {
  {
    auto [dialler, acceptor] = connection();
    const auto a = port_over(std::move(dialler), "key", Side::dialler);
    SocketPort plain(std::move(acceptor), false);
    ASSERT_TRUE(write_all(plain, view_of("TFRY and more"), soon()).ok());
    const auto status = secure(*a, soon());
    EXPECT_EQ(status.code(), Code::unauthenticated);
    EXPECT_THAT(std::string(status.what()), HasSubstr("this process uses TLS, and the peer does not"));
  }
  auto [dialler, acceptor] = connection();
  const auto b = port_over(std::move(acceptor), "key", Side::acceptor);
  SocketPort plain(std::move(dialler), false);
  ASSERT_TRUE(write_all(plain, view_of("TFRY and more"), soon()).ok());
  const auto status = secure(*b, soon());
  EXPECT_THAT(std::string(status.what()), HasSubstr("this process uses TLS, and the peer does not"));
  Bytes alert(7);
  ASSERT_TRUE(read_exactly(plain, alert, soon()).ok());
  EXPECT_TRUE(is_tls(alert)) << "which tells the other end";
}

TEST(TlsOption, IsRefusedWithTheReasonIfItCannotBeUsed) {
  const auto refusal = [](const std::string& option, const Key& key = {}) { return Tls::make(option, key).status(); };
  EXPECT_THAT(std::string(refusal("key").what()), HasSubstr("needs a cluster key"));
  EXPECT_THAT(std::string(refusal("yes").what()), HasSubstr("certificate=FILE,private_key=FILE,ca=FILE"));
  for (const auto* option : {"certificate=a,private_key=b", "certificate=a,certificate=b,private_key=c,ca=d", "ca"})
    EXPECT_EQ(refusal(option).code(), Code::invalid_argument) << option;
  const auto missing = refusal("certificate=/nowhere.crt,private_key=/nowhere.key,ca=/nowhere.pem");
  EXPECT_EQ(missing.code(), Code::invalid_argument);
  EXPECT_THAT(std::string(missing.what()), HasSubstr("/nowhere.crt"));
  EXPECT_EQ(*Tls::make("off", cluster_key), nullptr);
}

TEST(TlsOption, OfAPrivateKeyThatOthersCanReadIsRefusedWithTheCommandToFixIt) {
  const TemporaryFolder folder;
  const auto option = Authority(folder.path(), "authority").issue("one");
  const auto key = folder.path() + "/one.key";
  EXPECT_TRUE(Tls::make(option, {}).ok());
  std::vector<mode_t> refused{0604, 0602, 0620};
  if (::geteuid() == 0) {  // which may let a group read it
    ASSERT_EQ(::chmod(key.c_str(), 0640), 0);
    EXPECT_TRUE(Tls::make(option, {}).ok());
    ASSERT_EQ(::chown(key.c_str(), 12345, 0), 0);
    ASSERT_EQ(::chmod(key.c_str(), 0600), 0);
    EXPECT_THAT(std::string(Tls::make(option, {}).status().what()), HasSubstr("belongs to uid 12345"));
    ASSERT_EQ(::chown(key.c_str(), 0, 0), 0);
  } else {
    refused.push_back(0640);
  }
  for (const auto mode : refused) {
    ASSERT_EQ(::chmod(key.c_str(), mode), 0);
    const auto status = Tls::make(option, {}).status();
    EXPECT_EQ(status.code(), Code::invalid_argument) << std::oct << mode;
    EXPECT_THAT(std::string(status.what()), HasSubstr("chmod 600 " + key)) << std::oct << mode;
  }
}

TEST(TlsOption, OfAPrivateKeyThatBelongsToAnotherCertificateIsRefused) {
  const TemporaryFolder folder;
  const Authority authority(folder.path(), "authority");
  (void)authority.issue("one");
  (void)authority.issue("two");
  const auto base = folder.path() + "/";
  const auto status =
      Tls::make("certificate=" + base + "one.crt,private_key=" + base + "two.key,ca=" + authority.file(), {}).status();
  EXPECT_EQ(status.code(), Code::invalid_argument);
  EXPECT_THAT(std::string(status.what()), HasSubstr("two.key"));
}

}  // namespace
}  // namespace tensorferry
