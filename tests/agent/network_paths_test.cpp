// The networks that two agents have in common.
#include "agent/dial/network_paths.h"

#include <gtest/gtest.h>

#include <map>

namespace tensorferry {
namespace {

using Paths = std::vector<NetworkPath>;
using Routes = std::map<std::string, LocalRoute>;

const std::vector<std::string> ours = {"10.0.1.1:7000", "10.0.2.1:7001", "[fd00::1]:7002"};
const std::vector<std::string> theirs = {"10.0.1.2:8000", "10.0.2.2:8001", "[fd00::2]:8002"};
const NetworkPath first{"10.0.1.1", "10.0.1.2:8000"}, second{"10.0.2.1", "10.0.2.2:8001"},
    third{"fd00::1", "[fd00::2]:8002"};

Paths paths_with(const Routes& routes, const std::vector<std::string>& own = ours,
                 const std::vector<std::string>& other = theirs) {
  return separate_paths(own, other, [&](const std::string& host) -> std::optional<LocalRoute> {
    const auto found = routes.find(host);
    if (found == routes.end()) return std::nullopt;
    return found->second;
  });
}

TEST(NetworkPaths, AreThoseByDifferentAddressesInThePeersOrder) {
  const Routes routes = {{"10.0.1.2", {"10.0.1.1"}}, {"10.0.2.2", {"10.0.2.1"}}, {"fd00::2", {"fd00::1"}}};
  EXPECT_EQ(paths_with(routes), (Paths{first, second, third}));
  EXPECT_EQ(paths_with(routes, ours, {theirs[2], theirs[0]}), (Paths{third, first}));
}

TEST(NetworkPaths, AreNoneWithOneNetworkAlone) {
  const Routes one = {{"10.0.1.2", {"10.0.1.1"}}};
  EXPECT_EQ(paths_with(one), Paths{});
  EXPECT_EQ(paths_with({}), Paths{});
  const Routes routes = {{"10.0.1.2", {"10.0.1.1"}}, {"10.0.2.2", {"10.0.2.1"}}};
  EXPECT_EQ(paths_with(routes, {ours[0]}), Paths{});
  EXPECT_EQ(paths_with(routes, ours, {theirs[0]}), Paths{});
}

TEST(NetworkPaths, CountAnInterfaceOnce) {
  const Routes routed = {{"10.0.1.2", {"10.0.1.1"}}, {"10.0.2.2", {"10.0.1.1"}}, {"fd00::2", {"fd00::1"}}};
  EXPECT_EQ(paths_with(routed), (Paths{first, third}));
  const Routes twice = {
      {"10.0.1.2", {"10.0.1.1", 0, "ib0"}}, {"10.0.2.2", {"10.0.2.1", 0, "ib1"}}, {"fd00::2", {"fd00::1", 0, "ib0"}}};
  EXPECT_EQ(paths_with(twice), (Paths{first, second}));
}

TEST(NetworkPaths, LeaveOutInterfacesThatTheUserHasNotChosen) {
  const Routes routes = {{"10.0.1.2", {"10.0.1.1"}}, {"10.0.2.2", {"192.168.0.1"}}, {"fd00::2", {"fd00::1"}}};
  EXPECT_EQ(paths_with(routes), (Paths{first, third}));
}

TEST(NetworkPaths, LeaveOutThisHost) {
  const Routes routes = {{"10.0.1.1", {"10.0.1.1"}}, {"10.0.2.1", {"10.0.2.1"}}};
  EXPECT_EQ(paths_with(routes, ours, ours), Paths{});
}

TEST(NetworkPaths, LeaveOutInterfacesThatWouldHoldTheFirstOneUp) {
  const auto with = [](unsigned one, unsigned other) {
    return paths_with({{"10.0.1.2", {"10.0.1.1", one}}, {"10.0.2.2", {"10.0.2.1", other}}});
  };
  EXPECT_EQ(with(1000, 500), (Paths{first, second}));
  EXPECT_EQ(with(1000, 499), Paths{});
  EXPECT_EQ(with(1000, 100000), (Paths{first, second}));
  EXPECT_EQ(with(1000, 0), (Paths{first, second}));
  EXPECT_EQ(with(0, 10), (Paths{first, second}));
}

TEST(NetworkPaths, LeaveOutAddressesThatAreNone) {
  const Routes routes = {{"", {"10.0.1.1"}}, {"10.0.2.2", {"10.0.2.1"}}};
  EXPECT_EQ(paths_with(routes, ours, {"", "nonsense", "10.0.2.2:1"}), Paths{});
}

TEST(NetworkPaths, AreTakenInTurns) {
  const Paths paths{first, second, third};
  EXPECT_EQ(least_used(paths, {}), first);
  EXPECT_EQ(least_used(paths, {"10.0.1.1"}), second);
  EXPECT_EQ(least_used(paths, {"10.0.2.1"}), first);
  EXPECT_EQ(least_used(paths, {"10.0.1.1", "10.0.2.1"}), third);
  EXPECT_EQ(least_used(paths, {"10.0.1.1", "10.0.2.1", "fd00::1"}), first);
  EXPECT_EQ(least_used(paths, {"192.168.0.1"}), first);
}

TEST(NetworkPaths, TheKernelNamesTheAddressThatItWouldSendFrom) {
  const auto route = route_to("127.0.0.1");
  ASSERT_TRUE(route);
  EXPECT_EQ(route->from, "127.0.0.1");
  EXPECT_FALSE(route_to("nonsense"));
  EXPECT_FALSE(route_to(""));
}

}  // namespace
}  // namespace tensorferry
