/// Connects, and complete reads and writes on stream sockets, with a deadline, for the few callers that may block: the
/// stores' clients and the handshake of threads that dial. They work on ports and on blocking and non-blocking sockets;
/// a signal does not end them.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "agent/transport/port.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/status.h"

namespace tensorferry {

class TlsPort;

using Deadline = Clock::time_point;

/// Returns the time point `timeout` from now. A negative timeout counts as 0, and one of more than a year as a year (so
/// that the sum does not overflow).
Deadline deadline_after(std::chrono::milliseconds timeout, const Clock& clock = {}) noexcept;

/// Connects to a numeric address. DeadlineExceeded; ConnectionLost: it refuses, or cannot be reached; the errors of
/// start_connect_tcp().
Result<FileDescriptor> connect_tcp(const std::string& address, std::uint16_t port, Deadline deadline,
                                   const Clock& clock = {});

/// Fills `into`. DeadlineExceeded; ConnectionLost: the peer closed or reset the connection; InternalError: poll(2)
/// failed. After an error the bytes that had arrived are lost.
Status read_exactly(int fd, std::span<std::byte> into, Deadline deadline, const Clock& clock = {});
/// Writes all of `bytes`. Errors as read_exactly's.
Status write_all(int fd, ByteView bytes, Deadline deadline, const Clock& clock = {});

/// The same over a port.
Status read_exactly(StreamPort& port, std::span<std::byte> into, Deadline deadline, const Clock& clock = {});
Status write_all(StreamPort& port, ByteView bytes, Deadline deadline, const Clock& clock = {});
/// Completes the handshake of TLS. DeadlineExceeded; errors of TlsPort::failure().
Status secure(TlsPort& port, Deadline deadline, const Clock& clock = {});

/// Waits for `events` of poll(2). DeadlineExceeded, Internal.
Status wait_for_socket(int fd, short events, Deadline deadline, const Clock& clock = {});

/// Returns whether an idle stream cannot carry another request: it has ended, or has bytes that were not requested.
[[nodiscard]] bool spoiled(int fd) noexcept;

}  // namespace tensorferry
