#include "agent/transport/frame_stream.h"

#include <poll.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "agent/transport/socket_port.h"
#include "base/log.h"
#include "base/out_of_memory.h"
#include "channels/completion.h"

namespace tensorferry {
namespace {

constexpr std::size_t input_bytes = 2 * (wire::Header::max_length + wire::Header::size);
constexpr std::size_t cork_bytes = 32 * 1024;  // from so many queued bytes on, send() writes without `flush`
constexpr std::size_t max_iovecs = 64;
constexpr std::size_t slice_bytes = std::size_t{1} << 20;  // written in one system call, while senders wait
constexpr int most_yields = 1000;                          // until the senders that wait have queued their frames
constexpr std::size_t low_water_bytes = std::size_t{256} << 10;
constexpr std::size_t max_descriptors = 64;  // received, and not yet claimed by a frame; more are closed

}  // namespace

void FrameStream::complete_all(std::vector<Written>& written) {
  for (auto& part : written) {
    part.owner.reset();
    complete(std::move(part.written), {});
  }
}

FrameStream::FrameStream(std::unique_ptr<StreamPort> port, Use use) : port_(std::move(port)), use_(use) {
  read_.in.reset(new std::byte[input_bytes]);
}

FrameStream::FrameStream(FileDescriptor socket, bool local, Use use)
    : FrameStream(std::make_unique<SocketPort>(std::move(socket), local), use) {}

FrameStream::~FrameStream() {
  out_of_memory::with_reserve([this] { close({Code::connection_lost, "the connection was dropped"}); });
}

bool FrameStream::send(Bytes frame, std::vector<Part> trailing, Descriptors descriptors, bool flush,
                       std::vector<Written>* apart) {
  std::vector<Written> here;
  auto& written = apart != nullptr ? *apart : here;
  std::vector<Part> unsent;
  Status failed;
  bool done = true;
  bool write_now = false;
  senders_.fetch_add(1, std::memory_order_relaxed);
  {
    const std::lock_guard lock(write_mutex_);
    senders_.fetch_sub(1, std::memory_order_relaxed);
    if (!status_.ok()) {
      failed = status_;
      unsent = std::move(trailing);
    } else {
      enqueue(std::move(frame), std::move(trailing), std::move(descriptors));
      write_now = flush || unwritten_ >= cork_bytes;
    }
  }
  if (write_now) done = write(written, apart == nullptr);
  complete_all(here);
  for (auto& part : unsent) complete(std::move(part.written), failed);
  return done;
}

void FrameStream::queue(Bytes frame, Descriptors descriptors) {
  const std::lock_guard lock(write_mutex_);
  if (status_.ok()) enqueue(std::move(frame), {}, std::move(descriptors));
}

/// Under write_mutex_.
void FrameStream::enqueue(Bytes&& frame, std::vector<Part>&& trailing, Descriptors&& descriptors) {
  auto bytes = frame.size();
  for (const auto& part : trailing) bytes += part.buffer.bytes;
  const bool alone = trailing.empty() && descriptors.empty();
  if (alone && !queue_.empty() && queue_.back().parts.empty() && queue_.back().bytes.size() < cork_bytes) {
    queue_.back().bytes.insert(queue_.back().bytes.end(), frame.begin(), frame.end());
  } else {
    auto& out = queue_.emplace_back();  // first: without memory the parts must not end under this lock
    out.bytes = std::move(frame);
    out.parts = std::move(trailing);
    out.descriptors = std::move(descriptors);
  }
  unwritten_ += bytes;
}

bool FrameStream::write_some(std::vector<Written>* apart) {
  std::vector<Written> here;
  auto& written = apart != nullptr ? *apart : here;
  const bool done = write(written, apart == nullptr);
  complete_all(here);
  return done;
}

/// Writes the queue until the socket is full; returns false then. If `here`, completes what is written on the way.
bool FrameStream::write(std::vector<Written>& written, bool here) {
  while (true) {
    auto wrote = Wrote::all;
    {
      const std::lock_guard lock(write_mutex_);
      if (status_.ok()) wrote = write_once(written);
    }
    if (wrote != Wrote::some) return wrote == Wrote::all;
    if (here) {
      complete_all(written);
      written.clear();
    }
    let_others_queue();
  }
}

/// Waits until the threads that want to queue a frame have had the lock. A mutex alone would give it back to this
/// thread.
void FrameStream::let_others_queue() {
  for (int i = 0; i < most_yields && senders_.load(std::memory_order_relaxed) != 0; ++i) std::this_thread::yield();
}

/// Makes one system call, which writes at most `slice_bytes`. Under write_mutex_. After a socket error it writes no
/// more, and shuts the socket down, so that the reading thread closes the stream.
FrameStream::Wrote FrameStream::write_once(std::vector<Written>& written) {
  if (broken_ || queue_.empty()) return Wrote::all;
  std::array<iovec, max_iovecs> iov{};
  std::size_t count = 0;
  std::size_t room = slice_bytes;
  const auto add = [&](std::byte* data, std::size_t bytes) {
    bytes = std::min(bytes, room);
    room -= bytes;
    if (bytes != 0 && count < iov.size()) iov[count++] = {data, bytes};
  };
  std::span<const FileDescriptor> descriptors;
  for (auto& out : queue_) {
    const bool first = &out == &queue_.front();
    // Descriptors go with the first byte of their own frame, so that the receiver knows which frame they belong to.
    if (!first && !out.descriptors.empty()) break;
    if (first && out.done == 0) descriptors = out.descriptors;
    add(out.bytes.data() + out.done, out.bytes.size() - out.done);
    for (auto part = out.part; part < out.parts.size(); ++part) {
      const auto skip = part == out.part ? out.part_done : 0;
      add(out.parts[part].buffer.data + skip, out.parts[part].buffer.bytes - skip);
    }
    if (count == iov.size() || room == 0) break;
  }
  const auto sent = count == 0 ? 0 : port_->write({iov.data(), count}, descriptors);
  if (sent < 0) {
    if (errno == EINTR) return Wrote::some;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Wrote::full;
    if (errno == EFAULT)
      log_warning("the memory of a buffer was unmapped before the buffer was sent: the connection is closed");
    break_off();
    return Wrote::all;
  }
  advance(static_cast<std::size_t>(sent), written);
  return queue_.empty() ? Wrote::all : Wrote::some;
}

void FrameStream::advance(std::size_t bytes, std::vector<Written>& written) {
  unwritten_ -= bytes;
  while (!queue_.empty()) {
    auto& out = queue_.front();
    const auto head = std::min(bytes, out.bytes.size() - out.done);
    out.done += head;
    bytes -= head;
    if (out.done < out.bytes.size()) return;
    out.descriptors.clear();
    for (; out.part < out.parts.size(); ++out.part, out.part_done = 0) {
      auto& part = out.parts[out.part];
      const auto some = std::min(bytes, part.buffer.bytes - out.part_done);
      out.part_done += some;
      bytes -= some;
      if (out.part_done < part.buffer.bytes) return;
      written.push_back({std::move(part.written), std::move(part.buffer.owner)});
    }
    queue_.pop_front();
  }
}

bool FrameStream::begin_read() noexcept { return !reading_.exchange(true, std::memory_order_seq_cst); }

void FrameStream::end_read() noexcept {
  if (closed_.load(std::memory_order_acquire)) fail_reads();
  reading_.store(false, std::memory_order_seq_cst);
  // A close() between the two lines above found a reader and left the destinations to it.
  if (closed_.load(std::memory_order_seq_cst) && begin_read()) {
    fail_reads();
    reading_.store(false, std::memory_order_release);
  }
}

FrameStream::Progress FrameStream::read_some(FrameSink& sink) try {
  if (closed()) return Progress::closed;
  if (const auto held = parse(sink)) return *held;  // bytes that were received before a hold
  const auto got = receive();
  if (got < 0) {
    if (errno == EINTR) return Progress::some;  // bytes may wait in the socket, and no event will tell
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Progress::none;
    const std::string why = std::strerror(errno);
    const auto known = port_->failure();
    close({Code::connection_lost, "receiving failed: " + (known.ok() ? why : std::string(known.what()))});
    return Progress::closed;
  }
  if (got == 0) {
    const bool between = read_.begin == read_.end && read_.behind.empty() && read_.unclaimed == 0;
    close({Code::connection_lost,
           between ? "the peer closed the connection" : "the peer closed the connection in the middle of a frame"});
    return Progress::closed;
  }
  if (const auto ended = parse(sink)) return *ended;
  return Progress::some;
} catch (const std::bad_alloc&) {  // a part of a frame may have been handled, so the stream cannot go on
  out_of_memory::release_reserve();
  out_of_memory::with_reserve([this] { close(out_of_memory::status()); });
  return Progress::closed;
}

/// Lets the kernel report the socket as readable only when enough bytes of the first destination have come: for a large
/// buffer, a wake-up per packet would cost more than reading it. A unix socket has no such mark.
void FrameStream::set_low_water_mark() {
  if (local() || use_ != Use::bulk) return;
  const auto left = read_.behind.empty() ? 1 : read_.behind.front().destination.bytes - read_.behind.front().done;
  const auto mark = static_cast<int>(std::clamp<std::size_t>(left, 1, low_water_bytes));
  if (mark != std::exchange(read_.low_water_mark, mark)) port_->set_low_water_mark(mark);
}

bool FrameStream::wait_readable(std::chrono::milliseconds patience) {
  set_low_water_mark();
  pollfd readable{fd(), POLLIN, 0};
  return ::poll(&readable, 1, static_cast<int>(patience.count())) > 0;
}

/// Reads once. Bytes behind a frame go to the destinations first; bytes after them go to the input buffer.
std::ptrdiff_t FrameStream::receive() {
  std::array<iovec, max_iovecs> iov{};
  std::size_t count = 0;
  std::size_t direct = 0;
  for (auto it = read_.behind.begin(); it != read_.behind.end() && count < iov.size() - 1; ++it) {
    if (it->destination.data == nullptr) break;  // these bytes go to the input buffer and are dropped there
    iov[count++] = {it->destination.data + it->done, it->destination.bytes - it->done};
    direct += it->destination.bytes - it->done;
  }
  if (read_.begin == read_.end) read_.begin = read_.end = 0;
  if (read_.begin != 0 && read_.end == input_bytes) {
    std::memmove(read_.in.get(), read_.in.get() + read_.begin, read_.end - read_.begin);
    read_.end -= read_.begin;
    read_.begin = 0;
  }
  std::size_t room = input_bytes - read_.end;
  if (use_ == Use::bulk) {
    const bool dropping = !read_.behind.empty() && read_.behind.front().destination.data == nullptr;
    const auto dropped =
        dropping ? read_.behind.front().destination.bytes - read_.behind.front().done : read_.unclaimed;
    if (direct != 0)
      room = 0;
    else if (dropped != 0)
      room = std::min<std::size_t>(room, dropped);
    else
      room = wire::Header::size - (read_.end - read_.begin);
  }
  if (room != 0) iov[count++] = {read_.in.get() + read_.end, room};

  const auto got = port_->read({iov.data(), count}, read_.descriptors, max_descriptors);
  if (got <= 0) return got;
  const auto straight = std::min(static_cast<std::size_t>(got), direct);
  read_.end += static_cast<std::size_t>(got) - straight;
  land(straight);
  return got;
}

/// Counts `bytes` more bytes as arrived in the destinations, and completes those that are full.
void FrameStream::land(std::size_t bytes) {
  while (!read_.behind.empty()) {
    auto& front = read_.behind.front();
    const auto some = std::min(bytes, front.destination.bytes - front.done);
    front.done += some;
    bytes -= some;
    if (front.done < front.destination.bytes) return;
    auto landed = std::move(front.landed);
    read_.behind.pop_front();
    complete(std::move(landed), {});
  }
}

/// Moves buffered bytes to their destinations and drops unclaimed ones. Returns true if the next byte begins a frame.
bool FrameStream::fill_behind() {
  while (!read_.behind.empty()) {
    auto& front = read_.behind.front();
    const auto some = std::min(read_.end - read_.begin, front.destination.bytes - front.done);
    if (some != 0 && front.destination.data != nullptr) {
      std::memcpy(front.destination.data + front.done, read_.in.get() + read_.begin, some);
    }
    read_.begin += some;
    const bool whole = front.done + some == front.destination.bytes;
    land(some);
    if (!whole) return false;
  }
  const auto dropped = std::min<std::uint64_t>(read_.end - read_.begin, read_.unclaimed);
  read_.begin += dropped;
  read_.unclaimed -= dropped;
  return read_.unclaimed == 0;
}

/// Passes every complete frame in the input buffer to `sink`. Returns a value if read_some() must return it.
std::optional<FrameStream::Progress> FrameStream::parse(FrameSink& sink) {
  while (!closed()) {
    if (!fill_behind()) return std::nullopt;
    const ByteView bytes(read_.in.get() + read_.begin, read_.end - read_.begin);
    if (bytes.size() < wire::Header::size) return std::nullopt;
    const auto header = wire::Header::decode(bytes.first(wire::Header::size));
    Status error = header.status();
    if (error.ok() && header->length > bytes.size() - wire::Header::size) {
      if (use_ == Use::calls) {
        // The whole frame must fit between its begin and the end of the buffer.
        if (read_.begin + wire::Header::size + header->length > input_bytes) {
          std::memmove(read_.in.get(), read_.in.get() + read_.begin, bytes.size());
          read_.begin = 0;
          read_.end = bytes.size();
        }
        return std::nullopt;
      }
      error = {Code::protocol_error, "malformed frame: it has a body on a bulk connection"};
    }
    const bool dropped =
        error.ok() && header->descriptors > 0 && !read_.descriptors.empty() && !read_.descriptors.front();
    if (error.ok() && !dropped && header->descriptors > read_.descriptors.size()) {
      error = {Code::protocol_error, "malformed frame: it names file descriptors that did not arrive"};
    }
    if (error.ok()) {
      Descriptors descriptors;
      const std::ptrdiff_t taken_ones = dropped ? 1 : header->descriptors;
      for (std::ptrdiff_t i = 0; i < taken_ones && !dropped; ++i)
        descriptors.push_back(std::move(read_.descriptors[static_cast<std::size_t>(i)]));
      read_.descriptors.erase(read_.descriptors.begin(), read_.descriptors.begin() + taken_ones);
      read_.unclaimed = header->trailing;
      const auto taken =
          sink.on_frame(*this, *header, bytes.subspan(wire::Header::size, header->length), std::move(descriptors));
      if (taken.ok()) {
        if (*taken == FrameSink::Taken::hold) {
          read_.unclaimed = 0;
          return Progress::held;
        }
        read_.begin += wire::Header::size + header->length;
        continue;
      }
      error = taken.status();
    }
    close(error);
    return Progress::closed;
  }
  return Progress::closed;
}

void FrameStream::read(Buffer destination, Completion landed) {
  if (destination.bytes > read_.unclaimed) {
    read_.unclaimed = 0;
    return complete(std::move(landed), {Code::protocol_error, "fewer bytes follow the frame than its buffers have"});
  }
  read_.unclaimed -= destination.bytes;
  read_.behind.push_back({std::move(destination), 0, std::move(landed)});
}

void FrameStream::close(Status status) {
  std::deque<Outgoing> unsent;
  Status why;
  {
    const std::lock_guard lock(write_mutex_);
    if (!status_.ok()) return;
    why = status_ = std::move(status);
    unsent.swap(queue_);
    unwritten_ = 0;
    closed_.store(true, std::memory_order_seq_cst);  // before begin_read() below: see end_read()
  }
  port_->shutdown();
  for (auto& out : unsent) {
    for (; out.part < out.parts.size(); ++out.part) {
      complete(std::move(out.parts[out.part].written), why);
    }
  }
  // If a thread reads (perhaps this one, further up its stack), it finds closed_ in end_read().
  if (begin_read()) end_read();
}

void FrameStream::fail_reads() {
  const auto why = status();
  while (!read_.behind.empty()) {
    auto landed = std::move(read_.behind.front().landed);
    read_.behind.pop_front();
    complete(std::move(landed), why);
  }
}

Status FrameStream::status() const {
  const std::lock_guard lock(write_mutex_);
  return status_;
}

}  // namespace tensorferry
