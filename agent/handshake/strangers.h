/// The connections of a listener that have not proved themselves yet, and the places for them.
///
/// Strangers take their places fairly: if all are taken, the network address with the most places gives up its oldest
/// one. So strangers at one address, however many connections they open, push out their own connections alone, and a
/// newcomer always gets a place. A peer's handshake takes milliseconds, so its connection is seldom the oldest.
///
/// Threads: one, that of the listener.
#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

namespace tensorferry {

class Strangers final {
 public:
  /// A connection's place. `close` closes the connection; the place is free afterwards. It keeps no connection alive.
  struct Place {
    std::string from;
    std::function<void()> close;
  };
  using Held = std::shared_ptr<Place>;

  /// `places`: how many connections at once may be unproven; at least 1.
  explicit Strangers(std::size_t places) : places_(places) {}

  /// Gives a place to a connection from the network address `from` (stranger_address()). If all are taken, closes the
  /// oldest connection of the address with the most places first.
  Held admit(std::string from, std::function<void()> close);
  /// Frees the place: the connection has proved itself or has ended. Does nothing if it was pushed out.
  void release(const Held& place);
  /// Pushes out one connection, because the process has no descriptor left. False: there is none.
  bool shed();
  /// Closes all of them.
  void close_all();
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  const std::size_t places_;
  std::size_t size_ = 0;
  std::unordered_map<std::string, std::list<Held>> by_address_;  // oldest first; no list is empty
};

/// Returns how many strangers a listener of this process admits: 512, or an eighth of the descriptors that the process
/// may open (RLIMIT_NOFILE) if that is less.
std::size_t places_for_strangers() noexcept;

/// Returns the network address that shares places: the peer's IPv4 address, the /64 network of its IPv6 address, or the
/// uid at the other end of a unix socket.
std::string stranger_address(int fd);

}  // namespace tensorferry
