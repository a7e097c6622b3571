// A process of another user of this host, which has the key, uses regions and lies about itself. It runs in a child,
// and needs root to become another user.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "agent/rendezvous/tcp_store.h"
#include "channels/cma/process.h"
#include "tests/agent/forked.h"
#include "tests/rpc/regions/region_agents.h"

namespace tensorferry::testing {
namespace {

using namespace regions;

constexpr uid_t stranger = 12345;
const std::string shared_key = "the key that both users know";
void with_the_key(RawAgentOptions& options) { options.key = shared_key; }

/// Memory that a process and its children share.
struct SharedWords {
  std::uint64_t proof = 0, generation = 0;
  static SharedWords* make() {
    auto* const page = ::mmap(nullptr, sizeof(SharedWords), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return page == MAP_FAILED ? nullptr : new (page) SharedWords;
  }
};

class RegionUsers : public ::testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
    ASSERT_EQ(::pipe(ends_.data()), 0);
  }
  void TearDown() override {
    for (const int end : ends_) ::close(end);
    for (const auto child : children_) {
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
    }
  }
  /// Runs `life` in a child of the user `who`. Fork before this process has threads.
  template <class Life>
  pid_t fork_as(uid_t who, Life life) {
    const auto child = ::fork();
    if (child == 0) ::_exit(::setresuid(who, who, who) == 0 ? life() : not_allowed);
    children_.push_back(child);
    return child;
  }
  /// The store of both users. Its port goes to the child of join_as_stranger().
  void serve_store() {
    server_ = *TcpStoreServer::listen("127.0.0.1", 0, shared_key);
    const auto port = server_->port();
    ASSERT_EQ(::write(ends_[1], &port, sizeof port), ssize_t{sizeof port});
    store = *connect_tcp_store("127.0.0.1", port, shared_key, long_enough);
  }
  std::shared_ptr<RawAgent> join_as_stranger(const std::string& name) {
    std::uint16_t port = 0;
    if (::read(ends_[0], &port, sizeof port) != ssize_t{sizeof port}) return nullptr;
    return join(*connect_tcp_store("127.0.0.1", port, shared_key, long_enough), name, {}, with_the_key);
  }
  std::shared_ptr<Store> store;

 private:
  std::array<int, 2> ends_{-1, -1};
  std::vector<pid_t> children_;
  std::shared_ptr<TcpStoreServer> server_;
};

constexpr std::string_view secret = "what a third process of this user has in its memory";

TEST_F(RegionUsers, AnOwnerOfAnotherUserCannotHaveAThirdProcessReadInItsPlace) {
  auto* const words = SharedWords::make();
  ASSERT_NE(words, nullptr);
  const auto third = fork_as(0, [] { return ::pause(); });
  const cma::Identity process{third, cma::started_of(third).value_or(0)};
  fork_as(stranger, [&] {
    const auto liar = join_as_stranger("liar");
    if (!liar) return 2;
    std::vector<Reply> open;
    std::mutex mutex;
    liar->serve(std::string(attend_function), [&](const Request&, Reply reply) {
      const std::lock_guard lock(mutex);
      open.push_back(std::move(reply));
    });
    liar->serve(std::string(region_function), [&](const Request& request, Reply reply) {
      const auto message = decode<RegionMessage>(request.arguments.payload);
      const auto* asked = message ? std::get_if<OpenRegion>(&*message) : nullptr;
      if (asked == nullptr) return reply.fail({Code::not_found, "the liar has no memory of its own"});
      words->proof = asked->proof;
      words->generation = asked->id;
      RegionGrant grant;
      grant.id = asked->id;
      grant.bytes = secret.size();
      grant.read = true;
      grant.reach = Reach::in_place;
      grant.process = process;
      grant.address = reinterpret_cast<std::uintptr_t>(secret.data());
      grant.word_address = reinterpret_cast<std::uintptr_t>(&words->generation);
      grant.proof_address = reinterpret_cast<std::uintptr_t>(&words->proof);
      Message answer;
      answer.payload = encode(grant);
      reply.send(std::move(answer));
    });
    return ::pause();
  });
  serve_store();
  const auto agent = join(store, "reader", {}, with_the_key);
  const auto visits = std::make_shared<Visits>(agent);
  const auto remote = std::make_shared<RemoteRegions>(agent, visits);
  ASSERT_TRUE(agent->find("liar", long_enough).ok());
  const auto region = remote->open({"liar", 0, 1});
  ASSERT_TRUE(region.ok()) << region.status().text();
  EXPECT_NE(words->proof, 0U);
  EXPECT_EQ((*region)->reach(), Reach::served);
  const auto into = patterned(secret.size());
  EXPECT_EQ((*region)->read(Runs::one(0, secret.size()), into).code(), Code::not_found);
  EXPECT_NE(std::memcmp(into.data, secret.data(), secret.size()), 0);
  visits->close();
}

TEST_F(RegionUsers, AVisitorOfAnotherUserLearnsNoAddressesByClaimingToBeOfTheSame) {
  const auto visitor = fork_as(stranger, [&] {
    const auto liar = join_as_stranger("liar");
    if (!liar || !liar->find("owner", long_enough).ok()) return 2;
    Message asked;
    asked.payload = encode(RegionMessage(OpenRegion{1, 0, 1, {}, false, own_place(), 7}));
    auto reply = call_sync(*liar, "owner", region_function, std::move(asked));
    if (!reply.ok()) return 3;
    const auto grant = decode<RegionGrant>(reply->payload);
    if (!grant) return 4;
    const bool told = grant->address != 0 || grant->word_address != 0 || grant->proof_address != 0;
    return told || grant->reach != Reach::served ? 1 : 0;
  });
  serve_store();
  const auto agent = create(store, "owner", {}, with_the_key);
  const auto visitors = Visitors::serve(*agent);
  const auto owned = OwnedRegions::serve(agent, *visitors);
  const auto memory = patterned(100);
  ASSERT_EQ(*owned->add(memory, {}), 1U);
  ASSERT_TRUE(agent->announce().ok());
  EXPECT_EQ(end_of(visitor, std::chrono::seconds(60)), 0);
  owned->close();
}

}  // namespace
}  // namespace tensorferry::testing
