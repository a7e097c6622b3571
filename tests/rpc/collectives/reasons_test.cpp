// Seeds draw a group, a rank that ends it, how and when it does so, and what holds the others up meanwhile. Whatever
// they see first, the reason that all of them get is that rank's own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

#include "tests/agent/patience.h"
#include "tests/rpc/collectives/world.h"

namespace tensorferry::testing {
namespace {

using collectives::RawGroup;
using collectives::StartOptions;
using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::Not;
using Floats = std::vector<float>;

enum class End : std::uint8_t { abort, close, leave, exception, lateness };
constexpr std::array end_names{"abort", "close", "leave", "exception", "lateness"};
constexpr std::size_t operations = 3;

/// What a seed draws.
struct Scenario {
  explicit Scenario(std::uint64_t of) : seed(of), random_(of) {
    shape.ranks = 2 + below(3);
    shape.links = std::array{"memory", "mail", "messages"}.at(below(3));
    algorithm = std::array{"one_shot", "two_shot", "ring"}.at(below(3));
    count = std::array<std::size_t, 3>{100, 20'000, 100'000}.at(below(3));
    culprit = below(shape.ranks);
    end = static_cast<End>(below(end_names.size()));
    in_operation = below(operations);
    within = end == End::exception || (end != End::lateness && below(2) == 0);
    held = (culprit + 1 + below(shape.ranks - 1)) % shape.ranks;
    hold = milliseconds(below(3) == 0 ? 0 : below(300));
    for (std::size_t rank = 0; rank < shape.ranks; ++rank) {
      pauses.emplace_back(below(2) == 0 ? 0 : below(20));
      background.push_back(below(2) == 0);
    }
  }
  [[nodiscard]] std::string text() const {
    return "seed " + std::to_string(seed) + ": " + name_of(shape) + ", " + algorithm + " of " + std::to_string(count) +
           ", rank " + std::to_string(culprit) + " ends it by " + end_names.at(static_cast<std::size_t>(end)) +
           (within ? " within" : " before") + " operation " + std::to_string(in_operation);
  }

  std::uint64_t seed;
  GroupShape shape;
  std::string algorithm;
  std::size_t count = 0, culprit = 0, in_operation = 0;
  End end{};
  bool within = false;               // the reduction, else before the operation
  std::size_t held = 0;              // a rank whose threads for messages are occupied
  milliseconds hold{};               // for so long, from the operation on
  std::vector<milliseconds> pauses;  // of each rank, in its reductions
  std::vector<bool> background;      // whether each rank's operations run on a thread of the pool

 private:
  std::size_t below(std::size_t bound) { return static_cast<std::size_t>(random_() % bound); }
  std::mt19937_64 random_;
};

/// One run of a scenario.
class Ending final {
 public:
  explicit Ending(const Scenario& drawn)
      : of_(drawn), world_(of_.shape.ranks, [](RawAgentOptions& options) { options.max_threads = most_threads; }) {
    auto settings = GroupWorld::settings_of(of_.shape);
    settings.algorithms = "all_reduce=" + of_.algorithm;
    world_.form(settings);
    world_.agents[of_.held]->serve("hold", [time = of_.hold](Request, Reply reply) {
      std::this_thread::sleep_for(time);
      reply.send({});
    });
  }

  void run() {
    world_.run([this](std::size_t rank, RawGroup& group) {
      Status status;
      for (std::size_t number = 0; status.ok() && number < operations; ++number) status = operate(rank, number);
      if (rank == of_.culprit) return;
      if (status.ok()) status = ended(group.barrier());  // it had needed nothing more of that rank
      check(rank, status);
      check(rank, ended(group.barrier()));  // and it stays so
    });
  }

 private:
  static constexpr int most_threads = 2;

  Status operate(std::size_t rank, std::size_t number) {
    auto& group = *world_.groups[rank];
    const bool is_the_one = number == of_.in_operation;
    if (is_the_one && rank == of_.held && of_.hold.count() != 0) occupy();
    if (is_the_one && rank == of_.culprit && !of_.within) {
      end();
      return group.failed().ok() ? Status(Code::cancelled, "it has ended the group") : group.failed();
    }
    ReduceOp op(Reduction::custom);
    op.any_order = true;
    std::atomic<bool> first = true;
    op.combine = [&](void* sum, const void* other, std::size_t count, DType) {
      if (first.exchange(false)) {
        std::this_thread::sleep_for(of_.pauses[rank]);
        if (is_the_one && rank == of_.culprit && of_.within) end();
      }
      for (std::size_t i = 0; i < count; ++i) static_cast<float*>(sum)[i] += static_cast<const float*>(other)[i];
    };
    StartOptions options;
    options.background = of_.background[rank];
    if (is_the_one && of_.end == End::lateness) options.timeout = milliseconds(200);
    Floats values(of_.count, 1);
    return ended(group.all_reduce(bytes_in(values), bytes_in(values), DType::float32, op, options));
  }

  void occupy() {
    for (int i = 0; i < 2 * most_threads; ++i) {
      static_cast<void>(world_.agents[of_.held]->call(world_.names[of_.held], "hold", {}, within(long_enough)));
    }
  }

  /// The culprit ends the group.
  void end() {
    auto& group = *world_.groups[of_.culprit];
    switch (of_.end) {
      case End::abort:
        return group.abort(reason());
      case End::close:
        return group.close();
      case End::leave:
        return std::thread([this] {
                 world_.services[of_.culprit]->leave();
                 world_.agents[of_.culprit]->leave();
               })
            .join();
      case End::exception:
        throw std::runtime_error(reason());
      case End::lateness:
        EXPECT_TRUE(eventually([&] { return !group.failed().ok(); }));
    }
  }
  [[nodiscard]] std::string reason() const { return "by seed " + std::to_string(of_.seed); }
  [[nodiscard]] std::string named(std::size_t rank) const {
    return "rank " + std::to_string(rank) + " (\"" + world_.names[rank] + "\")";
  }

  void check(std::size_t rank, const Status& status) const {
    SCOPED_TRACE("rank " + std::to_string(rank));
    const auto text = status.text(), culprit = named(of_.culprit);
    EXPECT_THAT(text, Not(HasSubstr("withdrawn")));
    switch (of_.end) {
      case End::abort:
        EXPECT_THAT(text, HasSubstr(culprit + " aborted group \"default\": " + reason()));
        break;
      case End::close:
        EXPECT_THAT(text, HasSubstr(culprit + " has left group \"default\""));
        break;
      case End::leave:
        EXPECT_EQ(status.code(), Code::connection_lost);
        EXPECT_THAT(text, HasSubstr(culprit + " of group \"default\" has died or left: "));
        break;
      case End::exception:
        EXPECT_THAT(text, HasSubstr(culprit + " of group \"default\" has thrown in an operation: " + reason()));
        break;
      case End::lateness:  // a rank that was held up may be named beside it
        EXPECT_EQ(status.code(), Code::deadline_exceeded);
        EXPECT_THAT(text, HasSubstr(culprit));
        return;
    }
    for (std::size_t other = 0; other < of_.shape.ranks; ++other) {
      if (other != of_.culprit) {
        EXPECT_THAT(text, Not(HasSubstr(named(other))));
      }
    }
  }

  const Scenario of_;
  GroupWorld world_;
};

TEST(Reasons, OfTheRankThatEndsAGroupReachAllOthersForEachSeed) {
  const char* given = std::getenv("TENSORFERRY_SEED");
  const std::uint64_t first = given == nullptr ? 1 : std::strtoull(given, nullptr, 10);
  const std::uint64_t seeds = given != nullptr ? 1 : is_soak ? 1000 : under_sanitizer ? 10 : 30;
  for (auto seed = first; seed < first + seeds; ++seed) {
    const Scenario drawn(seed);
    SCOPED_TRACE(drawn.text() + " (TENSORFERRY_SEED=" + std::to_string(seed) + " draws it again)");
    Ending(drawn).run();
    if (HasFatalFailure() || HasNonfatalFailure()) break;
  }
}

}  // namespace
}  // namespace tensorferry::testing
