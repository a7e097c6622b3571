#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/environment.h"
#include "base/text.h"
#include "rpc/c/calls.h"
#include "rpc/c/error.h"
#include "rpc/c/openssl.h"
#include "rpc/c/options.h"
#include "tensorferry/errors.h"
#include "tensorferry/store.h"

namespace tensorferry::c {
namespace {

AgentOptions agent_options_of(const char* const* options, std::size_t count) {
  AgentOptions out;
  read_options(options, count,
               {
                   {"name", text_into(out.name)},
                   {"rank", integer_into(out.rank)},
                   {"world_size", integer_into(out.world_size)},
                   {"rendezvous", text_into(out.rendezvous)},
                   {"key", text_into(out.key)},
                   {"channels", text_into(out.channels)},
                   {"threads", integer_into(out.threads)},
                   {"max_queued_calls", integer_into(out.max_queued_calls)},
                   {"max_queued_bytes", integer_into(out.max_queued_bytes)},
                   {"max_bytes_in_flight", integer_into(out.max_bytes_in_flight)},
                   {"timeout", seconds_into(out.timeout)},
                   {"join_timeout", seconds_into(out.join_timeout)},
                   {"heartbeat", seconds_into(out.heartbeat)},
                   {"peer_timeout", seconds_into(out.peer_timeout)},
                   {"interface", text_into(out.interface)},
                   {"ports", text_into(out.ports)},
                   {"tls", text_into(out.tls)},
                   {"socket_dir", text_into(out.socket_dir)},
                   {"unix_sockets", boolean_into(out.unix_sockets)},
                   {"shared_memory", boolean_into(out.shared_memory)},
               });
  return out;
}

/// Throws InvalidArgument if the option asks for TLS and OpenSSL is not there.
void check_tls(std::string_view option) {
  if (option.empty()) option = environment::tls.value();
  if (option.empty() || option == "off") return;
  const auto missing = load_openssl();
  if (!missing.empty()) throw InvalidArgument("tls= needs OpenSSL 3 on this machine: " + missing);
}

char* text_for_c(const std::string& text) {
  auto* const out = new char[text.size() + 1];
  std::memcpy(out, text.c_str(), text.size() + 1);
  return out;
}

}  // namespace
}  // namespace tensorferry::c

using namespace tensorferry;     // NOLINT(google-build-using-namespace): the functions below are C's
using namespace tensorferry::c;  // NOLINT(google-build-using-namespace)

/// A store that this process serves.
struct tferry_store {
  StoreServer server;
};

int32_t tferry_abi(void) { return TFERRY_ABI; }
const char* tferry_version(void) { return TENSORFERRY_VERSION; }

tferry_error* tferry_agent_join(const char* const* options, size_t count, const char* const* served,
                                size_t served_count, tferry_agent** agent) {
  return guarded([&] {
    auto parsed = agent_options_of(options, count);
    check_tls(parsed.tls);
    if (parsed.max_queued_calls < 0) throw InvalidArgument("max_queued_calls is negative");
    auto events = std::make_shared<Events>(static_cast<std::size_t>(parsed.max_queued_calls), parsed.max_queued_bytes);
    parsed.prepare = [&](const Agent& joined) {
      for (std::size_t i = 0; i < served_count; ++i) serve(joined, events, served[i]);
    };
    auto joined = Agent::join(std::move(parsed));
    *agent = new tferry_agent{std::move(joined), std::move(events)};
  });
}

const char* tferry_agent_name(const tferry_agent* agent) { return agent->agent->name().c_str(); }
int32_t tferry_agent_rank(const tferry_agent* agent) { return agent->agent->rank(); }

tferry_error* tferry_agent_explain(const tferry_agent* agent, const char* peer, uint64_t bytes, char** text) {
  return guarded([&] { *text = text_for_c(agent->agent->explain(peer, {}, {}, bytes)); });
}

tferry_error* tferry_agent_link_state(const tferry_agent* agent, const char* peer, char** text) {
  return guarded([&] { *text = text_for_c(agent->agent->link_state(peer)); });
}

void tferry_text_free(char* text) { delete[] text; }

tferry_error* tferry_agent_shutdown(tferry_agent* agent, int64_t timeout_ms) {
  auto* const error = guarded([&] { agent->agent->shutdown(std::chrono::milliseconds(timeout_ms)); });
  agent->events->leave();
  return error;
}

void tferry_agent_leave(tferry_agent* agent) {
  agent->agent->leave();
  agent->events->leave();
}

void tferry_agent_free(tferry_agent* agent) {
  if (agent == nullptr) return;
  tferry_agent_leave(agent);
  delete agent;
}

tferry_error* tferry_store_serve(const char* host, uint16_t port, const char* key, const char* tls,
                                 tferry_store** store) {
  return guarded([&] {
    check_tls(tls);
    *store = new tferry_store{StoreServer(host, port, key, tls)};
  });
}

uint16_t tferry_store_port(const tferry_store* store) { return store->server.port(); }
void tferry_store_free(tferry_store* store) { delete store; }
