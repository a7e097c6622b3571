// Crossings that `tensorferry tune` has measured: their text, their file, and the groups that use them.
#include "rpc/collectives/tuning.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/text.h"
#include "tests/rpc/collectives/world.h"

namespace tensorferry::testing {
namespace {

using collectives::Algorithm;
using collectives::choose;
using collectives::explain_choice;
using collectives::find_crossings;
using collectives::Operation;
using collectives::parse_crossings;
using collectives::TuningKey;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(Crossings, AreParsed) {
  const auto parsed = parse_crossings("all_reduce=one_shot:65536:two_shot:1048576:ring,broadcast=direct");
  ASSERT_TRUE(parsed.ok()) << parsed.status().text();
  const collectives::Crossings expected{
      {Operation::all_reduce, {{Algorithm::one_shot, 65536}, {Algorithm::two_shot, 1048576}, {Algorithm::ring}}},
      {Operation::broadcast, {{Algorithm::direct}}}};
  EXPECT_EQ(*parsed, expected);
  EXPECT_TRUE(parse_crossings("")->empty());
}

TEST(Crossings, ThatMakeNoSenseAreRefusedWithTheReason) {
  const auto refusal = [](std::string_view text) {
    const auto parsed = parse_crossings(text);
    EXPECT_EQ(parsed.status().code(), Code::invalid_argument) << text;
    return parsed.status().text();
  };
  EXPECT_THAT(refusal("all_reduce"), HasSubstr("\"all_reduce\" says no crossings: it names no operation"));
  EXPECT_THAT(refusal("all_peduce=one_shot"), HasSubstr("it names no operation"));
  EXPECT_THAT(refusal("all_reduce="), HasSubstr("no such algorithm"));
  EXPECT_THAT(refusal("all_reduce=direct"), HasSubstr("no such algorithm"));
  EXPECT_THAT(refusal("all_reduce=one_shot:"), HasSubstr("a number of bytes is missing"));
  EXPECT_THAT(refusal("all_reduce=one_shot:1x:two_shot"), HasSubstr("a number of bytes is missing"));
  EXPECT_THAT(refusal("all_reduce=one_shot:-1:two_shot"), HasSubstr("a number of bytes is missing"));
  EXPECT_THAT(refusal("all_reduce=one_shot:99999999999999999999:two_shot"), HasSubstr("a number of bytes is missing"));
  EXPECT_THAT(refusal("all_reduce=one_shot:18446744073709551615:two_shot"), HasSubstr("a number of bytes is missing"));
  EXPECT_THAT(refusal("all_reduce=one_shot:100"), HasSubstr("the last algorithm is missing"));
  EXPECT_THAT(refusal("all_reduce=one_shot:100:two_shot:100:ring"), HasSubstr("the bytes do not increase"));
  EXPECT_THAT(refusal("broadcast=direct,,"), HasSubstr("\"\" says no crossings"));
}

TEST(Crossings, TakeThePlaceOfTheTableUnlessAnAlgorithmIsPrescribed) {
  const auto measured = *parse_crossings("all_reduce=one_shot:1000:two_shot:5000:ring");
  collectives::Asked asked{Operation::all_reduce, 1000, 4, {true, true}};
  EXPECT_EQ(choose(asked, {}, measured), Algorithm::one_shot);
  EXPECT_THAT(explain_choice(asked, {}, measured).reason, HasSubstr("as measured by `tensorferry tune`"));
  asked.bytes = 1001;
  EXPECT_EQ(choose(asked, {}, measured), Algorithm::two_shot);
  asked.bytes = 5001;
  EXPECT_EQ(choose(asked, {}, measured), Algorithm::ring);
  asked.in_turn = false;  // no ring can do that
  EXPECT_EQ(choose(asked, {}, measured), Algorithm::two_shot);
  EXPECT_EQ(choose(asked, *collectives::parse_algorithms("all_reduce=one_shot"), measured), Algorithm::one_shot);
  asked.operation = Operation::reduce;  // not measured
  EXPECT_EQ(choose(asked, {}, measured), Algorithm::one_shot);
  EXPECT_THAT(explain_choice(asked, {}, measured).reason, Not(HasSubstr("measured")));
  asked = {Operation::all_reduce, 1 << 20, 1, {}};
  EXPECT_EQ(choose(asked, {}, measured), Algorithm::one_shot);
}

constexpr std::string_view file = R"({"measured": [
  {"topology": "one host", "device": "a \"fast\" one", "ranks": 4, "version": "1.0", "when": [1, {"x": null}, -2.5e3],
   "crossings": {"all_reduce": "one_shot:1:two_shot", "reduce": "one_shot"}},
  {"topology": "one host", "device": "a \"fast\" one", "ranks": 2, "version": "1.0", "crossings": {}}
], "made by": true})";

TEST(TuningFile, HasCrossingsByTopologyDeviceRanksAndVersion) {
  const TuningKey key{"one host", "a \"fast\" one", 4, "1.0"};
  EXPECT_EQ(*find_crossings(file, key), "all_reduce=one_shot:1:two_shot,reduce=one_shot");
  for (const auto& other :
       {TuningKey{"PCIe", key.device, 4, "1.0"}, TuningKey{key.topology, "slow", 4, "1.0"},
        TuningKey{key.topology, key.device, 3, "1.0"}, TuningKey{key.topology, key.device, 2, "1.0"},
        TuningKey{key.topology, key.device, 4, "1.1"}}) {
    EXPECT_EQ(*find_crossings(file, other), "");
  }
}

TEST(TuningFile, IsRefusedIfItIsCutOffOrSomethingElse) {
  const TuningKey key{"one host", "a \"fast\" one", 4, "1.0"};
  for (std::size_t size = 0; size < file.size(); ++size) {
    EXPECT_FALSE(find_crossings(file.substr(0, size), key).ok()) << size;
  }
  for (const std::string_view text : {"[]", "{} x", "{\"measured\": 1}", "{\"measured\": [{\"ranks\": \"2\"}]}",
                                      "{\"a\": \"\\u0041\"}", "{\"measured\": [{\"crossings\": {\"x\": 1}}]}"}) {
    EXPECT_FALSE(find_crossings(text, key).ok()) << text;
  }
  EXPECT_FALSE(find_crossings("{\"deep\": " + std::string(1000, '[') + std::string(1000, ']') + "}", key).ok());
  EXPECT_EQ(*find_crossings("{}", key), "");
}

/// A file of crossings that TENSORFERRY_TUNING names until the test ends.
class TunedGroup : public ::testing::Test {
 protected:
  void SetUp() override { ::setenv("TENSORFERRY_TUNING", path_.c_str(), 1); }
  void TearDown() override {
    ::unsetenv("TENSORFERRY_TUNING");
    std::filesystem::remove(path_);
  }
  void write(std::string_view text) const { std::ofstream(path_) << text; }
  void write_crossings(std::size_t ranks, std::string_view crossings) const {
    const auto key = collectives::host_tuning_key(ranks);
    write(R"({"measured": [{"topology": ")" + key.topology + R"(", "device": ")" + key.device + R"(", "ranks": )" +
          std::to_string(ranks) + R"(, "version": ")" + key.version + R"(", "crossings": {"all_reduce": ")" +
          std::string(crossings) + R"("}}]})");
  }
  /// Returns what a group of so many ranks says of 1000 bytes, the same at each rank.
  static std::string explained(std::size_t ranks, const std::string& links = "memory") {
    GroupWorld world(ranks);
    world.form(GroupWorld::settings_of({ranks, links}));
    std::vector<std::string> said(ranks);
    world.run([&](std::size_t rank, collectives::RawGroup& group) {
      said[rank] = group.explain(Operation::all_reduce, 1000);
      std::vector<float> ones(250, 1);
      EXPECT_TRUE(ended(group.all_reduce(bytes_in(ones), bytes_in(ones), DType::float32, Reduction::sum)).ok());
      EXPECT_EQ(ones.back(), static_cast<float>(ranks));
    });
    for (const auto& each : said) EXPECT_EQ(each, said[0]);
    return said[0];
  }
  const std::string path_ =
      formatted("{}/tensorferry-tuning-{}.json", std::filesystem::temp_directory_path().string(), ::getpid());
};

TEST_F(TunedGroup, UsesTheCrossingsForItsSizeAtEveryRank) {
  write_crossings(3, "two_shot");
  EXPECT_THAT(explained(3), HasSubstr("two_shot (3 ranks on one host, as measured by `tensorferry tune`"));
  EXPECT_THAT(explained(2), HasSubstr("one_shot (2 ranks on one host: "));
}

TEST_F(TunedGroup, ThatExchangesMessagesUsesTheTable) {
  write_crossings(2, "two_shot");
  EXPECT_THAT(explained(2, "messages"), HasSubstr("one_shot (2 ranks that exchange messages: "));
}

TEST_F(TunedGroup, UsesTheTableWithoutAFileOrIfItMakesNoSense) {
  EXPECT_THAT(explained(2), HasSubstr("one_shot (2 ranks on one host: "));
  write("not JSON");
  EXPECT_THAT(explained(2), HasSubstr("one_shot (2 ranks on one host: "));
  write_crossings(2, "three_shot");
  EXPECT_THAT(explained(2), HasSubstr("one_shot (2 ranks on one host: "));
}

}  // namespace
}  // namespace tensorferry::testing
