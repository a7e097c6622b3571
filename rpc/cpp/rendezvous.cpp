#include "rpc/cpp/rendezvous.h"

#include <charconv>
#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "agent/rendezvous/torch_store.h"
#include "base/environment.h"
#include "rpc/cpp/failures.h"
#include "tensorferry/errors.h"

namespace tensorferry::detail {
namespace {

constexpr const char* kinds = "env://, tcp://host:port and store://host:port are known";

int number_of(const std::string& text, const std::string& what) {
  int number = 0;
  const auto* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || stopped != end || number < 0) throw InvalidArgument(what + " is not a number: " + text);
  return number;
}

struct StoreAddress {
  std::string host;
  std::uint16_t port = 0;
};

StoreAddress address_of(const std::string& host, const std::string& port, const std::string& what) {
  if (host.empty() || port.empty()) throw InvalidArgument(what + " needs a host and a port");
  const int number = number_of(port, "the port of " + what);
  if (number > 65535) throw InvalidArgument("the port of " + what + " is beyond 65535");
  return {host, static_cast<std::uint16_t>(number)};
}

StoreAddress parse(std::string_view rest, const std::string& whole) {
  rest = rest.substr(0, rest.find_first_of("/?"));
  const auto colon = rest.rfind(':');
  if (colon == std::string_view::npos) throw InvalidArgument(whole + " needs a host and a port");
  auto host = rest.substr(0, colon);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return address_of(std::string(host), std::string(rest.substr(colon + 1)), whole);
}

/// Returns the prefix of the keys of one session. With a world, each session has its own prefix, so that one process
/// may begin the next session while another still ends the last one. Each process counts the sessions of its ranks.
std::string prefix_of(const std::string& address, int world_size, int rank) {
  if (world_size == 0) return "tensorferry";
  static std::mutex mutex;
  static std::map<std::tuple<std::string, int, int>, int> sessions;
  const std::lock_guard lock(mutex);
  return "tensorferry/" + std::to_string(world_size) + "/" + std::to_string(sessions[{address, world_size, rank}]++);
}

void connect_to_torch(Meeting& meeting, const StoreAddress& address, bool from_environment,
                      const AgentOptions& options) {
  const bool by_torchrun = from_environment && environment::value_of("TORCHELASTIC_USE_AGENT_STORE") == "True";
  TorchStoreOptions torch;
  torch.counts_as_worker = meeting.world_size != 0 && !by_torchrun;
  torch.timeout = options.join_timeout;
  if (meeting.rank == 0 && !by_torchrun) {
    throw InvalidArgument(
        "rank 0 serves torch's store at tcp:// and env://, which C++ does not do: let rank 0 be a Python process, or "
        "use store://host:port");
  }
  meeting.store = value_or_throw(connect_torch_store(address.host, address.port, torch));
}

void connect_to_own(Meeting& meeting, const StoreAddress& address, const AgentOptions& options) {
  if (meeting.rank == 0) {
    auto server = TcpStoreServer::listen(address.host, address.port, options.key);
    // If listening fails, another process may serve the store already; connecting then shows it.
    if (server.ok()) meeting.server = *std::move(server);
  }
  meeting.store = value_or_throw(connect_tcp_store(address.host, address.port, options.key, options.join_timeout));
}

}  // namespace

Meeting meet(const AgentOptions& options) {
  Meeting out;
  out.rank = options.rank;
  out.world_size = options.world_size;
  if (options.store) {
    out.store = options.store;
    out.prefix =
        prefix_of(std::to_string(reinterpret_cast<std::uintptr_t>(options.store.get())), out.world_size, out.rank);
    return out;
  }
  const std::string method = options.rendezvous.empty() ? "env://" : options.rendezvous;
  const std::string_view view = method;
  const bool from_environment = view.starts_with("env://");
  StoreAddress address;
  if (from_environment) {
    if (out.rank < 0) {
      if (const std::string rank(environment::value_of("RANK")); !rank.empty()) out.rank = number_of(rank, "RANK");
      if (const std::string size(environment::value_of("WORLD_SIZE")); out.world_size == 0 && !size.empty()) {
        out.world_size = number_of(size, "WORLD_SIZE");
      }
    }
    address = address_of(std::string(environment::value_of("MASTER_ADDR")),
                         std::string(environment::value_of("MASTER_PORT")), "env:// (MASTER_ADDR, MASTER_PORT)");
  } else if (view.starts_with("tcp://")) {
    address = parse(view.substr(6), method);
  } else if (view.starts_with("store://")) {
    address = parse(view.substr(8), method);
  } else {
    throw InvalidArgument("rendezvous \"" + method + "\": " + kinds);
  }
  if (out.world_size < 0) throw InvalidArgument("a world has 0 (any number) or more agents");
  if (out.world_size != 0 && out.rank < 0) {
    throw InvalidArgument("a world of " + std::to_string(out.world_size) +
                          " needs this process's rank: AgentOptions::rank, or RANK (environment)");
  }
  out.host = address.host;
  if (view.starts_with("store://")) {
    connect_to_own(out, address, options);
  } else {
    connect_to_torch(out, address, from_environment, options);
  }
  out.prefix = prefix_of(method + " " + address.host + ":" + std::to_string(address.port), out.world_size, out.rank);
  return out;
}

}  // namespace tensorferry::detail
