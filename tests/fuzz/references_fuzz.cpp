// Fuzzes one agent's reference tables with arbitrary peers: messages, answers, records and deaths in any order,
// well-formed and malformed. After any input, no lock is held, nothing is counted twice, and close() completes all
// operations.
#include <deque>

#include "rpc/core/reference_mail.h"
#include "rpc/core/reference_proof.h"
#include "rpc/core/references.h"
#include "tests/fuzz/must.h"
#include "tests/fuzz/record_input.h"

namespace {

using namespace tensorferry;

using fuzzing::must;

class Network final : public References::Network {
 public:
  struct Sent {
    AgentId to;
    Bytes message;
    UniqueFunction<void(Result<Bytes>)> done;
  };
  void send(const AgentId& peer, Bytes message, UniqueFunction<void(Result<Bytes>)> done) override {
    sent.push_back({peer, std::move(message), std::move(done)});
  }
  void after(Milliseconds, UniqueFunction<void()> what) override { timers.push_back(std::move(what)); }
  std::deque<Sent> sent;
  std::deque<UniqueFunction<void()>> timers;
};

constexpr std::uint64_t here = 1;
constexpr std::size_t most_steps = 500;

class Fuzz {
 public:
  explicit Fuzz(ByteView input) : in_(input) {}

  void run() {
    for (std::size_t i = 0; i < most_steps && !in_.empty(); ++i) step();
    static_cast<void>(references_->counts());
    static_cast<void>(references_->settled());
    references_->close();
    must(fetching_ == 0);
    must(references_->counts() == References::Counts());
    for (auto& each : std::exchange(network_->sent, {})) each.done(Status(Code::agent_closed, ""));
    for (auto& each : std::exchange(network_->timers, {})) each();
  }

 private:
  // Few values of each kind, so that operations often name the same ones.
  std::uint64_t small(std::uint64_t below) { return in_.get<std::uint8_t>() % below; }
  AgentId agent() {
    const auto incarnation = small(5);
    return {std::string(1, static_cast<char>('a' + incarnation)), incarnation};
  }
  RRefId object() {
    if (!held_.empty() && small(2) == 0) return held_[small(held_.size())]->object();
    const auto incarnation = small(5);
    return {incarnation, small(6)};
  }
  /// A fork of `object` that was made for `receiver`; seldom one that was not.
  ForkId fork(const RRefId& object, std::uint64_t receiver) {
    const auto incarnation = small(5);
    ForkId fork{incarnation, small(6)};
    if (small(8) != 0) fork.nonce = proof_of(object, fork, receiver);
    return fork;
  }
  ReferenceOp op(const AgentId& from) {
    const auto object = this->object();
    const auto fork = this->fork(object, small(2) == 0 ? here : from.incarnation);
    auto op = ReferenceOp::of(static_cast<ReferenceOp::Kind>(small(6)), fork, object);
    op.parent = agent();
    op.call = small(3);
    op.text = "why";
    return op;
  }
  std::shared_ptr<Reference>* held() { return held_.empty() ? nullptr : &held_[small(held_.size())]; }

  void mail() {
    const auto from = agent();
    ReferenceBatch batch;
    for (auto left = small(4); left != 0; --left) batch.ops.push_back(op(from));
    auto& number = numbers_[from.incarnation];
    if (small(8) != 0) ++number;  // else repeats the number
    batch.number = number;
    batch.receiver = small(16) == 0 ? 9 : here;
    static_cast<void>(references_->receive_mail(from, encode(batch)));
  }
  void garbage() {
    const auto from = agent();
    static_cast<void>(references_->receive_mail(from, in_.raw(std::min<std::uint64_t>(small(64), in_.rest().size()))));
  }
  void answer() {
    if (network_->sent.empty()) return;
    auto sent = std::move(network_->sent.front());
    network_->sent.pop_front();
    const auto kind = small(8);
    if (kind == 0) return sent.done(Status(Code::not_found, ""));
    if (kind == 1) return sent.done(Status(Code::connection_lost, ""));
    if (kind == 2) {
      const auto bytes = in_.raw(std::min<std::uint64_t>(small(16), in_.rest().size()));
      return sent.done(Bytes(bytes.begin(), bytes.end()));
    }
    const auto batch = decode<ReferenceBatch>(sent.message);
    must(batch.has_value());
    ReferenceAnswer answer;
    for (std::size_t i = 0; i < batch->ops.size(); ++i) {
      answer.results.push_back({static_cast<ReferenceResult::Code>(small(6)), {}});
    }
    sent.done(encode(answer));
  }
  void receive() {
    const auto owner = agent();
    const auto object = this->object();
    const auto fork = this->fork(object, here);
    const auto parent = agent();
    auto received = references_->receive({owner, object, fork, parent, small(8) == 0 ? 9 : here, "hint"}, parent);
    if (received.ok()) held_.push_back(*received);
  }
  void pass() {
    const auto* reference = held();
    if (reference == nullptr) return;
    auto transfer = references_->pass_to(agent());
    static_cast<void>(transfer.add(**reference));
    const auto kind = small(4);
    if (kind == 0) return;  // the message is never sent
    transfer.sent();
    if (kind == 1) transfer.ended({});
    if (kind == 2) transfer.ended({Code::deadline_exceeded, ""});
    if (kind == 3) transfer.replied(small(3));
  }
  void create() {
    const auto creator = agent();
    const auto object = this->object();
    const auto fork = this->fork(object, creator.incarnation);
    static_cast<void>(references_->create(creator, {object, fork}));
  }
  void fetch() {
    ++fetching_;
    const auto deadline = small(2) == 0 ? std::optional(Clock().now()) : std::nullopt;
    references_->fetch(object(), deadline, [this](const Result<Outcome>&) { --fetching_; });
  }
  void drop() {
    auto* reference = held();
    if (reference == nullptr) return;
    std::swap(*reference, held_.back());
    held_.pop_back();
  }
  void end_creation() {
    const auto* reference = held();
    if (reference == nullptr) return;
    for (auto& each : creating_) {
      if (each != *reference) continue;
      references_->end_creation(**reference, small(2) == 0 ? Status() : Status(Code::cancelled, "why"));
      std::swap(each, creating_.back());
      creating_.pop_back();
      return;
    }
  }

  void step() {
    switch (small(13)) {
      case 0:
        return garbage();
      case 1:
        return answer();
      case 2:
        return receive();
      case 3:
        return pass();
      case 4:
        return create();
      case 5:
        return references_->fulfil(object(), Outcome{std::make_shared<int>(1), false});
      case 6:
        return fetch();
      case 7:
        return drop();
      case 8:
        held_.push_back(references_->own({std::make_shared<int>(1), false}));
        return;
      case 9:
        held_.push_back(references_->begin_creation(agent()));
        creating_.push_back(held_.back());
        return;
      case 10:
        return end_creation();
      case 11: {
        if (small(4) == 0) return references_->peer_lost(agent(), {Code::connection_lost, "gone"});
        if (network_->timers.empty()) return;
        const auto timer = std::move(network_->timers.front());
        network_->timers.pop_front();
        return timer();
      }
      default:
        return mail();
    }
  }

  Reader in_;
  int fetching_ = 0;
  std::shared_ptr<Network> network_ = std::make_shared<Network>();
  std::shared_ptr<References> references_ = References::make({"b", here}, network_, {.secret = {1, 2}});
  std::array<std::uint64_t, 5> numbers_{};
  std::vector<std::shared_ptr<Reference>> held_, creating_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto input = std::as_bytes(std::span(data, size));
  fuzzing::fuzz_records<ReferenceBatch, ReferenceAnswer>(input);
  Fuzz(input).run();
  return 0;
}
