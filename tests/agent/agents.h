/// Agents for tests: several agents in one process, which join through a store in memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "agent/rendezvous/memory_store.h"
#include "tests/agent/patience.h"

namespace tensorferry::testing {

inline Bytes bytes_of(std::string_view text) {
  const auto view = view_of(text);
  return {view.begin(), view.end()};
}

inline Message message_of(std::string_view text) { return {bytes_of(text), {}, {}, {}}; }

/// Returns a host buffer that owns its memory. The byte at i is 31 * i + seed + i / 4096. A sanitizer slows a loop over
/// bytes down a lot, so this copies blocks: 31 * i repeats after 256 bytes, and 223 * 31 is 1 modulo 256.
inline Buffer patterned(std::size_t bytes, unsigned seed = 1) {
  constexpr std::size_t block = 4096;
  static const auto line = [] {
    std::array<std::byte, block + 256> out{};
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = static_cast<std::byte>(i * 31);
    return out;
  }();
  auto owner = std::make_shared<Bytes>(bytes);
  for (std::size_t begin = 0; begin < bytes; begin += block) {
    const auto shift = (seed + begin / block) * 223 % 256;
    std::memcpy(owner->data() + begin, line.data() + shift, std::min(block, bytes - begin));
  }
  return {{}, owner->data(), bytes, nullptr, owner};
}

inline bool same_bytes(const Buffer& a, const Buffer& b) {
  return a.bytes == b.bytes && (a.bytes == 0 || std::memcmp(a.data, b.data, a.bytes) == 0);
}

/// How the agents of a test reach one another.
struct Ways {
  std::string transport = "ring";  // "ring", "unix" (no memory is shared), "tcp", "tls" (over TCP, by a cluster key)
  std::string channels;            // "": all channels of the build
};

/// Returns a test's name for `ways`, such as "ring_basic".
inline std::string name_of(const Ways& ways) {
  return ways.transport + (ways.channels.empty() ? "" : "_" + ways.channels.substr(0, ways.channels.find(',')));
}
inline void PrintTo(const Ways& ways, std::ostream* out) { *out << name_of(ways); }

/// Creates an agent that has not joined yet, so peers cannot find it.
inline std::shared_ptr<RawAgent> create(const std::shared_ptr<Store>& store, const std::string& name,
                                        const Ways& ways = {},
                                        const std::function<void(RawAgentOptions&)>& change = {}) {
  RawAgentOptions options;
  options.name = name;
  options.store = store;
  const bool tls = ways.transport == "tls";
  options.unix_sockets = ways.transport != "tcp" && !tls;
  if (tls) {
    options.tls = "key";
    options.key = "the cluster key of agents over TLS";
  }
  options.shared_memory = ways.transport == "ring";
  options.channels = ways.channels;
  if (change) change(options);
  auto agent = RawAgent::create(std::move(options));
  EXPECT_TRUE(agent.ok()) << agent.status().text();
  return agent.ok() ? *agent : nullptr;
}

inline std::shared_ptr<RawAgent> join(const std::shared_ptr<Store>& store, const std::string& name,
                                      const Ways& ways = {}, const std::function<void(RawAgentOptions&)>& change = {}) {
  auto agent = create(store, name, ways, change);
  const auto announced = agent ? agent->announce() : Status();
  EXPECT_TRUE(announced.ok()) << announced.text();
  return announced.ok() ? agent : nullptr;
}

inline void serve_echo(RawAgent& agent) {
  agent.serve("echo", [](Request request, Reply reply) {
    reply.send({std::move(request.arguments.payload), std::move(request.arguments.buffers), {}, {}});
  });
}

inline RawCallOptions within(Milliseconds timeout) {
  RawCallOptions options;
  options.timeout = timeout;
  return options;
}

inline Result<Received> call_sync(RawAgent& agent, std::string_view peer, std::string_view function, Message message,
                                  RawCallOptions options = {}) {
  auto call = agent.call(peer, function, std::move(message), std::move(options));
  if (!call.wait()) return Status(Code::internal, "wait() ended early");
  return call.take();
}

}  // namespace tensorferry::testing
