/// What an agent tells of its channels and its calls.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "channels/buffer.h"

namespace tensorferry {

struct Counters {
  std::uint64_t calls_sent = 0, calls_served = 0, calls_failed = 0;
  std::uint64_t late_answers = 0;  // calls that this agent answered after their callers had given up
  std::uint64_t late_replies = 0;  // replies to this agent that came after their calls had ended
  std::map<std::string, std::uint64_t> bytes_sent, bytes_received;  // by channel; "inline" inside frames
  std::uint64_t pinned_bytes = 0;  // page-locked host memory of the whole process, for GPUs and network cards
};

/// The channels between one local device and one device of a peer, and the transport of calls to that peer.
struct Route {
  Device remote;          // the device on which the buffer would land
  std::string channel;    // the one that would carry the buffer; "" if none can
  std::string transport;  // of calls to the peer: "ring", "unix", "tcp"
  std::string no_ring;    // why `transport` is not "ring"; "" if it is
  struct Candidate {
    std::string channel;
    bool usable;
    std::string reason;  // why not, or why not yet; for a usable channel, its Channel::describe()
  };
  std::vector<Candidate> candidates;  // in order of priority
};

}  // namespace tensorferry
