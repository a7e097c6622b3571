#include "agent/transport/tcp_liveness.h"

#include <linux/tcp.h>  // <netinet/tcp.h> lacks the counters of tcp_info, and cannot be included beside this
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>

namespace tensorferry {

BytesMoved bytes_moved(int tcp_socket) noexcept {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(tcp_socket, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) return {};
  return {info.tcpi_bytes_received, info.tcpi_bytes_acked};
}

void bound_silence(int tcp_socket, std::chrono::milliseconds limit) noexcept {
  const auto set = [tcp_socket](int level, int option, int value) {
    ::setsockopt(tcp_socket, level, option, &value, sizeof value);
  };
  constexpr int probes = 3;
  const auto seconds = static_cast<int>(std::max<std::int64_t>(1, limit.count() / 1000 / (probes + 1)));
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, seconds);
  set(IPPROTO_TCP, TCP_KEEPINTVL, seconds);
  set(IPPROTO_TCP, TCP_KEEPCNT, probes);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::max<std::int64_t>(1000, limit.count())));
}

}  // namespace tensorferry
