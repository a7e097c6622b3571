// What ranks of a group, and agents that are none, could do to a rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <future>
#include <string>
#include <vector>

#include "rpc/collectives/asked_data.h"
#include "tests/agent/patience.h"
#include "tests/rpc/collectives/world.h"

namespace tensorferry::testing {
namespace {

TEST(HostileRanks, RequestsForDataThatIsNeverSentAreBoundedForEachRankAndEndWithIt) {
  using collectives::AskedData;
  GroupWorld world(3);
  world.form(GroupWorld::settings_of({3, "messages"}));
  auto& mailbox = world.groups[0]->mailbox();
  const auto ask = [&](std::size_t rank, std::uint64_t number) {
    Message message;
    message.payload =
        encode(collectives::GroupMessage(collectives::FetchData{world.groups[0]->id(), false, number, 0}));
    return world.agents[rank]->call("rank0", collectives::group_function, std::move(message),
                                    within(std::chrono::seconds(600)));
  };
  constexpr std::size_t more = 8;
  std::vector<Call> calls;
  for (std::size_t i = 0; i < AskedData::most + more; ++i) calls.push_back(ask(1, 1000 + i));
  const auto ended = [](const Call& call) { return call.done(); };
  EXPECT_TRUE(
      eventually([&] { return std::count_if(calls.begin(), calls.end(), ended) == more; }, std::chrono::seconds(200)));
  EXPECT_EQ(mailbox.asked_by(1), AskedData::most);
  for (auto& call : calls) {
    if (call.done()) {
      EXPECT_EQ(call.take().status().code(), Code::resource_exhausted);
    }
  }
  const auto other = ask(2, 1000);
  EXPECT_TRUE(eventually([&] { return mailbox.asked_by(2) == 1; })) << "another rank has a bound of its own";
  const auto given_up = std::ranges::find_if(calls, [](const Call& call) { return !call.done(); });
  given_up->cancel();
  EXPECT_TRUE(eventually([&] { return mailbox.asked_by(1) == AskedData::most - 1; })) << "one was given up";
  world.agents[1]->leave();
  EXPECT_TRUE(eventually([&] { return mailbox.asked_by(1) == 0; })) << "all end with their rank";
}

TEST(HostileRanks, RegionsOfOneAreBounded) {
  using collectives::Exchange;
  GroupWorld world(3);
  world.form(GroupWorld::settings_of({3, "memory"}));
  auto& exchange = world.groups[0]->exchange();
  const auto map = [&](std::size_t rank, std::uint64_t region) { return exchange.map_region(rank, region, {}).code(); };
  for (std::uint64_t region = 0; region < Exchange::most_regions; ++region) ASSERT_EQ(map(1, region), Code::ok);
  EXPECT_EQ(map(1, Exchange::most_regions), Code::resource_exhausted);
  EXPECT_EQ(map(1, 0), Code::ok) << "it takes the place of the one with this number";
  EXPECT_EQ(map(2, 0), Code::ok) << "another rank has a bound of its own";
  exchange.unmap_region(1, 0);
  EXPECT_EQ(map(1, Exchange::most_regions), Code::ok);
}

// The sender of a message says on which device its buffers land.
TEST(HostileRanks, BytesOfAMessageThatLieOnADeviceAreNotRead) {
  GroupWorld world(2);
  world.form(GroupWorld::settings_of({2, "messages"}));
  auto& mailbox = world.groups[0]->mailbox();
  auto* const unreadable = reinterpret_cast<std::byte*>(16);  // NOLINT(performance-no-int-to-ptr)
  collectives::Posted posted;
  posted.from = 1;
  posted.by_tag = true;
  posted.bytes = 8;
  EXPECT_TRUE(mailbox.deliver(posted, {{DeviceType::cuda, 0}, unreadable, 8, nullptr, nullptr}).ok());
  Bytes into(8);
  EXPECT_EQ(mailbox.receive(1, {true, 0}, into.data(), into.size())->status().code(), Code::protocol_error);
}

TEST(HostileRanks, AnAgentThatIsNoMemberOfAFormingGroupHasNoPartInIt) {
  GroupWorld world(3);
  const auto send = [&](std::size_t from, const collectives::GroupMessage& each) {
    Message message;
    message.payload = encode(each);
    return call_sync(*world.agents[from], "rank0", collectives::group_function, std::move(message));
  };
  collectives::JoinGroup join{"group", {"rank0", "rank1"}, 1, {}};
  join.member.name = "rank1";
  auto forming = std::async(std::launch::async, [&] {
    auto settings = GroupWorld::settings_of({2, "memory"});
    settings.label = "group";
    return world.services[0]->form({"rank0", "rank1"}, settings).status();
  });
  const auto joined = send(1, join);
  ASSERT_TRUE(joined.ok()) << joined.status().text();
  const auto group = decode<collectives::Formed>(joined->payload)->group;
  EXPECT_EQ(send(2, collectives::GetBoard{group}).status().code(), Code::cancelled);
  for (const std::uint32_t rank : {0U, 1U, 2U, 1000U}) {
    EXPECT_EQ(send(2, collectives::ReadyForGroup{group, rank, {}, {}}).status().code(), Code::protocol_error) << rank;
  }
  EXPECT_EQ(send(1, collectives::ReadyForGroup{group, 2, {}, {}}).status().code(), Code::protocol_error);
  const auto board = send(1, collectives::GetBoard{group});
  EXPECT_TRUE(board.ok()) << board.status().text();
  join.names.emplace_back(256, 'x');
  EXPECT_EQ(send(1, join).status().code(), Code::protocol_error) << "no agent has such a name";
  world.services[0]->leave();
  EXPECT_EQ(forming.get().code(), Code::agent_closed);
}

}  // namespace
}  // namespace tensorferry::testing
