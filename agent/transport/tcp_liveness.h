/// What the kernel knows of a TCP connection's liveness. For another kind of socket, the functions do nothing.
#pragma once

#include <cstdint>

#include "agent/agent.h"

namespace tensorferry {

/// Bytes that TCP has moved over a connection so far: received, and sent and acknowledged by the peer's kernel.
struct TcpMoved {
  std::uint64_t received = 0, acknowledged = 0;
};
TcpMoved bytes_moved(int tcp_socket) noexcept;

/// Lets the kernel end a connection when the peer's kernel has not answered for `limit`, also while it is idle.
void bound_silence(int tcp_socket, Milliseconds limit) noexcept;

}  // namespace tensorferry
