/// Connection setup between agents: a pool thread dials, the reactor thread accepts. On both sides the handshake
/// comes first (auth.h), then a hello each way, the acceptor's first. After that the link owns the descriptor.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "agent/engine.h"
#include "base/file_descriptor.h"

namespace tensorferry {

/// A connection that has completed the handshake, and the peer's hello.
struct Connected {
  FileDescriptor socket;  // non-blocking
  bool local = false;     // a unix socket
  wire::Hello hello;
};

/// Connects to the agent of `record`, completes the handshake, and sends this agent's hello for `link`. Uses the unix
/// socket if the two agents may share one and it accepts, else the TCP addresses: the first at once, and each further
/// one when those before it have failed, or have not answered for 300 ms. Blocks until `deadline` at most.
///
/// ConnectionLost: no address accepts (the text says of each address why), or another agent answers there;
/// DeadlineExceeded; Unauthenticated, ProtocolError: the handshake failed. `may_answer`: an address did not answer, or
/// the agent closed the connection during its handshake, so another attempt may succeed.
Result<Connected> dial_agent(Engine& engine, const Record& record, const Link& link, wire::Hello::Purpose purpose,
                             Clock::time_point deadline, bool& may_answer);

/// Returns whether the agent of `record`, in that incarnation, answers at its addresses. Blocks for up to 2 s.
bool agent_answers(Engine& engine, const Record& record);

/// Returns whether the agent of `record` has ended without leaving: its addresses refuse, or another agent has them.
/// Dials for up to 2 s; an agent that is silent has not ended. On other hosts a firewall may refuse, so an agent there
/// counts as ended only if it was in an `earlier` world, whose processes all have to go before the next one begins.
bool has_ended(Engine& engine, const Record& record, bool earlier);

/// Returns whether no process listens at any address of an agent of this kernel and network namespace: the agent's
/// process has ended then, because its listener lives as long as it does. A process that it forked may keep the
/// listener. Blocks for up to 1 s for each address.
bool listener_is_gone(const Engine& engine, const Record& record);

/// Listens on this agent's addresses and attaches accepted connections to their links.
///
/// Handshakes run side by side, as coroutines on the reactor thread. A connection that fails its handshake costs one
/// log line. Until its peer has proved itself it takes a place among the strangers (strangers.h): for 1 s while it is
/// silent, and for 4 s more until its proof.
class Acceptor {
 public:
  virtual ~Acceptor() = default;
  /// Listens as the options say and writes the addresses into `engine->identity.record`. Unauthenticated: other hosts
  /// reach the TCP address and the user has set no key; also the errors of address.h.
  static Result<std::shared_ptr<Acceptor>> listen(const std::shared_ptr<Engine>& engine);
  /// Stops accepting and closes the connections that are in their handshake. Any thread may call it; the reactor
  /// thread does the work.
  virtual void stop() = 0;
};

}  // namespace tensorferry
