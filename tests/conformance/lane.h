/// One end of a socket that carries records and the bytes of buffers behind them, for tests.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "channels/buffer.h"
#include "channels/bytes.h"
#include "channels/channel.h"
#include "channels/file_descriptor.h"

namespace tensorferry::conformance {

/// A thread of its own writes what is queued, in order; another one reads. Both block, so bytes wait in a real socket
/// for a reader that is slow. After `end` (or when the other end is gone) queued parts complete with an error.
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

  /// Begins to write, and to call `read_record` on the reading thread until it says false; then runs `ended` there.
  void start(std::function<bool()> read_record, std::function<void()> ended);

  /// Never waits. After the end the parts complete at once, inside.
  void send(Record record);

  /// The reading thread alone. False, nullopt: the lane has ended. `to` null: drops.
  std::optional<std::pair<Bytes, Descriptors>> read_head();
  bool read(std::byte* to, std::size_t bytes);

  /// From now on the reader takes at most `bytes` at once and sleeps between.
  void slow_down(std::size_t bytes, std::chrono::microseconds pause);
  /// The reader stops after `bytes` more bytes of buffers, until `resume` or the end.
  void hold_after(std::size_t bytes);
  /// Whether it has stopped there.
  bool held();
  void resume();

  /// No further bytes from this end; what the other end sends is still read.
  void end_writing();
  /// Ends both directions: any thread, returns at once.
  void end();
  /// Waits until the lane has ended, for whatever reason. False after too long.
  bool wait_ended();
  /// Waits for both threads. Not from one of them.
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
  std::optional<std::size_t> left_;  // until the reader holds
  bool held_ = false;
  std::thread writer_, reader_;
};

}  // namespace tensorferry::conformance
