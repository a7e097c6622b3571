/// A network in memory between the agents of one process: a socket pair stands at each end of a connection, and its far
/// end belongs to the network, which moves bytes only when the simulation says so.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agent/transport/network.h"
#include "base/bytes.h"
#include "base/file_descriptor.h"

namespace tensorferry::testing {

/// Not thread-safe.
class SteppedNetwork final {
 public:
  /// Returns the network as the agent of number `host` sees it. Its address is a port of its own.
  std::shared_ptr<Network> join(std::size_t host);

  // --- what may happen next ------------------------------------------------------------------------------------------
  /// Returns the number of lanes (directions of connections) and of connections in the making on which something can
  /// happen now.
  [[nodiscard]] std::size_t ready();
  /// Lets it happen on the one of that number: up to `bytes` bytes arrive, an end arrives, or a connection is made.
  void progress(std::size_t which, std::size_t bytes);

  // --- faults --------------------------------------------------------------------------------------------------------
  /// Ends one connection. `lossy`: the bytes under way are lost. `seen_by`: which of the two ends notices; none: the
  /// connection is half-open, and carries nothing any more.
  enum class SeenBy : std::uint8_t { both, dialler, acceptor, none };
  void end(std::size_t which, bool lossy, SeenBy seen_by);
  [[nodiscard]] std::size_t connections() const { return connections_.size(); }
  /// Carries nothing between two hosts, or again. Connections stay.
  void part(std::size_t a, std::size_t b, bool parted);
  /// The process of a host ends: its connections end, and its address refuses. `silent`: the host ends with it, so that
  /// no peer is told, and its address does not answer.
  void kill(std::size_t host, bool silent);
  /// Undoes part(), and ends the connections that are half-open.
  void heal();

  /// Returns how many ends of connections agents hold.
  [[nodiscard]] std::size_t open_ends();

 private:
  class Endpoint;
  class SteppedPort;
  struct Traffic;
  /// One direction of a connection.
  struct Lane {
    std::size_t from = 0, to = 0;  // hosts
    Bytes under_way;
    bool ended = false;  // the sender has closed its end
    bool told = false;   // and the receiver knows
    bool cut = false;    // carries nothing any more
    bool full = false;   // the receiver did not take all
  };
  struct Connection {
    std::size_t dialler = 0, acceptor = 0;
    std::array<FileDescriptor, 2> far;  // the network's ends: of the dialler's pair, of the acceptor's
    std::array<std::shared_ptr<Traffic>, 2> traffic;
    std::array<Lane, 2> lanes;  // from the dialler, from the acceptor
    bool made = false;
  };
  struct Host {
    std::function<void(std::unique_ptr<StreamPort>)> accept;
    bool dead = false, silent = false;
  };

  Result<std::unique_ptr<StreamPort>> start_connect(std::size_t from, const std::string& address);
  void take_in(Connection& connection);
  void make(Connection& connection);
  void hang_up(Connection& connection, std::size_t end);
  [[nodiscard]] bool may_carry(const Connection& connection, std::size_t lane) const;
  static bool has_room(const Connection& connection, std::size_t lane);
  [[nodiscard]] bool parted(std::size_t a, std::size_t b) const;
  void drop_ended();

  std::vector<Host> hosts_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::vector<std::pair<std::size_t, std::size_t>> parted_;
  std::vector<std::pair<Connection*, std::size_t>> ready_;  // of the last ready(); the lane, or 2: to be made
};

}  // namespace tensorferry::testing
