/// What an emulated queue pair and its peer send each other over a unix socket.
///
/// The requester sends a Request. The responder answers with a Reply. If it says `go`, the bytes follow: of a READ from
/// the responder, each chunk behind a Chunk; of every other request from the requester, and then the responder sends a
/// second Reply.
#pragma once

#include <infiniband/verbs.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace tensorferry::emulated_verbs {

/// What a packet of a real responder says, or that none comes.
enum class Answer : std::uint32_t {
  go,         // the bytes may follow
  done,       // an acknowledgement
  dropped,    // no answer: the port is down, or no queue pair there expects this requester
  not_ready,  // RNR NAK: no receive request is posted
  access,     // NAK: remote access error
  invalid,    // NAK: invalid request
  operation   // NAK: remote operational error
};

struct Request {
  std::uint32_t opcode;  // ibv_wr_opcode
  std::uint32_t source;  // queue pair numbers
  std::uint32_t destination;
  ibv_gid gid;              // of the destination's port
  std::uint32_t roce_v2;    // else version 1
  std::uint32_t first_psn;  // that the requester counts from
  std::uint32_t reads;      // that the requester may have under way
  std::uint32_t key;
  std::uint64_t address;
  std::uint64_t bytes;
  std::uint32_t immediate;
};

struct Reply {
  Answer answer;
  std::uint32_t timer;  // with not_ready: the code of the time to wait
};

struct Chunk {
  Answer answer;  // go or access
  std::uint32_t bytes;
};

inline constexpr std::size_t chunk_bytes = std::size_t{64} << 10;

inline bool send_all(int fd, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    const auto sent = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    at += sent;
    bytes -= static_cast<std::size_t>(sent);
  }
  return true;
}

inline bool receive_all(int fd, void* data, std::size_t bytes) {
  auto* at = static_cast<std::byte*>(data);
  while (bytes > 0) {
    const auto got = ::recv(fd, at, bytes, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

}  // namespace tensorferry::emulated_verbs
