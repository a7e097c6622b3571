/// Ordered frames, and the bytes of buffers behind them, over one connected socket.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "agent/wire/frame.h"
#include "channels/buffer.h"
#include "channels/bytes.h"
#include "channels/file_descriptor.h"
#include "channels/status.h"

namespace tensorferry {

class FrameStream;

/// What a stream reads goes here: on the reading thread, under no lock.
class FrameSink {
 public:
  enum class Taken : std::uint8_t { yes, hold };  // hold: present the frame again at the next read_some

  /// `body` is valid until the return. For the `header.trailing` bytes behind the frame it may call `stream.read`
  /// before it returns; what it does not ask for is dropped. An error closes the stream.
  virtual Result<Taken> on_frame(FrameStream& stream, const wire::Header& header, ByteView body,
                                 Descriptors descriptors) = 0;

 protected:
  ~FrameSink() = default;
};

/// Writing: any thread. Reading: one thread at a time, the one whose begin_read() said true.
/// What is handed over (parts to send, destinations to read into) is completed exactly once, with the error of close()
/// where the stream ended first. The descriptor is closed by the destructor, so it is never reused under a reader.
class FrameStream final {
 public:
  enum class Use : std::uint8_t { calls, bulk };  // bulk: never reads past a frame, so that buffers are read in place

  struct Part {
    Buffer buffer;
    Completion written;
  };

  FrameStream(FileDescriptor fd, bool local, Use use);
  ~FrameStream();
  FrameStream(const FrameStream&) = delete;
  FrameStream& operator=(const FrameStream&) = delete;

  /// Queues a frame and the buffers behind it, and writes what the socket takes if `flush` or much is queued. False:
  /// something is left unwritten that no later send will write for certain: see write_some(). After close() the parts
  /// complete with its error.
  bool send(Bytes frame, std::vector<Part> trailing, Descriptors descriptors, bool flush);
  /// Writes what the socket takes now. True: nothing is left.
  bool write_some();
  /// Frames wait in the queue because a sender did not flush.
  [[nodiscard]] bool corked() const noexcept { return unwritten_.load(std::memory_order_relaxed) != 0; }

  bool begin_read() noexcept;
  void end_read() noexcept;
  /// A thread has the right to read. For descriptions: it may change at once.
  [[nodiscard]] bool being_read() const noexcept { return reading_.load(std::memory_order_relaxed); }

  enum class Progress : std::uint8_t { some, none, held, closed };
  /// At most one receive from the socket, which does not block, and everything that it completes.
  Progress read_some(FrameSink& sink);
  /// Inside on_frame: the next `destination.bytes` behind the frame go to `destination.data` (null: dropped).
  void read(Buffer destination, Completion landed);
  /// Inside on_frame: bytes behind the frame that nobody has asked for.
  [[nodiscard]] std::uint64_t unclaimed() const noexcept { return unclaimed_; }

  /// Ends both directions; the first status stays. Any thread; completes what nobody is reading or writing.
  void close(Status status);
  [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }
  [[nodiscard]] Status status() const;

  [[nodiscard]] int fd() const noexcept { return fd_.get(); }
  /// A unix socket: the peer is on this host and descriptors can travel.
  [[nodiscard]] bool local() const noexcept { return local_; }

 private:
  struct Outgoing {
    Bytes bytes;
    std::size_t done = 0;
    std::vector<Part> parts;
    std::size_t part = 0;  // the first one not wholly written
    std::size_t part_done = 0;
    Descriptors descriptors;
  };
  struct Incoming {
    Buffer destination;
    std::size_t done = 0;
    Completion landed;
  };

  struct Written;
  static void complete(std::vector<Written>& written);
  bool write_queue(std::vector<Written>& written);
  void advance(std::size_t bytes, std::vector<Written>& written);
  std::ptrdiff_t receive();
  std::optional<Progress> parse(FrameSink& sink);
  bool fill_behind();
  void land(std::size_t bytes);
  void fail_reads();

  const FileDescriptor fd_;
  const bool local_;
  const Use use_;

  mutable std::mutex write_mutex_;
  std::deque<Outgoing> queue_;
  std::atomic<std::size_t> unwritten_{0};  // bytes in queue_
  Status status_;                          // under write_mutex_

  std::atomic<bool> closed_{false};
  std::atomic<bool> reading_{false};

  // The reader's.
  std::unique_ptr<std::byte[]> in_;
  std::size_t begin_ = 0, end_ = 0;
  std::deque<Incoming> behind_;
  std::uint64_t unclaimed_ = 0;  // of the current frame's trailing bytes, those not asked for: dropped after behind_
  std::vector<FileDescriptor> descriptors_;
};

}  // namespace tensorferry
