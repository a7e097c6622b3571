/// The store of C++ agents: opens the one that rpc/member/rendezvous.h finds.
#pragma once

#include <memory>
#include <string>

#include "agent/rendezvous/tcp_store.h"
#include "agent/store.h"
#include "tensorferry/agent.h"

namespace tensorferry::detail {

/// The store where agents meet, this agent's rank among them, and the store's host.
struct OpenRendezvous {
  std::shared_ptr<TcpStoreServer> server;  // set if this process serves the store
  std::shared_ptr<Store> store;
  int rank = -1;
  int world_size = 0;  // 0: agents join and leave at any time
  std::string host;    // the store's, to choose the interface that reaches it; empty if the program gave the store
  std::string prefix;  // of the keys in the store
};

/// Opens the rendezvous that `options` and the environment name; rank 0 also serves a store:// one. Throws
/// InvalidArgument (the rendezvous is malformed, or a world has no rank) and the errors of connecting.
OpenRendezvous meet(const AgentOptions& options);

}  // namespace tensorferry::detail
