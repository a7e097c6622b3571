/// Where an agent of C++ meets the others, by the same rules as Python's (python/tensorferry/rendezvous.py).
#pragma once

#include <memory>
#include <string>

#include "agent/rendezvous/store.h"
#include "agent/rendezvous/tcp_store.h"
#include "tensorferry/agent.h"

namespace tensorferry::detail {

/// A store, who this process is among those that meet there, and the host that leads to them.
struct Meeting {
  std::shared_ptr<TcpStoreServer> server;  // where this process serves the store
  std::shared_ptr<Store> store;
  int rank = -1;
  int world_size = 0;  // 0: agents join and leave at any time
  std::string host;
  std::string prefix;  // of the keys in the store
};

/// Throws InvalidArgument (a rendezvous that is none, a world without a rank), and what connecting comes to.
Meeting meet(const AgentOptions& options);

}  // namespace tensorferry::detail
