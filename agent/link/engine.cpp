#include "agent/link/engine.h"

#include <algorithm>
#include <new>
#include <utility>

#include "agent/calls/thrown_replies.h"
#include "agent/link/link.h"
#include "agent/transport/cluster_key.h"
#include "base/foreign_code.h"
#include "base/log.h"
#include "base/out_of_memory.h"

namespace tensorferry {

Engine::Engine(RawAgentOptions agent_options)
    : options(std::move(agent_options)), clock(options.surroundings.clock), memory(options.memory), peers(*this) {}

Engine::~Engine() = default;

Status Engine::used_after_fork() const {
  return {Code::agent_closed,
          "the agent \"" + identity.self.name +
              "\" belongs to the parent of this forked process: start another agent here, under another name"};
}

wire::Hello Engine::hello(wire::Hello::Purpose purpose, std::uint64_t connection, std::uint64_t expected) const {
  wire::Hello hello;
  hello.connection = connection;
  hello.purpose = purpose;
  hello.name = identity.self.name;
  hello.rank = identity.self.rank;
  hello.incarnation = identity.self.incarnation;
  hello.expected = expected;
  hello.drivers = drivers.announced();
  hello.devices = options.devices;
  hello.features = wire::feature::bundles | wire::feature::several_bulk | wire::feature::status | wire::feature::pieces;
  if (options.shared_memory && pool->doorbell().shareable()) hello.features |= wire::feature::ring;
  return hello;
}

void Engine::activate(std::weak_ptr<TickedLink> link) {
  active_links.add(std::move(link));
  reactor->kick();
}

Pace Engine::tick() {
  const auto pace = pool->tick();
  return std::max(pace, active_links.tick(clock.now()));
}

void Engine::look_after() try {
  const auto now = clock.now();
  for (const auto& link : peers.all_links()) {
    link->keep_alive(now);
  }
  counters.late_answers.log_if_due(now);
  memory.trim();
  out_of_memory::take_reserve();
  log_rate::write_counted();
} catch (const std::bad_alloc&) {  // the next time does the rest
  out_of_memory::release_reserve();
}

void Engine::run_handler(std::shared_ptr<const RawFunction> function, const std::string& name, const PeerInfo& peer,
                         Received arguments, Reply reply) {
  if (!reply.begin()) {
    const bool expired = reply.deadline() && *reply.deadline() <= clock.now();
    const std::string called(shown_name(function ? function->name : name));
    return reply.fail({expired ? Code::deadline_exceeded : Code::cancelled,
                       "\"" + called + "\": " + (expired ? "its deadline had passed" : "its caller had cancelled it") +
                           " before it could run on \"" + identity.self.name + "\""});
  }
  if (!function) {
    auto found = functions.find_or_resolve(name);
    if (!found.ok()) {
      if (found.status().code() == Code::permission_denied) log_refusal(peer.name, name, found.status());
      return reply.fail(found.status());
    }
    function = *std::move(found);
    if (!function) {
      return reply.fail({Code::not_found, "\"" + identity.self.name + "\" serves no function \"" + name + "\""});
    }
    reply.tell(function->number);
  }
  ThrownReplies thrown;
  try {
    function->handler({peer, function->name, std::move(arguments)}, std::move(reply));
    return;
  } catch (const ForcedUnwind&) {
    sleep_until_exit();
  } catch (const std::bad_alloc&) {
    out_of_memory::release_reserve();
    thrown.fail(out_of_memory::status());
    return log_warning("call=" + function->name + " its handler had no memory");
  } catch (...) {  // a handler should answer with its errors itself
    log_thrown("call=" + function->name + " its handler");
  }
  thrown.fail({Code::internal, "the handler ended without a reply"});
}

}  // namespace tensorferry
