#include "rpc/member/rendezvous.h"

#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <tuple>

#include "agent/transport/address.h"
#include "base/log.h"
#include "base/text.h"

namespace tensorferry {
namespace {

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

Status number_of(std::string_view text, std::string_view what, int most, int& out) {
  const auto* const end = text.data() + text.size();
  const auto [stopped, error] = std::from_chars(text.data(), end, out);
  if (error != std::errc() || stopped != end || out < 0) {
    return {Code::invalid_argument, formatted("{} is no number: {}", what, text)};
  }
  if (out > most) return {Code::invalid_argument, formatted("{} is beyond {}", what, most)};
  return {};
}

Status set_address(Rendezvous& out, std::string_view host, std::string_view port, std::string_view what) {
  if (host.empty() || port.empty()) return {Code::invalid_argument, formatted("{} needs a host and a port", what)};
  int number = 0;
  if (auto read = number_of(port, formatted("the port of {}", what), 65535, number); !read.ok()) return read;
  out.host = host;
  out.port = static_cast<std::uint16_t>(number);
  return {};
}

Status read_address(Rendezvous& out, std::string_view rest, std::string_view method) {
  rest = rest.substr(0, rest.find_first_of("/?"));
  const auto colon = rest.rfind(':');
  if (colon == std::string_view::npos) return set_address(out, {}, {}, method);
  auto host = rest.substr(0, colon);
  if (host.size() > 1 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return set_address(out, host, rest.substr(colon + 1), method);
}

Status read_environment(Rendezvous& out) {
  constexpr int any = 1 << 30;
  out.torchrun = environment("TORCHELASTIC_USE_AGENT_STORE") == "True";
  if (out.rank < 0) {
    if (const auto rank = environment("RANK"); !rank.empty()) {
      if (auto read = number_of(rank, "RANK", any, out.rank); !read.ok()) return read;
    }
    if (const auto size = environment("WORLD_SIZE"); out.world_size == 0 && !size.empty()) {
      if (auto read = number_of(size, "WORLD_SIZE", any, out.world_size); !read.ok()) return read;
    }
  }
  return set_address(out, environment("MASTER_ADDR"), environment("MASTER_PORT"), "env:// (MASTER_ADDR, MASTER_PORT)");
}

Status read_method(Rendezvous& out, std::string_view method) {
  if (method.empty() || method.starts_with("env://")) return read_environment(out);
  if (method.starts_with("tcp://")) return read_address(out, method.substr(6), method);
  if (method.starts_with("store://")) {
    out.kind = Rendezvous::Kind::own;
    return read_address(out, method.substr(8), method);
  }
  if (method.starts_with("file://")) {
    out.kind = Rendezvous::Kind::file;
    const auto slash = method.find('/', 7);
    if (slash != std::string_view::npos) out.path = method.substr(slash, method.find('?', slash) - slash);
    if (out.path.empty()) return {Code::invalid_argument, formatted("{} needs a path: file:///path", method)};
    return {};
  }
  return {Code::invalid_argument,
          formatted("\"{}\": env://, tcp://host:port, store://host:port and file:///path are known", method)};
}

/// Logs a line if the launcher's environment tells of several hosts, and they are to meet at a loopback address.
void warn_of_loopback(const Rendezvous& found) {
  if (found.host.empty() || found.world_size == 0 || !is_loopback(found.host)) return;
  for (const std::string_view local : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"}) {
    int here = 0;
    if (!number_of(environment(local.data()), local, 1 << 30, here).ok() || here == 0) continue;
    if (here >= found.world_size) continue;
    return log_warning(
        formatted("a world of {}, {} of them on this host ({}), meets at the loopback address {}: other "
                  "hosts cannot reach it. Set MASTER_ADDR to an address of rank 0's host",
                  found.world_size, here, local, join_host_port(found.host, found.port)));
  }
}

}  // namespace

Result<Rendezvous> find_rendezvous(std::string_view method, int rank, int world_size) {
  Rendezvous out;
  out.rank = rank;
  out.world_size = world_size;
  if (auto read = read_method(out, method); !read.ok()) return read;
  if (out.world_size < 0) return Status(Code::invalid_argument, "a world has 0 (any number) or more agents");
  if (out.world_size != 0 && out.rank < 0) {
    return Status(Code::invalid_argument,
                  formatted("a world of {} needs this process's rank: rank=, or RANK (environment)", out.world_size));
  }
  if (out.world_size != 0 && out.rank >= out.world_size) {
    return Status(Code::invalid_argument, formatted("rank {} is not within a world of {}: ranks are 0 to {}", out.rank,
                                                    out.world_size, out.world_size - 1));
  }
  warn_of_loopback(out);
  out.place = formatted("{} {}:{}{}", method.empty() ? "env://" : method, out.host, out.port, out.path);
  return out;
}

std::string world_prefix(const std::string& place, int world_size, int rank) {
  if (world_size == 0) return "tensorferry";
  static std::mutex mutex;
  static std::map<std::tuple<std::string, int, int>, int> worlds;
  const std::lock_guard lock(mutex);
  return formatted("tensorferry/{}/{}", world_size, worlds[{place, world_size, rank}]++);
}

}  // namespace tensorferry
