#include "rpc/cpp/serving.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "rpc/core/exception.h"
#include "rpc/cpp/failures.h"
#include "tensorferry/errors.h"

namespace tensorferry::detail {

// ---- answers

void TypedReply::send(Encoder& out, ObjectMarshaller& marshaller) {
  check(out.status());
  auto message = out.take();
  if (call_.creates()) {
    if (!marshaller.kept()) return call_.keep({std::make_shared<KeptReply>(std::move(message)), false});
    // The result is an object already: the caller's reference becomes one more reference to it.
    const auto& object = *marshaller.kept().reference();
    if (object.owner().incarnation != core_->self().incarnation)
      throw InvalidArgument("a reference to an object of another agent cannot stay here as a result");
    auto& tables = core_->tables();
    const auto deadline = call_.reply().deadline();
    // If the object is still being created, this answers later, on the thread that runs the creation.
    tables.fetch(object.object(), deadline, [self = std::move(*this)](Result<Outcome> outcome) mutable {
      outcome.ok() ? self.call_.keep(*std::move(outcome)) : self.fail(outcome.status());
    });
    return;
  }
  call_.send(std::move(message), marshaller.take());
}

void TypedReply::error(const std::exception_ptr& thrown) {
  RemoteException described;
  const auto status = describe_thrown(thrown, core_->self().name, described);
  if (!status.ok()) return fail(status);
  Encoder out;
  begin_reply(out, ReplyKind::exception);
  write_exception(out, described);
  if (call_.creates()) return call_.keep({std::make_shared<KeptReply>(out.take()), true});
  call_.send(out.take(), {});
}

void TypedReply::fail(const Status& status) {
  if (call_.creates()) return call_.keep({std::make_shared<KeptReply>(status), true});
  call_.fail(status);
}

namespace {

/// The call, as the function that serves it sees it.
class Running final : public Invocation {
 public:
  Running(TypedReply& answer, Reading& reading, const RequestHead& head, std::size_t skipped,
          const std::vector<std::string>& parameters, std::size_t arguments)
      : answer_(answer),
        reading_(reading),
        reader_(reading),
        parameters_(parameters),
        given_(head.positional - skipped),
        arguments_(arguments) {}

  [[nodiscard]] std::string_view peer() const override { return answer_.call().caller().name; }
  [[nodiscard]] int rank() const override { return answer_.call().rank(); }
  [[nodiscard]] std::optional<Clock::time_point> deadline() const override { return answer_.call().reply().deadline(); }
  [[nodiscard]] bool cancelled() const override { return answer_.call().reply().cancelled(); }

  ValueReader* argument(std::size_t index) override {
    if (index < given_) return &reader_;
    const auto& names = reading_.keywords();
    if (index >= parameters_.size()) return nullptr;
    const auto found = std::find(names.begin(), names.end(), parameters_[index]);
    if (found == names.end()) return nullptr;
    ++by_keyword_;
    reading_.go_to_keyword(static_cast<std::size_t>(found - names.begin()));
    return &reader_;
  }
  void end_arguments() override {
    if (given_ > arguments_ || reading_.keywords().size() != by_keyword_) throw Mismatch();
    reading_.finish();
  }
  ValueWriter& result() override { return *out_; }
  void result_later(std::shared_ptr<Pending> pending, void (*write)(ValueWriter&, Pending&, void (*)()),
                    void (*take)()) override;

  void write_to(ValueWriter* out) { out_ = out; }
  [[nodiscard]] bool answers_later() const noexcept { return later_; }

 private:
  TypedReply& answer_;
  Reading& reading_;
  ValueReader reader_;
  const std::vector<std::string>& parameters_;
  const std::size_t given_, arguments_;
  std::size_t by_keyword_ = 0;
  ValueWriter* out_ = nullptr;
  bool later_ = false;
};

/// Answers with the result or the exception of a future.
class ReplyLater final : public Continuation {
 public:
  ReplyLater(TypedReply answer, std::shared_ptr<Pending> pending, void (*write)(ValueWriter&, Pending&, void (*)()),
             void (*take)())
      : answer_(std::move(answer)), pending_(std::move(pending)), write_(write), take_(take) {}
  void run() override {
    try {
      answer_.value([&](ValueWriter& out) {
        write_(out, *pending_, take_);
        return true;
      });
    } catch (...) {
      answer_.error(std::current_exception());
    }
  }

 private:
  TypedReply answer_;
  std::shared_ptr<Pending> pending_;
  void (*write_)(ValueWriter&, Pending&, void (*)());
  void (*take_)();
};

void Running::result_later(std::shared_ptr<Pending> pending, void (*write)(ValueWriter&, Pending&, void (*)()),
                           void (*take)()) {
  if (!pending) throw_used_future();
  later_ = true;
  auto next = std::make_unique<ReplyLater>(std::move(answer_), pending, write, take);
  pending->on_done(std::move(next));
}

}  // namespace

void run_function(Function& function, std::string_view shown, Reading& reading, const RequestHead& head,
                  std::size_t skipped, TypedReply answer) {
  Running running(answer, reading, head, skipped, function.parameters, function.arguments());
  try {
    if (head.packed || head.positional < skipped || head.positional - skipped > function.arguments()) throw Mismatch();
    answer.value([&](ValueWriter& out) {
      running.write_to(&out);
      function.run(running);
      return !running.answers_later();
    });
  } catch (const Mismatch&) {
    auto came = describe_arguments(reading.message());
    if (skipped != 0) {  // drop the first argument, which the library added
      const auto comma = came.find(", ");
      came = "(" + came.substr(comma == std::string::npos ? came.size() - 1 : comma + 2);
    }
    answer.fail({Code::invalid_argument, std::string(shown) + function.signature() + " on \"" +
                                             answer.core().self().name + "\"; called with " + came});
  } catch (...) {
    answer.error(std::current_exception());
  }
}

std::string signature_text(const std::vector<std::string>& parameters, const std::vector<std::string>& types,
                           const std::string& result) {
  std::string out = "(";
  for (std::size_t i = 0; i < types.size(); ++i) {
    if (i != 0) out += ", ";
    if (i < parameters.size()) out += parameters[i] + ": ";
    out += types[i];
  }
  return out + ") -> " + result;
}

void throw_missing_argument() { throw Mismatch(); }

Handler handler_of(const std::shared_ptr<AgentCore>& core, std::string shown, std::shared_ptr<Function> function) {
  return reading_handler(core, [shown = std::move(shown), function = std::move(function)](
                                   Reading& reading, const RequestHead& head, TypedReply& answer) {
    run_function(*function, shown, reading, head, 0, std::move(answer));
  });
}

}  // namespace tensorferry::detail
