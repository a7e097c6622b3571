/// The sockets of the bare_* programs: two connected ends of one kind.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

namespace tensorferry::benchmarks {

[[noreturn]] inline void die(const char* what) {
  std::perror(what);
  std::exit(1);
}

struct Ends {
  int caller;
  int callee;
};

inline Ends unix_sockets() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) die("socketpair");
  return {ends[0], ends[1]};
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

}  // namespace tensorferry::benchmarks
