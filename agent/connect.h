/// How connections between agents come to be: dialled on a pool thread, accepted by the housekeeping thread. Either way
/// the greeting comes first (auth.h), then a hello each way, the acceptor's first; then the descriptor is the link's
/// own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "agent/engine.h"
#include "channels/file_descriptor.h"

namespace tensorferry {

/// A connection that has greeted, and what the other side said of itself.
struct Greeted {
  FileDescriptor socket;  // non-blocking
  bool local = false;     // a unix socket
  wire::Hello hello;
};

/// Connects to the agent of `record`, by unix socket where one may be in common, else by TCP, and says hello. Blocks up
/// to `deadline`. ConnectionLost: nobody listens at any address (says which); Unauthenticated, ProtocolError.
Result<Greeted> dial_agent(Engine& engine, const Record& record, wire::Hello::Purpose purpose,
                           Clock::time_point deadline);

/// Whether the agent of `record`, and no other, answers at its addresses.
bool agent_answers(Engine& engine, const Record& record);

/// Where this agent listens. Greets whoever comes, side by side, and attaches the good ones to their links; a stranger
/// costs one log line and holds a place for at most a few seconds.
class Acceptor {
 public:
  virtual ~Acceptor() = default;
  /// Listens as the options say, and writes the addresses into `engine->record`.
  static Result<std::shared_ptr<Acceptor>> listen(const std::shared_ptr<Engine>& engine);
  /// Any thread. No connection is accepted any more; those that greet are dropped.
  virtual void stop() = 0;
};

}  // namespace tensorferry
