/// Fuzzes both sides of a ring of calls; either may be hostile. Between any two operations, the input writes arbitrary
/// values into the memory that both sides map. The ring must stay within its memory, return only lengths and indices in
/// bounds, and never give the caller one slot for two calls at once.
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "agent/transport/call_ring.h"
#include "base/bytes.h"
#include "base/shared_memory.h"
#include "tests/fuzz/must.h"

namespace tensorferry {
namespace {

using fuzzing::must;

constexpr std::size_t most_steps = 200;

class Fuzz {
 public:
  explicit Fuzz(Reader& in) : in_(in) {
    auto made = CallRing::create(7);
    must(made.ok());
    caller_ = std::move(*made);
    auto descriptor = caller_->share(), again = caller_->share();
    must(descriptor.ok() && again.ok());
    auto mapped = CallRing::map(std::move(*descriptor), 7);
    must(mapped.ok());
    callee_ = std::move(*mapped);
    auto raw = SharedMemory::map(std::move(*again), CallRing::memory_bytes());
    must(raw.ok());
    raw_ = std::move(*raw);
  }

  void step() {
    switch (in_.get<std::uint8_t>() % 12) {
      case 0:
      case 1:
        return call();
      case 2:
      case 3:
        return serve();
      case 4:
        return answer();
      case 5:
        return take();
      case 6:
        return wait();
      case 7:
        return give_up();
      case 8:
        caller_->reclaim();
        caller_->wake_all();
        return;
      case 9:
        if (const auto done = caller_->next_done()) must(done->index < CallRing::slots);
        (void)caller_->any_done();
        (void)caller_->ended();
        return;
      default:
        return write();
    }
  }

 private:
  struct Asked {
    SlotId slot;
    bool given_up = false;  // the slot becomes free when the answer comes; it may be free already
  };

  void call() {
    const auto slot = caller_->reserve();
    if (!slot) return;
    must(slot->index < CallRing::slots);
    for (const auto& other : asked_) must(other.given_up || other.slot.index != slot->index);
    const Bytes frame(1 + in_.get<std::uint16_t>() % CallRing::most_request, std::byte{5});
    if (caller_->push(*slot, frame))
      asked_.push_back({*slot});
    else
      caller_->unreserve(*slot);
  }

  void serve() {
    (void)callee_->empty();
    (void)callee_->peek_function();
    std::vector<std::byte> into(in_.get<std::uint8_t>() % 2 ? CallRing::most_request : in_.get<std::uint16_t>());
    bool valid = true;
    const auto request = callee_->pop(into, valid);
    if (!request) return;
    must(valid && request->bytes <= into.size() && request->slot.index < CallRing::slots);
    served_.push_back(request->slot);
  }

  void answer() {
    if (served_.empty()) return;
    const auto slot = served_.front();
    served_.pop_front();
    if (in_.get<std::uint8_t>() % 4 == 0)
      (void)callee_->answer_by_socket(slot);
    else
      (void)callee_->answer(slot, Bytes(1 + in_.get<std::uint16_t>() % CallRing::most_reply, std::byte{6}));
  }

  Asked* some_call() { return asked_.empty() ? nullptr : &asked_[in_.get<std::uint8_t>() % asked_.size()]; }

  void take() {
    auto* asked = some_call();
    if (asked == nullptr) return;
    if (caller_->state(asked->slot) == CallRing::State::by_socket) {
      caller_->take_by_socket(asked->slot);
      asked->given_up = true;
      return;
    }
    bool valid = true;
    const auto reply = caller_->take(asked->slot, valid);
    if (reply) must(valid && reply->size() <= CallRing::most_reply);
    if (reply || !valid) asked->given_up = true;
  }

  void wait() {
    const auto* asked = some_call();
    if (asked == nullptr || asked->given_up) return;
    (void)caller_->cpu_of(asked->slot);
    if (in_.get<std::uint8_t>() % 2)
      (void)caller_->watch(asked->slot);
    else
      (void)caller_->sleep(asked->slot, std::chrono::steady_clock::now());
  }

  void give_up() {
    auto* asked = some_call();
    if (asked == nullptr) return;
    bool valid = true;
    const auto reply = caller_->abandon(asked->slot, valid);
    if (reply) must(valid && reply->size() <= CallRing::most_reply);
    asked->given_up = true;
  }

  /// Writes an arbitrary value to a word near the beginning, or in front of a slot. The words that matter are there.
  void write() {
    const auto where = in_.get<std::uint8_t>();
    const auto at = where % 2 ? std::size_t{in_.get<std::uint16_t>()} * 4
                              : raw_.bytes() - CallRing::slots * std::size_t{4096} +
                                    in_.get<std::uint8_t>() * std::size_t{4096} + where / 2 % 4 * std::size_t{4};
    if (at + sizeof(std::uint32_t) > raw_.bytes()) return;
    auto& word = *reinterpret_cast<std::atomic<std::uint32_t>*>(raw_.data() + at);
    const auto value = in_.get<std::uint32_t>();
    word.store(in_.get<std::uint8_t>() % 2 ? value : word.load() ^ (value & 0xff));
  }

  Reader& in_;
  std::shared_ptr<CallRing> caller_, callee_;
  SharedMemory raw_;
  std::vector<Asked> asked_;
  std::deque<SlotId> served_;
};

}  // namespace
}  // namespace tensorferry

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  Reader in(std::as_bytes(std::span(data, size)));
  Fuzz fuzz(in);
  for (std::size_t step = 0; step < most_steps && !in.empty(); ++step) fuzz.step();
  return 0;
}
