/// What a program or its environment prescribes for the channels over RDMA cards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace tensorferry::rdma {

struct Options {
  /// The cards and ports that may be used: "mlx5_0:1,mlx5_1" names port 1 of one card and all ports of another, in the
  /// order of preference. Empty: all.
  std::string devices;
  /// The index in each port's table of GIDs; -1: rdma::usable_ports chooses.
  int gid_index = -1;
  /// The InfiniBand service level, 0 to 15; on Ethernet the priority.
  int service_level = 0;
  /// The traffic class of the packets, 0 to 255: on RoCE v2 the byte with DSCP and ECN bits of the IP header.
  int traffic_class = 0;
  /// How long a packet waits for its answer until it is sent again: 4.096 us * 2^timeout, 1 to 31. 16 is 0.27 s. Most
  /// lost packets are noticed earlier, by those that follow. If the time is too short, an answer that is late makes the
  /// card read again, and this second read may come after the peer has deregistered the memory: that fails both ends.
  int timeout = 16;
  /// A buffer of more bytes is split over several ports, if there are several.
  std::size_t stripe_bytes = std::size_t{1} << 20;
  /// Work requests that one queue pair holds, 1 to 32768.
  int queue_depth = 256;
  /// So many bytes may be registered (pinned) at once in this process; 0: no limit but that of `ulimit -l`.
  std::uint64_t pinned_bytes = 0;

  /// Returns the options that the variables TENSORFERRY_RDMA_* prescribe, and the defaults for the others. Fails with
  /// InvalidArgument, and names the variable, if a value is no number or out of its range. Sizes may end in K, M or G
  /// (powers of 1024).
  static Result<Options> from_environment();
};

}  // namespace tensorferry::rdma
