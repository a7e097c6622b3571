#include "agent/handshake/handshake_io.h"

#include <boost/asio/redirect_error.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace tensorferry {

namespace asio = boost::asio;
using Direction = asio::posix::stream_descriptor;

HandshakeIo::HandshakeIo(asio::io_context& context, const Clock& clock, std::unique_ptr<StreamPort> port)
    : port_(std::move(port)), descriptor_(context, port_->descriptor()), clock_(clock), timer_(context, clock) {}

HandshakeIo::~HandshakeIo() {
  if (port_) (void)descriptor_.release();
}

void HandshakeIo::set_deadline(Clock::time_point at) {
  timer_.call_at(at, [this] {
    cut_ = {Code::deadline_exceeded, "the peer did not answer in time"};
    descriptor_.cancel();
  });
}

void HandshakeIo::cut() {
  cut_ = {Code::connection_lost, "the handshake was cut off"};
  if (port_) descriptor_.cancel();
}

asio::awaitable<void> HandshakeIo::wait(Direction::wait_type direction) {
  boost::system::error_code cancelled;
  co_await descriptor_.async_wait(direction, asio::redirect_error(asio::use_awaitable, cancelled));
}

Status HandshakeIo::failure(const char* doing) const {
  const Status by_errno(Code::connection_lost, std::string(doing) + ": " + std::strerror(errno));
  const auto known = port_->failure();
  return known.ok() ? by_errno : known;
}

asio::awaitable<Status> HandshakeIo::readable() {
  if (cut_.ok()) co_await wait(Direction::wait_read);
  co_return cut_;
}

asio::awaitable<Status> HandshakeIo::secure(TlsPort& tls) {
  for (;;) {
    if (!cut_.ok()) co_return cut_;
    const auto awaits = tls.advance();
    if (awaits == TlsPort::Awaits::nothing) co_return tls.failure();
    co_await wait(awaits == TlsPort::Awaits::readable ? Direction::wait_read : Direction::wait_write);
  }
}

asio::awaitable<Status> HandshakeIo::read_exactly(std::span<std::byte> into) {
  while (!into.empty()) {
    if (!cut_.ok()) co_return cut_;
    iovec part{into.data(), into.size()};
    Descriptors none;
    const auto got = port_->read({&part, 1}, none, 0);
    if (got > 0) {
      received_ += static_cast<std::size_t>(got);
      into = into.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      closed_by_peer_ = true;
      co_return Status(Code::connection_lost, "the peer closed the connection");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      co_await wait(Direction::wait_read);
    } else if (errno != EINTR) {
      co_return failure("reading");
    }
  }
  co_return Status();
}

asio::awaitable<Status> HandshakeIo::write_all(ByteView bytes) {
  while (!bytes.empty()) {
    if (!cut_.ok()) co_return cut_;
    iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
    const auto put = port_->write({&part, 1}, {});
    if (put >= 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(put));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      co_await wait(Direction::wait_write);
    } else if (errno != EINTR) {
      co_return failure("writing");
    }
  }
  co_return Status();
}

std::unique_ptr<StreamPort> HandshakeIo::take_port() {
  timer_.cancel();
  (void)descriptor_.release();
  return std::move(port_);
}

}  // namespace tensorferry
