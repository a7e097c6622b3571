// Published versions in C++ programs: what readers see, what is refused, and how publications end.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdint>
#include <thread>
#include <vector>

#include "tests/rpc/cpp/typed_agents.h"

namespace {

using namespace tensorferry;
using namespace tensorferry::testing;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

Tensor filled(float value, Tensor::Shape shape) {
  auto out = Tensor::empty(std::move(shape), DType::float32);
  std::ranges::fill(out.elements<float>(), value);
  return out;
}

/// Two tensors: "weight", [rows, 64] of `value`, and "steps", one int64.
std::vector<NamedTensor> weights(float value, std::int64_t rows = 1024) {
  return {{"weight", filled(value, {rows, 64})},
          {"steps", Tensor::from_vector(std::vector<std::int64_t>{static_cast<std::int64_t>(value)})}};
}

/// "sim" publishes, and "reader" subscribes; it maps versions, or copies them.
class TypedVersions : public TypedAgents, public ::testing::WithParamInterface<const char*> {
 protected:
  [[nodiscard]] bool maps() const { return std::string(GetParam()) == "mapped"; }
  std::shared_ptr<Agent> reader = [this] {
    AgentOptions options;
    options.name = "reader";
    options.store = store;
    if (!maps()) options.channels = "basic";
    return Agent::join(std::move(options));
  }();
};
INSTANTIATE_TEST_SUITE_P(, TypedVersions, ::testing::Values("mapped", "copied"),
                         [](const auto& each) { return std::string(each.param); });

TEST_P(TypedVersions, StayAsTheyAreWhileThePublisherGoesOn) {
  const auto policy = sim->publish("policy", weights(1), {.checksums = true});
  EXPECT_EQ(policy.version(), 1U);
  const auto source = reader->subscribe("sim", "policy");
  auto held = source.latest();
  EXPECT_EQ(source.carried(), GetParam());
  EXPECT_THAT(held.names(), ElementsAre("weight", "steps"));
  EXPECT_THAT(held.tensor("weight").shape(), ElementsAre(1024, 64));
  for (int value = 2; value < 8; ++value) {
    auto next = weights(static_cast<float>(value));
    std::ranges::reverse(next);  // the order does not count
    EXPECT_EQ(policy.update(next), static_cast<std::uint64_t>(value));
    const auto newer = source.wait(static_cast<std::uint64_t>(value) - 1);
    EXPECT_EQ(newer.number(), static_cast<std::uint64_t>(value));
    EXPECT_THAT(newer.tensor("weight").elements<float>(), Each(static_cast<float>(value)));
    EXPECT_EQ(newer.tensor("steps").item<std::int64_t>(), value);
    EXPECT_THAT(held.tensor("weight").elements<float>(), Each(1.0F));
  }
  const auto tensor = held.tensor("weight");
  held = {};
  (void)policy.update(weights(9));
  EXPECT_THAT(tensor.elements<float>(), Each(1.0F)) << "a tensor keeps its version";
}

TEST_P(TypedVersions, ALoaderCopiesWhatHasChangedIntoOwnTensors) {
  auto state = weights(1);
  const auto policy = sim->publish("policy", state, {.block = 4096});
  const auto source = reader->subscribe("sim", "policy");
  const auto all = filled(0, {1024, 64}), shard = filled(0, {16, 64});
  const auto loader = source.into({{"weight", all}, {"weight", shard, 512}});
  EXPECT_EQ(loader.version(), 0U);
  EXPECT_EQ(loader.load(), 1U);
  EXPECT_THAT(all.elements<float>(), Each(1.0F));
  EXPECT_THAT(shard.elements<float>(), Each(1.0F));
  const auto whole = source.fetched();
  all.elements<float>().back() = 77;  // a load copies changed blocks alone, so this stays
  state[0].tensor.elements<float>()[512U * 64] = 2;
  (void)policy.update(state);
  EXPECT_EQ(loader.wait(), 2U);
  EXPECT_EQ(all.elements<float>()[512U * 64], 2);
  EXPECT_EQ(all.elements<float>().back(), 77);
  EXPECT_EQ(shard.elements<float>()[0], 2);
  EXPECT_EQ(shard.elements<float>()[1], 1);
  EXPECT_EQ(source.fetched() - whole, maps() ? 0U : 4096U) << "one block travels";
  EXPECT_EQ(loader.load(), 2U);
}

TEST_P(TypedVersions, AnUpdateOfSomeTensorsLeavesTheOthers) {
  const auto policy = sim->publish("policy", weights(1));
  const auto source = reader->subscribe("sim", "policy");
  const auto first = source.latest();
  EXPECT_EQ(policy.update_only({weights(2)[1]}), 2U);
  EXPECT_EQ(policy.update_only({}), 3U);
  const auto newer = source.wait(2);
  EXPECT_EQ(newer.number(), 3U);
  EXPECT_THAT(newer.tensor("weight").elements<float>(), Each(1.0F));
  EXPECT_EQ(newer.tensor("steps").item<std::int64_t>(), 2);
  EXPECT_THAT(thrown_by<InvalidArgument>([&] {
                policy.update_only({{"bias", weights(2)[1].tensor}});
              }),
              HasSubstr("bias"));
}

TEST_P(TypedVersions, AWaitEndsWithAnUpdateOrTheEndOfThePublication) {
  auto policy = sim->publish("policy", weights(1));
  const auto source = reader->subscribe("sim", "policy");
  thrown_by<DeadlineExceeded>([&] { (void)source.wait(1, 10ms); });
  std::thread updating([&] { (void)policy.update(weights(2)); });
  EXPECT_EQ(source.wait(1).number(), 2U);
  updating.join();
  std::thread ending([&] { policy = {}; });  // the last one withdraws it
  EXPECT_THAT(thrown_by<NotFound>([&] { (void)source.wait(2); }), HasSubstr("policy"));
  ending.join();
  const auto again = sim->publish("policy", weights(5, 2));
  EXPECT_THAT(source.wait(2).tensor("weight").elements<float>(), Each(5.0F)) << "any version of another is newer";
  again.withdraw();
  again.withdraw();
  thrown_by<NotFound>([&] { (void)reader->subscribe("sim", "policy").latest(); });
}

using VersionRefusals = TypedAgents;

TEST_F(VersionRefusals, NameWhatDoesNotFit) {
  const auto policy = sim->publish("policy", weights(1));
  const auto refused = [](auto function) { return thrown_by<InvalidArgument>(function); };
  EXPECT_THAT(refused([&] { (void)policy.update(weights(1, 3)); }), HasSubstr("\"weight\", a float32 tensor"));
  EXPECT_THAT(refused([&] { (void)policy.update({{"other", filled(1, {2})}}); }), HasSubstr("\"other\""));
  EXPECT_THAT(refused([&] { (void)policy.update({weights(1)[0]}); }), HasSubstr("without its tensor \"steps\""));
  EXPECT_THAT(refused([&] { (void)policy.update({weights(1)[0], weights(1)[0]}); }), HasSubstr("two tensors"));
  EXPECT_THAT(refused([&] { (void)sim->publish("twice", {weights(1)[0], weights(1)[0]}); }), HasSubstr("two tensors"));
  EXPECT_THAT(refused([&] { (void)sim->publish("policy", weights(1)); }), HasSubstr("already"));
  EXPECT_THAT(refused([&] { (void)sim->publish("b", weights(1), {.block = 5000}); }), HasSubstr("power of two"));
  EXPECT_THAT(refused([&] { (void)sim->publish("k", weights(1), {.kept = 1}); }), HasSubstr("at least 2"));
  const auto whole = filled(1, {4});
  const auto gaps = Tensor::from_memory(whole.raw(), {2}, DType::float32, whole.owner(), {2});
  EXPECT_THAT(refused([&] { (void)sim->publish("gaps", {{"g", gaps}}); }), HasSubstr("contiguous"));
  EXPECT_EQ(policy.version(), 1U);

  const auto source = trainer->subscribe("sim", "policy");
  EXPECT_THAT(refused([&] { (void)source.latest().tensor("none"); }), HasSubstr("no tensor \"none\""));
  EXPECT_THAT(refused([&] { (void)source.into({{"none", filled(0, {1})}}); }), HasSubstr("no tensor \"none\""));
  EXPECT_THAT(refused([&] { (void)source.into({{"weight", filled(0, {3, 64})}}); }), HasSubstr("does not fit"));
  EXPECT_THAT(refused([&] { (void)source.into({{"weight", filled(0, {3, 64}), 1022}}); }), HasSubstr("from row 1022"));
  EXPECT_THAT(refused([&] { (void)source.into({{"weight", filled(0, {3, 64}), -1}}); }), HasSubstr("from row -1"));
  EXPECT_THAT(refused([&] { (void)source.into({{"weight", filled(0, {1024, 64}), 1}}); }), HasSubstr("from row 1"));
  EXPECT_THAT(refused([&] { (void)source.into({{"steps", filled(0, {1})}}); }), HasSubstr("int64"));
  EXPECT_THAT(refused([] { (void)OwnPublication().version(); }), HasSubstr("empty"));
  EXPECT_THAT(refused([] { (void)PeerPublication().latest(); }), HasSubstr("empty"));
  EXPECT_THAT(refused([] { (void)PublishedVersion().number(); }), HasSubstr("empty"));
  EXPECT_THAT(refused([] { (void)VersionLoader().load(); }), HasSubstr("empty"));
}

TEST_F(VersionRefusals, AnUpdateNamesTheReadersThatHoldAllImages) {
  const auto policy = sim->publish("policy", weights(1), {.kept = 2});
  const auto source = trainer->subscribe("sim", "policy");
  auto held = source.latest();
  EXPECT_EQ(policy.leases(), 1U);
  EXPECT_EQ(policy.update(weights(2)), 2U);
  EXPECT_THAT(thrown_by<ResourceExhausted>([&] { (void)policy.update(weights(3), 10ms); }), HasSubstr("\"trainer\""));
  std::thread freeing([&] { held = {}; });
  EXPECT_EQ(policy.update(weights(3)), 3U);
  freeing.join();
}

TEST_F(VersionRefusals, ShutdownWaitsForNoSubscriber) {
  const auto policy = sim->publish("policy", weights(4));
  const auto held = trainer->subscribe("sim", "policy").latest();
  trainer->shutdown(patience);
  sim->shutdown(patience);
  EXPECT_THAT(held.tensor("weight").elements<float>(), Each(4.0F));
}

TEST(PublisherKills, LeaveWhatIsHeldAndAreErrorsAtSubscribers) {
  std::array<int, 2> ports{};
  ASSERT_EQ(::pipe(ports.data()), 0);
  const auto child = ::fork();
  if (child == 0) {
    std::uint16_t port = 0;
    if (::read(ports[0], &port, sizeof port) != sizeof port) ::_exit(1);
    const auto publisher = join(connect_store("127.0.0.1", port), "publisher");
    const auto policy = publisher->publish("policy", weights(3));
    for (;;) ::pause();
  }
  const StoreServer server;
  const auto port = server.port();
  ASSERT_EQ(::write(ports[1], &port, sizeof port), static_cast<ssize_t>(sizeof port));
  const auto reader = join(connect_store("127.0.0.1", port), "reader");
  PeerPublication source;
  const auto until = std::chrono::steady_clock::now() + patience;
  for (bool there = false; !there && std::chrono::steady_clock::now() < until;) {
    try {
      source = reader->subscribe("publisher", "policy");
      there = true;
    } catch (const NotFound&) {  // it has not joined, or not published yet
    }
  }
  const auto held = source.wait();
  std::thread killing([&] { ::kill(child, SIGKILL); });
  EXPECT_THAT(thrown_by<ConnectionLost>([&] { (void)source.wait(1); }), HasSubstr("publisher"));
  killing.join();
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_THAT(held.tensor("weight").elements<float>(), Each(3.0F));
}

}  // namespace
