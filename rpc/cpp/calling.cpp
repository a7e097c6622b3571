#include <optional>
#include <utility>

#include "rpc/core/envelope.h"
#include "rpc/core/exception.h"
#include "rpc/cpp/core.h"
#include "rpc/cpp/failures.h"
#include "rpc/cpp/reading.h"
#include "tensorferry/errors.h"

namespace tensorferry::detail {
namespace {

/// The state of one call, from its start until its result has been read.
class CallInFlight final : public PendingReply, public std::enable_shared_from_this<CallInFlight> {
 public:
  CallInFlight(std::shared_ptr<AgentCore> core, std::string_view peer, std::string_view shown)
      : core_(std::move(core)), peer_(peer), shown_(shown) {}
  ~CallInFlight() override { end_call({Code::cancelled, "its future was dropped"}); }

  /// Encodes the request and sends it. Throws if an argument cannot be sent.
  void start(const CallOptions& options, std::string_view function, ByteView first, std::size_t arguments,
             WriteArguments write, const void* pack, bool may_hold_object) {
    Encoder out;
    if (may_hold_object) number_ = core_->tables().begin_call();
    const std::size_t before = first.empty() ? 0 : 1;
    begin_request(out, arguments + before, {}, number_);
    if (before != 0) out.bytes(first, [] { return Owner(); });
    ReferenceMarshaller marshaller(*core_, peer_);
    ValueWriter writer(out, &marshaller);
    write(writer, pack);
    begin_keywords(out, 0);
    check(out.status());
    transfer_ = marshaller.take();
    transfer_.sent();
    call_ = core_->raw().call(peer_, function, out.take(), core_->options_of(options));
  }

  bool wait(std::optional<TimePoint> until) override {
    // Call::wait returns false at once for a call without a link, which has completed or is being completed now.
    return call_.wait(until) || call_.done();
  }
  bool done() override { return call_.done(); }
  void cancel() override { call_.cancel(); }
  void on_done(std::unique_ptr<Continuation> next) override {
    call_.on_done([self = shared_from_this(), next = std::move(next)](Result<Received> reply) {
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
    end_call({});
  }
  void discard() override {
    read_reply();
    end_call({});
  }

 private:
  /// Takes the reply. Throws the error or the exception that came instead of a result.
  Reading& read_reply() {
    if (!reply_) reply_.emplace(call_.take());
    if (!reply_->ok()) {
      end_call(reply_->status());
      throw_status(reply_->status());
    }
    auto& reading = reading_.emplace(**reply_, core_.get());
    if (reading.reply() == ReplyKind::exception) {
      end_call({});
      throw_remote(reading.exception());
    }
    return reading;
  }

  void end_call(const Status& status) {
    if (!transfer_.empty()) transfer_.ended(status);
    if (number_ != 0) core_->tables().end_call(std::exchange(number_, 0));
  }

  const std::shared_ptr<AgentCore> core_;
  const std::string peer_, shown_;
  Call call_;
  ReferenceTransfer transfer_;
  std::uint64_t number_ = 0;
  std::optional<Result<Received>> reply_;
  std::optional<Reading> reading_;
  std::optional<ValueReader> reader_;
};

}  // namespace

std::shared_ptr<Pending> start_call(const std::shared_ptr<AgentCore>& core, const CallOptions& options,
                                    std::string_view peer, std::string_view function, ByteView first,
                                    std::string_view shown, std::size_t arguments, WriteArguments write,
                                    const void* pack, bool may_hold_object) {
  auto call = std::make_shared<CallInFlight>(core, peer, shown);
  call->start(options, function, first, arguments, write, pack, may_hold_object);
  return call;
}

}  // namespace tensorferry::detail
