/// What every channel must do, as tests. A channel's own test file holds a fixture and one line:
///
///     struct BasicFixture {
///       static constexpr auto name = "basic";
///       static Drivers drivers() { return {std::make_unique<BasicDriver>()}; }
///       static Traits traits() { return {}; }
///     };
///     INSTANTIATE_CHANNEL_SUITE(BasicFixture);
///
/// and links tensorferry_channel_suite. A channel for other memory than the CPU's adds
///
///       static DevicePair devices() { return {{DeviceType::cuda, 0}, {DeviceType::cuda, 1}}; }   // of end a
///       static std::unique_ptr<DeviceMemory> memory(Device device) { ... }
///
/// and may say in `traits().missing` why this machine cannot run it: the tests are then skipped with that reason.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "channels/channel.h"
#include "tests/conformance/device_memory.h"
#include "tests/conformance/outcome.h"
#include "tests/conformance/wire_pair.h"

namespace tensorferry::conformance {

/// One driver for both ends, or one each.
struct Drivers {
  std::unique_ptr<Driver> one;
  std::unique_ptr<Driver> other = nullptr;
};

struct Traits {
  bool same_process = false;  // both ends are in one process: no test kills a process
  bool forks = true;          // who has used the channel may fork a process that uses it (not with CUDA)
  bool shares = false;        // Sharing::shared is refused by the rest
  std::string missing = {};   // why this machine cannot run the channel
};

/// A fixture as a value, so that the cases are compiled once and not once a channel.
struct ChannelKind {
  std::string name;
  std::function<Drivers()> drivers;
  std::function<std::unique_ptr<DeviceMemory>(Device)> memory;
  Traits traits;
  DevicePair devices;
};
inline void PrintTo(const ChannelKind& kind, std::ostream* out) { *out << kind.name; }

template <class Fixture>
ChannelKind channel_kind() {
  ChannelKind kind{.name = Fixture::name,
                   .drivers = Fixture::drivers,
                   .memory = [](Device) { return cpu_memory(); },
                   .traits = Fixture::traits(),
                   .devices = {}};
  if constexpr (requires { Fixture::memory(Device{}); }) kind.memory = Fixture::memory;
  if constexpr (requires { Fixture::devices(); }) kind.devices = Fixture::devices();
  return kind;
}

/// Two ends of the channel, connected from SetUp on.
class ChannelSuite : public ::testing::TestWithParam<ChannelKind> {
 protected:
  void SetUp() override;
  void TearDown() override;

  /// Drivers and memory without ends, for a test that makes its own.
  void make_drivers();
  /// Before a process is forked: a driver may have threads, which a child would not.
  void drop_drivers() { drivers_ = {}; }
  /// Ends the present pair, if there is one, and makes another; fails the test where its probe fails.
  void connect();
  /// Ends the pair: after it, every completion has run.
  void disconnect() { pair_.reset(); }
  Driver& driver_a() { return *drivers_.one; }
  Driver& driver_b() { return drivers_.other ? *drivers_.other : *drivers_.one; }
  DeviceMemory& memory_a() { return *memory_a_; }
  DeviceMemory& memory_b() { return *memory_b_; }
  WireEnd& a() { return *a_; }
  WireEnd& b() { return *b_; }
  const Traits& traits() { return GetParam().traits; }

  /// Sends a filled buffer and sees it come, released once.
  void expect_carries(WireEnd& from, WireEnd& to, std::size_t bytes, std::uint32_t seed);
  /// The only buffer of the next message, which must hold what `seed` stands for.
  void expect_arrives(WireEnd& to, std::size_t bytes, std::uint32_t seed);
  /// Completed once, at the latest in a while.
  static void expect_once(const Outcome& outcome, const char* what);
  /// Runs `work` on another thread: false where it does not return, which is what a lock that is held does to it.
  static bool returns_elsewhere(std::function<void()> work);

  /// Whether `condition` comes true.
  static bool becomes_true(const std::function<bool()>& condition);

 private:
  Drivers drivers_;
  std::unique_ptr<DeviceMemory> memory_a_, memory_b_;
  std::unique_ptr<WirePair> pair_;
  WireEnd* a_ = nullptr;  // as in pair_; completions use them while it ends
  WireEnd* b_ = nullptr;
};

/// Cases that kill a process make their ends themselves.
class ChannelProcessSuite : public ChannelSuite {
 protected:
  void SetUp() override;
  /// Runs `body` here, or in a child of its own where the channel wants that of who forks again and again; its failures
  /// are the test's.
  void in_a_process_that_may_fork(const std::function<void()>& body);
};

}  // namespace tensorferry::conformance

#define INSTANTIATE_CHANNEL_SUITE(Fixture)                                                    \
  namespace tensorferry::conformance {                                                        \
  INSTANTIATE_TEST_SUITE_P(Fixture, ChannelSuite, ::testing::Values(channel_kind<Fixture>()), \
                           [](const auto& kind) { return kind.param.name; });                 \
  }                                                                                           \
  INSTANTIATE_CHANNEL_PROCESS_SUITE(Fixture)

/// Only the cases with a process at the other end.
#define INSTANTIATE_CHANNEL_PROCESS_SUITE(Fixture)                                                   \
  namespace tensorferry::conformance {                                                               \
  INSTANTIATE_TEST_SUITE_P(Fixture, ChannelProcessSuite, ::testing::Values(channel_kind<Fixture>()), \
                           [](const auto& kind) { return kind.param.name; });                        \
  }                                                                                                  \
  static_assert(true)
