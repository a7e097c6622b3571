/// Tests of `ibv` and `cuda_gdr` between two processes, of which one dies in the middle of a read. On emulated cards,
/// which stop transfers half-way (Controls::stall).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "channels/ibv/ibv_channel.h"
#ifdef TENSORFERRY_HAS_CUDA
#include "channels/cuda_gdr/cuda_gdr_channel.h"
#include "tests/conformance/cuda_memory.h"
#endif
#include "tests/conformance/child.h"
#include "tests/conformance/wire_pair.h"
#include "tests/emulated_verbs/control.h"

namespace tensorferry::conformance {
namespace {

constexpr std::size_t megabyte = 1 << 20;
constexpr std::uint32_t buffers = 8;

/// Waits until a transfer of this process is held half-way.
[[nodiscard]] bool await_stall() {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (emulated_verbs::controls().stalled() == 0 && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return emulated_verbs::controls().stalled() != 0;
}

/// A channel that reads by a card.
struct Kind {
  const char* name;
  DevicePair devices;
  std::unique_ptr<DeviceMemory> (*memory)();
  std::unique_ptr<Driver> (*driver)();
};

/// One end of the channel in this process.
struct End {
  End(const Kind& kind, WireEnd::Sockets sockets)
      : memory(kind.memory()),
        driver(kind.driver()),
        wire("the other process", *driver, kind.devices, *memory, std::move(sockets)) {
    wire.start();
  }
  /// Tells the other process to go on, which waits in awaits_word().
  void give_word() { wire.send(memory->filled(1, 1)); }
  [[nodiscard]] bool awaits_word() { return wire.receive().size() == 1; }
  [[nodiscard]] bool ready() { return wire.wait_ready().value_or(Status(Code::internal, "no answer")).ok(); }

  const std::unique_ptr<DeviceMemory> memory;
  const std::unique_ptr<Driver> driver;
  WireEnd wire;
};

class IbvProcess : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (emulated_verbs::controls().stall == nullptr) GTEST_SKIP() << "the cards are not emulated";
#ifdef TENSORFERRY_HAS_CUDA
    if (GetParam().devices != DevicePair{}) {
      if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
    }
#endif
  }
  std::pair<WireEnd::Sockets, WireEnd::Sockets> sockets = connected_sockets();
};

TEST_P(IbvProcess, ASenderKilledInTheMiddleOfReadsCompletesEachPullOnce) {
  Child child(std::move(sockets.second), sockets.first, [](WireEnd::Sockets mine) {
    End end(GetParam(), std::move(mine));
    if (!end.ready() || !end.awaits_word()) return 1;
    for (std::uint32_t i = 0; i < buffers; ++i) end.wire.send(end.memory->filled(8 * megabyte, i));
    end.wire.messages().wait_ended();
    return 0;
  });
  End end(GetParam(), std::move(sockets.first));
  ASSERT_TRUE(end.ready());
  std::mutex mutex;
  Arrivals pulled;
  end.wire.behave({.on_message = [&](Arrivals& arrivals) {
    emulated_verbs::controls().stall(1);
    for (auto& arrival : arrivals) {
      end.wire.pull(arrival);
      const std::lock_guard lock(mutex);
      pulled.push_back(arrival);
    }
  }});
  end.give_word();
  const auto some = [&] {
    const std::lock_guard lock(mutex);
    return !pulled.empty();
  };
  EXPECT_TRUE(await_stall());
  child.kill();
  end.wire.messages().wait_ended();
  end.wire.finish();
  emulated_verbs::controls().stall(0);
  ASSERT_TRUE(some());
  for (const auto& arrival : pulled) {
    EXPECT_NE(arrival->landed.wait_name(), "nothing");
    EXPECT_NE(arrival->landed.wait_name(), "Ok");
    EXPECT_EQ(arrival->landed.runs(), 1);
    EXPECT_EQ(arrival->consumed.runs(), 1);
  }
}

TEST_P(IbvProcess, AReceiverKilledInTheMiddleOfReadsReleasesEachSourceOnce) {
  Child child(std::move(sockets.second), sockets.first, [](WireEnd::Sockets mine) {
    End end(GetParam(), std::move(mine));
    emulated_verbs::controls().stall(1);
    if (!end.ready() || !await_stall()) return 1;
    end.give_word();
    end.wire.messages().wait_ended();
    return 0;
  });
  End end(GetParam(), std::move(sockets.first));
  ASSERT_TRUE(end.ready());
  std::vector<Outcome> released;
  for (std::uint32_t i = 0; i < buffers; ++i) released.push_back(end.wire.send(end.memory->filled(8 * megabyte, i)));
  ASSERT_TRUE(end.awaits_word()) << "the receiver reads, and is held half-way";
  for (const auto& each : released) EXPECT_EQ(each.runs(), 0);
  child.kill();
  end.wire.messages().wait_ended();
  end.wire.finish();
  for (const auto& each : released) {
    EXPECT_NE(each.wait_name(), "nothing");
    EXPECT_EQ(each.runs(), 1);
  }
}

TEST_P(IbvProcess, ASourceThatIsReleasedByTheEndOfTheLinkIsNotReadAnyMore) {
  Child child(std::move(sockets.second), sockets.first, [](WireEnd::Sockets mine) {
    End end(GetParam(), std::move(mine));
    if (!end.ready() || !end.awaits_word()) return 1;
    Letter letter(end.wire);
    const auto source = end.memory->filled(64 * megabyte, 1);
    if (!letter.offer(source)) return 2;
    letter.send();
    if (!end.awaits_word()) return 4;  // the receiver reads, and is held half-way
    end.wire.close(Status(Code::agent_closed, "closed by the test"));
    if (letter.released.front().runs() != 1) return 3;
    end.memory->fill(source, 2);  // the owner may write it now
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    return 0;
  });
  End end(GetParam(), std::move(sockets.first));
  ASSERT_TRUE(end.ready());
  std::shared_ptr<Arrival> pulled;
  end.wire.behave({.on_message = [&](Arrivals& arrivals) {
    emulated_verbs::controls().stall(1);
    pulled = arrivals.front();
    end.wire.pull(pulled);
  }});
  end.give_word();
  EXPECT_TRUE(await_stall());
  end.give_word();
  EXPECT_EQ(child.wait(), 0);
  emulated_verbs::controls().stall(0);
  end.wire.messages().wait_ended();
  end.wire.finish();
  ASSERT_NE(pulled, nullptr);
  EXPECT_EQ(pulled->landed.runs(), 1);
  if (pulled->landed.wait_name() == "Ok") {
    EXPECT_TRUE(end.memory->holds(pulled->buffer, 1)) << "bytes of the next use of the memory";
  }
}

INSTANTIATE_TEST_SUITE_P(
    By, IbvProcess,
    ::testing::Values(Kind{
        "ibv", {}, cpu_memory, []() -> std::unique_ptr<Driver> { return std::make_unique<IbvDriver>(); }}),
    [](const auto& kind) { return kind.param.name; });
#ifdef TENSORFERRY_HAS_CUDA
constexpr Device gpu{DeviceType::cuda, 0};
INSTANTIATE_TEST_SUITE_P(ByGpu, IbvProcess,
                         ::testing::Values(Kind{
                             "cuda_gdr",
                             {gpu, gpu},
                             [] { return cuda_memory(0); },
                             []() -> std::unique_ptr<Driver> { return std::make_unique<CudaGdrDriver>(); }}),
                         [](const auto& kind) { return kind.param.name; });
#endif

}  // namespace
}  // namespace tensorferry::conformance
