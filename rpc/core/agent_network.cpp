#include "rpc/core/agent_network.h"

#include <algorithm>
#include <string>
#include <utility>

namespace tensorferry {

void AgentNetwork::send(const AgentId& peer, Bytes message, UniqueFunction<void(Result<Bytes>)> done) {
  // Long enough for a busy peer, and short enough to repeat a message soon if it was lost with its connection.
  RawCallOptions options;
  options.timeout = Milliseconds(10000);
  Message request;
  request.payload = std::move(message);
  auto call = agent_->call(peer.name, reference_function, std::move(request), std::move(options));
  call.on_done([weak = std::weak_ptr(agent_), peer, done = std::move(done)](Result<Received> reply) {
    if (reply.status().code() == Code::connection_lost) {
      // If the session goes on, it alone knows when its peer is dead: the loss must not count towards `give_up`.
      const auto agent = weak.lock();
      const auto linked = agent ? agent->linked(peer.name) : std::nullopt;
      if (linked && linked->incarnation == peer.incarnation)
        return done(Status(Code::deadline_exceeded, std::string(reply.status().what())));
    }
    if (!reply.ok()) return done(reply.status());
    // The agent reassembles a payload that is too long for a frame. The protocol uses no buffers.
    done(std::move(reply->payload));
  });
}

void AgentNetwork::after(Milliseconds delay, UniqueFunction<void()> what) {
  // At most a century, so that the sum does not overflow.
  timer_.submit(std::move(what), agent_->clock().now() + std::min<Milliseconds>(delay, std::chrono::hours(24 * 36500)));
}

void serve_references(RawAgent& agent, const std::shared_ptr<References>& references) {
  agent.serve(std::string(reference_function), [weak = std::weak_ptr(references)](const Request& request, Reply reply) {
    const auto here = weak.lock();
    if (!here) return reply.fail({Code::agent_closed, "the agent was shut down"});
    auto answer = here->receive_mail({request.peer.name, request.peer.incarnation}, request.arguments.payload);
    if (!answer.ok()) return reply.fail(answer.status());
    Message message;
    message.payload = *std::move(answer);
    reply.send(std::move(message));
  });
}

}  // namespace tensorferry
