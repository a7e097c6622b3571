/// Whole reads and writes on stream sockets with a deadline, for the few places that may block: the store's client, the
/// greeting of plain descriptors. Work on blocking and non-blocking sockets alike; a signal does not end them.
#pragma once

#include <chrono>
#include <cstddef>
#include <span>

#include "channels/bytes.h"
#include "channels/status.h"

namespace tensorferry {

using Deadline = std::chrono::steady_clock::time_point;

/// `timeout` from now; a negative one is none, and one of more than a year is a year (so that sums do not overflow).
Deadline deadline_after(std::chrono::milliseconds timeout) noexcept;

/// DeadlineExceeded, or ConnectionLost: the peer closed or reset it. What had arrived by then is lost with the error.
Status read_exactly(int fd, std::span<std::byte> into, Deadline deadline);
Status write_all(int fd, ByteView bytes, Deadline deadline);

/// Waits for `events` of poll(2). DeadlineExceeded, Internal.
Status wait_for_socket(int fd, short events, Deadline deadline);

/// Whether an idle stream has ended, or has bytes that nobody asked for: it cannot be used for another request.
[[nodiscard]] bool spoiled(int fd) noexcept;

}  // namespace tensorferry
