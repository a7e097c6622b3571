#include "rpc/cpp/rendezvous.h"

#include <utility>

#include "agent/rendezvous/torch_store.h"
#include "base/environment.h"
#include "rpc/cpp/failures.h"
#include "rpc/member/rendezvous.h"
#include "tensorferry/errors.h"

namespace tensorferry::detail {
namespace {

std::shared_ptr<Store> open_torch_store(const Rendezvous& where, const AgentOptions& options) {
  if (where.rank == 0 && !where.torchrun) {
    throw InvalidArgument(
        "rank 0 serves torch's store at tcp:// and env://, which C++ does not do: let rank 0 be a Python process, or "
        "use store://host:port");
  }
  TorchStoreOptions torch;
  torch.counts_as_worker = where.world_size != 0 && !where.torchrun;
  torch.timeout = options.join_timeout;
  return value_or_throw(connect_torch_store(where.host, where.port, torch));
}

}  // namespace

OpenRendezvous meet(const AgentOptions& options) {
  OpenRendezvous out;
  out.rank = options.rank;
  out.world_size = options.world_size;
  if (options.store) {
    out.store = options.store;
    out.prefix =
        world_prefix(std::to_string(reinterpret_cast<std::uintptr_t>(out.store.get())), out.world_size, out.rank);
    return out;
  }
  const auto where = value_or_throw(find_rendezvous(options.rendezvous, options.rank, options.world_size));
  out.rank = where.rank;
  out.world_size = where.world_size;
  out.host = where.host;
  switch (where.kind) {
    case Rendezvous::Kind::torch:
      out.store = open_torch_store(where, options);
      break;
    case Rendezvous::Kind::own:
      if (where.rank == 0) {
        auto server = TcpStoreServer::listen(where.host, where.port, options.key, {}, options.tls);
        // If listening fails, another process may serve the store already; connecting then shows it.
        if (server.ok()) out.server = *std::move(server);
      }
      out.store =
          value_or_throw(connect_tcp_store(where.host, where.port, options.key, options.join_timeout, {}, options.tls));
      break;
    case Rendezvous::Kind::file:
      throw InvalidArgument("file:// is a store of torch's that C++ does not open: meet at store://host:port");
  }
  out.prefix = world_prefix(where.place, out.world_size, out.rank);
  return out;
}

}  // namespace tensorferry::detail
