/// The descriptors that the leader of a pool watches, each with its reader.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "base/file_descriptor.h"

namespace tensorferry {

/// The reader of one descriptor in the pool's epoll set. The leader calls it. Its calls may overlap when the lead
/// changes, or when a blocking one is armed again before it has returned: implementations must allow that.
class Readable {
 public:
  virtual ~Readable() = default;
  /// Runs when the descriptor is readable or has ended. Reads the available bytes and submits jobs for them. Must not
  /// block unless it was added as Watch::blocking.
  virtual void on_readable() = 0;
};

/// Threads: the pool's mutex guards all functions.
class ReadableSet final {
 public:
  enum class Watch : std::uint8_t {
    always,    // level-triggered: reported until the bytes have been read; after disarm() only a full end is reported
    closing,   // edge-triggered: reported when the peer closes; between arm() and disarm() also when bytes come
    blocking,  // reported once per arm(), the first time armed by add(); a thread that does not lead runs on_readable,
               // which may therefore take long
  };
  struct Entry {
    std::shared_ptr<Readable> readable;
    Watch watch;
  };
  /// The descriptors that one wait() reports.
  struct Ready {
    std::array<int, 16> fds;
    std::size_t count = 0;
  };

  ReadableSet();

  /// Keeps `readable` until remove(). The descriptor must stay open until then.
  void add(int fd, std::shared_ptr<Readable> readable, Watch watch);
  /// Change what is reported; see Watch. Do nothing if the descriptor is not in the set.
  void arm(int fd);
  void disarm(int fd);
  /// Returns the reader; null: the descriptor is not in the set. The caller drops it after it has released the mutex,
  /// because it may be the last reference.
  std::shared_ptr<Readable> remove(int fd);
  /// Returns the entry of a descriptor; null: it has been removed. Valid until the set changes.
  [[nodiscard]] const Entry* find(int fd) const;

  /// Sleeps until descriptors are ready or another thread interrupts. Releases `lock`, which holds the pool's mutex,
  /// meanwhile. One thread at a time.
  Ready wait(std::unique_lock<std::mutex>& lock);
  /// Returns the descriptors that are ready now.
  Ready poll();
  /// Returns whether a thread is inside wait().
  [[nodiscard]] bool waits() const noexcept { return waits_; }
  /// Wakes the thread inside wait(), or the next one. After close() does nothing.
  void interrupt();

  /// Removes all entries and hands them out; the caller drops them as for remove().
  std::unordered_map<int, Entry> clear();
  /// Closes the descriptors of the set itself. No thread may be inside wait().
  void close();

 private:
  void watch(int fd, Watch kind, bool armed, bool fresh);
  Ready ready(int timeout) const;

  FileDescriptor epoll_;
  FileDescriptor wake_;  // eventfd in the epoll set
  std::unordered_map<int, Entry> entries_;
  bool waits_ = false;
};

}  // namespace tensorferry
