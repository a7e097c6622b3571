/// What a dial (Engine::dial) takes from the link whose connection it makes.
#pragma once

#include <memory>
#include <string_view>

#include "agent/connections/session.h"
#include "agent/message.h"
#include "base/status.h"

namespace tensorferry {

class Connections;

/// A link, as the dial of one of its connections sees it. Threads: any.
class DialLink {
 public:
  virtual Connections& connections() = 0;
  [[nodiscard]] virtual bool closed() const noexcept = 0;
  [[nodiscard]] virtual const PeerInfo& peer() const noexcept = 0;
  /// Returns the session that the link continues; null if no incarnation of the peer is known yet.
  [[nodiscard]] virtual std::shared_ptr<Session> session() const = 0;
  /// Ends the link: its peer cannot be reached.
  virtual void give_up(const Status& why, Loss loss) = 0;
  /// Handles a failed attempt to dial a peer of which no incarnation is known: Connections::fail_impatient(). True: no
  /// call waits, and the link has been closed.
  virtual bool unreachable(const Status& why, bool may_answer) = 0;
  /// Adds an event of the link to the agent's flight recorder.
  virtual void note(std::string_view event) = 0;

 protected:
  ~DialLink() = default;
};

}  // namespace tensorferry
