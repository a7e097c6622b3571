#include <optional>
#include <utility>

#include "agent/buffers/placement.h"
#include "rpc/core/envelope.h"
#include "rpc/core/exception.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "rpc/cpp/reading.h"
#include "rpc/member/outgoing_call.h"
#include "tensorferry/errors.h"

namespace tensorferry::detail {
namespace {

/// Returns the options of the RawAgent's call to `peer`. A negative time-out becomes the agent's.
RawCallOptions raw_options_of(const CallOptions& options, const AgentCore& core, std::string_view peer) {
  RawCallOptions out;
  out.timeout = options.timeout.count() < 0 ? core.timeout : options.timeout;
  out.require = options.require;
  out.wait_for_ready = options.wait_for_ready;
  out.order = options.order;
  out.idempotent = options.idempotent;
  if (!options.devices.empty()) {
    out.arguments = detail::placement_of(options.devices);
  } else if (const auto map = core.devices.maps.find(peer); map != core.devices.maps.end()) {
    out.arguments = map->second;
  }
  out.results = reversed(out.arguments);
  return out;
}

/// The state of one call, from its start until its result has been read.
class CallInFlight final : public PendingReply, public std::enable_shared_from_this<CallInFlight> {
 public:
  CallInFlight(std::shared_ptr<AgentCore> core, std::string_view peer, std::string_view shown)
      : core_(std::move(core)), peer_(peer), shown_(shown) {}

  /// Encodes the request and sends it. Throws if an argument cannot be sent.
  void start(const CallOptions& options, std::string_view function, ByteView first, std::size_t arguments,
             WriteArguments write, const void* pack, bool may_hold_object, bool writes_keywords) {
    Encoder out;
    if (may_hold_object) call_.begin(*core_->member);
    const std::size_t before = first.empty() ? 0 : 1;
    begin_request(out, arguments + before, {}, call_.number(), options.timeout.count() >= 0);
    if (before != 0) out.bytes(first, [] { return Owner(); });
    ObjectMarshaller marshaller(*core_->member, peer_);
    ValueWriter writer(out, &marshaller, core_->devices.devices.get());
    write(writer, pack);
    if (!writes_keywords) begin_keywords(out, 0);
    check(out.status());
    call_.carry(marshaller.take());
    call_.send(*core_->member, peer_, function, out.take(), raw_options_of(options, *core_, peer_));
  }

  bool wait(std::optional<TimePoint> until) override {
    // Call::wait returns false at once for a call without a link, which has completed or is being completed now.
    return call().wait(until) || call().done();
  }
  bool done() override { return call().done(); }
  void cancel() override { call().cancel(); }
  void on_done(std::unique_ptr<Continuation> next) override {
    call().on_done([self = shared_from_this(), next = std::move(next)](Result<Received> reply) {
      self->reply_.emplace(std::move(reply));
      run_guarded(*next);
    });
  }

  ValueReader& open(std::string (*wanted)()) override {
    auto& reading = read_reply();
    reading.expect_result(shown_, peer_, wanted);
    reading.come_from({peer_, 0});
    return reader_.emplace(reading);
  }
  void close() override {
    reading_->finish();
    call_.end({});
  }
  void discard() override {
    read_reply();
    call_.end({});
  }

 private:
  Call& call() noexcept { return call_.call; }
  /// Takes the reply. Throws the error or the exception that came instead of a result.
  Reading& read_reply() {
    if (!reply_) reply_.emplace(call().take());
    if (!reply_->ok()) {
      call_.end(reply_->status());
      throw_status(reply_->status());
    }
    auto& reading = reading_.emplace(**reply_, core_.get());
    if (reading.reply() == ReplyKind::exception) {
      call_.end({});
      throw_remote(reading.exception());
    }
    return reading;
  }

  const std::shared_ptr<AgentCore> core_;
  const std::string peer_, shown_;
  OutgoingCall call_;
  std::optional<Result<Received>> reply_;
  std::optional<Reading> reading_;
  std::optional<ValueReader> reader_;
};

}  // namespace

std::shared_ptr<Pending> start_call(const std::shared_ptr<AgentCore>& core, const CallOptions& options,
                                    std::string_view peer, std::string_view function, ByteView first,
                                    std::string_view shown, std::size_t arguments, WriteArguments write,
                                    const void* pack, bool may_hold_object, bool writes_keywords) {
  auto call = std::make_shared<CallInFlight>(core, peer, shown);
  call->start(options, function, first, arguments, write, pack, may_hold_object, writes_keywords);
  return call;
}

}  // namespace tensorferry::detail
