/// Sends and receives ordered frames, and the bytes of buffers behind them, over one connection.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "agent/transport/port.h"
#include "agent/wire/frame.h"
#include "base/bytes.h"
#include "base/file_descriptor.h"
#include "base/function.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channels/buffer.h"

namespace tensorferry {

class FrameStream;

/// Receives the frames that a stream reads: on the reading thread, under no lock.
class FrameSink {
 public:
  enum class Taken : std::uint8_t { yes, hold };  // hold: the stream passes the frame again at the next read_some

  /// Handles one frame. `body` is valid until the return. To receive some of the `header.trailing` bytes behind the
  /// frame, the sink calls `stream.read` before it returns; the stream drops the rest of them. An error closes the
  /// stream. The sink may hold a frame only if it has not called `stream.read` for it, and only if the frame carries no
  /// descriptors: the stream does not keep them.
  virtual Result<Taken> on_frame(FrameStream& stream, const wire::Header& header, ByteView body,
                                 Descriptors descriptors) = 0;

 protected:
  ~FrameSink() = default;
};

/// One end of a connection.
///
/// Threads: any thread may write. One thread at a time reads: the thread whose begin_read() returned true.
///
/// Completions: the stream completes each part to send and each destination to read into exactly once, under no lock.
/// If the stream closes first, they complete with the error of close(). A part completes on the thread that wrote its
/// last byte, or that called send() or close(). A destination completes on the reading thread, or on the thread that
/// called close() if no thread reads. A completion may be empty.
///
/// Ownership: the destructor closes the descriptor, so the number is never reused under a reader.
class FrameStream final {
 public:
  enum class Use : std::uint8_t { calls, bulk };  // bulk: never reads past a frame, so that buffers are read in place

  struct Part {
    Buffer buffer;
    Completion written;
  };
  /// A part whose bytes have been written. Its owner and its completion may take the program's locks (in Python, the
  /// GIL), so the stream drops them under none of its own locks.
  struct Written {
    Completion written;
    Owner owner;
  };
  static void complete_all(std::vector<Written>& written);

  FrameStream(std::unique_ptr<StreamPort> port, Use use);
  /// Over a socket; see SocketPort.
  FrameStream(FileDescriptor socket, bool local, Use use);
  ~FrameStream();
  FrameStream(const FrameStream&) = delete;
  FrameStream& operator=(const FrameStream&) = delete;

  /// Queues a frame and the buffers behind it. If `flush`, or if much is queued, also writes as much as the socket
  /// takes. Never blocks.
  ///
  /// Returns false if the socket is full: the caller must see to it that write_some() writes the rest, because no later
  /// send may come. After close() the parts complete with its error. `apart`: receives the written parts, which the
  /// caller completes on a thread that may wait for the program's locks; null: they complete here.
  bool send(Bytes frame, std::vector<Part> trailing, Descriptors descriptors, bool flush,
            std::vector<Written>* apart = nullptr);
  /// Queues a frame and writes nothing, so it runs no completion. The caller calls write_some() soon. After close() it
  /// drops the frame.
  void queue(Bytes frame, Descriptors descriptors);
  /// Writes as much of the queue as the socket takes now. Returns true if nothing is left, or if the socket has failed.
  /// `apart`: as for send(). Between two system calls it lets other threads queue their frames, so a sender waits for
  /// one system call at most.
  bool write_some(std::vector<Written>* apart = nullptr);
  /// Returns whether bytes wait in the queue for a socket that works: a sender did not flush, or the socket was full.
  [[nodiscard]] bool corked() const noexcept { return unwritten() != 0 && !broken_.load(std::memory_order_relaxed); }
  /// Returns how many bytes wait in the queue.
  [[nodiscard]] std::size_t unwritten() const noexcept { return unwritten_.load(std::memory_order_relaxed); }

  /// Takes the right to read. Returns false if another thread has it.
  bool begin_read() noexcept;
  /// Gives up the right to read. If the stream is closed, first completes the destinations that are left.
  void end_read() noexcept;
  /// Returns whether a thread has the right to read. The answer may be outdated at once.
  [[nodiscard]] bool being_read() const noexcept { return reading_.load(std::memory_order_relaxed); }

  /// some: the caller should read again; none: the socket is empty; held: the sink held a frame.
  enum class Progress : std::uint8_t { some, none, held, closed };
  /// Receives at most once from the socket, without blocking, and passes every complete frame to `sink`.
  Progress read_some(FrameSink& sink);
  /// Sleeps until there is something to read, or until `patience` has passed; true: read again. Only for the thread
  /// that has the right to read. Over TCP, the kernel wakes the thread once for many bytes of a buffer that is on its
  /// way; until then (also in epoll) fewer bytes do not count as readable.
  bool wait_readable(std::chrono::milliseconds patience);
  /// Reads the next `destination.bytes` bytes behind the frame into `destination.data`, or drops them if it is null.
  /// Only inside on_frame. Completes with ProtocolError if fewer bytes stand behind the frame.
  void read(Buffer destination, Completion landed);
  /// Returns how many bytes behind the frame no read() has asked for. Only inside on_frame.
  [[nodiscard]] std::uint64_t unclaimed() const noexcept { return read_.unclaimed; }

  /// Ends both directions and completes the unsent parts. The first status stays; later calls do nothing. Any thread.
  /// If a thread is reading, that thread completes the destinations in its end_read().
  void close(Status status);
  /// Shuts the connection down, so that the thread that reads it, here and at the peer, closes it. Takes no memory and
  /// no lock.
  void break_off() noexcept {
    broken_ = true;
    port_->shutdown();
  }
  [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }
  /// Returns the status given to close(), or Ok before it.
  [[nodiscard]] Status status() const;

  [[nodiscard]] StreamPort& port() noexcept { return *port_; }
  [[nodiscard]] const StreamPort& port() const noexcept { return *port_; }
  [[nodiscard]] int fd() const noexcept { return port_->descriptor(); }
  /// Returns true for a unix socket: the peer is on this host, and the socket passes descriptors.
  [[nodiscard]] bool local() const noexcept { return port_->local(); }
  [[nodiscard]] Use use() const noexcept { return use_; }

 private:
  struct Outgoing {
    Bytes bytes;
    std::size_t done = 0;
    std::vector<Part> parts;
    std::size_t part = 0;  // the first part that is not wholly written
    std::size_t part_done = 0;
    Descriptors descriptors;
  };
  struct Incoming {
    Buffer destination;
    std::size_t done = 0;
    Completion landed;
  };

  enum class Wrote : std::uint8_t { all, some, full };  // some: the queue is not empty, and the socket may take more
  void enqueue(Bytes&& frame, std::vector<Part>&& trailing, Descriptors&& descriptors);
  bool write(std::vector<Written>& written, bool here);
  Wrote write_once(std::vector<Written>& written);
  void let_others_queue();
  void set_low_water_mark();
  void advance(std::size_t bytes, std::vector<Written>& written);
  std::ptrdiff_t receive();
  std::optional<Progress> parse(FrameSink& sink);
  bool fill_behind();
  void land(std::size_t bytes);
  void fail_reads();

  const std::unique_ptr<StreamPort> port_;
  const Use use_;

  mutable Mutex write_mutex_;
  std::deque<Outgoing> queue_;
  std::atomic<std::size_t> unwritten_{0};  // bytes in queue_
  Status status_;                          // under write_mutex_
  std::atomic<int> senders_{0};            // threads that want to queue a frame

  std::atomic<bool> broken_{false};  // writing has failed: the reading thread closes the stream
  std::atomic<bool> closed_{false};
  std::atomic<bool> reading_{false};

  /// Only for the thread that has the right to read.
  struct Reading {
    std::unique_ptr<std::byte[]> in;
    std::size_t begin = 0, end = 0;
    std::deque<Incoming> behind;
    std::uint64_t unclaimed = 0;  // trailing bytes of the frame that no read() asked for: dropped after `behind`
    std::vector<FileDescriptor> descriptors;  // an empty one stands for all of a frame, which the system has dropped
    int low_water_mark = 1;                   // SO_RCVLOWAT
  };
  Reading read_;
};

}  // namespace tensorferry
