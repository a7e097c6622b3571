/// A session: one incarnation of a peer, from the first connection until it is dead. Links come and go under it: when a
/// link is lost, Peers::lost makes another one, which dials until the peer answers.
///
/// States, drawn in docs/architecture.md: *linked* (a link has a connection), *lost* (the last link has ended, and the
/// next one dials), *dead* (final). A peer is dead when its process has ended, its record has left the store or names
/// another incarnation, or RawAgentOptions::peer_timeout has passed without contact. Until then its holds on this
/// agent's objects stay.
///
/// Threads: any.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "agent/message.h"
#include "agent/rendezvous/record.h"
#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"

namespace tensorferry {

/// What ends with a link: its connections alone, or the peer.
enum class Loss : std::uint8_t { connection, peer };

/// Returns ConnectionLost: the process of that pid (0: not known) on that host has ended.
Status process_has_ended(std::int32_t pid, const std::string& host);

class Session final {
 public:
  explicit Session(PeerInfo peer, Clock clock = {}) : peer_(std::move(peer)), clock_(std::move(clock)) { heard(); }

  [[nodiscard]] const PeerInfo& peer() const noexcept { return peer_; }

  /// Notes a sign of life: bytes have arrived, or bytes that wait to be sent have gone.
  void heard() noexcept { last_heard_.store(clock_.now().time_since_epoch().count(), std::memory_order_relaxed); }
  [[nodiscard]] Clock::time_point last_heard() const noexcept {
    return Clock::time_point(Clock::duration(last_heard_.load(std::memory_order_relaxed)));
  }

  /// Keeps the descriptor of the peer's process on this host, and its pid here (0: not known). Returns the descriptor's
  /// number, or -1 if one is known already.
  int watch(FileDescriptor process, std::int32_t pid);
  /// Returns the number of that descriptor, which stays open as long as the session; -1: none is known.
  [[nodiscard]] int process() const;
  /// Returns the pid of that process here, as the kernel tells; 0: not known.
  [[nodiscard]] std::int32_t pid() const;
  /// Returns whether the peer's process is known to have ended. Waits up to `patience` for that: the kernel closes the
  /// connections of a process shortly before it reports the end.
  [[nodiscard]] bool process_ended(Milliseconds patience = Milliseconds(0)) const;
  /// Returns the error of a peer whose process has ended. `host`: that of this agent.
  [[nodiscard]] Status end_of_process(const std::string& host) const;

  /// Keeps the peer's addresses, so that the next dial needs no store.
  void set_record(const Record& record);
  [[nodiscard]] std::optional<Record> record() const;

  /// Notes that a connection for calls is in use, by its number; see wire::Hello::connection. False: one with a greater
  /// number has been, so this one is given up already.
  bool use_connection(std::uint64_t number);
  /// Returns the number of the last one; 0: there was none.
  [[nodiscard]] std::uint64_t connection() const;

  /// Marks the peer as dead. True for the first caller, who reports it.
  bool mark_dead() noexcept { return !dead_.exchange(true); }
  [[nodiscard]] bool dead() const noexcept { return dead_.load(); }

 private:
  const PeerInfo peer_;
  const Clock clock_;
  std::atomic<Clock::rep> last_heard_{0};
  std::atomic<bool> dead_{false};
  mutable Mutex mutex_;  // guards the next four
  FileDescriptor process_;
  std::int32_t pid_ = 0;
  std::optional<Record> record_;
  std::uint64_t connection_ = 0;
};

}  // namespace tensorferry
