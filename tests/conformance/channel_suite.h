/// The conformance suite for channels: fixtures `ChannelSuite` and `ChannelProcessSuite`, and the macros that
/// instantiate their cases. A channel's own test file defines a fixture and instantiates the suite with it:
///
///     struct BasicFixture {
///       static constexpr auto name = "basic";
///       static Drivers drivers() { return {std::make_unique<BasicDriver>()}; }
///       static Traits traits() { return {}; }
///     };
///     INSTANTIATE_CHANNEL_SUITE(BasicFixture);
///
/// The test links tensorferry_channel_suite, or outside the tree tensorferry::conformance. The fixture of a channel for
/// memory other than the CPU's adds
///
///       static DevicePair devices() { return {{DeviceType::cuda, 0}, {DeviceType::cuda, 1}}; }   // of end a
///       static std::unique_ptr<DeviceMemory> memory(Device device) { ... }
///
/// If this machine cannot run the channel, `traits().missing` gives the reason, and the tests are skipped with it.
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

/// The drivers of the two ends. If `other` is null, both ends use `one`.
struct Drivers {
  std::unique_ptr<Driver> one;
  std::unique_ptr<Driver> other = nullptr;
};

struct Traits {
  bool same_process = false;  // both ends stay in one process: the cases with a second process are skipped
  bool forks = true;          // a process that has used the channel may fork one that uses it (not with CUDA)
  bool shares = false;        // takes Sharing::shared; the other channels must refuse it
  std::string missing = {};   // why this machine cannot run the channel; "" if it can
};

/// A fixture as a value, so that the cases are compiled once for all channels.
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

/// The fixture of most cases: two ends of the channel in this process, connected by SetUp. Its functions run on the
/// test's thread.
class ChannelSuite : public ::testing::TestWithParam<ChannelKind> {
 protected:
  void SetUp() override;
  void TearDown() override;

  /// Makes drivers and memory but no ends, for a test that makes its own ends.
  void make_drivers();
  /// Destroys the drivers. Call it before a fork, because a driver may have threads, which the child would lack.
  void drop_drivers() { drivers_ = {}; }
  /// Ends the present pair, if there is one, and makes another. Fails the test if a probe fails.
  void connect();
  /// Ends the pair. Waits up to `patience` for each end's completions to run.
  void disconnect() { pair_.reset(); }
  Driver& driver_a() { return *drivers_.one; }
  Driver& driver_b() { return drivers_.other ? *drivers_.other : *drivers_.one; }
  DeviceMemory& memory_a() { return *memory_a_; }
  DeviceMemory& memory_b() { return *memory_b_; }
  WireEnd& a() { return *a_; }
  WireEnd& b() { return *b_; }
  const Traits& traits() { return GetParam().traits; }

  /// Sends a buffer with the pattern of `seed`. Expects it to arrive and to be released once.
  void expect_carries(WireEnd& from, WireEnd& to, std::size_t bytes, std::uint32_t seed);
  /// Receives the next message. Expects it to have one buffer, whose first `bytes` bytes hold the pattern of `seed`.
  void expect_arrives(WireEnd& to, std::size_t bytes, std::uint32_t seed);
  /// Expects that an operation completes within `patience`, and once only.
  static void expect_once(const Outcome& outcome, const char* what);
  /// Runs `work` on another thread. Returns false if it does not return within `patience`, as when the calling thread
  /// holds a lock that `work` needs.
  static bool returns_elsewhere(std::function<void()> work);

  /// Polls `condition`. Returns whether it comes true within `patience`.
  static bool becomes_true(const std::function<bool()>& condition);

 private:
  Drivers drivers_;
  std::unique_ptr<DeviceMemory> memory_a_, memory_b_;
  std::unique_ptr<WirePair> pair_;
  WireEnd* a_ = nullptr;  // the ends of pair_; completions use these pointers while the pair ends
  WireEnd* b_ = nullptr;
};

/// The fixture of the cases with a second process, which a case may kill. A case makes its own ends.
class ChannelProcessSuite : public ChannelSuite {
 protected:
  void SetUp() override;
  /// Runs `body` in this process if the channel permits a fork after use (`Traits::forks`), else in a forked child.
  /// Failures in the child fail the test.
  void in_a_process_that_may_fork(const std::function<void()>& body);
};

}  // namespace tensorferry::conformance

#define INSTANTIATE_CHANNEL_SUITE(Fixture)                                                    \
  namespace tensorferry::conformance {                                                        \
  INSTANTIATE_TEST_SUITE_P(Fixture, ChannelSuite, ::testing::Values(channel_kind<Fixture>()), \
                           [](const auto& kind) { return kind.param.name; });                 \
  }                                                                                           \
  INSTANTIATE_CHANNEL_PROCESS_SUITE(Fixture)

/// Instantiates only the cases with a second process.
#define INSTANTIATE_CHANNEL_PROCESS_SUITE(Fixture)                                                   \
  namespace tensorferry::conformance {                                                               \
  INSTANTIATE_TEST_SUITE_P(Fixture, ChannelProcessSuite, ::testing::Values(channel_kind<Fixture>()), \
                           [](const auto& kind) { return kind.param.name; });                        \
  }                                                                                                  \
  static_assert(true)
