// What ranks of a group, and agents that are none, could do to a rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <future>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/host.h"
#include "base/text.h"
#include "channels/cma/process.h"
#include "rpc/collectives/asked_data.h"
#include "tests/agent/patience.h"
#include "tests/rpc/collectives/world.h"

namespace tensorferry::testing {
namespace {

using ::testing::HasSubstr;

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

// Each rank tells the others what it calls, and may make it up.
TEST(HostileRanks, ACallThatDoesNotExistIsNamedAndTheGroupGoesOn) {
  using collectives::Fingerprint;
  const auto shift = Fingerprint::algorithm_shift;
  std::vector<std::pair<Fingerprint, std::string>> calls;
  const auto add = [&](const std::string& text, auto change) {
    Fingerprint called;
    called.operation = static_cast<std::uint8_t>(collectives::Operation::all_reduce);
    called.dtype = static_cast<std::uint8_t>(DType::float32);
    called.reduction = static_cast<std::uint8_t>(Reduction::sum);
    called.elements = 4;
    change(called);
    calls.emplace_back(called, text);
  };
  for (auto told = static_cast<unsigned>(collectives::Algorithm::last) + 2; told < 16; ++told) {
    add("all_reduce(sum) of 4 float32 elements by algorithm \"?\"",
        [&](Fingerprint& called) { called.reduction |= static_cast<std::uint8_t>(told << shift); });
  }
  add("all_reduce(?) of 4 float32 elements by algorithm \"?\"", [](Fingerprint& called) { called.reduction = 0xff; });
  add("all_reduce(sum) of 4 ? elements", [](Fingerprint& called) { called.dtype = 0xff; });
  for (const std::uint8_t operation : {9, 200, 254}) {
    add("? of 4 float32 elements", [=](Fingerprint& called) { called.operation = operation; });
  }
  for (const std::string links : {"memory", "messages"}) {
    GroupWorld world(2);
    world.form(GroupWorld::settings_of({2, links}));
    std::vector<float> own(4, 1), sum(4), others(4);
    const auto reduce = [&](std::size_t rank, std::vector<float>& out) {
      collectives::StartOptions options;
      options.background = true;
      return world.groups[rank]->all_reduce(bytes_in(own), bytes_in(out), DType::float32, Reduction::sum, options);
    };
    for (const auto& [called, text] : calls) {
      const auto honest = reduce(0, sum);
      const collectives::WaitLimits limits{Clock().now() + long_enough, [] { return Status(); }, {}};
      const auto hostile = world.groups[1]->exchange().step(called, collectives::ExchangeStep(2), limits);
      for (const auto& status : {ended(honest), hostile}) {
        EXPECT_EQ(status.code(), Code::invalid_argument) << status.text();
        EXPECT_THAT(status.text(), HasSubstr("rank 1 (\"rank1\") called " + text)) << links;
      }
    }
    const auto first = reduce(0, sum), second = reduce(1, others);
    EXPECT_TRUE(ended(first).ok() && ended(second).ok()) << ended(first).text() << ended(second).text();
    EXPECT_EQ(sum, std::vector<float>(4, 2));
  }
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

/// Forms a group of rank 0 and a rank 1 that says in its record that `host` is it. Returns why rank 0 and rank 1 do not
/// read each other's memory, as rank 0 has decided it.
std::string no_memory_with(GroupWorld& world, const collectives::HostIdentity& host) {
  const auto send = [&](const collectives::GroupMessage& each) {
    Message message;
    message.payload = encode(each);
    return call_sync(*world.agents[1], "rank0", collectives::group_function, std::move(message));
  };
  auto forming = std::async(std::launch::async, [&] {
    auto settings = GroupWorld::settings_of({2, "memory"});
    settings.label = "group";
    return world.services[0]->form({"rank0", "rank1"}, settings).status();
  });
  const auto joined = send(
      collectives::JoinGroup{"group", {"rank0", "rank1"}, 1, {"rank1", world.agents[1]->self().incarnation, host}});
  EXPECT_TRUE(joined.ok()) << joined.status().text();
  const auto group = decode<collectives::Formed>(joined->payload)->group;
  const auto board = send(collectives::GetBoard{group});
  const auto decided = send(collectives::ReadyForGroup{group, 1, {}, {}});
  EXPECT_TRUE(forming.get().ok());
  EXPECT_TRUE(decided.ok()) << decided.status().text();
  const auto decision = decode<collectives::Decision>(decided->payload);
  return decision ? decision->no_memory : "malformed";
}

TEST(HostileRankProcesses, MemoryOfAnotherProcessThanTheRankIsNotReadEvenIfItIsOfTheSameUser) {
  static const std::uint64_t word = 0x5eed;
  GroupWorld world(2);
  const auto third = ::fork();
  if (third == 0) ::_exit(::pause());
  collectives::HostIdentity host{
      boot_id(), ::geteuid(), own_namespace("pid"), own_namespace("user"), {third, cma::started_of(third).value_or(0)},
      0,         word};
  host.probe_address = reinterpret_cast<std::uintptr_t>(&word);
  EXPECT_THAT(no_memory_with(world, host),
              HasSubstr(formatted("\"rank1\" names process {} as its own, but it is process {}", third, ::getpid())));
  ::kill(third, SIGKILL);
  ::waitpid(third, nullptr, 0);
}

/// What a rank 0 answers that is not served by Groups.
void serve_as_rank_0(RawAgent& agent, collectives::Formed formed, const collectives::Decision& decision) {
  agent.serve(std::string(collectives::group_function), [=](const Request& request, Reply reply) {
    const auto asked = decode<collectives::GroupMessage>(request.arguments.payload);
    Message answer;
    if (std::holds_alternative<collectives::GetBoard>(*asked)) return reply.fail({Code::cancelled, "no board"});
    if (std::holds_alternative<collectives::JoinGroup>(*asked)) answer.payload = encode(formed);
    if (std::holds_alternative<collectives::ReadyForGroup>(*asked)) answer.payload = encode(decision);
    reply.send(std::move(answer));
  });
}

TEST(HostileRanks, ARankZeroCannotDecideForABoardOrForMemoryThatARankLacks) {
  GroupWorld world(2);
  collectives::Formed formed{7, {{"rank0", 1, {}}, {"rank1", 2, {}}}};
  for (auto& member : formed.members) member.host.boot_id = "one host";
  serve_as_rank_0(*world.agents[0], formed, {});
  const auto form = [&] {
    return world.services[1]->form({"rank0", "rank1"}, GroupWorld::settings_of({2, "memory"})).status();
  };
  auto refused = form();
  EXPECT_EQ(refused.code(), Code::protocol_error);
  EXPECT_THAT(refused.text(), HasSubstr("rank 0 has decided for links that this rank lacks"));
  formed.members[0].name = "rank2";
  serve_as_rank_0(*world.agents[0], formed, {"no board", "no memory", {}});
  refused = form();
  EXPECT_EQ(refused.code(), Code::protocol_error);
  EXPECT_THAT(refused.text(), HasSubstr("rank 0 formed another group"));
}

}  // namespace
}  // namespace tensorferry::testing
