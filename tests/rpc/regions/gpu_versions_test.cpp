// Versions whose tensors stay on a GPU: what readers get of them there and by the host, here within one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "agent/rendezvous/memory_store.h"
#include "agent/rendezvous/tcp_store.h"
#include "channels/cuda/copy_timer.h"
#include "channels/cuda/device.h"
#include "rpc/regions/service.h"
#include "tests/agent/agents.h"
#include "tests/agent/patience.h"
#include "tests/conformance/cuda_memory.h"
#include "tests/rpc/regions/version_agents.h"

namespace tensorferry::testing {
namespace {

using conformance::CudaKind;
using regions::BlockMarks;
using regions::GpuMemory;
using regions::HeldVersion;
using ::testing::HasSubstr;

void copy_bytes(const void* to, const void* from, std::size_t bytes) {
  const cuda::DeviceGuard here(0);
  cuda::CopyTimer timer;
  timer.copy(cuda::address_of(static_cast<const std::byte*>(to)), cuda::address_of(static_cast<const std::byte*>(from)),
             bytes);
  EXPECT_TRUE(timer.wait("a test's copy").ok());
}

Bytes bytes_on_gpu(const Buffer& memory) {
  Bytes out(memory.bytes);
  copy_bytes(out.data(), memory.data, memory.bytes);
  return out;
}

/// Tensors of which the last `on_gpu` are published on GPU 0. Its memory is overwritten when it is freed.
struct GpuSet : TestSet {
  GpuSet(const std::vector<std::size_t>& sizes, std::size_t last, CudaKind kind = CudaKind::malloc)
      : TestSet(sizes), on_gpu(last), gpu(conformance::cuda_memory(0, kind)) {
    shape.block = 4096;
    shape.pieces = layout().pieces;
    lay_out(shape, on_gpu);
  }
  /// Returns the bytes of the part on the GPU.
  [[nodiscard]] Bytes part() const {
    Bytes out(shape.bytes - shape.gpu_from, std::byte{0});
    for (auto i = bytes.size() - on_gpu; i < bytes.size(); ++i) {
      std::ranges::copy(bytes[i], out.begin() + static_cast<std::ptrdiff_t>(shape.pieces[i].offset - shape.gpu_from));
    }
    return out;
  }
  [[nodiscard]] regions::GpuWriter writer() const {
    return {[this](std::uint64_t size) -> Result<GpuMemory> {
              auto memory = gpu->filled(size, 1);
              EXPECT_TRUE(gpu->holds(memory, 1)) << "nothing of its stream is under way";
              return GpuMemory{std::move(memory), 0};
            },
            [this](const Buffer& image, const Buffer* base) -> Result<BlockMarks> {
              if (!refusal.ok()) return refusal;
              const auto now = part();
              copy_bytes(image.data, now.data(), now.size());
              BlockMarks marks(now.size() / shape.block, 1);
              if (base == nullptr) return marks;
              const auto before = bytes_on_gpu(*base);
              for (std::size_t i = 0; i < marks.size(); ++i) {
                const auto at = i * shape.block;
                marks[i] = std::memcmp(now.data() + at, before.data() + at, shape.block) == 0 ? 0 : 1;
              }
              return marks;
            }};
  }
  [[nodiscard]] regions::ImageLayout given() const {
    auto out = shape;
    for (auto& piece : out.pieces) piece.offset = 0;
    return out;
  }
  Result<std::uint64_t> update(regions::Publication& publication, Milliseconds patience = long_enough) const {
    auto host = pointers();
    host.resize(host.size() - on_gpu);
    const auto writer = this->writer();
    return publication.update({host}, Clock().now() + patience, {}, &writer);
  }
  /// Returns whether the view, which has a region, has these bytes.
  [[nodiscard]] bool is_on_gpu(const HeldVersion& view) const {
    const auto mapped = view->region->map_on(0, false);
    EXPECT_TRUE(mapped.ok()) << mapped.status().text();
    const bool same = mapped.ok() && bytes_on_gpu(*mapped) == part();
    EXPECT_TRUE(view->region->alive().ok());
    for (std::size_t i = 0; i + on_gpu < bytes.size(); ++i) {
      if (!std::equal(bytes[i].begin(), bytes[i].end(), view->data + shape.pieces[i].offset)) return false;
    }
    return same;
  }
  [[nodiscard]] bool is_on_host(const HeldVersion& view) const { return is(view->data, shape); }

  std::size_t on_gpu;
  regions::ImageLayout shape;
  Status refusal;
  std::unique_ptr<conformance::DeviceMemory> gpu;
};

struct ServiceAgent {
  ServiceAgent(const std::shared_ptr<Store>& store, const std::string& name, const std::string& host = "")
      : agent(join(store, name, {"ring", ""})), service(agent) {
    if (host.empty()) return;
    service.publications->pretend_host(host);
    service.subscriptions->pretend_host(host);
  }
  ~ServiceAgent() { leave(); }
  ServiceAgent(const ServiceAgent&) = delete;
  ServiceAgent& operator=(const ServiceAgent&) = delete;
  void leave() {
    service.close();
    agent->leave();
  }
  [[nodiscard]] std::shared_ptr<regions::Subscription> subscribe() const {
    auto out = service.subscriptions->subscribe("trainer", "policy", soon());
    EXPECT_TRUE(out.ok()) << out.status().text();
    return *out;
  }
  std::shared_ptr<RawAgent> agent;
  regions::RegionService service;
};

class GpuVersions : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto missing = conformance::why_no_cuda(1);
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
  std::shared_ptr<regions::Publication> publish(const GpuSet& set, std::size_t kept = 3) {
    auto out = publisher.service.publications->publish("policy", set.given(), {kept}, set.on_gpu);
    EXPECT_TRUE(out.ok()) << out.status().text();
    EXPECT_EQ((*out)->store().layout(), set.shape);
    return *out;
  }

  std::shared_ptr<Store> store = std::make_shared<MemoryStore>();
  ServiceAgent publisher{store, "trainer"};
  ServiceAgent reader{store, "sampler"};
};

TEST_F(GpuVersions, HaveTheSameBytesOnTheGpuOnTheHostAndOnAnotherHost) {
  GpuSet set({5000, 0, 100'000, 7, 65'536}, 3);
  const auto publication = publish(set);
  ServiceAgent other(store, "other"), far(store, "far", "elsewhere");
  const auto mapping = reader.subscribe(), landing = other.subscribe(), fetching = far.subscribe();
  std::mt19937 random(7);
  std::vector<std::pair<HeldVersion, std::vector<Bytes>>> held;
  for (unsigned version = 1; version <= 60; ++version) {
    for (int change = 0; change < 3; ++change) {
      auto& tensor = set.bytes[random() % set.bytes.size()];
      if (!tensor.empty()) tensor[random() % tensor.size()] = static_cast<std::byte>(random());
    }
    const auto made = set.update(*publication);
    ASSERT_TRUE(made.ok()) << made.status().text();
    ASSERT_EQ(*made, version);
    // Each reader misses some versions, so that images of the host are brought up to date by steps of several.
    if (random() % 2 == 0) {
      const auto view = mapping->latest(soon(), true);
      ASSERT_TRUE(view.ok()) << view.status().text();
      ASSERT_NE((*view)->region, nullptr);
      EXPECT_TRUE(set.is_on_gpu(*view)) << version;
    }
    if (random() % 2 == 0) {
      const auto view = landing->latest(soon());
      ASSERT_TRUE(view.ok()) << view.status().text();
      EXPECT_EQ((*view)->region, nullptr);
      EXPECT_TRUE(set.is_on_host(*view)) << version;
    }
    if (random() % 3 == 0) {
      const auto view = fetching->latest(soon(), true);
      ASSERT_TRUE(view.ok()) << view.status().text();
      EXPECT_EQ((*view)->region, nullptr) << "another host maps no GPU";
      EXPECT_TRUE(set.is_on_host(*view)) << version;
    }
  }
  EXPECT_EQ(fetching->carried(), "copied");
  EXPECT_LE(publication->store().images(), 3U);
}

TEST_F(GpuVersions, TellWhichBlocksChanged) {
  GpuSet set({100, 64 << 10, 64 << 10}, 2);
  const auto publication = publish(set);
  ASSERT_TRUE(set.update(*publication).ok());
  const auto subscription = reader.subscribe();
  const auto first = *subscription->latest(soon(), true);
  set.bytes[1][5000] = std::byte{1};
  set.bytes[2].back() = std::byte{1};
  ASSERT_TRUE(set.update(*publication).ok());
  const auto second = *subscription->latest(soon(), true);
  const auto changes = subscription->changes(*second, first->version, first->epoch, soon());
  using Ranges = std::vector<regions::ByteRange>;
  EXPECT_EQ(changes, (Ranges{{set.shape.gpu_from + 4096, 4096}, {set.shape.bytes - 4096, 4096}}));
}

TEST_F(GpuVersions, AreNotWrittenWhileAReaderHoldsThem) {
  GpuSet set({100'000}, 1);
  const auto publication = publish(set, 2);
  set.fill(1);
  ASSERT_TRUE(set.update(*publication).ok());
  const auto subscription = reader.subscribe();
  auto held = *subscription->latest(soon(), true);
  GpuSet then({100'000}, 1);
  then.fill(1);
  set.fill(2);
  ASSERT_TRUE(set.update(*publication).ok());
  set.fill(3);
  const auto full = set.update(*publication, Milliseconds(0));
  EXPECT_EQ(full.status().code(), Code::resource_exhausted);
  EXPECT_THAT(full.status().text(), HasSubstr("by \"sampler\""));
  EXPECT_TRUE(then.is_on_gpu(held));
  held.reset();
  ASSERT_TRUE(set.update(*publication).ok());
  EXPECT_TRUE(set.is_on_gpu(*subscription->latest(soon(), true)));
}

TEST_F(GpuVersions, OfAReaderThatWasLostAreTakenFromItBeforeTheirMemoryIsUsedAgain) {
  GpuSet set({100'000}, 1);
  const auto publication = publish(set);
  set.fill(1);
  ASSERT_TRUE(set.update(*publication).ok());
  const auto lost = *reader.subscribe()->latest(soon(), true);
  ServiceAgent other(store, "other");
  const auto subscription = other.subscribe();
  auto kept = *subscription->latest(soon(), true);
  const auto id = kept->region->id();
  reader.service.end_visits();
  EXPECT_TRUE(eventually([&] { return publication->leases() == 1; }));
  EXPECT_FALSE(lost->region->alive().ok());
  GpuSet then({100'000}, 1);
  then.fill(1);
  for (unsigned version = 2; version < 6; ++version) {
    set.fill(version);
    ASSERT_TRUE(set.update(*publication).ok());
    EXPECT_TRUE(then.is_on_gpu(kept)) << "a lost reader harms no other";
  }
  kept.reset();
  EXPECT_TRUE(eventually([&] { return publication->leases() == 0; }));
  const regions::RegionKey key{"trainer", 0, id};
  EXPECT_TRUE(eventually([&] { return other.service.remote->open(key).status().code() == Code::not_found; }))
      << "the image that the lost reader held has ended";
  EXPECT_TRUE(set.is_on_gpu(*subscription->latest(soon(), true)));
}

TEST_F(GpuVersions, InMemoryThatCannotBeMappedComeByTheHost) {
  GpuSet set({100'000, 100}, 2, CudaKind::chunks);
  const auto publication = publish(set);
  set.fill(4);
  ASSERT_TRUE(set.update(*publication).ok());
  const auto subscription = reader.subscribe();
  const auto view = *subscription->latest(soon(), true);
  ASSERT_NE(view->region, nullptr);
  EXPECT_EQ(view->region->map_on(0, false).status().code(), Code::channel_unavailable);
  const auto landed = *subscription->latest(soon());
  EXPECT_EQ(landed->version, 1U);
  EXPECT_TRUE(set.is_on_host(landed));
}

TEST_F(GpuVersions, OfAPublicationThatHasEndedAreUnmappedByTheNextCall) {
  GpuSet set({3'000'000}, 1);
  const auto publication = publish(set);
  set.fill(1);
  ASSERT_TRUE(set.update(*publication).ok());
  const auto subscription = reader.subscribe();
  const auto held = *subscription->latest(soon());
  auto view = *subscription->latest(soon(), true);
  ASSERT_TRUE(set.is_on_gpu(view));
  const std::weak_ptr region = view->region;
  view = nullptr;
  EXPECT_FALSE(region.expired()) << "the next version in this image is not mapped anew";
  publisher.service.publications->withdraw("policy");
  EXPECT_EQ(publisher.service.owned->size(), 0U) << "the memory of the GPU is let go";
  EXPECT_EQ(subscription->wait(1, soon()).status().code(), Code::not_found);
  EXPECT_TRUE(region.expired());
  EXPECT_TRUE(set.is_on_host(held)) << "a view of the host's memory stays";
}

TEST_F(GpuVersions, ThatCannotBeWrittenLeaveTheVersionBefore) {
  GpuSet set({100, 50'000}, 1);
  const auto publication = publish(set);
  set.fill(1);
  ASSERT_TRUE(set.update(*publication).ok());
  GpuSet then({100, 50'000}, 1);
  then.fill(1);
  const auto subscription = reader.subscribe();
  for (unsigned round = 2; round < 8; ++round) {
    set.fill(round);
    set.refusal = Status(Code::internal, "the GPU has failed");
    EXPECT_EQ(set.update(*publication).status().text(), set.refusal.text());
    const auto view = *subscription->latest(soon(), true);
    EXPECT_EQ(view->version, round - 1);
    EXPECT_TRUE(then.is_on_gpu(view));
    set.refusal = {};
    const auto made = set.update(*publication);
    ASSERT_TRUE(made.ok()) << made.status().text();
    EXPECT_EQ(*made, round);
    EXPECT_TRUE(set.is_on_gpu(*subscription->latest(soon(), true)));
    EXPECT_TRUE(set.is_on_host(*subscription->latest(soon())));
    then.fill(round);
  }
  auto layout = set.given();
  layout.checksums = true;
  const auto refused = publisher.service.publications->publish("sums", std::move(layout), {}, 1);
  EXPECT_EQ(refused.status().code(), Code::invalid_argument);
}

TEST_F(GpuVersions, ThatCannotBeCopiedToTheHostFailAndAreMappedOn) {
  // The agent has no regions, so nothing looks at the memory before it is copied.
  VersionAgent broken(store, "broken", "", {"ring", ""});
  GpuSet set({100, 50'000}, 1);
  const auto publication = *broken.publications->publish("policy", set.given(), {3}, 1);
  const regions::GpuWriter writer{[](std::uint64_t size) -> Result<GpuMemory> {
                                    const auto bytes = std::make_shared<Bytes>(size);
                                    return GpuMemory{{{DeviceType::cuda, 99}, bytes->data(), size, nullptr, bytes}, 0};
                                  },
                                  [&](const Buffer& image, const Buffer*) -> Result<BlockMarks> {
                                    return BlockMarks(image.bytes / set.shape.block, 1);
                                  }};
  const std::vector<const std::byte*> host{set.bytes[0].data()};
  ASSERT_TRUE(publication->update({host}, Clock().now() + long_enough, {}, &writer).ok());
  const auto subscription = *reader.service.subscriptions->subscribe("broken", "policy", soon());
  const auto refused = subscription->latest(soon()).status();
  EXPECT_EQ(refused.code(), Code::internal);
  EXPECT_THAT(refused.text(), HasSubstr("\"policy\" cannot be copied from the GPU to the host"));
  EXPECT_EQ(subscription->carried(), "mapped");
}

/// Kills, with processes: children that publish or read until they are killed. All are forked at first, because a
/// process that has used CUDA must not fork. The parent's port comes by a pipe.
class GpuVersionKills : public ::testing::Test {
 protected:
  static constexpr std::size_t tensor_bytes = 3'000'000;
  struct Child {
    pid_t process = 0;
    int pipe = -1;
    std::string name;
  };
  void SetUp() override {
    const auto missing = conformance::why_no_cuda(1);
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
  template <class Life>
  static std::vector<Child> fork_some(Life life) {
    std::vector<Child> out(static_cast<std::size_t>(std::max(12, testing::rounds(60))));
    for (std::size_t i = 0; i < out.size(); ++i) {
      int pipe[2];
      EXPECT_EQ(::pipe(pipe), 0);
      out[i].name = "child" + std::to_string(i);
      out[i].process = ::fork();
      if (out[i].process == 0) {
        std::uint16_t port = 0;
        if (::read(pipe[0], &port, sizeof port) != sizeof port) ::_exit(1);
        life(*connect_tcp_store("127.0.0.1", port, "", long_enough), out[i].name);
        ::_exit(0);
      }
      ::close(pipe[0]);
      out[i].pipe = pipe[1];
    }
    return out;
  }
  static void start(const Child& child, std::uint16_t port) {
    ASSERT_EQ(::write(child.pipe, &port, sizeof port), static_cast<ssize_t>(sizeof port));
  }
  /// Kills the child, and returns its status.
  static int end(const Child& child) {
    int status = 0;
    ::kill(child.process, SIGKILL);
    EXPECT_EQ(::waitpid(child.process, &status, 0), child.process);
    ::close(child.pipe);
    return status;
  }
  /// Publishes versions, each full of its number's last byte.
  static void update_until(const std::function<bool()>& ended, regions::Publication& publication, GpuSet& set) {
    for (unsigned number = 1; !ended(); ++number) {
      set.fill(number & 0xff);
      const auto version = set.update(publication);
      EXPECT_TRUE(version.ok()) << version.status().text();
    }
  }
  /// The driver may refuse the memory of a process that has ended before its peers know of the end.
  static bool mapped_nothing(const Status& why) { return why.code() == Code::channel_unavailable; }
  /// Copies the newest version after `version`, and returns its number. ProtocolError: it has bytes of two versions.
  static Result<std::uint64_t> load(regions::Subscription& subscription, std::uint64_t version) {
    const auto view = subscription.wait(version, soon(), true);
    if (!view.ok()) return view.status();
    const auto mapped = (*view)->region->map_on(0, false);
    if (!mapped.ok()) return mapped.status();
    auto bytes = bytes_on_gpu(*mapped);
    if (auto alive = (*view)->region->alive(); !alive.ok()) return alive;
    bytes.resize(tensor_bytes);
    if (std::ranges::count(bytes, bytes[0]) == static_cast<std::ptrdiff_t>(tensor_bytes)) return (*view)->version;
    return Status(Code::protocol_error, "torn");
  }
};

TEST_F(GpuVersionKills, APublisherThatIsKilledTearsNoVersion) {
  const auto children = fork_some([](const auto& store, const std::string& name) {
    ServiceAgent publisher(store, name);
    GpuSet set({tensor_bytes}, 1);
    const auto publication = *publisher.service.publications->publish("policy", set.given(), {3}, 1);
    update_until([] { return false; }, *publication, set);
  });
  const auto server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
  ServiceAgent reader(*connect_tcp_store("127.0.0.1", server->port(), "", long_enough), "reader");
  for (std::size_t i = 0; i < children.size(); ++i) {
    const auto& child = children[i];
    std::mt19937 random(static_cast<unsigned>(i));
    start(child, server->port());
    Result<std::shared_ptr<regions::Subscription>> subscription = Status(Code::not_found, "");
    ASSERT_TRUE(eventually(
        [&] { return (subscription = reader.service.subscriptions->subscribe(child.name, "policy", soon())).ok(); },
        long_enough));
    ASSERT_TRUE(load(**subscription, 0).ok());
    std::thread killing([&, after = random() % 30'000] {
      std::this_thread::sleep_for(std::chrono::microseconds(after));
      end(child);
    });
    Result<std::uint64_t> version = std::uint64_t{0};
    for (std::uint64_t last = 0; (version = load(**subscription, last)).ok() || mapped_nothing(version.status());) {
      if (version.ok()) last = *version;
    }
    EXPECT_EQ(version.status().code(), Code::connection_lost) << "seed " << i << ": " << version.status().text();
    EXPECT_THAT(version.status().text(), HasSubstr(child.name));
    killing.join();
  }
}

TEST_F(GpuVersionKills, AReaderThatIsKilledHarmsNobody) {
  const auto children = fork_some([](const auto& store, const std::string& name) {
    ServiceAgent reader(store, name);
    const auto subscription = reader.subscribe();
    for (std::uint64_t version = 0;;) {
      const auto loaded = load(*subscription, version);
      if (!loaded.ok()) ::_exit(3);
      version = *loaded;
    }
  });
  const auto server = std::move(*TcpStoreServer::listen("127.0.0.1", 0, ""));
  const auto store = connect_tcp_store("127.0.0.1", server->port(), "", long_enough);
  ServiceAgent publisher(*store, "trainer"), reader(*store, "reader");
  GpuSet set({tensor_bytes}, 1);
  const auto publication = *publisher.service.publications->publish("policy", set.given(), {3}, 1);
  std::atomic<bool> ended = false;
  std::thread updating([&] { update_until([&] { return ended.load(); }, *publication, set); });
  const auto subscription = reader.subscribe();
  std::uint64_t version = 0;
  for (std::size_t i = 0; i < children.size(); ++i) {
    std::mt19937 random(static_cast<unsigned>(i));
    start(children[i], server->port());
    const auto until = Clock().now() + std::chrono::microseconds(random() % 60'000);
    do {
      const auto loaded = load(*subscription, version);
      EXPECT_TRUE(loaded.ok()) << "seed " << i << ": " << loaded.status().text();
      version = loaded.ok() ? *loaded : 0;
    } while (Clock().now() < until);
    const auto status = end(children[i]);
    EXPECT_TRUE(WIFSIGNALED(status)) << "seed " << i << ": the reader got an error or a torn version";
  }
  ended = true;
  updating.join();
  EXPECT_TRUE(eventually([&] { return publication->leases() == 0; }));
  EXPECT_LE(publication->store().images(), 3U);
  EXPECT_LE(publisher.service.owned->size(), 3U) << "the memory of those that the killed had is let go";
}

}  // namespace
}  // namespace tensorferry::testing
