/// One connection of the hostile peer, by a unix socket or TCP.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/hostile/wire.h"

namespace hostile {

/// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;
};

/// Used by one thread. Every wait ends after five seconds, a write after half a second, and the connection with it.
class Connection {
 public:
  /// Connects to "@name", "/path" or "host:port". Returns a connection that has ended if this fails.
  static Connection dial(const std::string& address);

  /// Gives the proof of the key, and asks for the other side's. Returns whether that was right.
  bool handshake(std::string_view key, std::string_view random_bytes);

  /// Writes all bytes; the descriptors go with the first one. Returns false if the connection has ended.
  bool write(std::string_view bytes, const std::vector<int>& descriptors = {});

  struct Incoming {
    Header header;
    std::string body;
    std::vector<Descriptor> descriptors;
  };
  /// Returns the next frame, for which it waits up to `limit`. Drops the bytes of buffers.
  std::optional<Incoming> read(std::chrono::milliseconds limit);

  [[nodiscard]] bool ended() const { return ended_; }
  [[nodiscard]] bool by_unix_socket() const { return unix_; }

 private:
  bool fill(std::chrono::milliseconds limit);
  std::optional<std::string> exactly(std::size_t bytes);

  Descriptor socket_;
  bool unix_ = false, ended_ = false;
  std::string buffered_;
  std::uint64_t to_drop_ = 0;  // bytes of buffers behind the last frame
  std::deque<Descriptor> received_;
};

}  // namespace hostile
