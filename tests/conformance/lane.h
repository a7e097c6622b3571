/// One end of a test socket. It carries records, and the bytes of buffers behind them.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/bytes.h"
#include "base/file_descriptor.h"
#include "channels/buffer.h"
#include "channels/channel.h"

namespace tensorferry::conformance {

/// Writes queued records in order on one thread, and reads on another.
///
/// Both threads block, so bytes wait in a real socket if the reader is slow. After `end`, or when the other end has
/// closed, queued parts complete with an error. All functions but the two that read may be called on any thread.
class Lane {
 public:
  struct Part {
    Buffer buffer;
    Completion written;
  };
  struct Record {
    Bytes head;
    Descriptors descriptors = {};
    std::vector<Part> parts = {};
  };

  explicit Lane(FileDescriptor socket) : socket_(std::move(socket)) {}
  ~Lane();
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  /// Starts both threads. The reading thread calls `read_record` until it returns false, and then `ended`.
  void start(std::function<bool()> read_record, std::function<void()> ended);

  /// Queues a record. Never waits. After the end, the parts complete inside the call.
  void send(Record record);

  /// Read a record's head, and bytes behind it. Only the reading thread may call them. They return nullopt or false
  /// when the lane has ended. If `to` is null, `read` drops the bytes.
  std::optional<std::pair<Bytes, Descriptors>> read_head();
  bool read(std::byte* to, std::size_t bytes);

  /// Makes the reader take at most `bytes` bytes of buffers at once, and sleep for `pause` before each read.
  void slow_down(std::size_t bytes, std::chrono::microseconds pause);
  /// Stops the reader after `bytes` more bytes of buffers, until `resume` or the end.
  void hold_after(std::size_t bytes);
  /// Returns whether the reader has stopped there.
  bool held();
  void resume();

  /// Ends writing. This end still reads the bytes that the other end sends.
  void end_writing();
  /// Ends both directions. Any thread may call it; it returns at once.
  void end();
  /// Waits until the lane has ended, for any reason. Returns false if that takes longer than `patience`.
  bool wait_ended();
  /// Waits for both threads to exit. Neither of the two may call it.
  void join();

 private:
  void write_loop();
  bool write(const Record& record);
  bool write_all(const std::byte* data, std::size_t bytes);
  std::size_t allowed(std::size_t bytes);

  const FileDescriptor socket_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Record> queue_;
  bool ended_ = false;
  std::size_t chunk_ = 0;
  std::chrono::microseconds pause_{0};
  std::optional<std::size_t> left_;  // bytes that the reader takes before it stops; nullopt: no limit
  bool held_ = false;
  std::thread writer_, reader_;
};

}  // namespace tensorferry::conformance
