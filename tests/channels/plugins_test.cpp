#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tensorferry/plugin.h"

namespace tensorferry {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

std::unique_ptr<Driver> no_driver() { return nullptr; }
void keep_first(void*, const void*, std::size_t, DType) {}

/// Returns the names of the channels that an agent made now would have; or the error.
std::vector<std::string> channels_now() {
  auto registry = Registry::built_in();
  const auto status = Plugins::of_process().add_channels_to(registry);
  return status.ok() ? registry.names() : std::vector{status.text()};
}

std::string error_now() { return Plugins::of_process().check().text(); }

TEST(Plugins, AChannelIsRegisteredWhileItsObjectLives) {
  {
    const ChannelPlugin plugin("owl", 70, no_driver);
    const auto names = channels_now();
    EXPECT_THAT(names, Contains("owl"));
    EXPECT_LT(std::find(names.begin(), names.end(), "owl"), std::find(names.begin(), names.end(), "cma"));
  }
  EXPECT_THAT(channels_now(), Not(Contains("owl")));
}

TEST(Plugins, AChannelWithoutAPriorityIsOnRequest) {
  const ChannelPlugin plugin("owl", std::nullopt, no_driver);
  EXPECT_EQ(channels_now().back(), "owl");
}

TEST(Plugins, ANameThatIsRegisteredTwiceIsAnErrorUntilOneIsGone) {
  const ChannelPlugin first("owl", 70, no_driver);
  {
    const ChannelPlugin second("owl", 10, no_driver);
    EXPECT_THAT(channels_now(), ElementsAre(HasSubstr("\"channel owl\" is registered twice in this process: by this")));
  }
  EXPECT_THAT(channels_now(), Contains("owl"));
  const ReductionPlugin of_another_kind("owl", keep_first);
  EXPECT_EQ(error_now(), "Ok");
}

TEST(Plugins, ANameOfTheLibrarysOwnIsRefused) {
  for (const auto* name : {"shm", "basic"}) {
    const ChannelPlugin plugin(name, 70, no_driver);
    EXPECT_THAT(error_now(), AllOf(HasSubstr(name), HasSubstr("a name of TensorFerry's own")));
  }
  const ReductionPlugin plugin("sum", keep_first);
  EXPECT_THAT(error_now(), HasSubstr("\"reduction sum\""));
}

TEST(Plugins, WhatHasNoNameOrNoFunctionIsRefused) {
  {
    const ChannelPlugin plugin("owl", 70, nullptr);
    EXPECT_THAT(error_now(), HasSubstr("\"channel owl\" of this program needs a name and a function"));
  }
  const ReductionPlugin plugin("", keep_first);
  EXPECT_THAT(error_now(), HasSubstr("needs a name"));
}

TEST(Plugins, AReductionIsFoundByItsName) {
  const ReductionPlugin plugin("owl", keep_first, /*any_order=*/true);
  const auto found = Plugins::of_process().reduction("owl");
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->kind, Reduction::custom);
  EXPECT_TRUE(found->any_order);
  EXPECT_THAT(
      Plugins::of_process().reduction("crow").status().text(),
      AllOf(HasSubstr("no reduction \"crow\""), HasSubstr("sum, "), HasSubstr("owl"), Not(HasSubstr("custom"))));
}

std::string load_error(const std::string& path) { return Plugins::of_process().load(path).status().text(); }

TEST(PluginLibraries, ATakenNameIsRefusedAndNothingIsTaken) {
  const ReductionPlugin plugin("last", keep_first);
  EXPECT_THAT(load_error(PIGEON_PLUGIN), AllOf(HasSubstr("\"reduction last\" is registered twice"),
                                               HasSubstr("by this program"), HasSubstr(PIGEON_PLUGIN)));
  EXPECT_THAT(channels_now(), Not(Contains("pigeon")));
}

TEST(PluginLibraries, WhatALibraryRegistersIsTakenOnce) {
  for (int time = 0; time < 2; ++time) {
    const auto names = Plugins::of_process().load(PIGEON_PLUGIN);
    ASSERT_TRUE(names.ok()) << names.status().text();
    EXPECT_THAT(*names, ElementsAre("channel pigeon", "reduction last"));
  }
  auto registry = Registry::built_in();
  ASSERT_TRUE(Plugins::of_process().add_channels_to(registry).ok());
  const auto drivers = registry.drivers("pigeon");
  ASSERT_TRUE(drivers.ok()) << drivers.status().text();
  EXPECT_EQ((*drivers)[0]->name(), "pigeon");
  const auto last = Plugins::of_process().reduction("last");
  ASSERT_TRUE(last.ok());
  int into = 1;
  const int from = 2;
  last->combine(&into, &from, 1, DType::int32);
  EXPECT_EQ(into, 2);
}

TEST(PluginLibraries, OtherFilesAreRefusedWithTheReason) {
  EXPECT_THAT(load_error("/nonexistent/plugin.so"), AllOf(HasSubstr("/nonexistent/plugin.so"), HasSubstr("No such")));
  EXPECT_THAT(load_error("libc.so.6"), HasSubstr("libc.so.6 is no plugin"));
  EXPECT_THAT(load_error(OLD_PLUGIN), HasSubstr("is a plugin for TensorFerry 0.0, and this is " PROJECT_MINOR));
}

}  // namespace
}  // namespace tensorferry
