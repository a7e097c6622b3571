/// Tests of `cuda_basic` with memory whose stream is busy, at either end: it holds up no other buffer. A stream that
/// waits for a word in host memory stands for a long kernel.
#include <gtest/gtest.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <future>
#include <mutex>
#include <thread>
#include <utility>

#include "channels/cuda/event_poller.h"
#include "channels/cuda_basic/cuda_basic_channel.h"
#include "channels/cuda_basic/messages.h"
#include "tests/agent/patience.h"
#include "tests/channels/blocked_stream.h"
#include "tests/conformance/cuda_memory.h"
#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {
namespace {

using cuda::api;
using cuda::DeviceGuard;
using std::chrono::milliseconds;
using tensorferry::testing::eventually;

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::size_t megabyte = 1 << 20;

/// Both ends are on the first GPU. The parameter says whether the bytes travel by ring; else they are bulk data.
class CudaBasicBusy : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
    memory_a = cuda_memory(0, CudaKind::chunks);
    memory_b = cuda_memory(0, CudaKind::chunks);
    pair = std::make_unique<WirePair>(driver, driver, DevicePair{gpu, gpu}, *memory_a, *memory_b);
    for (auto* memory : {memory_a.get(), memory_b.get()}) take_and_give_back(*memory);
    if (GetParam()) {
      EXPECT_TRUE(eventually([&] { return kind_of_a_small_buffer() == cuda_basic::FlowKind::ring; }));
    } else {
      pair->a->send(memory_a->filled(megabyte, 1));  // ahead of time: page-locked slots
      EXPECT_EQ(pair->b->receive().at(0)->landed.wait_name(), "Ok");
    }
    pair->b->behave({.on_message = [this](Arrivals& message) {
      if (const auto instead = std::exchange(on_message, nullptr)) return instead(message.front());
      pull(message.front());
    }});
  }
  /// Makes memory for the buffers of a case ahead of time: an allocation may wait in the driver until a kernel ends.
  static void take_and_give_back(DeviceMemory& memory) {
    std::vector<Buffer> taken;
    for (const auto bytes : {std::size_t{100}, megabyte, 3 * megabyte, 20 * megabyte, 34 * megabyte}) {
      for (int i = 0; i < 3; ++i) taken.push_back(memory.allocate(bytes));
    }
  }
  void TearDown() override {
    if (pair) pair->b->behave({});
  }
  cuda_basic::FlowKind kind_of_a_small_buffer() {
    pair->a->send(memory_a->filled(100, 1));
    const auto arrivals = pair->b->receive();
    EXPECT_EQ(arrivals.at(0)->landed.wait_name(), "Ok");
    return decode<cuda_basic::CudaBasicTicket>(arrivals.at(0)->ticket.opaque)->kind;
  }

  void pull(const std::shared_ptr<Arrival>& each) {
    pair->b->pull(each);
    came(each);
  }
  void came(const std::shared_ptr<Arrival>& each) {
    const std::lock_guard lock(mutex);
    all.push_back(each);
    changed.notify_all();
  }
  /// Returns the receiver's buffer of the message with this index, when it has come.
  std::shared_ptr<Arrival> arrival(std::size_t index) {
    std::unique_lock lock(mutex);
    EXPECT_TRUE(changed.wait_for(lock, patience, [&] { return all.size() > index; }));
    return all.at(index);
  }

  /// Ends the blocked stream's work, and what waits for it.
  static void end_kernel(const Blocked& kernel) {
    kernel.let_go();
    {
      const DeviceGuard here(0);
      while (api()->stream_query(kernel.get()) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
    }
    cuda::EventPoller::of_this_process().poll_now();
  }

  /// Returns memory of the sender that the blocked stream will set to `value`.
  Buffer written_behind(const Blocked& kernel, std::size_t bytes, unsigned char value) const {
    auto source = memory_a->filled(bytes, 99);
    source.stream = kernel.get();
    const DeviceGuard here(0);
    EXPECT_EQ(api()->memset_async(cuda::address_of(source.data), value, bytes, kernel.get()), CUDA_SUCCESS);
    return source;
  }
  static void expect_all(const Buffer& buffer, unsigned char value) {
    std::vector<std::byte> found(buffer.bytes);
    const DeviceGuard here(0);
    auto* const stream = static_cast<CUstream>(buffer.stream);
    ASSERT_EQ(api()->memcpy_async(cuda::address_of(found.data()), cuda::address_of(buffer.data), buffer.bytes, stream),
              CUDA_SUCCESS);
    while (api()->stream_query(stream) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
    EXPECT_EQ(found, std::vector<std::byte>(buffer.bytes, std::byte{value}));
  }
  /// Expects that a buffer that is sent now arrives while the others wait.
  void expect_one_arrives(std::uint32_t seed, std::size_t index) {
    const auto released = pair->a->send(memory_a->filled(3 * megabyte, seed));
    const auto there = arrival(index);
    const auto landed = there->landed.wait();
    ASSERT_TRUE(landed.has_value()) << "the buffer waits behind a busy one";
    EXPECT_EQ(landed->text(), "Ok");
    EXPECT_TRUE(memory_b->holds(there->buffer, seed));
    EXPECT_EQ(released.wait_name(), "Ok");
  }

  std::unique_ptr<DeviceMemory> memory_a, memory_b;
  CudaBasicDriver driver;
  std::unique_ptr<WirePair> pair;
  std::function<void(const std::shared_ptr<Arrival>&)> on_message;  // for one message, in place of pull()

  std::mutex mutex;
  std::condition_variable changed;
  Arrivals all;
};
INSTANTIATE_TEST_SUITE_P(Way, CudaBasicBusy, ::testing::Bool(),
                         [](const auto& each) { return each.param ? "ByRing" : "AsBulkData"; });

TEST_P(CudaBasicBusy, AReadyBufferArrivesBeforeABusyOneThatWasOfferedFirst) {
  for (const auto bytes : {std::size_t{100}, 34 * megabyte}) {
    all.clear();
    const Blocked kernel;
    const auto released = pair->a->send(written_behind(kernel, bytes, 0x5a));
    expect_one_arrives(2, 1);
    EXPECT_EQ(arrival(0)->landed.runs(), 0);
    EXPECT_EQ(released.runs(), 0) << "the source was given back before it was read";
    kernel.let_go();
    EXPECT_EQ(arrival(0)->landed.wait_name(), "Ok");
    expect_all(arrival(0)->buffer, 0x5a);
    EXPECT_EQ(released.wait_name(), "Ok");
  }
}

TEST_P(CudaBasicBusy, AKernelThatWaitsForALaterBufferEnds) {
  const Blocked first, second;
  const auto released_first = pair->a->send(written_behind(first, megabyte, 1));
  const auto released_second = pair->a->send(written_behind(second, megabyte, 2));
  expect_one_arrives(3, 2);
  second.let_go();
  EXPECT_EQ(arrival(1)->landed.wait_name(), "Ok");
  expect_all(arrival(1)->buffer, 2);
  EXPECT_EQ(arrival(0)->landed.runs(), 0);
  first.let_go();
  EXPECT_EQ(arrival(0)->landed.wait_name(), "Ok");
  expect_all(arrival(0)->buffer, 1);
  EXPECT_EQ(released_first.wait_name(), "Ok");
  EXPECT_EQ(released_second.wait_name(), "Ok");
}

TEST_P(CudaBasicBusy, ABufferForMemoryThatIsBusyHoldsUpNoOther) {
  for (const auto bytes : {std::size_t{100}, 34 * megabyte}) {
    all.clear();
    auto destination = memory_b->filled(bytes, 1);
    const Blocked kernel;
    destination.stream = kernel.get();
    Into into(destination);
    on_message = [&](const std::shared_ptr<Arrival>& first) {
      pair->b->channel().pull(first->ticket, into, first->landed.completion(), first->consumed.completion());
      came(first);
    };
    const auto released = pair->a->send(memory_a->filled(bytes, 7));
    expect_one_arrives(2, 1);
    expect_one_arrives(3, 2);
    EXPECT_EQ(arrival(0)->landed.runs(), 0);
    EXPECT_EQ(arrival(0)->consumed.runs(), 0);
    EXPECT_EQ(released.wait_name(), "Ok") << "the source was read";
    EXPECT_TRUE(memory_b->holds(Buffer{gpu, destination.data, bytes, nullptr, {}}, 1));
    kernel.let_go();
    EXPECT_EQ(arrival(0)->landed.wait_name(), "Ok");
    EXPECT_EQ(arrival(0)->consumed.wait_name(), "Ok");
    EXPECT_TRUE(memory_b->holds(destination, 7));
    EXPECT_EQ(arrival(0)->landed.runs() + arrival(0)->consumed.runs(), 2);
  }
}

TEST_P(CudaBasicBusy, AWithdrawnBufferOfABusyStreamIsReleasedAtOnceAndSkipped) {
  const Blocked kernel;
  Letter letter(*pair->a);
  ASSERT_TRUE(letter.offer(written_behind(kernel, 20 * megabyte, 1))) << letter.refusal;
  letter.drop();
  const auto released = letter.released.at(0).wait();
  ASSERT_TRUE(released.has_value()) << "it waits for the kernel";
  EXPECT_EQ(released->text(), "Ok");
  expect_one_arrives(2, 0);
  kernel.let_go();
  expect_one_arrives(3, 1);
  EXPECT_EQ(letter.released.at(0).runs(), 1);
}

TEST_P(CudaBasicBusy, ABufferThatIsWithdrawnAfterItsKernelIsSkipped) {
  Letter letter(*pair->a);
  {
    const Blocked kernel;
    ASSERT_TRUE(letter.offer(written_behind(kernel, 20 * megabyte, 1))) << letter.refusal;
  }
  std::this_thread::sleep_for(milliseconds(20));  // so that its bytes are under way
  letter.drop();
  expect_one_arrives(2, 0);
  EXPECT_EQ(letter.released.at(0).wait_name(), "Ok");
  EXPECT_EQ(letter.released.at(0).runs(), 1);
}

TEST_P(CudaBasicBusy, ADiscardedBufferIsSkippedBeforeAndAfterItsKernel) {
  for (const bool before : {true, false}) {
    all.clear();
    const Blocked kernel;
    on_message = [&](const std::shared_ptr<Arrival>& first) {
      if (before) pair->b->discard(first);
      came(first);
    };
    const auto released = pair->a->send(written_behind(kernel, 20 * megabyte, 1));
    expect_one_arrives(2, 1);
    kernel.let_go();
    std::this_thread::sleep_for(milliseconds(20));  // so that its bytes are under way
    if (!before) pair->b->discard(arrival(0));
    expect_one_arrives(3, 2);
    EXPECT_EQ(released.wait_name(), "Ok");
    EXPECT_EQ(released.runs(), 1);
  }
}

TEST_P(CudaBasicBusy, APullAfterTheKernelGetsTheBytes) {
  const Blocked kernel;
  on_message = [&](const std::shared_ptr<Arrival>& first) { came(first); };
  const auto released = pair->a->send(written_behind(kernel, 20 * megabyte, 0x5a));
  const auto first = arrival(0);
  kernel.let_go();
  std::this_thread::sleep_for(milliseconds(20));  // so that its bytes are under way
  pair->b->pull(first);
  EXPECT_EQ(first->landed.wait_name(), "Ok");
  expect_all(first->buffer, 0x5a);
  EXPECT_EQ(released.wait_name(), "Ok");
}

TEST_P(CudaBasicBusy, AnEndOfTheLinkReleasesABusyBufferAtOnce) {
  const Blocked kernel;
  const auto released = pair->a->send(written_behind(kernel, 20 * megabyte, 1));
  const auto first = arrival(0);
  pair->a->close({Code::connection_lost, "gone"});
  EXPECT_NE(released.wait().value_or(Status()).text(), "Ok");
  EXPECT_NE(first->landed.wait().value_or(Status()).text(), "Ok");
  EXPECT_NE(first->consumed.wait().value_or(Status()).text(), "Ok");
  end_kernel(kernel);
  pair.reset();  // no thread uses the channel any more
  EXPECT_EQ(released.runs() + first->landed.runs() + first->consumed.runs(), 3);
}

TEST_P(CudaBasicBusy, AnEndOfTheLinkFailsABufferThatWaitsForItsMemory) {
  for (const bool arrived : {true, false}) {
    if (!arrived) SetUp();
    all.clear();
    auto destination = memory_b->filled(20 * megabyte, 1);
    const Blocked kernel;
    destination.stream = kernel.get();
    Into into(destination);
    on_message = [&](const std::shared_ptr<Arrival>& first) {
      pair->b->channel().pull(first->ticket, into, first->landed.completion(), first->consumed.completion());
      came(first);
    };
    const auto released = pair->a->send(memory_a->filled(20 * megabyte, 7));
    const auto first = arrival(0);
    if (arrived) {
      EXPECT_EQ(released.wait_name(), "Ok");
      std::this_thread::sleep_for(milliseconds(50));
    }
    pair->b->close({Code::connection_lost, "gone"});
    EXPECT_EQ(first->landed.wait().value_or(Status()).code(), Code::connection_lost);
    EXPECT_EQ(first->consumed.wait().value_or(Status()).code(), Code::connection_lost);
    end_kernel(kernel);
    pair.reset();  // no thread uses the channel any more
    EXPECT_EQ(first->landed.runs() + first->consumed.runs(), 2);
    EXPECT_TRUE(memory_b->holds(destination, 1)) << "written after the pull had failed";
  }
}

/// A GPU that has failed never gets well, so the case has a process of its own.
TEST(CudaBasicFailure, AGpuThatFailsEndsTheBuffersThatWaitForIt) {
  if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
  const auto fail = driver_function<void (*)()>("emulatedFail");
  if (fail == nullptr) GTEST_SKIP() << "only the emulated GPU fails at will";
  const auto memory = cuda_memory(0, CudaKind::chunks);
  CudaBasicDriver driver;
  WirePair pair(driver, driver, DevicePair{gpu, gpu}, *memory, *memory);
  const Blocked kernel;
  auto source = memory->allocate(megabyte), destination = memory->allocate(megabyte);
  source.stream = destination.stream = kernel.get();
  Into into(destination);
  Outcome landed, consumed;
  std::promise<void> pulled;
  pair.b->behave({.on_message = [&](Arrivals& arrivals) {
    pair.b->channel().pull(arrivals.front()->ticket, into, landed.completion(), consumed.completion());
    pulled.set_value();
  }});
  const auto arrived = pair.a->send(memory->allocate(megabyte));  // waits for the destination
  pulled.get_future().wait();
  EXPECT_EQ(arrived.wait_name(), "Ok");
  std::promise<void> came;
  Outcome second_landed, second_consumed;
  Into into_second(memory->allocate(megabyte));
  pair.b->behave({.on_message = [&](Arrivals& arrivals) {
    pair.b->channel().pull(arrivals.front()->ticket, into_second, second_landed.completion(),
                           second_consumed.completion());
    came.set_value();
  }});
  const auto released = pair.a->send(source);  // waits for its kernel
  came.get_future().wait();
  EXPECT_EQ(landed.runs() + second_landed.runs() + released.runs(), 0);
  fail();
  EXPECT_EQ(released.wait_name(), "ChannelUnavailable");
  EXPECT_EQ(landed.wait_name(), "ChannelUnavailable");
  EXPECT_EQ(consumed.wait_name(), "ChannelUnavailable");
  EXPECT_EQ(second_landed.wait_name(), "ChannelUnavailable");
  EXPECT_EQ(second_consumed.wait_name(), "ChannelUnavailable");
  EXPECT_TRUE(eventually([&] { return !pair.a->wait_ready().value_or(Status()).ok(); })) << "the pair carries no more";
}

}  // namespace
}  // namespace tensorferry::conformance
