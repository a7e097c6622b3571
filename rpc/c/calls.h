/// Calls of the C interface, in both directions, and the agent's handle.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "rpc/c/events.h"
#include "rpc/c/message.h"
#include "rpc/cpp/serving.h"
#include "tensorferry/agent.h"

/// An agent and its events.
struct tferry_agent {
  std::shared_ptr<tensorferry::Agent> agent;
  std::shared_ptr<tensorferry::c::Events> events;
};

/// A result that comes later.
struct tferry_future {
  std::shared_ptr<tensorferry::c::Events> events;
  std::shared_ptr<tensorferry::detail::Pending> pending;
  /// Takes the result out of `pending`, or throws.
  std::function<tensorferry::c::Message(tensorferry::detail::Pending&)> take;
};

/// A call of a peer. Its destructor ends the count of Events::admit.
struct tferry_call {
  tferry_call(tensorferry::detail::TypedReply answer, std::shared_ptr<tensorferry::c::Events> its_events,
              std::size_t its_bytes)
      : reply(std::move(answer)), events(std::move(its_events)), bytes(its_bytes) {}
  ~tferry_call() { events->answered(bytes); }
  tferry_call(const tferry_call&) = delete;
  tferry_call& operator=(const tferry_call&) = delete;

  tensorferry::detail::TypedReply reply;
  const std::shared_ptr<tensorferry::c::Events> events;
  const std::size_t bytes;
  std::string function;
  tensorferry::c::Message arguments;
  std::size_t positional = 0;
  std::vector<std::string> keywords;
  std::vector<const char*> keyword_texts;
};

namespace tensorferry::c {

/// Makes calls of `function` come as events. Throws InvalidArgument: it is no name that can be served.
void serve(const Agent& agent, const std::shared_ptr<Events>& events, const std::string& function);

}  // namespace tensorferry::c
