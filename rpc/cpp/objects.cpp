#include "rpc/cpp/objects.h"

#include <utility>

#include "rpc/core/envelope.h"
#include "rpc/core/method_target.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "rpc/cpp/reading.h"
#include "rpc/cpp/serving.h"
#include "tensorferry/errors.h"

namespace tensorferry {
namespace detail {
namespace {

std::string names_of(const SharedObject& object) {
  std::string out;
  for (const auto& [name, method] : object.methods) out += (out.empty() ? "" : ", ") + name;
  return out.empty() ? "none" : out;
}

/// Runs the method that `target`, the first argument, names, with the other arguments.
void run_method(const RemoteValue* thing, const MethodTarget& target, Reading& reading, const RequestHead& head,
                TypedReply answer) {
  const auto& here = answer.core().self().name;
  if (const auto* kept = dynamic_cast<const KeptReply*>(thing); kept != nullptr && !kept->failure.ok()) {
    return answer.fail(kept->failure);
  }
  const auto* object = dynamic_cast<const SharedObject*>(thing);
  if (object == nullptr) {
    return answer.fail(
        {Code::invalid_argument, "the object on \"" + here + "\" is a plain C++ value without methods: use to_here()"});
  }
  const auto found = object->methods.find(target.method);
  if (found == object->methods.end()) {
    return answer.fail({Code::not_found, "\"" + object->type_name + "\" on \"" + here + "\" has no method \"" +
                                             target.method + "\" for peers; it has: " + names_of(*object)});
  }
  const auto method = found->second;
  run_function(*method, object->type_name + "." + target.method, reading, head, 1, std::move(answer));
}

void answer_method(Reading& reading, const RequestHead& head, TypedReply& answer) {
  if (head.packed) {
    return answer.fail(
        {Code::invalid_argument, "a method of C++ cannot be called with objects that only Python can read (a pickle)"});
  }
  if (head.positional == 0 || reading.peek() != Tag::bytes) {
    return answer.fail({Code::protocol_error, "tf:method without a target"});
  }
  const auto target = answer.call().target_of(reading.take().view());
  if (!target.ok()) return answer.fail(target.status());
  // If the object is still being created, fetch() completes later, on the thread that runs the creation.
  Result<Outcome> outcome = Status(Code::internal, "");
  Event there;
  const auto take = [&](Result<Outcome> found) {
    outcome = std::move(found);
    there.set();
  };
  answer.core().tables().fetch(target->object, answer.call().reply().deadline(), take, target->fork);
  there.wait(std::nullopt);
  if (!outcome.ok()) return answer.fail(outcome.status());
  run_method(static_cast<const RemoteValue*>(outcome->value.get()), *target, reading, head, std::move(answer));
}

void answer_fetch(const std::shared_ptr<AgentCore>& core, const Request& request, Reply reply) {
  IncomingCall call(*core->member, request.peer, std::move(reply));
  const auto fetch = call.begin_fetch(request.arguments);
  if (!fetch.ok()) return call.fail(fetch.status());
  const auto deadline = call.reply().deadline();
  auto answer = [core, call = std::move(call)](const Result<Outcome>& outcome) mutable {
    if (!outcome.ok()) return call.fail(outcome.status());
    const auto* thing = static_cast<const RemoteValue*>(outcome->value.get());
    if (const auto* kept = dynamic_cast<const KeptReply*>(thing)) {
      return kept->failure.ok() ? call.send(kept->reply, {}) : call.fail(kept->failure);
    }
    const auto* object = dynamic_cast<const SharedObject*>(thing);
    const auto& name = core->self().name;
    call.fail({Code::invalid_argument, "\"" + (object != nullptr ? object->type_name : "") + "\" on \"" + name +
                                           "\" is an object of C++, which cannot be copied: call its methods (" +
                                           (object != nullptr ? names_of(*object) : "") + ") by rpc_sync()"});
  };
  core->tables().fetch(fetch->object, deadline, std::move(answer), fetch->fork);
}

}  // namespace

void serve_objects(const std::shared_ptr<AgentCore>& core) {
  core->raw().serve(std::string(method_function), reading_handler(core, &answer_method));
  core->raw().serve(std::string(fetch_function), handler(core, &answer_fetch));
}

}  // namespace detail

const std::string& Object::owner() const {
  if (!reference_) throw InvalidArgument("the Object holds nothing");
  return reference_->owner().name;
}

const std::string& Object::type_name() const {
  if (!reference_) throw InvalidArgument("the Object holds nothing");
  return reference_->type_hint();
}

std::shared_ptr<detail::Pending> Object::start(const CallOptions& options, std::string_view method,
                                               std::size_t arguments, detail::WriteArguments write, const void* pack,
                                               bool may_hold_object) const {
  const auto& owner = this->owner();
  detail::check(reference_->status());
  const auto target = encode(
      MethodTarget{reference_->owner().incarnation, reference_->object(), reference_->ids().fork, std::string(method)});
  return detail::start_call(agent_, options, owner, method_function, target, method, arguments, write, pack,
                            may_hold_object);
}

}  // namespace tensorferry
