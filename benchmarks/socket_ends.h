/// What bare_roundtrip and bare_transfer share: two connected sockets of one kind, and the bytes that go there and
/// back.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <span>
#include <string_view>
#include <vector>

#include "benchmarks/samples.h"

namespace tensorferry::benchmarks {

[[noreturn]] inline void die(const char* what) {
  std::perror(what);
  std::exit(1);
}

inline Ends tcp_sockets() {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(listener, generic, length) != 0 || listen(listener, 1) != 0) die("listen");
  if (getsockname(listener, generic, &length) != 0) die("getsockname");
  const int caller = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(caller, generic, length) != 0) die("connect");
  const int callee = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (callee < 0) die("accept");
  const int on = 1;
  for (const int end : {caller, callee}) setsockopt(end, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  close(listener);
  return {caller, callee};
}

/// `transport`: "unix" or "tcp", over the loopback interface.
inline Ends connected_ends(std::string_view transport) { return transport == "tcp" ? tcp_sockets() : unix_sockets(); }

/// Fills `bytes`. False: the stream has ended.
inline bool receive(int socket, std::span<char> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = read(socket, bytes.data(), bytes.size());
    if (n == 0) return false;
    if (n < 0) die("read");
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
  return true;
}

inline void send(int socket, std::span<const char> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(socket, bytes.data(), bytes.size());
    if (n < 0) die("write");
    bytes = bytes.subspan(static_cast<std::size_t>(n));
  }
}

/// Measures how long `bytes` bytes take to the other process and back, and prints it. Returns the exit status of
/// main().
inline int bounce(std::size_t bytes, const SampleArguments& arguments) {
  signal(SIGPIPE, SIG_IGN);
  const auto callee = [&](int socket) {
    std::vector<char> received(bytes, 'y');
    pin(arguments.callee_cpu);
    while (receive(socket, received)) send(socket, received);
  };
  const auto caller = [&](int socket, pid_t /*child*/) {
    const std::vector<char> sent(bytes, 'x');
    std::vector<char> received(bytes, 'y');
    pin(arguments.caller_cpu);
    print(repeat(
        [&] {
          send(socket, sent);
          if (!receive(socket, received)) die("the other process ended");
        },
        arguments.seconds));
  };
  return run_in_two_processes(connected_ends(arguments.transport), callee, caller);
}

}  // namespace tensorferry::benchmarks
