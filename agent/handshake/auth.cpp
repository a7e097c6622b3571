#include "agent/handshake/auth.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "agent/transport/blocking_io.h"
#include "agent/transport/tcp_owner.h"
#include "agent/transport/tls.h"
#include "base/file_descriptor.h"
#include "base/text.h"

namespace tensorferry {

namespace {

constexpr std::string_view magic = "TFRY";
constexpr std::uint8_t demands_proof_flag = 1, has_key_flag = 2;

bool has_key(const Terms& terms) { return terms.key != nullptr && !terms.key->empty(); }

Preamble preamble_of(const Terms& terms) {
  Preamble mine{.version_min = terms.version_min,
                .version_max = terms.version_max,
                .features = terms.features,
                .demands_proof = terms.demands_proof,
                .has_key = has_key(terms)};
  fill_random(mine.nonce);
  return mine;
}

Result<Agreement> agree(const Preamble& mine, const Preamble& theirs) {
  Agreement agreement{.version = std::min(mine.version_max, theirs.version_max),
                      .features = mine.features & theirs.features,
                      .proven = mine.demands_proof || theirs.demands_proof};
  if (agreement.version < std::max(mine.version_min, theirs.version_min)) {
    return Status(Code::protocol_error,
                  formatted("the peer speaks versions {} to {} of the protocol, this side {} to {}: run the same "
                            "release of tensorferry at both ends",
                            theirs.version_min, theirs.version_max, mine.version_min, mine.version_max));
  }
  return agreement;
}

Status key_at_both_ends(const Preamble& mine, const Preamble& theirs) {
  if (!mine.has_key) {
    return {Code::unauthenticated,
            formatted("the peer demands the cluster key, but this process has none. {}", how_to_set_a_key())};
  }
  if (!theirs.has_key) {
    return {Code::unauthenticated,
            formatted("this process demands the cluster key, but the peer has none. {}", how_to_set_a_key())};
  }
  return {};
}

Status another_key() {
  return {Code::unauthenticated,
          formatted("the peer has another cluster key than this process. {}", how_to_set_a_key())};
}

/// Returns whether the other end of a TCP connection has closed it.
bool has_closed(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  return ::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 && info.tcpi_state != TCP_ESTABLISHED;
}

uid_t overflow_uid() {
  static const uid_t uid = [] {
    unsigned long value = 65534;
    std::ifstream("/proc/sys/kernel/overflowuid") >> value;
    return static_cast<uid_t>(value);
  }();
  return uid;
}

}  // namespace

Digest proof(const Key& key, Side side, std::string_view purpose, const Preamble::Encoded& dialler,
             const Preamble::Encoded& acceptor) {
  Bytes signed_bytes;
  Writer out(signed_bytes);
  out.sized("tensorferry greeting 1");
  out.put(static_cast<std::uint8_t>(side));
  out.sized(purpose);
  out.raw(dialler);
  out.raw(acceptor);
  return hmac(key, signed_bytes);
}

// ---- Handshake

Preamble::Encoded Preamble::encode() const {
  Bytes bytes;
  bytes.reserve(size);
  Writer out(bytes);
  out.raw(view_of(magic));
  out.put(version_min);
  out.put(version_max);
  out.put(features);
  out.put(static_cast<std::uint8_t>((demands_proof ? demands_proof_flag : 0) | (has_key ? has_key_flag : 0)));
  out.raw(Bytes(3));
  out.raw(nonce);
  Encoded encoded{};
  std::copy_n(bytes.begin(), size, encoded.begin());
  return encoded;
}

Result<Preamble> Preamble::decode(ByteView bytes) {
  if (bytes.size() != size || text_of(bytes.first(magic.size())) != magic) {
    return Status(Code::protocol_error, "the peer does not speak the tensorferry protocol");
  }
  Reader in(bytes.subspan(magic.size()));
  Preamble preamble;
  preamble.version_min = in.get<std::uint16_t>();
  preamble.version_max = in.get<std::uint16_t>();
  preamble.features = in.get<std::uint32_t>();
  const auto flags = in.get<std::uint8_t>();
  preamble.demands_proof = (flags & demands_proof_flag) != 0;
  preamble.has_key = (flags & has_key_flag) != 0;
  in.raw(3);
  const auto nonce = in.raw(sizeof(Nonce));
  std::copy(nonce.begin(), nonce.end(), preamble.nonce.begin());
  if (preamble.version_min > preamble.version_max) {
    return Status(Code::protocol_error, formatted("the peer's range of versions is empty: {} to {}",
                                                  preamble.version_min, preamble.version_max));
  }
  return preamble;
}

std::optional<uid_t> unix_peer_uid(int fd) noexcept {
  int domain = 0;
  socklen_t size = sizeof domain;
  if (::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) != 0 || domain != AF_UNIX) return std::nullopt;
  ucred peer{};
  size = sizeof peer;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) return std::nullopt;
  return peer.uid;
}

std::int32_t unix_peer_pid(int fd) noexcept {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.pid > 0 ? peer.pid : 0;
}

FileDescriptor unix_peer_process(int fd) noexcept {
  constexpr int so_peerpidfd = 77;  // SO_PEERPIDFD, which an older <asm-generic/socket.h> lacks
  int pidfd = -1;
  socklen_t size = sizeof pidfd;
  if (::getsockopt(fd, SOL_SOCKET, so_peerpidfd, &pidfd, &size) == 0) return FileDescriptor(pidfd);
  const auto pid = unix_peer_pid(fd);
  return pid != 0 ? FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0))) : FileDescriptor();
}

bool key_needed(std::optional<uid_t> peer, uid_t mine) { return !peer || *peer != mine || *peer == overflow_uid(); }

Status check_same_user(int fd) {
  auto uid = unix_peer_uid(fd);
  if (!uid) uid = tcp_peer_uid(fd);
  if (!key_needed(uid, ::geteuid())) return {};
  if (!uid && has_closed(fd)) return {Code::connection_lost, "the peer closed the connection during the handshake"};
  const auto who = uid ? formatted("a process of uid {} is at the other end", *uid)
                       : std::string("the kernel does not say whose process is at the other end");
  return {Code::unauthenticated, formatted("{}, and without a cluster key uid {} speaks with its own processes of this "
                                           "host alone. {}",
                                           who, ::geteuid(), how_to_set_a_key())};
}

Result<bool> acceptor_demands_proof(int fd, const Key& key) {
  const auto uid = unix_peer_uid(fd);
  if (uid || !key.empty()) return key_needed(uid, ::geteuid());
  const auto same = check_same_user(fd);
  if (same.code() == Code::connection_lost) return same;
  return !same.ok();
}

Status why_refused(int fd, const Key& key, const Status& verdict) {
  if (!key.empty() || verdict.code() != Code::unauthenticated) return verdict;
  const auto same = check_same_user(fd);
  return same.ok() ? verdict : same;
}

bool dialler_demands_proof(int fd, const Key& key) {
  const auto uid = unix_peer_uid(fd);
  return (uid || !key.empty()) && key_needed(uid, ::geteuid());
}

DiallerHandshake::DiallerHandshake(Terms terms)
    : terms_(std::move(terms)), mine_(preamble_of(terms_)), hello_(mine_.encode()) {}

Result<Digest> DiallerHandshake::answer(ByteView bytes) {
  if (bytes.size() != answer_bytes)
    return Status(Code::protocol_error, "the acceptor's answer in the handshake has a wrong size");
  const auto encoded = bytes.first(Preamble::size);
  const auto theirs = Preamble::decode(encoded);
  if (!theirs) return theirs.status();
  const auto agreed = agree(mine_, *theirs);
  if (!agreed) return agreed.status();
  agreement_ = *agreed;
  if (!agreement_.proven) return Digest{};

  if (auto status = key_at_both_ends(mine_, *theirs); !status) return status;
  Preamble::Encoded acceptor{};
  std::copy(encoded.begin(), encoded.end(), acceptor.begin());
  const auto expected = proof(*terms_.key, Side::acceptor, terms_.purpose, hello_, acceptor);
  if (!equal_in_constant_time(expected, bytes.subspan(Preamble::size))) return another_key();
  return proof(*terms_.key, Side::dialler, terms_.purpose, hello_, acceptor);
}

AcceptorHandshake::AcceptorHandshake(Terms terms) : terms_(std::move(terms)) {}

Result<AcceptorHandshake::AcceptorReply> AcceptorHandshake::answer(ByteView hello) {
  const auto theirs = Preamble::decode(hello);
  const bool tls = is_tls(hello);
  if (!theirs && !tls) return theirs.status();
  const auto mine = preamble_of(terms_);
  const auto acceptor = mine.encode();
  AcceptorReply answer{};
  std::copy(acceptor.begin(), acceptor.end(), answer.bytes.begin());
  if (tls) {  // a dialler with TLS learns from the preamble that this side has none
    answer.verdict = only_peer_uses_tls();
    return answer;
  }

  const auto agreed = agree(mine, *theirs);
  if (agreed) agreement_ = *agreed;
  answer.verdict = agreed.status();
  if (answer.verdict && agreement_.proven) answer.verdict = key_at_both_ends(mine, *theirs);
  if (!answer.verdict || !agreement_.proven) return answer;

  Preamble::Encoded dialler{};
  std::copy(hello.begin(), hello.end(), dialler.begin());
  const auto proved = proof(*terms_.key, Side::acceptor, terms_.purpose, dialler, acceptor);
  std::copy(proved.begin(), proved.end(), answer.bytes.begin() + Preamble::size);
  expected_ = proof(*terms_.key, Side::dialler, terms_.purpose, dialler, acceptor);
  return answer;
}

Status AcceptorHandshake::check(ByteView bytes) const {
  if (bytes.size() != sizeof(Digest)) return {Code::protocol_error, "the proof in the handshake has a wrong size"};
  if (agreement_.proven && !equal_in_constant_time(expected_, bytes)) return another_key();
  return {};
}

namespace {

/// `over`: a descriptor or a StreamPort, whose descriptor is `fd`.
template <class Over>
Result<Agreement> dial_over(Over& over, int fd, bool tls, Terms terms, Deadline deadline, const Clock& clock) {
  const auto during = [](const Status& status) {
    return Status(status.code(), formatted("the handshake with a peer failed: {}", status.what()));
  };
  DiallerHandshake handshake(std::move(terms));
  std::array<std::byte, DiallerHandshake::answer_bytes> answer{};
  if (auto status = write_all(over, handshake.hello(), deadline, clock); !status) return during(status);
  if (auto status = read_exactly(over, answer, deadline, clock); !status)
    return !tls && is_tls(answer) ? only_peer_uses_tls() : during(status);
  const auto mine = handshake.answer(answer);
  if (!mine) return mine.status();
  if (!handshake.agreement().proven) {
    if (auto status = check_same_user(fd); !status) return status;
  }
  if (auto status = write_all(over, *mine, deadline, clock); !status) return during(status);
  return handshake.agreement();
}

}  // namespace

Result<Agreement> handshake_as_dialler(int fd, Terms terms, Deadline deadline, const Clock& clock) {
  return dial_over(fd, fd, false, std::move(terms), deadline, clock);
}

Result<Agreement> handshake_as_dialler(StreamPort& port, bool tls, Terms terms, Deadline deadline, const Clock& clock) {
  return dial_over(port, port.descriptor(), tls, std::move(terms), deadline, clock);
}

Result<Agreement> handshake_as_acceptor(int fd, Terms terms, Deadline deadline, const Clock& clock) {
  const auto during = [](const Status& status) {
    return Status(status.code(), formatted("the handshake with a peer that dialled failed: {}", status.what()));
  };
  AcceptorHandshake handshake(std::move(terms));
  std::array<std::byte, AcceptorHandshake::hello_bytes> hello;
  if (auto status = read_exactly(fd, hello, deadline, clock); !status) return during(status);
  const auto answer = handshake.answer(hello);
  if (!answer) return answer.status();
  if (auto status = write_all(fd, answer->bytes, deadline, clock); !status) return during(status);
  if (!answer->verdict) return answer->verdict;
  Digest theirs;
  if (auto status = read_exactly(fd, theirs, deadline, clock); !status) {
    // The dialler checks this side's proof first. If its key differs, it closes without sending a proof of its own.
    if (handshake.agreement().proven && status.code() == Code::connection_lost) return another_key();
    return during(status);
  }
  if (auto status = handshake.check(theirs); !status) return status;
  return handshake.agreement();
}

}  // namespace tensorferry
