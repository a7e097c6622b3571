#include "rpc/member/incoming_call.h"

#include <utility>

#include "base/log.h"
#include "base/text.h"

namespace tensorferry {

bool IncomingCall::begin(std::uint64_t call, bool timed, const std::optional<Creation>& creation) {
  number_ = call;
  timed_ = timed;
  if (!creation) return true;
  if (const auto admitted = member_->references().create(caller_, *creation); !admitted.ok()) {
    if (member_->references().comes_again(caller_, *creation))
      answer_as_before(*creation);
    else
      fail(admitted);
    return false;
  }
  creation_ = creation;
  reply_.outlive_link();  // if the connection is lost, the request may come again, and makes no other object
  return true;
}

/// Answers that an object has been created.
static void send_nothing(Reply& reply) {
  Encoder out;
  begin_reply(out, ReplyKind::value);
  out.none();
  reply.send(out.take());
}

/// Answers a request that has come before, when the object that the first one creates is there.
void IncomingCall::answer_as_before(const Creation& creation) {
  const auto deadline = reply_.deadline();
  member_->references().fetch(
      creation.object, deadline,
      [reply = std::move(reply_)](const Result<Outcome>& outcome) mutable {
        if (outcome.ok())
          send_nothing(reply);
        else
          reply.fail(outcome.status());
      },
      creation.fork);
}

void IncomingCall::keep(Outcome outcome) {
  member_->references().fulfil(creation_->object, std::move(outcome));
  creation_.reset();
  send_nothing(reply_);
}

void IncomingCall::fail(const Status& status) {
  if (creation_) member_->references().fulfil(creation_->object, status);
  creation_.reset();
  reply_.fail(status);
}

std::shared_ptr<std::atomic<bool>> IncomingCall::given_up() {
  if (!given_up_) {
    given_up_ = std::make_shared<std::atomic<bool>>(false);
    reply_.on_cancelled([flag = given_up_] { *flag = true; });
  }
  return given_up_;
}

void IncomingCall::send(Message message, ReferenceTransfer transfer) {
  transfer.sent();
  transfer.replied(number_);
  std::optional<Unlocked> unlocked;
  if (member_->lock() != nullptr && message.bytes() != 0) unlocked.emplace(member_->lock());
  reply_.send(std::move(message));
}

Result<Fetch> IncomingCall::begin_fetch(const Received& request) {
  Decoder in(request.payload, request.buffers);
  const auto fetch = read_fetch(in);
  if (const auto malformed = in.finish(); !malformed.ok()) return malformed;
  number_ = fetch.call;
  if (const auto may = check_use(fetch, fetch_function); !may.ok()) return may;
  return fetch;
}

Result<MethodTarget> IncomingCall::target_of(ByteView argument) const {
  auto target = decode<MethodTarget>(argument);
  if (!target) return Status(Code::protocol_error, "a call of a method names no method");
  if (const auto may = check_use(*target, method_function); !may.ok()) return may;
  return *std::move(target);
}

template <class Target>
Status IncomingCall::check_use(const Target& target, std::string_view function) const {
  if (target.owner != member_->self().incarnation) {
    return {Code::connection_lost,
            formatted("the object was on an earlier \"{}\", which has ended", member_->self().name)};
  }
  auto may = member_->references().may_use(caller_, target.object, target.fork);
  if (!may.ok()) log_refusal(caller_.name, function, may);
  return may;
}

}  // namespace tensorferry
