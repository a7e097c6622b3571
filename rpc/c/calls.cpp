#include "rpc/c/calls.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "rpc/c/error.h"
#include "rpc/core/envelope.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "tensorferry/errors.h"

namespace tensorferry::c {
namespace {

using detail::Mismatch;
using detail::Reading;
using detail::TypedReply;

std::size_t bytes_of(const Received& message) {
  auto bytes = message.payload.size();
  for (const auto& buffer : message.buffers) bytes += buffer.bytes;
  return bytes;
}

/// Reads the arguments into `call`. Throws Mismatch for one that cannot be read without Python.
void read_arguments(Reading& reading, const RequestHead& head, tferry_call& call) {
  if (head.packed) throw Mismatch();
  call.arguments = std::make_unique<tferry_message>();
  call.positional = head.positional;
  for (auto left = head.positional; left != 0; --left) read_value(reading, *call.arguments);
  for (const auto name : reading.keywords()) call.keywords.emplace_back(name);
  for (std::size_t i = 0; i < call.keywords.size(); ++i) {
    reading.go_to_keyword(i);
    read_value(reading, *call.arguments);
  }
  reading.finish();
  for (const auto& name : call.keywords) call.keyword_texts.push_back(name.c_str());
}

void take_call(const std::shared_ptr<Events>& events, const std::string& function, Reading& reading,
               const RequestHead& head, TypedReply& answer) {
  const auto bytes = bytes_of(reading.message());
  if (!events->admit(bytes)) {
    return answer.fail({Code::resource_exhausted, "\"" + answer.core().self().name +
                                                      "\" has as many calls to answer as "
                                                      "max_queued_calls= and max_queued_bytes= let it have"});
  }
  auto call = std::make_unique<tferry_call>(std::move(answer), events, bytes);
  call->function = function;
  try {
    read_arguments(reading, head, *call);
  } catch (const Mismatch&) {
    return call->reply.fail({Code::invalid_argument, function + " on \"" + call->reply.core().self().name +
                                                         "\" takes values that can be read without Python and torch; "
                                                         "called with " +
                                                         detail::describe_arguments(reading.message())});
  } catch (const Error&) {
    return call->reply.error(std::current_exception());
  }
  events->add_call(std::move(call));
}

}  // namespace

void serve(const Agent& agent, const std::shared_ptr<Events>& events, const std::string& function) {
  const auto parsed = parse_function(function);
  if (!parsed || parsed->kind != FunctionKind::served || function.size() > 4096) {
    throw InvalidArgument("\"" + function +
                          "\" cannot be served: a name is not empty and begins with none of py:, op:, tf:");
  }
  agent.core()->raw().serve(
      function, detail::reading_handler(
                    agent.core(), [events, function](Reading& reading, const RequestHead& head, TypedReply& answer) {
                      take_call(events, function, reading, head, answer);
                    }));
}

namespace {

/// What write_arguments() writes.
struct GivenArguments {
  const tferry_arguments& given;
  ValueList values;
};

void write_given(ValueWriter& out, const void* pack) {
  auto& arguments = *static_cast<GivenArguments*>(const_cast<void*>(pack));
  for (std::size_t i = 0; i < arguments.given.positional; ++i) arguments.values.write(out);
  begin_keywords(out.encoder(), arguments.given.keyword_count);
  for (std::size_t i = 0; i < arguments.given.keyword_count; ++i) {
    out.encoder().raw_text(arguments.given.keywords[i]);
    arguments.values.write(out);
  }
  arguments.values.finish();
}

/// Tells the events that a future has completed.
class Notice final : public detail::Continuation {
 public:
  Notice(std::shared_ptr<Events> events, std::uint64_t token) : events_(std::move(events)), token_(token) {}
  void run() override { events_->add_completed(token_); }

 private:
  const std::shared_ptr<Events> events_;
  const std::uint64_t token_;
};

std::optional<std::chrono::milliseconds> limit_of(std::int64_t timeout_ms) {
  if (timeout_ms < 0) return std::nullopt;
  // Not so long that the time of the clock overflows.
  return std::chrono::milliseconds(std::min(timeout_ms, std::int64_t{1} << 40));
}

CallOptions options_of(const tferry_call_options* given) {
  CallOptions out;
  if (given == nullptr) return out;
  out.timeout = std::chrono::milliseconds(std::max(given->timeout_ms, std::int64_t{-1}));
  if (given->require != nullptr) out.require = given->require;
  out.order = given->order;
  out.wait_for_ready = given->wait_for_ready != 0;
  out.idempotent = given->idempotent != 0;
  return out;
}

}  // namespace
}  // namespace tensorferry::c

using namespace tensorferry;     // NOLINT(google-build-using-namespace): the functions below are C's
using namespace tensorferry::c;  // NOLINT(google-build-using-namespace)

tferry_error* tferry_agent_call(tferry_agent* agent, const tferry_call_options* options, const char* peer,
                                const char* function, const tferry_arguments* arguments, tferry_future** future) {
  return guarded([&] {
    GivenArguments given{*arguments, {arguments->values, arguments->count, agent->events->owner_of(arguments->memory)}};
    auto pending = detail::start_call(agent->agent->core(), options_of(options), peer, function, {}, function,
                                      arguments->positional, &write_given, &given, false, true);
    *future = new tferry_future{agent->events, std::move(pending), &detail::take_reply<tensorferry::c::Message>};
  });
}

int32_t tferry_future_wait(tferry_future* future, int64_t timeout_ms) {
  const auto limit = limit_of(timeout_ms);
  const auto until = limit ? std::optional(Clock().now() + *limit) : std::nullopt;
  return future->pending->wait(until) ? 1 : 0;
}

void tferry_future_notify(tferry_future* future, uint64_t token) {
  future->pending->on_done(std::make_unique<Notice>(future->events, token));
}

void tferry_future_cancel(tferry_future* future) { future->pending->cancel(); }

tferry_error* tferry_future_take(tferry_future* future, tferry_message** message) {
  return guarded([&] { *message = future->take(*future->pending).release(); });
}

void tferry_future_free(tferry_future* future) { delete future; }

void tferry_agent_next(tferry_agent* agent, int64_t timeout_ms, tferry_event* event) {
  const auto events = agent->events;
  *event = events->next(limit_of(timeout_ms));
}

tferry_error* tferry_agent_serve(tferry_agent* agent, const char* function) {
  return guarded([&] { serve(*agent->agent, agent->events, function); });
}

size_t tferry_agent_released(tferry_agent* agent, uint64_t* numbers, size_t most) {
  return agent->events->take_released(numbers, most);
}

const char* tferry_call_function(const tferry_call* call) { return call->function.c_str(); }

const char* tferry_call_peer(const tferry_call* call) {
  return const_cast<tferry_call*>(call)->reply.call().caller().name.c_str();
}

int32_t tferry_call_rank(const tferry_call* call) { return const_cast<tferry_call*>(call)->reply.call().rank(); }

int32_t tferry_call_cancelled(const tferry_call* call) {
  return const_cast<tferry_call*>(call)->reply.call().reply().cancelled() ? 1 : 0;
}

int64_t tferry_call_left_ms(const tferry_call* call) {
  const auto deadline = const_cast<tferry_call*>(call)->reply.call().reply().deadline();
  if (!deadline) return -1;
  const auto left = *deadline - const_cast<tferry_call*>(call)->reply.core().raw().clock().now();
  return std::max<std::int64_t>(0, std::chrono::duration_cast<std::chrono::milliseconds>(left).count());
}

tferry_message* tferry_call_arguments(tferry_call* call, size_t* positional, const char* const** keywords,
                                      size_t* keyword_count) {
  *positional = call->positional;
  *keywords = call->keyword_texts.data();
  *keyword_count = call->keyword_texts.size();
  return call->arguments.release();
}

tferry_error* tferry_call_answer(tferry_call* call, const tferry_value* values, size_t count, uint64_t memory) {
  auto* const error = guarded([&] {
    ValueList list(values, count, call->events->owner_of(memory));
    call->reply.value([&](ValueWriter& out) {
      list.write(out);
      list.finish();
      return true;
    });
  });
  if (error == nullptr) delete call;
  return error;
}

void tferry_call_fail(tferry_call* call, int32_t code, const char* type_name, const char* text, const char* traceback) {
  const std::unique_ptr<tferry_call> owned(call);
  tferry_error_free(guarded([&] {
    if (code != static_cast<std::int32_t>(Code::remote_error)) {
      return call->reply.fail({static_cast<Code>(code), text});
    }
    const auto& self = call->reply.core().self().name;
    call->reply.error(std::make_exception_ptr(RemoteError(text, type_name, text, traceback, self)));
  }));
}
