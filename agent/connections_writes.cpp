// The rest of what a link's connections write when a socket was full.
#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <boost/asio/posix/stream_descriptor.hpp>
#include <boost/asio/post.hpp>
#include <memory>
#include <mutex>
#include <utility>

#include "agent/connections.h"
#include "agent/engine.h"
#include "agent/link.h"
#include "agent/transport/long_slice.h"

namespace tensorferry {
namespace {

/// How long a thread waits for a peer that does not read, before the reactor does.
constexpr Milliseconds patience_of_a_thread(20);

}  // namespace

void Connections::finish_writes(const Stream& stream) {
  {
    const std::lock_guard lock(mutex_);
    if (std::find(writing_.begin(), writing_.end(), stream) != writing_.end()) return;
    writing_.push_back(stream);
  }
  write_rest(stream);
}

/// Writes a stream in writing_ on a pool thread. While the peer reads, the thread waits for it, because waking another
/// one would cost a fast transfer more. A peer that reads nothing keeps no thread: the reactor waits for it.
void Connections::write_rest(const Stream& stream) {
  link_.engine().pool->submit_long([this, link = link_.shared_from_this(), stream] {
    const LongSlice slice;
    const auto& engine = link->engine();
    do {
      while (!stream->closed() && !stream->write_some()) {
        const bool many = engine.pool->threads() / 2 > engine.options.max_threads;
        pollfd writable{stream->fd(), POLLOUT, 0};
        if (::poll(&writable, 1, many ? 0 : static_cast<int>(patience_of_a_thread.count())) != 0) continue;
        if (write_when_writable(stream)) return;
        ::poll(&writable, 1, 1000);
      }
    } while (go_on_writing(stream, nullptr) != NextBuffer::none);
  });
}

/// Lets the reactor wait until the socket has room or has ended; write_rest() then goes on. False: no descriptor is
/// left to wait with.
bool Connections::write_when_writable(const Stream& stream) {
  FileDescriptor again(::fcntl(stream->fd(), F_DUPFD_CLOEXEC, 0));
  if (!again) return false;
  auto& context = link_.engine().reactor->context();
  const auto waiting = std::make_shared<boost::asio::posix::stream_descriptor>(context);
  boost::asio::post(context, [waiting, stream, link = std::weak_ptr(link_.shared_from_this()),
                              fd = std::make_shared<FileDescriptor>(std::move(again))] {
    boost::system::error_code error;
    waiting->assign(fd->release(), error);
    waiting->async_wait(boost::asio::posix::stream_descriptor::wait_write,
                        [waiting, stream, link](const boost::system::error_code&) {
                          if (const auto held = link.lock()) held->connections().write_rest(stream);
                        });
  });
  return true;
}

}  // namespace tensorferry
