// The shared memory of one direction of calling, without agents. Both ends are in one process, each with its own
// mapping.
#include "agent/transport/call_ring.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <set>
#include <thread>
#include <vector>

#include "agent/transport/doorbell.h"
#include "base/spin.h"
#include "tests/agent/patience.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using State = CallRing::State;
using Answered = CallRing::Answered;
using std::chrono::milliseconds;

Bytes frame_of(std::size_t bytes, unsigned seed) {
  Bytes frame(bytes);
  for (std::size_t i = 0; i < bytes; ++i) frame[i] = static_cast<std::byte>(i * 7 + seed);
  return frame;
}

class CallRings : public ::testing::Test {
 protected:
  CallRings() {
    auto made = CallRing::create(4711);
    EXPECT_TRUE(made.ok());
    caller = *made;
    auto descriptor = caller->share();
    EXPECT_TRUE(descriptor.ok());
    auto mapped = CallRing::map(std::move(*descriptor), 4711);
    EXPECT_TRUE(mapped.ok());
    callee = *mapped;
  }

  SlotId send(const Bytes& frame) {
    const auto slot = caller->reserve();
    EXPECT_TRUE(slot && caller->push(*slot, frame));
    return slot.value_or(SlotId{});
  }
  std::optional<std::pair<SlotId, Bytes>> pop() {
    bool valid = true;
    const auto request = callee->pop(buffer_, valid);
    EXPECT_TRUE(valid);
    if (!request) return std::nullopt;
    return std::pair(request->slot, Bytes(buffer_.begin(), buffer_.begin() + static_cast<long>(request->bytes)));
  }
  std::optional<Bytes> take(SlotId slot) {
    bool valid = true;
    auto frame = caller->take(slot, valid);
    EXPECT_TRUE(valid);
    return frame;
  }
  std::optional<Bytes> abandon(SlotId slot) {
    bool valid = true;
    auto frame = caller->abandon(slot, valid);
    EXPECT_TRUE(valid);
    return frame;
  }

  std::shared_ptr<CallRing> caller, callee;

 private:
  Bytes buffer_ = Bytes(CallRing::most_request);
};

TEST_F(CallRings, CarryRequestsInOrderAndRepliesToTheirSlots) {
  for (unsigned round = 0; round < 2000; ++round) {
    const auto first = frame_of(40 + round % 3000, round), second = frame_of(40, round + 1);
    const auto a = send(first), b = send(second);
    const auto got_a = pop(), got_b = pop();
    ASSERT_TRUE(got_a && got_b);
    EXPECT_EQ(got_a->second, first);
    EXPECT_EQ(got_b->second, second);
    EXPECT_FALSE(pop());
    EXPECT_EQ(callee->answer(got_b->first, second), Answered::quietly);
    EXPECT_EQ(caller->state(a), State::pending);
    EXPECT_EQ(callee->answer(got_a->first, first), Answered::quietly);
    EXPECT_EQ(take(a), first);
    EXPECT_EQ(take(b), second);
    EXPECT_EQ(take(b), std::nullopt) << "only once";
  }
}

TEST_F(CallRings, RefuseRequestsWhileTheyAreFull) {
  const auto frame = frame_of(60'000, 1);
  int sent = 0;
  while (true) {
    const auto slot = caller->reserve();
    ASSERT_TRUE(slot);
    if (!caller->push(*slot, frame)) {
      caller->unreserve(*slot);
      break;
    }
    ++sent;
  }
  EXPECT_EQ(sent, static_cast<int>(CallRing::ring_bytes / 60'016));
  ASSERT_TRUE(pop());
  (void)send(frame);
  for (int i = 0; i < sent; ++i) EXPECT_EQ(pop()->second, frame);
}

TEST_F(CallRings, HaveAFixedNumberOfSlots) {
  std::set<std::uint32_t> taken;
  for (std::uint32_t i = 0; i < CallRing::slots; ++i) taken.insert(caller->reserve()->index);
  EXPECT_EQ(taken.size(), CallRing::slots);
  EXPECT_FALSE(caller->reserve());
  caller->unreserve({5, 1});
  EXPECT_EQ(caller->reserve()->index, 5U);
}

TEST_F(CallRings, DropALateReply) {
  const auto old = send(frame_of(50, 1));
  const auto request = pop();
  EXPECT_EQ(abandon(old), std::nullopt);
  EXPECT_EQ(callee->state(old), State::abandoned) << "the callee can see it";
  for (std::uint32_t i = 1; i < CallRing::slots; ++i) EXPECT_NE(caller->reserve()->index, old.index);
  EXPECT_FALSE(caller->reserve()) << "the slot is not used again while its answer may come";
  EXPECT_EQ(callee->answer(request->first, frame_of(60, 2)), Answered::too_late);
  caller->reclaim();
  const auto next = caller->reserve();
  ASSERT_TRUE(next);
  EXPECT_EQ(next->index, old.index);
  EXPECT_NE(next->generation, old.generation);
  EXPECT_EQ(callee->answer(request->first, frame_of(60, 3)), Answered::too_late) << "nor by a second answer";
  EXPECT_EQ(caller->state(*next), State::pending);
}

TEST_F(CallRings, HandOutTheReplyOfACallThatIsAbandonedTooLate) {
  const auto slot = send(frame_of(50, 1));
  EXPECT_EQ(callee->answer(pop()->first, frame_of(60, 2)), Answered::quietly);
  EXPECT_EQ(abandon(slot), frame_of(60, 2));
  EXPECT_EQ(abandon(slot), std::nullopt) << "only once";
  EXPECT_EQ(caller->reserve()->index, slot.index);
}

TEST_F(CallRings, ReportEachWatchedSlotToTheCallerOnce) {
  const auto a = send(frame_of(50, 1)), b = send(frame_of(50, 2));
  const auto got_a = pop(), got_b = pop();
  EXPECT_EQ(callee->answer(got_a->first, frame_of(44, 1)), Answered::quietly);
  EXPECT_FALSE(caller->watch(a)) << "it has been answered";
  EXPECT_TRUE(caller->watch(b));
  EXPECT_FALSE(caller->any_done());
  EXPECT_EQ(callee->answer_by_socket(got_b->first), Answered::must_ring);
  ASSERT_TRUE(caller->any_done());
  const auto done = caller->next_done();
  ASSERT_TRUE(done);
  EXPECT_EQ(done->index, b.index);
  EXPECT_EQ(done->generation, b.generation);
  EXPECT_EQ(caller->state(b), State::by_socket);
  EXPECT_FALSE(caller->next_done());
}

TEST_F(CallRings, WakeTheSleeperOfASlot) {
  for (int round = 0; round < rounds(20'000); ++round) {
    const auto slot = send(frame_of(40, 1));
    std::thread server([&] {
      const auto request = pop();
      if (round % 3 == 0) std::this_thread::yield();
      if (round % 4 == 3)
        abandon(request->first);  // as a thread does that cancels the call
      else
        (void)callee->answer(request->first, frame_of(40, 2));
    });
    const auto open = [&] { return caller->state(slot) == State::pending || caller->state(slot) == State::sleeping; };
    while (open()) caller->sleep(slot, std::nullopt);
    server.join();
    EXPECT_EQ(take(slot).has_value(), round % 4 != 3);
    abandon(slot);
    if (round % 4 == 3) (void)callee->answer(slot, frame_of(40, 2));
    caller->reclaim();
  }
}

TEST_F(CallRings, ReportASlotToTheCallerIfItsSleeperHasStopped) {
  const auto slot = send(frame_of(40, 1));
  caller->sleep(slot, std::chrono::steady_clock::now() + milliseconds(1));
  EXPECT_EQ(caller->state(slot), State::sleeping);
  EXPECT_FALSE(caller->watch(slot));
  caller->stop_sleeping(slot);
  EXPECT_TRUE(caller->watch(slot));
  ASSERT_TRUE(pop());
  EXPECT_EQ(callee->answer(slot, frame_of(40, 2)), CallRing::Answered::must_ring);
  caller->stop_sleeping(slot);  // too late to change anything
  EXPECT_EQ(caller->state(slot), State::full);
  EXPECT_TRUE(caller->next_done());
}

TEST_F(CallRings, StopOneSleeperAndKeepTheOther) {
  const auto slot = send(frame_of(40, 1));
  std::thread other([&] {
    while (caller->state(slot) != State::full) caller->sleep(slot, std::nullopt);
  });
  while (caller->state(slot) != State::sleeping) std::this_thread::yield();
  caller->sleep(slot, std::chrono::steady_clock::now() + milliseconds(1));
  caller->stop_sleeping(slot);
  while (caller->state(slot) != State::sleeping) std::this_thread::yield();  // the other one sleeps again
  ASSERT_TRUE(pop());
  EXPECT_EQ(callee->answer(slot, frame_of(40, 2)), CallRing::Answered::quietly);
  other.join();
  EXPECT_TRUE(take(slot));
}

TEST_F(CallRings, WithAnotherNonceOrSizeOrUnsealedMemoryAreRefused) {
  EXPECT_EQ(CallRing::map(std::move(*caller->share()), 4712).status().code(), Code::protocol_error);
  FileDescriptor unsealed(::memfd_create("unsealed", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(unsealed.get(), 16 << 20), 0);
  EXPECT_EQ(CallRing::map(std::move(unsealed), 4711).status().code(), Code::protocol_error);
  auto small = SharedMemory::create(4096);
  ASSERT_TRUE(small.ok());
  EXPECT_EQ(CallRing::map(std::move(*small->share()), 4711).status().code(), Code::protocol_error);
}

TEST_F(CallRings, WithInvalidContentsAreRefusedWithoutReadingOutside) {
  // The first word of the ring's bytes is the length of its first request. A hostile caller may write any length there.
  auto descriptor = caller->share();
  const auto slot = send(frame_of(40, 1));
  (void)slot;
  const auto bytes = ::lseek(descriptor->get(), 0, SEEK_END);
  auto* raw = static_cast<std::byte*>(
      ::mmap(nullptr, static_cast<std::size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor->get(), 0));
  ASSERT_NE(raw, MAP_FAILED);
  const std::uint32_t length = 40;
  std::byte* at = nullptr;
  for (std::byte* p = raw; p < raw + 64 * 1024; p += 16) {
    std::uint32_t word = 0;
    std::memcpy(&word, p, sizeof word);
    if (word == length) at = p;
  }
  ASSERT_NE(at, nullptr);
  Bytes into(CallRing::most_request);
  for (const std::uint32_t lie : {0xffffffffU, 1U << 20, 41U + 64U}) {
    std::memcpy(at, &lie, sizeof lie);
    bool valid = true;
    EXPECT_FALSE(callee->pop(into, valid));
    EXPECT_FALSE(valid) << lie;
  }
  ::munmap(raw, static_cast<std::size_t>(bytes));
}

/// The memory of a ring as a hostile callee sees it.
class HostileCallee {
 public:
  explicit HostileCallee(CallRing& ring)
      : raw_(static_cast<std::byte*>(
            ::mmap(nullptr, CallRing::memory_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, ring.share()->get(), 0))) {
    EXPECT_NE(raw_, MAP_FAILED);
  }
  HostileCallee(const HostileCallee&) = delete;
  HostileCallee& operator=(const HostileCallee&) = delete;
  ~HostileCallee() { ::munmap(raw_, CallRing::memory_bytes()); }

  /// Writes a state into the word of a slot: the slots are the last part of the memory, 4096 bytes each.
  void write(SlotId slot, State state) {
    const auto word = slot.generation << 4 | static_cast<std::uint32_t>(state);
    const auto slots_at = CallRing::memory_bytes() - std::size_t{CallRing::slots} * 4096;
    std::memcpy(raw_ + slots_at + slot.index * std::size_t{4096}, &word, sizeof word);
  }

 private:
  std::byte* raw_;
};

TEST_F(CallRings, FreeEachSlotOnceWhateverTheCalleeWrites) {
  HostileCallee lies(*caller);
  bool valid = true;
  const auto free_it = [&](State first, State second) {
    const auto slot = send(frame_of(40, 1));
    lies.write(slot, first);
    if (first == State::full) (void)caller->take(slot, valid);
    if (first == State::by_socket) caller->take_by_socket(slot);
    if (first == State::pending) (void)caller->abandon(slot, valid);
    lies.write(slot, second);
    (void)caller->abandon(slot, valid);
    (void)caller->take(slot, valid);
    caller->take_by_socket(slot);
    lies.write(slot, State::late);
    caller->reclaim();
    (void)pop();
  };
  for (const auto first : {State::full, State::by_socket, State::pending}) {
    for (const auto second : {State::pending, State::sleeping, State::full, State::by_socket, State::late}) {
      for (std::uint32_t i = 0; i < 3; ++i) free_it(first, second);
    }
  }
  const auto unsent = caller->reserve();
  ASSERT_TRUE(unsent);
  lies.write(*unsent, State::full);
  (void)caller->take(*unsent, valid);
  caller->unreserve(*unsent);

  std::set<std::uint32_t> indices;
  while (const auto slot = caller->reserve()) {
    ASSERT_TRUE(indices.insert(slot->index).second) << "slot " << slot->index << " is free twice";
    ASSERT_LT(slot->index, CallRing::slots);
    ASSERT_LE(indices.size(), CallRing::slots);
  }
  EXPECT_EQ(indices.size(), CallRing::slots);
}

TEST_F(CallRings, WithAWildDoneListHoldNoMoreEntriesThanSlots) {
  const auto descriptor = caller->share();
  auto* raw = static_cast<std::byte*>(
      ::mmap(nullptr, CallRing::memory_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor->get(), 0));
  ASSERT_NE(raw, MAP_FAILED);
  constexpr std::size_t done_head = 192;  // its place in the memory: the callee counts the entries there
  const auto slot = send(frame_of(40, 1));
  ASSERT_TRUE(caller->watch(slot) && pop());
  ASSERT_EQ(callee->answer(slot, frame_of(8, 1)), Answered::must_ring);
  std::uint64_t head = 0;
  std::memcpy(&head, raw + done_head, sizeof head);
  ASSERT_EQ(head, 1U) << "the list's head lies there";
  head = std::uint64_t{1} << 60;
  std::memcpy(raw + done_head, &head, sizeof head);
  std::uint32_t entries = 0;
  while (entries <= CallRing::slots && caller->next_done()) ++entries;
  EXPECT_LE(entries, CallRing::slots);
  EXPECT_FALSE(caller->any_done());
  ::munmap(raw, CallRing::memory_bytes());
}

// ---- The doorbell

TEST(Doorbells, NeverLoseAWakeUpInARace) {
  const auto bell = Doorbell::create();
  const auto peers = Doorbell::map(std::move(*bell->share()));
  ASSERT_TRUE(peers.ok());
  std::atomic<int> work{0}, done{0};
  const int all = rounds(2'000'000);
  std::thread sleeper([&] {
    bell->begin_polling();
    while (done < all) {
      const auto ticket = bell->ticket();
      if (work.load() > done.load()) {
        ++done;
        continue;
      }
      bell->park();
      if (work.load() == done.load()) (void)bell->sleep(ticket, std::nullopt);
      bell->unpark();
    }
  });
  for (int i = 0; i < all; ++i) {
    ++work;
    (*peers)->ring();
    while (i % 2 == 0 && done.load() <= i) std::this_thread::yield();
  }
  EXPECT_TRUE(eventually([&] { return done.load() == all; }));
  sleeper.join();
}

TEST(Doorbells, EndASleepAtItsTimeout) {
  const auto bell = Doorbell::create();
  bell->begin_polling();
  const auto ticket = bell->ticket();
  bell->park();
  EXPECT_FALSE(bell->sleep(ticket, milliseconds(20)));
  bell->wake();
  EXPECT_TRUE(bell->sleep(ticket, milliseconds(20)));
  bell->unpark();
}

// ---- Spinning

TEST(Spins, StopIfTheyFindNothingAndAreRetriedRarely) {
  Spin spin;
  int polls = 0;
  const auto nothing = [&] {
    ++polls;
    return false;
  };
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(spin.until(nothing));
  polls = 0;
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(spin.until(nothing));
  EXPECT_EQ(polls, 50) << "one look each: it has come down to nothing";
  for (int i = 0; i < 200; ++i) (void)spin.until([] { return true; });
  polls = 0;
  EXPECT_FALSE(spin.until(nothing));
  EXPECT_GT(polls, 1) << "finding something at once is no reason to stop looking";
}

TEST(Spins, LastLongerByTheWorkOfTheOtherSideAndForThatWaitAlone) {
  Spin spin;
  const auto spun = [&](std::chrono::milliseconds work) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_FALSE(spin.until([] { return false; }, {}, work));
    return std::chrono::steady_clock::now() - begin;
  };
  constexpr std::chrono::milliseconds work{100};
  EXPECT_GE(spun(work), work);
  EXPECT_LT(spun({}), work);
}

}  // namespace
}  // namespace tensorferry
