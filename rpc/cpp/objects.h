/// The values of the objects that live in this agent and that peers refer to.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "tensorferry/function.h"

namespace tensorferry::detail {

/// Base of the values of this agent's objects (the value of an Outcome).
class RemoteValue {
 public:
  virtual ~RemoteValue() = default;
};

/// An object that Agent::share_object shared. Its methods are filled before it is shared, and only read afterwards.
class SharedObject final : public RemoteValue {
 public:
  explicit SharedObject(std::string type) : type_name(std::move(type)) {}
  const std::string type_name;
  std::map<std::string, std::shared_ptr<Function>, std::less<>> methods;
};

/// The result of a function whose caller asked that the result stay here. It is stored as the reply that a fetch sends.
class KeptReply final : public RemoteValue {
 public:
  explicit KeptReply(Message message) : reply(std::move(message)) {}
  explicit KeptReply(Status why) : failure(std::move(why)) {}
  const Message reply;
  const Status failure;  // if not ok, it replaces the reply
};

}  // namespace tensorferry::detail
