/// Cases with the other end in a second process. Most cases kill a process, which then runs no destructor and sends no
/// goodbye.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tests/conformance/channel_suite.h"
#include "tests/conformance/child.h"

namespace tensorferry::conformance {

namespace {

constexpr std::size_t kilobyte = 1 << 10;
constexpr std::size_t megabyte = 1 << 20;

[[noreturn]] void die() {
  ::raise(SIGKILL);
  std::abort();
}

enum class Step { offer_made, ticket_delivered, while_pulling, bytes_half_there, before_acknowledgement };
constexpr Step steps[] = {Step::offer_made, Step::ticket_delivered, Step::while_pulling, Step::bytes_half_there,
                          Step::before_acknowledgement};

/// One way for a peer to die: at `step` of a transfer of `bytes` bytes.
struct Death {
  Step step;
  std::size_t bytes;
  WireEnd::Sockets mine;
  std::unique_ptr<Child> child;  // sleeps until its start()
};

/// Returns all deaths. Each child runs `life`. They are forked together: after the first of them, this process may have
/// used a GPU, and could not fork any more. No child sees this process close a link, because later children have a copy
/// of its socket: kill the child.
std::vector<Death> all_deaths(const std::function<int(WireEnd::Sockets, Step, std::size_t)>& life) {
  std::vector<Death> all;
  for (const auto step : steps) {
    for (const auto bytes : {kilobyte, 4 * megabyte}) {
      auto [mine, theirs] = connected_sockets();
      const auto in_child = [&](WireEnd::Sockets sockets) { return life(std::move(sockets), step, bytes); };
      auto child = std::make_unique<Child>(std::move(theirs), mine, in_child, Child::Begins::at_start);
      all.push_back({step, bytes, std::move(mine), std::move(child)});
    }
  }
  return all;
}

/// Waits until half of the bytes have arrived. If the channel moves none over the link's sockets, waits until they have
/// landed.
void wait_half(WireEnd& end, const std::atomic<bool>& landed) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (!landed && !end.messages().held() && !end.bulk().held() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

/// The child's part in the cases in which the receiver dies.
void receive_and_die(WireEnd& end, Step step, std::size_t bytes) {
  std::atomic<bool> landed{false};
  if (step == Step::bytes_half_there) {
    end.messages().hold_after(bytes / 2);
    end.bulk().hold_after(bytes / 2);
  }
  end.behave({.on_message =
                  [&](Arrivals& arrivals) {
                    if (step == Step::ticket_delivered) die();
                    for (auto& arrival : arrivals) {
                      if (step == Step::while_pulling) {
                        arrival->may_adopt = false;
                        arrival->on_reserve = die;
                      }
                      end.pull(arrival);
                    }
                  },
              .on_landed =
                  [&](Arrival&) {
                    if (step == Step::before_acknowledgement) die();
                    landed = true;
                  },
              .acknowledges = false});
  end.start();
  wait_half(end, landed);
  die();
}

}  // namespace

TEST_P(ChannelProcessSuite, CarriesBetweenProcessesInBothDirections) {
  auto [mine, theirs] = connected_sockets();
  const std::vector<std::size_t> sizes{0, 1, 10 * kilobyte, 300 * kilobyte, 5 * megabyte};
  Child child(std::move(theirs), mine, [&](WireEnd::Sockets sockets) {
    make_drivers();
    WireEnd end("parent", driver_b(), DevicePair{GetParam().devices.remote, GetParam().devices.local}, memory_b(),
                std::move(sockets));
    end.start();
    const auto probed = end.wait_ready();  // the parent may send before this end may
    if (!probed || !probed->ok()) ::_exit(1);
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto arrivals = end.receive();
      if (arrivals.size() != 1) ::_exit(1);
      auto back = arrivals.front()->buffer;
      back.bytes = arrivals.front()->ticket.bytes;
      end.send(back);
    }
    end.messages().wait_ended();  // the parent closes the link at the end of the test
    return 0;
  });
  make_drivers();
  WireEnd end("child", driver_a(), GetParam().devices, memory_a(), std::move(mine));
  end.start();
  const auto probed = end.wait_ready();
  ASSERT_TRUE(probed && probed->ok());
  for (std::uint32_t i = 0; i < sizes.size(); ++i) {
    const auto released = end.send(memory_a().filled(sizes[i], i));
    ASSERT_NO_FATAL_FAILURE(expect_arrives(end, sizes[i], i));
    EXPECT_EQ(released.wait_name(), "Ok");
  }
}

TEST_P(ChannelProcessSuite, AReceiverKilledAtAnyStepReleasesTheSource) {
  in_a_process_that_may_fork([&] {
    auto deaths = all_deaths([&](WireEnd::Sockets sockets, Step step, std::size_t bytes) {
      make_drivers();
      WireEnd end("parent", driver_b(), DevicePair{GetParam().devices.remote, GetParam().devices.local}, memory_b(),
                  std::move(sockets));
      receive_and_die(end, step, bytes);
      return 0;
    });
    make_drivers();
    for (auto& [step, bytes, mine, child] : deaths) {
      SCOPED_TRACE(testing::Message() << "step " << static_cast<int>(step) << ", " << bytes << " bytes");
      child->start();
      WireEnd end("child", driver_a(), GetParam().devices, memory_a(), std::move(mine));
      end.start();
      Letter letter(end);
      const bool offered = end.wait_ready()->ok() && letter.offer(memory_a().filled(bytes, 1));
      if (step == Step::offer_made) child->kill();
      letter.send();
      if (offered) expect_once(letter.released.front(), "released");
      child->kill();
      end.finish();
      for (const auto& released : letter.released) expect_once(released, "released");
    }
  });
}

TEST_P(ChannelProcessSuite, ASenderKilledAtAnyStepCompletesThePull) {
  in_a_process_that_may_fork([&] {
    auto deaths = all_deaths([&](WireEnd::Sockets sockets, Step step, std::size_t bytes) {
      make_drivers();
      WireEnd end("parent", driver_a(), GetParam().devices, memory_a(), std::move(sockets));
      end.start();
      (void)end.wait_ready();
      Letter letter(end);
      (void)letter.offer(memory_a().filled(bytes, 1));
      if (step == Step::offer_made) die();
      letter.send();
      end.messages().wait_ended();
      return 0;
    });
    make_drivers();
    for (auto& death : deaths) {
      SCOPED_TRACE(testing::Message() << "step " << static_cast<int>(death.step) << ", " << death.bytes << " bytes");
      death.child->start();
      WireEnd end("child", driver_b(), DevicePair{GetParam().devices.remote, GetParam().devices.local}, memory_b(),
                  std::move(death.mine));
      std::atomic<bool> landed{false};
      std::mutex mutex;
      Arrivals pulled;
      end.behave({.on_message =
                      [&](Arrivals& arrivals) {
                        if (death.step == Step::ticket_delivered) death.child->kill();
                        for (auto& arrival : arrivals) {
                          if (death.step == Step::while_pulling) {
                            arrival->may_adopt = false;
                            arrival->on_reserve = [&] { death.child->kill(); };
                          }
                          end.pull(arrival);
                          std::lock_guard lock(mutex);
                          pulled.push_back(arrival);
                        }
                      },
                  .on_landed = [&](Arrival&) { landed = true; },
                  .acknowledges = death.step != Step::before_acknowledgement});
      if (death.step == Step::bytes_half_there) {
        end.messages().hold_after(death.bytes / 2);
        end.bulk().hold_after(death.bytes / 2);
      }
      end.start();
      if (death.step == Step::bytes_half_there || death.step == Step::before_acknowledgement) {
        wait_half(end, landed);
        death.child->kill();
      }
      end.messages().resume();
      end.bulk().resume();
      end.messages().wait_ended();  // the child died by itself, or was killed above
      end.finish();
      for (const auto& arrival : pulled) {
        expect_once(arrival->landed, "landed");
        expect_once(arrival->consumed, "consumed");
        if (arrival->landed.wait_name() == "Ok") {
          arrival->buffer.bytes = death.bytes;
          EXPECT_TRUE(memory_b().holds(arrival->buffer, 1)) << "said to have landed, and has not";
        }
      }
    }
  });
}

}  // namespace tensorferry::conformance
