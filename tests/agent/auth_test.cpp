#include "agent/handshake/auth.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "base/file_descriptor.h"

namespace tensorferry {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;

constexpr std::string_view key_text = "a key of thirty bytes or so....";

auto soon(milliseconds wait = seconds(5)) { return std::chrono::steady_clock::now() + wait; }

std::pair<FileDescriptor, FileDescriptor> connected_pair() {
  int fds[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
  return {FileDescriptor(fds[0]), FileDescriptor(fds[1])};
}

struct Outcome {
  Result<Agreement> dialler = Status(Code::internal, "not run");
  Result<Agreement> acceptor = Status(Code::internal, "not run");
};

// Runs both sides of the handshake over a socket pair. Each side closes its end when its part is over, as a
// connection's owner does.
Outcome run_handshake(Terms dialler, Terms acceptor) {
  auto [a, b] = connected_pair();
  Outcome outcome;
  std::thread other([&, b = std::move(b)]() mutable {
    outcome.acceptor = handshake_as_acceptor(b.get(), std::move(acceptor), soon());
    b.reset();
  });
  outcome.dialler = handshake_as_dialler(a.get(), std::move(dialler), soon());
  a.reset();
  other.join();
  return outcome;
}

Terms terms(const Key* key, bool demands = true, std::string purpose = "link") {
  return {.key = key, .demands_proof = demands, .purpose = std::move(purpose)};
}

// ---- Key

class KeyFile : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("auth_test-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    std::filesystem::remove_all(folder_);
    ::unsetenv("TENSORFERRY_KEY");
    ::unsetenv("TENSORFERRY_KEY_FILE");
  }
  std::string write(std::string_view text, mode_t mode) {
    auto path = (folder_ / "key").string();
    std::ofstream(path) << text;
    EXPECT_EQ(::chmod(path.c_str(), mode), 0);
    return path;
  }
  std::filesystem::path folder_;
};

TEST_F(KeyFile, GivesTheSameKeyAsAVariableWithTheSameText) {
  const auto from_file = Key::from_file(write(std::string(key_text) + "\n", 0600));
  ASSERT_TRUE(from_file.ok()) << from_file.status().text();
  const auto from_text = Key::from_text(key_text);
  ASSERT_TRUE(from_text.ok());
  EXPECT_EQ(text_of(from_file->bytes()), text_of(from_text->bytes()));
}

TEST_F(KeyFile, ThatOthersCanReadIsRefusedWithTheCommandToFixIt) {
  for (const mode_t mode : {0640, 0604, 0660, 0622}) {
    const auto path = write(key_text, mode);
    const auto key = Key::from_file(path);
    ASSERT_FALSE(key.ok()) << std::oct << mode;
    EXPECT_EQ(key.status().code(), Code::permission_denied);
    EXPECT_THAT(std::string(key.status().what()), HasSubstr("chmod 600 " + path));
  }
}

TEST_F(KeyFile, ErrorsNeverShowTheKey) {
  for (const auto& key : {Key::from_file(write("short-secret", 0600)), Key::from_text("short-secret")}) {
    ASSERT_FALSE(key.ok());
    EXPECT_EQ(key.status().code(), Code::invalid_argument);
    EXPECT_EQ(key.status().text().find("short-secret"), std::string::npos);
  }
}

TEST_F(KeyFile, ThatIsMissingOrADirectoryIsAnError) {
  EXPECT_EQ(Key::from_file((folder_ / "none").string()).status().code(), Code::not_found);
  EXPECT_FALSE(Key::from_file(folder_.string()).ok());
  ASSERT_EQ(::mkfifo((folder_ / "fifo").c_str(), 0600), 0);
  EXPECT_FALSE(Key::from_file((folder_ / "fifo").string()).ok());
  EXPECT_FALSE(Key::from_file(write(std::string(Key::most_bytes + 1, 'x'), 0600)).ok());
}

TEST_F(KeyFile, OptionPrecedesFilePrecedesVariable) {
  EXPECT_TRUE(Key::load("")->empty());
  ::setenv("TENSORFERRY_KEY", "the variable's key, long enough", 1);
  EXPECT_EQ(text_of(Key::load("")->bytes()), "the variable's key, long enough");
  ::setenv("TENSORFERRY_KEY_FILE", write(key_text, 0600).c_str(), 1);
  EXPECT_EQ(text_of(Key::load("")->bytes()), key_text);
  EXPECT_EQ(text_of(Key::load("the option's key, long enough")->bytes()), "the option's key, long enough");
}

TEST(Key, RandomOnesDiffer) { EXPECT_NE(text_of(Key::random().bytes()), text_of(Key::random().bytes())); }

// ---- Signatures

TEST(Signature, IsValidOnlyForItsBytesContextAndKey) {
  const auto key = Key::random(), other = Key::random();
  const auto signature = sign(key, "record trainer0", view_of("body"));
  EXPECT_TRUE(verify(key, "record trainer0", view_of("body"), signature));
  EXPECT_FALSE(verify(key, "record trainer1", view_of("body"), signature));
  EXPECT_FALSE(verify(key, "record trainer0", view_of("bodx"), signature));
  EXPECT_FALSE(verify(other, "record trainer0", view_of("body"), signature));
  EXPECT_FALSE(verify(key, "record trainer0", view_of("body"), ByteView(signature).first(31)));
  EXPECT_FALSE(verify(key, "record trainer0b", view_of("ody"), signature));  // no byte may move between the fields
}

TEST(Proof, DiffersBetweenSidesAndBetweenConnections) {
  const auto key = Key::random();
  Preamble a, b;
  fill_random(a.nonce);
  fill_random(b.nonce);
  const auto mine = proof(key, Side::dialler, "link", a.encode(), b.encode());
  EXPECT_NE(mine, proof(key, Side::acceptor, "link", a.encode(), b.encode()));
  EXPECT_NE(mine, proof(key, Side::dialler, "store", a.encode(), b.encode()));
  EXPECT_NE(mine, proof(key, Side::dialler, "link", b.encode(), a.encode()));
  auto downgraded = b;
  downgraded.features ^= 1;
  EXPECT_NE(mine, proof(key, Side::dialler, "link", a.encode(), downgraded.encode()));
  fill_random(b.nonce);
  EXPECT_NE(mine, proof(key, Side::dialler, "link", a.encode(), b.encode()));
}

// ---- Preamble

TEST(Preamble, RoundTrips) {
  Preamble sent{.version_min = 2, .version_max = 7, .features = 0xdeadbeef, .demands_proof = true, .has_key = false};
  fill_random(sent.nonce);
  const auto got = Preamble::decode(sent.encode());
  ASSERT_TRUE(got.ok());
  EXPECT_EQ(got->encode(), sent.encode());
  EXPECT_EQ(got->features, 0xdeadbeef);
}

TEST(Preamble, InvalidBytesAreAProtocolError) {
  auto encoded = Preamble{}.encode();
  EXPECT_EQ(Preamble::decode(ByteView(encoded).first(47)).status().code(), Code::protocol_error);
  encoded[0] = std::byte{'G'};
  EXPECT_EQ(Preamble::decode(encoded).status().code(), Code::protocol_error);
  EXPECT_EQ(Preamble::decode(Preamble{.version_min = 3, .version_max = 2}.encode()).status().code(),
            Code::protocol_error);
}

// ---- Which connections need a key

TEST(KeyNeeded, ByEveryPeerExceptTheSameUserOverAUnixSocket) {
  EXPECT_FALSE(key_needed(1000, 1000));
  EXPECT_TRUE(key_needed(1001, 1000));
  EXPECT_TRUE(key_needed(0, 1000));
  EXPECT_TRUE(key_needed(std::nullopt, 1000));
}

TEST(KeyNeeded, ByUsersThatThisUserNamespaceDoesNotMap) {
  uid_t overflow = 65534;
  std::ifstream("/proc/sys/kernel/overflowuid") >> overflow;
  EXPECT_TRUE(key_needed(overflow, overflow));
}

TEST(UnixPeer, HasAUidAndOtherSocketsHaveNone) {
  const auto [a, b] = connected_pair();
  EXPECT_EQ(unix_peer_uid(a.get()), ::geteuid());
  const FileDescriptor tcp(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(unix_peer_uid(tcp.get()), std::nullopt);
  EXPECT_EQ(unix_peer_uid(-1), std::nullopt);
}

// ---- Handshake

TEST(Handshake, WithTheSameKeySucceedsAndProvesBothSides) {
  const auto key = Key::random();
  auto a = terms(&key), b = terms(&key);
  a.version_max = 5, a.features = 0b0110;
  b.version_max = 3, b.features = 0b1100;
  const auto outcome = run_handshake(a, b);
  ASSERT_TRUE(outcome.dialler.ok()) << outcome.dialler.status().text();
  ASSERT_TRUE(outcome.acceptor.ok()) << outcome.acceptor.status().text();
  for (const auto& agreed : {*outcome.dialler, *outcome.acceptor}) {
    EXPECT_EQ(agreed.version, 3);
    EXPECT_EQ(agreed.features, 0b0100U);
    EXPECT_TRUE(agreed.proven);
  }
}

TEST(Handshake, NeedsNoKeyIfNeitherSideDemandsOne) {
  const auto outcome = run_handshake(terms(nullptr, false), terms(nullptr, false));
  ASSERT_TRUE(outcome.dialler.ok() && outcome.acceptor.ok());
  EXPECT_FALSE(outcome.dialler->proven);
}

TEST(Handshake, ProvesBothSidesIfOneSideDemandsAKey) {
  const auto key = Key::random(), other = Key::random();
  for (const bool dialler_asks : {true, false}) {
    const auto good = run_handshake(terms(&key, dialler_asks), terms(&key, !dialler_asks));
    ASSERT_TRUE(good.dialler.ok() && good.acceptor.ok());
    EXPECT_TRUE(good.dialler->proven && good.acceptor->proven);
    const auto bad = run_handshake(terms(&key, dialler_asks), terms(&other, !dialler_asks));
    EXPECT_EQ(bad.dialler.status().code(), Code::unauthenticated);
    EXPECT_EQ(bad.acceptor.status().code(), Code::unauthenticated);
  }
}

TEST(Handshake, WithDifferentKeysFailsAtBothEndsWithAdvice) {
  const auto key = Key::random(), other = Key::random();
  const auto outcome = run_handshake(terms(&key), terms(&other));
  for (const auto& end : {outcome.dialler, outcome.acceptor}) {
    EXPECT_EQ(end.status().code(), Code::unauthenticated);
    EXPECT_THAT(std::string(end.status().what()), HasSubstr("TENSORFERRY_KEY_FILE"));
  }
}

TEST(Handshake, NamesTheEndWithoutAKey) {
  const auto key = Key::random();
  const auto without = run_handshake(terms(nullptr, false), terms(&key));
  EXPECT_EQ(without.dialler.status().code(), Code::unauthenticated);
  EXPECT_THAT(std::string(without.dialler.status().what()), HasSubstr("this process has none"));
  EXPECT_EQ(without.acceptor.status().code(), Code::unauthenticated);
  EXPECT_THAT(std::string(without.acceptor.status().what()), HasSubstr("but the peer has none"));
}

TEST(Handshake, WithDifferentPurposesFails) {
  const auto key = Key::random();
  const auto outcome = run_handshake(terms(&key, true, "link"), terms(&key, true, "store"));
  EXPECT_EQ(outcome.dialler.status().code(), Code::unauthenticated);
  EXPECT_EQ(outcome.acceptor.status().code(), Code::unauthenticated);
}

TEST(Handshake, WithoutACommonVersionNamesBothRanges) {
  const auto key = Key::random();
  auto old_one = terms(&key), new_one = terms(&key);
  new_one.version_min = 2, new_one.version_max = 4;
  const auto outcome = run_handshake(old_one, new_one);
  EXPECT_EQ(outcome.dialler.status().code(), Code::protocol_error);
  EXPECT_THAT(std::string(outcome.dialler.status().what()), HasSubstr("versions 2 to 4"));
  EXPECT_EQ(outcome.acceptor.status().code(), Code::protocol_error);
  EXPECT_THAT(std::string(outcome.acceptor.status().what()), HasSubstr("this side 2 to 4"));
}

TEST(Handshake, AcceptorDoesNotAnswerGarbage) {
  auto [a, b] = connected_pair();
  const auto key = Key::random();
  const std::string garbage = "GET / HTTP/1.1\r\nHost: example\r\nAccept: everything\r\n\r\n";
  ASSERT_EQ(::write(a.get(), garbage.data(), garbage.size()), static_cast<ssize_t>(garbage.size()));
  EXPECT_EQ(handshake_as_acceptor(b.get(), terms(&key), soon()).status().code(), Code::protocol_error);
  b.reset();
  char byte;
  EXPECT_LE(::recv(a.get(), &byte, 1, 0), 0);
}

TEST(Handshake, AReflectedProofIsRefused) {
  // The dialler echoes the acceptor's own proof: reflection.
  auto [a, b] = connected_pair();
  const auto key = Key::random();
  std::thread attacker([fd = a.get()] {
    const auto hello = Preamble{.demands_proof = true, .has_key = true}.encode();
    ASSERT_EQ(::send(fd, hello.data(), hello.size(), 0), 48);
    std::array<std::byte, DiallerHandshake::answer_bytes> answer;
    ASSERT_EQ(::recv(fd, answer.data(), answer.size(), MSG_WAITALL), 80);
    ASSERT_EQ(::send(fd, answer.data() + 48, 32, 0), 32);
  });
  EXPECT_EQ(handshake_as_acceptor(b.get(), terms(&key), soon()).status().code(), Code::unauthenticated);
  attacker.join();
}

TEST(Handshake, ARecordedConnectionCannotBeReplayed) {
  const auto key = Key::random();
  DiallerHandshake honest(terms(&key));
  AcceptorHandshake first(terms(&key));
  const auto answer = first.answer(honest.hello());
  const auto recorded = honest.answer(answer->bytes);
  ASSERT_TRUE(recorded.ok());
  ASSERT_TRUE(first.check(*recorded).ok());
  AcceptorHandshake second(terms(&key));
  ASSERT_TRUE(second.answer(honest.hello()).ok());
  EXPECT_EQ(second.check(*recorded).code(), Code::unauthenticated);
  EXPECT_EQ(second.check(ByteView(*recorded).first(8)).code(), Code::protocol_error);
}

TEST(Handshake, WithASilentOrVanishedPeerEndsAtTheDeadline) {
  const auto key = Key::random();
  {
    auto [a, b] = connected_pair();
    EXPECT_EQ(handshake_as_acceptor(b.get(), terms(&key), soon(milliseconds(30))).status().code(),
              Code::deadline_exceeded);
    EXPECT_EQ(handshake_as_dialler(a.get(), terms(&key), soon(milliseconds(30))).status().code(),
              Code::deadline_exceeded);
  }
  auto [a, b] = connected_pair();
  b.reset();
  EXPECT_EQ(handshake_as_dialler(a.get(), terms(&key), soon()).status().code(), Code::connection_lost);
}

}  // namespace
}  // namespace tensorferry
