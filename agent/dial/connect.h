/// Connection setup between agents, without a thread that waits for a peer: dials and handshakes are coroutines on the
/// reactor. On both sides the handshake comes first (auth.h), then a hello each way, the acceptor's first, and then a
/// `go` frame of the side that decides on the connection. After that the link owns it.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <memory>
#include <string>
#include <vector>

#include "agent/connections/connections.h"
#include "agent/handshake/handshake_io.h"
#include "agent/link/engine.h"

namespace tensorferry {

/// The outcome of an attempt to reach an agent.
struct DialResult {
  Result<Connected> connected;
  /// An address did not answer, or the agent closed the connection during its handshake, so another attempt may
  /// succeed.
  bool may_answer = false;
};

/// Returns the error of a dial whose connection ended after the listener had taken it, as ResourceExhausted: the agent
/// has too many connections in the handshake, or the network cut this one, and it may answer another time.
Status refused_for_now(const Status& status);

/// Reads the `go` frame of the peer, which decides on this connection. Returns its number. ProtocolError; the errors of
/// HandshakeIo::read_exactly.
boost::asio::awaitable<Result<std::uint64_t>> read_go(HandshakeIo& io);

/// Connects to the agent of `record`, completes the handshake, and checks that it is that agent. Uses the unix socket
/// if the two agents may share one and it accepts, else the TCP addresses: the first at once, and each further one when
/// those before it have failed, or have not answered for 300 ms.
///
/// ConnectionLost: no address accepts (the text says of each address why), or another agent answers there;
/// DeadlineExceeded; Unauthenticated, ProtocolError: the handshake failed.
boost::asio::awaitable<DialResult> reach(std::shared_ptr<Engine> engine, Record record, Clock::time_point deadline);

/// Returns whether no process listens at any address of an agent of this kernel and network namespace: the agent's
/// process has ended then, because its listener lives as long as it does. A process that it forked may keep the
/// listener. Takes up to 1 s for each address.
boost::asio::awaitable<bool> finds_no_listener(std::shared_ptr<Engine> engine, Record record);

// The next three are for the program's threads and those of the pool: they block until the reactor has the answer.

/// Returns whether the agent of `record`, in that incarnation, answers at its addresses. Blocks for up to 2 s.
bool agent_answers(Engine& engine, const Record& record);
/// Returns whether the agent of `record` has ended without leaving: its addresses refuse, or another agent has them.
/// Dials for up to 2 s; an agent that is silent has not ended. On other hosts a firewall may refuse, so an agent there
/// counts as ended only if it was in an `earlier` world, whose processes all have to go before the next one begins.
bool has_ended(Engine& engine, const Record& record, bool earlier);
/// As finds_no_listener().
bool listener_is_gone(Engine& engine, const Record& record);

/// Listens on this agent's addresses and attaches accepted connections to their links.
///
/// Handshakes run side by side. A connection that fails its handshake costs one log line. Until its peer has proved
/// itself it takes a place among the strangers (strangers.h): for 1 s while it is silent, and for 4 s more until its
/// proof.
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
