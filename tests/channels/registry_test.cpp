#include "channels/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tensorferry {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

/// Returns `names` without the channels for GPUs and network cards, which not every build has.
std::vector<std::string> for_cpu(std::vector<std::string> names) {
  std::erase_if(names, [](const std::string& name) { return name.starts_with("cuda_") || name == "ibv"; });
  return names;
}

std::vector<std::string> names_of(const Result<std::vector<std::unique_ptr<Driver>>>& drivers) {
  std::vector<std::string> names;
  if (!drivers.ok()) return {drivers.status().text()};
  for (const auto& driver : *drivers) names.emplace_back(driver->name());
  return for_cpu(std::move(names));
}

/// A channel as another project might write it. It carries nothing: it refuses every offer and fails every pull.
class PigeonChannel final : public Channel {
 public:
  Offer offer(const Buffer&, Sharing, Outgoing&, Completion) override { return Refusal{"no pigeon at hand"}; }
  void pull(const Ticket&, Sink&, Completion landed, Completion consumed) override {
    landed(Status(Code::protocol_error, "no pigeon left"));
    consumed(Status(Code::protocol_error, "no pigeon left"));
  }
  void withdraw(const Ticket&) override {}
  void close(Status) noexcept override {}
};

class PigeonDriver final : public Driver {
 public:
  explicit PigeonDriver(std::string name = "pigeon") : name_(std::move(name)) {}
  [[nodiscard]] std::string_view name() const override { return name_; }
  std::variant<Bytes, Refusal> descriptor(Device) override { return Bytes{}; }
  std::optional<Refusal> reaches(ByteView, ByteView) override { return std::nullopt; }
  std::unique_ptr<Channel> open(Wire& wire, DevicePair) override {
    wire.ready({});
    return std::make_unique<PigeonChannel>();
  }

 private:
  std::string name_;
};

Registry::Factory pigeon(std::string name = "pigeon") {
  return [name] { return std::make_unique<PigeonDriver>(name); };
}

TEST(Registry, BuiltInChannelsAreOrderedFastestFirst) {
  EXPECT_THAT(names_of(Registry::built_in().drivers("")), ElementsAre("xth", "shm", "cma", "basic"));
}

TEST(Registry, AUserAddsAChannelFromOutside) {
  auto registry = Registry::built_in();
  registry.add("pigeon", 50, pigeon());
  EXPECT_THAT(names_of(registry.drivers("")), ElementsAre("xth", "shm", "cma", "pigeon", "basic"));
  EXPECT_THAT(for_cpu(registry.names()), ElementsAre("xth", "shm", "cma", "pigeon", "basic"));
  EXPECT_THAT(names_of(registry.drivers("pigeon")), ElementsAre("pigeon"));
}

TEST(Registry, AChannelOnRequestIsUsedOnlyIfItIsNamed) {
  auto registry = Registry::built_in();
  registry.add_on_request("owl", pigeon("owl"));
  registry.add("pigeon", -1, pigeon());
  EXPECT_THAT(names_of(registry.drivers("")), ElementsAre("xth", "shm", "cma", "basic", "pigeon"));
  EXPECT_THAT(names_of(registry.drivers("-xth,-owl")), ElementsAre("shm", "cma", "basic", "pigeon"));
  EXPECT_THAT(names_of(registry.drivers("owl,basic")), ElementsAre("owl", "basic"));
  EXPECT_THAT(for_cpu(registry.names()), ElementsAre("xth", "shm", "cma", "basic", "pigeon", "owl"));
  registry.add("owl", 70, pigeon("owl"));
  EXPECT_THAT(names_of(registry.drivers("")), ElementsAre("xth", "shm", "owl", "cma", "basic", "pigeon"));
}

TEST(Registry, EqualPrioritiesKeepTheOrderOfAdding) {
  Registry registry;
  for (const auto* name : {"a", "b", "c"}) registry.add(name, 1, pigeon(name));
  registry.add("first", 2, pigeon("first"));
  registry.add("last", 0, pigeon("last"));
  EXPECT_THAT(names_of(registry.drivers("")), ElementsAre("first", "a", "b", "c", "last"));
}

TEST(Registry, DriversOfOneAgentShareWhatTheyAskForAndThoseOfTwoAgentsDoNot) {
  struct Loft {};
  std::vector<std::shared_ptr<Loft>> lofts;
  Registry registry;
  for (const auto* name : {"pigeon", "dove"}) {
    registry.add_sharing(name, 50, [&lofts, name](SharedState& of_agent) {
      lofts.push_back(of_agent.find_or_make<Loft>(nullptr, [] { return std::make_shared<Loft>(); }));
      return std::make_unique<PigeonDriver>(name);
    });
  }
  for (int agent = 0; agent < 2; ++agent) ASSERT_TRUE(registry.drivers("").ok());
  ASSERT_EQ(lofts.size(), 4U);
  EXPECT_EQ(lofts[0], lofts[1]);
  EXPECT_EQ(lofts[2], lofts[3]);
  EXPECT_NE(lofts[0], lofts[2]);
}

TEST(SharedState, KeepsOneObjectOfEachTypeAndKeyAsLongAsItIsUsed) {
  SharedState shared;
  int made = 0;
  const auto find = [&](const void* key) {
    return shared.find_or_make<int>(key, [&] { return std::make_shared<int>(++made); });
  };
  auto one = find(nullptr);
  EXPECT_EQ(find(nullptr), one);
  EXPECT_EQ(*find(&made), 2) << "another key";
  EXPECT_EQ(*shared.find_or_make<long>(nullptr, [] { return std::make_shared<long>(7); }), 7) << "another type";
  one.reset();
  EXPECT_EQ(*find(nullptr), 3);
}

TEST(Registry, ANameAddedAgainReplacesTheEarlierOne) {
  auto registry = Registry::built_in();
  registry.add("basic", 1000, pigeon("basic"));
  EXPECT_THAT(names_of(registry.drivers("")), ElementsAre("basic", "xth", "shm", "cma"));
  auto drivers = registry.drivers("basic");
  ASSERT_TRUE(drivers.ok());
  EXPECT_NE(dynamic_cast<PigeonDriver*>((*drivers).front().get()), nullptr);
}

TEST(Registry, AListAllowsOnlyItsChannelsInItsOrder) {
  const auto registry = Registry::built_in();
  EXPECT_THAT(names_of(registry.drivers("basic")), ElementsAre("basic"));
  EXPECT_THAT(names_of(registry.drivers("basic,xth")), ElementsAre("basic", "xth"));
  EXPECT_THAT(names_of(registry.drivers(" basic , xth,")), ElementsAre("basic", "xth"));
  EXPECT_THAT(names_of(registry.drivers("basic,basic")), ElementsAre("basic"));
  EXPECT_THAT(names_of(registry.drivers(" ,, ")), ElementsAre("xth", "shm", "cma", "basic"));
}

TEST(Registry, APriorityMovesAChannelInTheDefaultOrder) {
  auto registry = Registry::built_in();
  registry.add_on_request("owl", pigeon("owl"));
  EXPECT_THAT(names_of(registry.drivers("cma:90")), ElementsAre("xth", "cma", "shm", "basic"));
  EXPECT_THAT(names_of(registry.drivers("cma:10, shm:5")), ElementsAre("xth", "cma", "shm", "basic"));
  EXPECT_THAT(names_of(registry.drivers("basic:1000,-shm,owl:-3")), ElementsAre("basic", "xth", "cma", "owl"));
  EXPECT_THAT(names_of(registry.drivers("")), ElementsAre("xth", "shm", "cma", "basic")) << "the registry is unchanged";
  for (const auto* wrong : {"cma:", "cma:fast", "cma:1.5", "cma:99999999999", "-cma:5"})
    EXPECT_THAT(std::string(registry.drivers(wrong).status().what()),
                AllOf(HasSubstr("gives no priority"), HasSubstr("known channels are: xth, ")))
        << wrong;
  EXPECT_THAT(std::string(registry.drivers("cma:5,basic").status().what()), HasSubstr("both allows"));
  EXPECT_THAT(std::string(registry.drivers("crow:5").status().what()), HasSubstr("no channel \"crow\""));
}

TEST(Registry, AMinusRemovesAChannelFromTheDefaultOrder) {
  const auto registry = Registry::built_in();
  EXPECT_THAT(names_of(registry.drivers("-xth")), ElementsAre("shm", "cma", "basic"));
  EXPECT_THAT(names_of(registry.drivers("-basic, -xth")), ElementsAre("shm", "cma"));
}

TEST(Registry, AnUnknownNameIsAnErrorThatListsTheKnownOnes) {
  const auto registry = Registry::built_in();
  for (const auto* choice : {"carrier", "-carrier", "basic,carrier"}) {
    const auto drivers = registry.drivers(choice);
    ASSERT_FALSE(drivers.ok()) << choice;
    EXPECT_EQ(drivers.status().code(), Code::invalid_argument);
    EXPECT_THAT(std::string(drivers.status().what()), HasSubstr("\"carrier\""));
    EXPECT_THAT(std::string(drivers.status().what()),
                AllOf(HasSubstr("xth, "), HasSubstr("shm, "), HasSubstr("basic")));
  }
  EXPECT_FALSE(registry.drivers("-").ok());
}

TEST(Registry, AllowingAndRemovingAtOnceIsAnError) {
  EXPECT_EQ(Registry::built_in().drivers("xth,-basic").status().code(), Code::invalid_argument);
}

TEST(Registry, AFactoryThatReturnsNullOrAnotherNameIsAnError) {
  Registry registry;
  registry.add("empty", 1, nullptr);
  registry.add("null", 1, [] { return std::unique_ptr<Driver>(); });
  registry.add("dove", 1, pigeon("pigeon"));
  for (const auto* name : {"empty", "null", "dove"}) {
    const auto drivers = registry.drivers(name);
    ASSERT_FALSE(drivers.ok()) << name;
    EXPECT_EQ(drivers.status().code(), Code::invalid_argument);
    EXPECT_THAT(std::string(drivers.status().what()), HasSubstr(name));
  }
}

TEST(Registry, EachCallMakesNewDrivers) {
  const auto registry = Registry::built_in();
  auto one = registry.drivers("basic");
  auto two = registry.drivers("basic");
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_NE((*one).front().get(), (*two).front().get());
}

}  // namespace
}  // namespace tensorferry
