/// Cases in which bytes arrive: every size, both directions, many at once, slow readers. The first eight have the names
/// of TensorPipe's channel tests.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "tests/conformance/channel_suite.h"

namespace tensorferry::conformance {

namespace {
constexpr std::size_t kilobyte = 1 << 10;
constexpr std::size_t megabyte = 1 << 20;
}  // namespace

TEST_P(ChannelSuite, DeviceDescriptors) {
  const auto devices = GetParam().devices;
  auto mine = driver_a().descriptor(devices.local);
  auto theirs = driver_b().descriptor(devices.remote);
  ASSERT_TRUE(std::holds_alternative<Bytes>(mine)) << std::get<Refusal>(mine).reason;
  ASSERT_TRUE(std::holds_alternative<Bytes>(theirs)) << std::get<Refusal>(theirs).reason;
  EXPECT_FALSE(driver_a().reaches(std::get<Bytes>(mine), std::get<Bytes>(theirs)).has_value());
  EXPECT_FALSE(driver_b().reaches(std::get<Bytes>(theirs), std::get<Bytes>(mine)).has_value());
  EXPECT_EQ(driver_a().name(), GetParam().name);

  auto unknown = driver_a().descriptor(Device{static_cast<DeviceType>(200), 0});
  ASSERT_TRUE(std::holds_alternative<Refusal>(unknown));
  EXPECT_FALSE(std::get<Refusal>(unknown).reason.empty());
}

TEST_P(ChannelSuite, ClientToServer) { expect_carries(a(), b(), 10 * kilobyte, 1); }

TEST_P(ChannelSuite, ServerToClient) { expect_carries(b(), a(), 10 * kilobyte, 2); }

TEST_P(ChannelSuite, SendMultipleTensors) {
  Letter letter(a());
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    ASSERT_TRUE(letter.offer(memory_a().filled(100 * kilobyte * seed + 1, seed))) << letter.refusal;
  }
  letter.send();
  const auto arrivals = b().receive();
  ASSERT_EQ(arrivals.size(), 10u);
  for (std::uint32_t seed = 0; seed < 10; ++seed) {
    auto& arrival = *arrivals[seed];
    EXPECT_EQ(arrival.landed.wait_name(), "Ok");
    EXPECT_EQ(arrival.ticket.bytes, 100 * kilobyte * seed + 1);
    EXPECT_TRUE(memory_b().holds(arrival.buffer, seed)) << seed;
    EXPECT_EQ(letter.released[seed].wait_name(), "Ok");
  }
}

TEST_P(ChannelSuite, SendTensorsBothWays) {
  const auto forth = a().send(memory_a().filled(megabyte, 3));
  const auto back = b().send(memory_b().filled(megabyte, 4));
  expect_arrives(b(), megabyte, 3);
  expect_arrives(a(), megabyte, 4);
  EXPECT_EQ(forth.wait_name(), "Ok");
  EXPECT_EQ(back.wait_name(), "Ok");
}

TEST_P(ChannelSuite, EmptyTensor) { expect_carries(a(), b(), 0, 5); }

TEST_P(ChannelSuite, EmptyAndNonEmptyTensors) {
  Letter letter(a());
  const std::vector<std::size_t> sizes{0, 5, 0, 0, megabyte, 0, 1};
  for (std::uint32_t seed = 0; seed < sizes.size(); ++seed) {
    ASSERT_TRUE(letter.offer(memory_a().filled(sizes[seed], seed))) << letter.refusal;
  }
  letter.send();
  const auto arrivals = b().receive();
  ASSERT_EQ(arrivals.size(), sizes.size());
  for (std::uint32_t seed = 0; seed < sizes.size(); ++seed) {
    EXPECT_EQ(arrivals[seed]->landed.wait_name(), "Ok");
    EXPECT_EQ(arrivals[seed]->ticket.bytes, sizes[seed]);
    EXPECT_TRUE(memory_b().holds(arrivals[seed]->buffer, seed)) << seed;
  }
  for (const auto& released : letter.released) EXPECT_EQ(released.wait_name(), "Ok");
}

TEST_P(ChannelSuite, NullPointer) {
  Buffer nothing;
  nothing.device = GetParam().devices.local;
  const auto released = a().send(nothing);
  expect_arrives(b(), 0, 0);
  EXPECT_EQ(released.wait_name(), "Ok");
}

TEST_P(ChannelSuite, ANullPointerWithASizeIsRefused) {
  Letter letter(a());
  Buffer wrong;
  wrong.device = GetParam().devices.local;
  wrong.bytes = 100;
  Outcome outcome;
  EXPECT_FALSE(letter.offer(wrong, outcome.completion()));
  EXPECT_FALSE(letter.refusal.empty());
  EXPECT_EQ(outcome.runs(), 0);  // a channel that refuses drops the completion without running it
}

TEST_P(ChannelSuite, CarriesEverySize) {
  std::vector<std::size_t> sizes{1, 2, 3, 63, 64, 65, 4095, 4096, 4097, 5 * megabyte + 12345};
  for (std::size_t size = 16 * kilobyte; size <= 4 * megabyte; size *= 4) {
    sizes.insert(sizes.end(), {size - 1, size, size + 1});
  }
  std::uint32_t seed = 0;
  for (const auto size : sizes) {
    ASSERT_NO_FATAL_FAILURE(expect_carries(a(), b(), size, ++seed));
    ASSERT_NO_FATAL_FAILURE(expect_carries(b(), a(), size, ++seed));
  }
}

TEST_P(ChannelSuite, CarriesBuffersOfAnyAlignment) {
  for (std::size_t offset : {1ul, 7ul, 33ul}) {
    const std::size_t bytes = 600 * kilobyte;
    auto whole = memory_a().allocate(bytes + offset);
    whole.data += offset;
    whole.bytes = bytes;
    memory_a().fill(whole, static_cast<std::uint32_t>(offset));
    const auto released = a().send(whole);
    expect_arrives(b(), bytes, static_cast<std::uint32_t>(offset));
    EXPECT_EQ(released.wait_name(), "Ok");
  }
}

TEST_P(ChannelSuite, CarriesWithMessagesThatTakeNoAppendedBytes) {
  for (std::size_t bytes : {1ul, 4 * kilobyte, megabyte}) {
    Letter letter(a(), /*appends=*/false);
    ASSERT_TRUE(letter.offer(memory_a().filled(bytes, 9))) << letter.refusal;
    letter.send();
    expect_arrives(b(), bytes, 9);
    EXPECT_EQ(letter.released.front().wait_name(), "Ok");
  }
}

TEST_P(ChannelSuite, EachTicketGetsItsOwnBytesAmongMixedSizes) {
  for (int round = 0; round < 20; ++round) {
    Letter letter(a());
    for (std::uint32_t i = 0; i < 16; ++i) {
      const auto bytes = i % 3 == 0 ? 300 * kilobyte + i : 1 + i * 37 % 5000;
      ASSERT_TRUE(letter.offer(memory_a().filled(bytes, i * 7 + 1))) << letter.refusal;
    }
    letter.send();
  }
  for (int round = 0; round < 20; ++round) {
    const auto arrivals = b().receive();
    ASSERT_EQ(arrivals.size(), 16u);
    for (std::uint32_t i = 0; i < 16; ++i) EXPECT_TRUE(memory_b().holds(arrivals[i]->buffer, i * 7 + 1)) << i;
  }
}

TEST_P(ChannelSuite, CarriesManyAtOnceFromManyThreadsInBothDirections) {
  constexpr int threads = 4, messages = 50;
  std::vector<std::thread> senders;
  std::vector<std::vector<Outcome>> released(2 * threads);
  for (int thread = 0; thread < 2 * threads; ++thread) {
    senders.emplace_back([&, thread] {
      auto& from = thread % 2 == 0 ? a() : b();
      for (int i = 0; i < messages; ++i) {
        const auto bytes = static_cast<std::size_t>(i % 10 == 0 ? 400 * kilobyte : 100 * i + 1);
        released[static_cast<std::size_t>(thread)].push_back(
            from.send(from.memory().filled(bytes, static_cast<std::uint32_t>(bytes))));
      }
    });
  }
  for (auto* to : {&a(), &b()}) {
    for (int i = 0; i < threads * messages; ++i) {
      const auto arrivals = to->receive();
      ASSERT_EQ(arrivals.size(), 1u);
      const auto& arrival = *arrivals.front();
      EXPECT_EQ(arrival.landed.wait_name(), "Ok");
      EXPECT_TRUE(to->memory().holds(arrival.buffer, static_cast<std::uint32_t>(arrival.ticket.bytes)));
      EXPECT_EQ(arrival.landed.runs(), 1);
      EXPECT_EQ(arrival.consumed.runs(), 1);
    }
  }
  for (auto& sender : senders) sender.join();
  for (const auto& of_thread : released) {
    for (const auto& outcome : of_thread) EXPECT_EQ(outcome.wait_name(), "Ok");
  }
  disconnect();
  for (const auto& of_thread : released) {
    for (const auto& outcome : of_thread) EXPECT_EQ(outcome.runs(), 1);
  }
}

TEST_P(ChannelSuite, ASlowReceiverGetsEveryBufferAndDelaysNoOffer) {
  b().messages().slow_down(20'000, std::chrono::microseconds(200));
  b().bulk().slow_down(100'000, std::chrono::microseconds(200));
  std::vector<Outcome> released;
  const auto begin = std::chrono::steady_clock::now();
  for (std::uint32_t i = 0; i < 40; ++i)
    released.push_back(a().send(memory_a().filled(i % 2 ? 100'000 : 1'000'000, i)));
  const auto offering = std::chrono::steady_clock::now() - begin;
  for (std::uint32_t i = 0; i < 40; ++i) ASSERT_NO_FATAL_FAILURE(expect_arrives(b(), i % 2 ? 100'000 : 1'000'000, i));
  for (const auto& outcome : released) EXPECT_EQ(outcome.wait_name(), "Ok");
  EXPECT_LT(offering, patience / 3);  // filling the buffers takes most of this time
}

TEST_P(ChannelSuite, OffersReturnWhileTheReceiverReadsNothing) {
  b().messages().hold_after(0);
  b().bulk().hold_after(0);
  std::vector<Outcome> released;
  for (std::uint32_t i = 0; i < 20; ++i) released.push_back(a().send(memory_a().filled(500'000, i)));
  b().messages().resume();
  b().bulk().resume();
  for (std::uint32_t i = 0; i < 20; ++i) ASSERT_NO_FATAL_FAILURE(expect_arrives(b(), 500'000, i));
  for (const auto& outcome : released) EXPECT_EQ(outcome.wait_name(), "Ok");
}

TEST_P(ChannelSuite, TheReceiverMayProvideTheMemory) {
  b().behave({.before_pull = [](Arrival& arrival) { arrival.may_adopt = false; }});
  for (std::size_t bytes : {1ul, 100 * kilobyte, 2 * megabyte}) expect_carries(a(), b(), bytes, 6);
}

TEST_P(ChannelSuite, AReceiverWithoutMemoryFailsOnlyThatBuffer) {
  b().behave({.before_pull = [](Arrival& arrival) {
    arrival.has_memory = arrival.may_adopt = arrival.number.index % 2 == 0;
  }});
  for (std::size_t bytes : {100ul, 50 * kilobyte, 2 * megabyte}) {
    Letter letter(a());
    for (std::uint32_t i = 0; i < 4; ++i) ASSERT_TRUE(letter.offer(memory_a().filled(bytes, i))) << letter.refusal;
    letter.send();
    const auto arrivals = b().receive();
    ASSERT_EQ(arrivals.size(), 4u);
    for (std::uint32_t i = 0; i < 4; ++i) {
      EXPECT_EQ(arrivals[i]->landed.wait_name(), i % 2 ? "ResourceExhausted" : "Ok");
      expect_once(arrivals[i]->consumed, "consumed");
      EXPECT_TRUE(i % 2 || memory_b().holds(arrivals[i]->buffer, i));
      expect_once(letter.released[i], "released");
    }
  }
}

TEST_P(ChannelSuite, TheSourceIsKeptUntilItsRelease) {
  for (std::size_t bytes : {1ul, 100 * kilobyte, 2 * megabyte}) {
    struct Watch {
      Buffer memory;
      std::shared_ptr<std::atomic<bool>> gone;
      ~Watch() { *gone = true; }
    };
    auto gone = std::make_shared<std::atomic<bool>>(false);
    auto early = std::make_shared<std::atomic<bool>>(false);
    auto memory = memory_a().filled(bytes, 8);
    auto source = memory;
    source.owner = std::shared_ptr<Watch>(new Watch{memory, gone});
    const std::weak_ptr<void> alive = source.owner;
    memory = {};

    b().messages().hold_after(0);
    b().bulk().hold_after(0);
    Letter letter(a());
    ASSERT_TRUE(letter.offer(source, [gone, early](Status) { *early = gone->load(); })) << letter.refusal;
    source = {};
    letter.send();
    b().messages().resume();
    b().bulk().resume();

    expect_arrives(b(), bytes, 8);
    EXPECT_EQ(letter.released.front().wait_name(), "Ok");
    EXPECT_FALSE(*early) << "the memory went before its release ran";
    letter.tickets.clear();
    EXPECT_TRUE(becomes_true([&] { return alive.expired(); })) << "the channel keeps the memory after its release";
  }
}

TEST_P(ChannelSuite, AReusedAddressCarriesItsNewBytes) {
  for (const auto bytes : {2 * kilobyte, 700 * kilobyte}) {
    const auto memory = memory_a().allocate(bytes);
    for (std::uint32_t round = 0; round < 50; ++round) {
      memory_a().fill(memory, round);
      ASSERT_EQ(a().send(memory).wait_name(), "Ok");  // released: the next round overwrites it, landed or not
    }
    for (std::uint32_t round = 0; round < 50; ++round) ASSERT_NO_FATAL_FAILURE(expect_arrives(b(), bytes, round));
    for (std::uint32_t round = 0; round < 50; ++round) {
      a().send(memory_a().filled(bytes, round));  // an allocator often returns the address that was freed last
      ASSERT_NO_FATAL_FAILURE(expect_arrives(b(), bytes, round));
    }
  }
}

TEST_P(ChannelSuite, ReleasedMemoryMayBeOverwrittenAtOnce) {
  for (const auto bytes : {2 * kilobyte, 700 * kilobyte}) {
    for (std::uint32_t round = 0; round < 20; ++round) {
      const auto memory = memory_a().filled(bytes, round);
      a().send(memory, [&, memory](Status) { memory_a().fill(memory, 1000); });
      ASSERT_NO_FATAL_FAILURE(expect_arrives(b(), bytes, round));
    }
  }
}

TEST_P(ChannelSuite, SharingHandsMemoryOverOrIsRefused) {
  if (traits().shares) GTEST_SKIP() << "the channel's own test sees to it";
  Letter letter(a());
  Outcome outcome;
  EXPECT_FALSE(letter.offer(memory_a().filled(100, 1), outcome.completion(), Sharing::shared));
  EXPECT_FALSE(letter.refusal.empty());
  EXPECT_EQ(outcome.runs(), 0);
}

}  // namespace tensorferry::conformance
