/// What the objects of this agent are, that peers refer to.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "agent/agent.h"
#include "tensorferry/function.h"

namespace tensorferry::detail {

/// The value of an Outcome.
class RemoteThing {
 public:
  virtual ~RemoteThing() = default;
};

/// Shared by Agent::share_object.
class SharedObject final : public RemoteThing {
 public:
  explicit SharedObject(std::string type) : type_name(std::move(type)) {}
  const std::string type_name;
  std::map<std::string, std::shared_ptr<Function>, std::less<>> methods;
};

/// The result of a function that a peer asked to stay here: the reply as it would have gone.
class KeptReply final : public RemoteThing {
 public:
  explicit KeptReply(Message message) : reply(std::move(message)) {}
  explicit KeptReply(Status why) : failure(std::move(why)) {}
  const Message reply;
  const Status failure;  // not ok: instead
};

}  // namespace tensorferry::detail
