/// What the kernel knows of a TCP connection's liveness. For another kind of socket, the functions do nothing.
#pragma once

#include <chrono>

#include "agent/transport/port.h"

namespace tensorferry {

/// Returns what TCP has moved over a connection so far.
BytesMoved bytes_moved(int tcp_socket) noexcept;

/// Lets the kernel end a connection when the peer's kernel has not answered for `limit`, also while it is idle.
void bound_silence(int tcp_socket, std::chrono::milliseconds limit) noexcept;

}  // namespace tensorferry
