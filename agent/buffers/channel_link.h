/// What the channels of a link take from the link and from its agent.
#pragma once

#include <cstddef>
#include <memory>

#include "agent/agent_drivers.h"
#include "agent/buffers/receive_memory.h"
#include "agent/message.h"
#include "agent/observing/agent_counters.h"
#include "agent/transport/frame_stream.h"
#include "base/bytes.h"
#include "base/function.h"
#include "base/status.h"

namespace tensorferry {

/// The link, as its channels see it. Threads: any.
class ChannelLink {
 public:
  /// Queues a control frame, and writes what is queued; see Connections.
  virtual void queue_control(Bytes frame, Descriptors descriptors) = 0;
  virtual void write_controls() = 0;
  /// Sends a bulk frame and its buffer; see Connections.
  virtual void send_bulk(Bytes frame, FrameStream::Part part) = 0;
  /// Returns whether large buffers should go in pieces; see Connections.
  [[nodiscard]] virtual bool splits_bulk() const = 0;
  /// Continues to read the peer's bulk connections: a destination for bulk bytes has been registered.
  virtual void resume_bulk() = 0;
  /// Returns how many bulk connections there are on which the peer sends.
  [[nodiscard]] virtual std::size_t bulk_connections_in() const = 0;

  [[nodiscard]] virtual const PeerInfo& peer() const noexcept = 0;  // incarnation 0 until connected
  /// Returns whether the peer is connected by unix socket, so that descriptors can travel.
  [[nodiscard]] virtual bool local() const = 0;
  [[nodiscard]] virtual bool closed() const noexcept = 0;
  /// Returns Ok, or why the link has ended.
  [[nodiscard]] virtual Status status() const = 0;
  /// Ends the link.
  virtual void fail(const Status& why) = 0;

  /// Makes the reactor tick the link: something is under way.
  virtual void activate() = 0;
  /// Runs `job` on the agent's pool. False: the pool has been stopped, and drops the job. The second one: see
  /// Pool::submit_long.
  virtual bool run(UniqueFunction<void()> job) = 0;
  virtual bool run_long(UniqueFunction<void()> job) = 0;
  /// Returns what keeps the link as long as it is held.
  virtual std::shared_ptr<void> hold() = 0;

 protected:
  ~ChannelLink() = default;
};

/// All of it. What it names outlives the channels.
struct ChannelSurroundings {
  ChannelLink& link;
  const AgentDrivers& drivers;
  ReceiveMemory& memory;
  AgentCounters& counters;
  LinkCounters& of_link;
  bool shares_memory;  // RawAgentOptions::shared_memory
};

}  // namespace tensorferry
