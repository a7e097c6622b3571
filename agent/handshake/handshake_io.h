/// Reads and writes of a connection in its handshake, or of a store's client, as coroutines on the reactor.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <cstddef>
#include <memory>
#include <span>

#include "agent/transport/port.h"
#include "agent/transport/timer.h"
#include "agent/transport/tls_port.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/status.h"

namespace tensorferry {

/// A port whose peer is awaited without a thread. One coroutine at a time uses it.
///
/// Threads: the reactor's.
class HandshakeIo final {
 public:
  HandshakeIo(boost::asio::io_context& context, const Clock& clock, std::unique_ptr<StreamPort> port);
  ~HandshakeIo();
  HandshakeIo(const HandshakeIo&) = delete;
  HandshakeIo& operator=(const HandshakeIo&) = delete;

  /// Cuts the handshake off at `at`: the read or write under way, and each later one, fails with DeadlineExceeded.
  void set_deadline(Clock::time_point at);
  /// Cuts it off now, with ConnectionLost.
  void cut();

  /// Waits until bytes have come or the connection has ended. Errors as read_exactly's, but for the end.
  boost::asio::awaitable<Status> readable();
  /// Completes the handshake of TLS on this object's port, which `tls` is. Errors: those of TlsPort::failure(), and as
  /// readable().
  boost::asio::awaitable<Status> secure(TlsPort& tls);

  /// Fills `into`. ConnectionLost: the peer closed or reset the connection (see received()), or cut();
  /// DeadlineExceeded.
  boost::asio::awaitable<Status> read_exactly(std::span<std::byte> into);
  /// Writes all of `bytes`. Errors as read_exactly's.
  boost::asio::awaitable<Status> write_all(ByteView bytes);

  /// Returns how many bytes have come in all.
  [[nodiscard]] std::size_t received() const noexcept { return received_; }
  /// Returns whether the peer has closed its end properly, rather than reset it.
  [[nodiscard]] bool closed_by_peer() const noexcept { return closed_by_peer_; }
  [[nodiscard]] StreamPort& port() noexcept { return *port_; }
  /// Hands the port on to a link. The object is of no more use.
  std::unique_ptr<StreamPort> take_port();

 private:
  boost::asio::awaitable<void> wait(boost::asio::posix::stream_descriptor::wait_type direction);
  [[nodiscard]] Status failure(const char* doing) const;

  std::unique_ptr<StreamPort> port_;
  boost::asio::posix::stream_descriptor descriptor_;  // the port's, which closes it
  const Clock clock_;
  Timer timer_;
  Status cut_;  // why the handshake was cut off
  std::size_t received_ = 0;
  bool closed_by_peer_ = false;
};

}  // namespace tensorferry
