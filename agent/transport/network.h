/// How an agent reaches other hosts, if not by the TCP sockets of its own: a simulation's network.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "agent/transport/port.h"
#include "base/status.h"

namespace tensorferry {

/// The functions are called on the agent's reactor, except for listen(), which runs before it starts.
class Network {
 public:
  virtual ~Network() = default;
  /// Takes connections to this agent from now on: `accept` gets each of them, on the reactor. Returns the addresses for
  /// the agent's record.
  virtual Result<std::vector<std::string>> listen(std::function<void(std::unique_ptr<StreamPort>)> accept) = 0;
  virtual void stop_listening() = 0;
  /// Begins to connect to an address of a record. The port's descriptor is writable when the connection is made or has
  /// failed. Errors as those of start_connect_tcp().
  virtual Result<std::unique_ptr<StreamPort>> start_connect(const std::string& address) = 0;
};

}  // namespace tensorferry
