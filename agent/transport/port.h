/// The bytes of one connection, as a FrameStream and the handshake read and write them: a socket (socket_port.h), or
/// what stands in for one.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <span>

#include "agent/wire/frame.h"
#include "base/file_descriptor.h"
#include "base/status.h"

namespace tensorferry {

/// Bytes that a connection to another host has moved so far: received, and sent and acknowledged by the peer's kernel.
struct BytesMoved {
  std::uint64_t received = 0, acknowledged = 0;
};

/// No function blocks. read() and write() return the number of bytes that they moved, or -1 with errno: EAGAIN if there
/// are none to move now, EINTR, or why the connection has failed.
///
/// Threads: one reads and one writes at a time; the others any. The descriptor is closed with the port.
class StreamPort {
 public:
  virtual ~StreamPort() = default;

  /// Reads into `into`, in order. 0: the peer has closed its end. Appends the file descriptors that came to
  /// `descriptors`, at most `most` in all; further ones are closed. Appends an empty one instead of those that the
  /// system has dropped.
  virtual std::ptrdiff_t read(std::span<iovec> into, Descriptors& descriptors, std::size_t most) = 0;
  /// Writes from `from`, in order, and passes on `descriptors` with the first byte (local() alone).
  virtual std::ptrdiff_t write(std::span<iovec> from, std::span<const FileDescriptor> descriptors) = 0;
  /// Ends both directions. A later read() returns what has come, then 0.
  virtual void shutdown() noexcept = 0;

  /// Returns the descriptor that poll(2) and epoll report as readable if read() may get on, as writable if write() may,
  /// and as ended if the peer has closed its end.
  [[nodiscard]] virtual int descriptor() const noexcept = 0;
  /// Returns whether the peer is on this host and connected by unix socket, so that descriptors can travel.
  [[nodiscard]] virtual bool local() const noexcept = 0;
  /// Returns the errno of the attempt to connect, once the descriptor is writable; 0: it is connected.
  [[nodiscard]] virtual int connect_error() noexcept = 0;
  /// Returns whether the peer has closed its end. Bytes that came before may wait to be read.
  [[nodiscard]] virtual bool ended() const noexcept = 0;
  /// Returns how many bytes have come and were not read.
  [[nodiscard]] virtual std::size_t unread() const noexcept = 0;
  /// Returns what the connection has moved; nothing for a local one, whose end tells that the peer is gone.
  [[nodiscard]] virtual BytesMoved moved() const noexcept = 0;
  /// Lets the descriptor count as readable only when `bytes` have come, if the system can.
  virtual void set_low_water_mark(int bytes) noexcept = 0;
  /// Returns why the connection has failed, if errno does not say it; Ok: errno does.
  [[nodiscard]] virtual Status failure() const { return {}; }
};

}  // namespace tensorferry
