/// Where agents meet, as a program or the environment names it: `init_method` in Python, AgentOptions::rendezvous in
/// C++.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tensorferry {

/// The store where agents meet, and this process's place among them.
struct Rendezvous {
  enum class Kind : std::uint8_t { torch, file, own };
  Kind kind = Kind::torch;  // torch: a TCPStore of torch's; file: a FileStore of torch's; own: a StoreServer
  std::string host;         // of `torch` and `own`
  std::uint16_t port = 0;
  std::string path;       // of `file`
  bool torchrun = false;  // whether torchrun serves the store; else rank 0 does
  std::string place;      // names the store in this process, for world_prefix()
  int rank = -1;          // -1: none
  int world_size = 0;     // 0: agents join and leave at any time
};

/// Reads `method`:
///  - "tcp://host:port": a TCPStore.
///  - "env://", or "": a TCPStore at MASTER_ADDR and MASTER_PORT of the environment. If `rank` is negative, RANK is the
///    rank, and WORLD_SIZE the world size unless `world_size` is given.
///  - "file:///path": a FileStore.
///  - "store://host:port": a StoreServer.
///
/// InvalidArgument: the method is malformed; or a world has no rank, or one that it does not have.
Result<Rendezvous> find_rendezvous(std::string_view method, int rank, int world_size);

/// Returns the prefix in the store of the keys of a member. With a world, successive worlds of one process get
/// different prefixes, because a process may join the next world while another process still leaves the last one. The
/// process counts them by `place` (the store), world size and rank. Thread-safe.
std::string world_prefix(const std::string& place, int world_size, int rank);

}  // namespace tensorferry
