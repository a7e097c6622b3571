/// A relay between the agents of one process. Each agent listens as usual, and its peers find the relay's address in
/// its record. The relay carries the bytes of every connection on, and applies faults to them that a seed decides.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "agent/store.h"
#include "base/bytes.h"
#include "base/file_descriptor.h"
#include "base/status.h"

namespace tensorferry::testing {

/// Faults of one direction of one connection. Different connections have different delays, so bytes of one overtake
/// those of another.
struct Faults {
  enum class End : std::uint8_t { none, close, reset, truncate };
  End end = End::none;
  std::size_t end_after = 0;          // bytes; `truncate` drops the rest of what came with them
  std::size_t largest_piece = 65536;  // bytes are carried on in pieces of up to this
  std::chrono::microseconds delay{0};
  std::size_t stall_after = 0;  // bytes; 0: no stall
  std::chrono::milliseconds stall{0};
};

/// Thread-safe. One thread carries all bytes.
class Relay final {
 public:
  explicit Relay(std::uint64_t seed);
  ~Relay();
  Relay(const Relay&) = delete;
  Relay& operator=(const Relay&) = delete;

  /// Listens for the connections to an agent at `address`, and returns the address to dial instead.
  std::string listen_for(const std::string& address);
  /// Applies no faults from now on, and carries everything on at once.
  void calm() { calm_ = true; }
  /// Ends all connections now.
  void end_connections() { end_all_ = true; }
  [[nodiscard]] std::size_t connections() const { return made_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct Listener {
    FileDescriptor socket;
    std::string target;
  };
  struct Piece {
    Clock::time_point due;
    Bytes bytes;
  };
  /// One direction: what was read from `from` and is due at `to`.
  struct Lane {
    int from = -1, to = -1;
    Faults faults;
    std::size_t carried = 0;
    std::deque<Piece> pieces;
    bool ended = false;  // `from` has ended
  };
  struct Carried {
    FileDescriptor dialler, acceptor;
    Lane lanes[2];
    bool over = false;
  };

  void run();
  void accept(const Listener& listener);
  Faults draw();
  void read(Lane& lane);
  bool write(Carried& connection, Lane& lane);
  static void reset(Carried& connection);
  [[nodiscard]] int milliseconds_to_wait() const;

  std::mt19937_64 random_;
  std::mutex mutex_;  // guards the next one
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::vector<std::unique_ptr<Carried>> connections_;  // used by the thread alone
  std::atomic<bool> calm_{false}, end_all_{false}, stop_{false};
  std::atomic<std::size_t> made_{0};
  std::thread thread_;
};

/// A store in memory that puts the relay's address into every record.
class RelayedStore final : public Store {
 public:
  explicit RelayedStore(Relay& relay);
  ~RelayedStore() override;
  Status set(std::string_view key, ByteView value) override;
  Result<Bytes> get(std::string_view key, std::chrono::milliseconds timeout) override;
  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override;
  [[nodiscard]] bool loopback() const override { return true; }

 private:
  Relay& relay_;
  std::unique_ptr<Store> store_;
};

}  // namespace tensorferry::testing
