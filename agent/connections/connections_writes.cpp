// The rest of what a link's connections write when a socket was full.
#include <poll.h>

#include <algorithm>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <memory>
#include <mutex>
#include <utility>

#include "agent/connections/connections.h"
#include "agent/options.h"
#include "agent/pool/pool.h"
#include "agent/pool/reactor.h"
#include "agent/transport/long_slice.h"

namespace tensorferry {
namespace {

/// How long a thread stays at a full socket, in real time, before the reactor waits for it.
constexpr Milliseconds lingers_for(1);

}  // namespace

void Connections::finish_writes(const Stream& stream) {
  or_break_off(stream, [&] {
    {
      const std::lock_guard lock(mutex_);
      if (std::find(writing_.begin(), writing_.end(), stream) != writing_.end()) return;
      writing_.push_back(stream);
    }
    write_rest(stream);
  });
}

/// Writes a stream in writing_ on a pool thread, until the socket is full. While the peer reads, the thread stays for a
/// moment, because waking another one would cost a fast transfer more.
void Connections::write_rest(const Stream& stream) {
  or_break_off(stream, [&] {
    around_.pool.submit_long(
        [this, held = around_.link.hold(), stream] { or_break_off(stream, [&] { write_while_writable(stream); }); });
  });
}

void Connections::write_while_writable(const Stream& stream) {
  const LongSlice slice;
  do {
    while (!stream->closed() && !stream->write_some()) {
      const bool many =
          !around_.options.surroundings.threads || around_.pool.threads() / 2 > around_.options.max_threads;
      pollfd writable{stream->fd(), POLLOUT, 0};
      if (::poll(&writable, 1, many ? 0 : static_cast<int>(lingers_for.count())) == 0)
        return write_when_writable(stream);
    }
  } while (go_on_writing(stream, nullptr) != NextBuffer::none);
}

/// Lets the reactor wait until the socket has room or has ended; write_rest() then goes on.
void Connections::write_when_writable(const Stream& stream) {
  /// The stream's descriptor in the reactor, which does not close it.
  struct Waiting {
    Waiting(boost::asio::io_context& context, Stream of) : stream(std::move(of)), descriptor(context, stream->fd()) {}
    ~Waiting() { (void)descriptor.release(); }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    const Stream stream;
    boost::asio::posix::stream_descriptor descriptor;
  };
  auto& reactor = around_.reactor;
  const auto wait = [this, &reactor, stream, link = std::weak_ptr(around_.link.hold())] {
    const auto waiting = std::make_shared<Waiting>(reactor.context(), stream);
    waiting->descriptor.async_wait(boost::asio::posix::stream_descriptor::wait_write,
                                   [this, waiting, link](const boost::system::error_code& cancelled) {
                                     if (cancelled) return;
                                     const auto stream_of = waiting->stream;
                                     (void)waiting->descriptor.release();
                                     if (const auto held = link.lock()) write_rest(stream_of);
                                   });
  };
  reactor.post([wait, stream] { or_break_off(stream, wait); });
}

}  // namespace tensorferry
