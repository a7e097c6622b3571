// What a peer can make an agent keep, and what happens when there is no memory. The peers here have proved themselves,
// and break no rule of the protocol's forms.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <functional>
#include <future>
#include <iterator>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "agent/buffers/incoming_controls.h"
#include "agent/pool/pool.h"
#include "channels/host_memory.h"
#include "tests/agent/agents.h"
#include "tests/agent/mail_channel.h"
#include "tests/agent/patience.h"
#include "tests/agent/raw_peer.h"

namespace tensorferry {
namespace {

using namespace tensorferry::testing;
using std::chrono::seconds;
using ::testing::HasSubstr;

Message large(std::size_t bytes) { return {{}, {patterned(bytes)}, {}, {}}; }

std::size_t threads_of_this_process() {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

/// Writes frames until the other side has had enough. Returns how many it took.
std::size_t write_until_refused(RawConnection& connection, std::size_t most,
                                const std::function<Bytes(std::uint64_t)>& frame) {
  for (std::size_t sent = 0; sent < most; ++sent) {
    if (!connection.write(frame(sent + 1)).ok()) return sent;
  }
  return most;
}

TEST(HostileBounds, RecordsOfEmptyBuffersCountInTheQueueAndWhileTheyWaitForControls) {
  const auto store = std::make_shared<MemoryStore>();
  const auto target = join(store, "target", {}, [](RawAgentOptions& o) { o.max_queued_bytes = std::size_t{1} << 20; });
  serve_echo(*target);
  constexpr std::uint16_t records = 1000;
  constexpr ControlId never = ControlId{1} << 60;
  const auto record = record_frame(0, Bytes(1), 0, never);
  Bytes all;
  for (int i = 0; i < records; ++i) all.insert(all.end(), record.begin(), record.end());
  auto peer = raw_dial(store, "target", raw_hello("mallory"));
  constexpr std::size_t most = 2 * IncomingControls::most_waiting / records;
  const auto sent =
      write_until_refused(peer, most, [&](std::uint64_t call) { return request_frame(call, "echo", all, records); });
  EXPECT_LT(sent, most) << "nothing bounds the records that wait for a control message";
  EXPECT_TRUE(peer.ended());
  EXPECT_TRUE(eventually([&] { return target->in_flight().second == 0; }));

  auto modest =
      raw_dial(store, "target", raw_hello("modest", 78));  // beyond the queue alone: refused, and the link lives
  ASSERT_TRUE(modest.write(request_frame(1, "echo", all, records)).ok());
  for (std::uint64_t call = 2; call < 5; ++call)
    ASSERT_TRUE(modest.write(request_frame(call, "echo", all, records)).ok());
  const auto refused = modest.read(wire::Kind::reply);
  ASSERT_TRUE(refused.ok());
  EXPECT_THAT(std::string(text_of(refused->body)), HasSubstr("max_queued_bytes"));
}

TEST(HostileBounds, AnswersToControlsOfAPeerThatTakesNoneEndItsLink) {
  const auto store = std::make_shared<MemoryStore>();
  const auto target = join(store, "target", {}, [](RawAgentOptions& o) {
    o.registry = with_mail();
    o.max_bytes_in_flight = std::size_t{1} << 20;
  });
  auto hello = raw_hello("mallory");
  hello.drivers = {{"mail", {{{}, Bytes(1, std::byte{1})}}}};
  auto peer = raw_dial(store, "target", hello);
  const auto question = [](std::uint64_t id) {
    Bytes payload;
    Writer writer(payload);
    writer.put(std::uint8_t{4});   // a message ...
    writer.put(std::uint32_t{0});  // ... of the first channel, between the CPUs
    writer.put('?');
    writer.put('*');
    wire::Header header;
    header.kind = wire::Kind::control;
    header.call = id;
    return wire::assemble(header, {}, {}, payload);
  };
  constexpr std::size_t most = 1'000'000;  // answers of some 50 bytes
  EXPECT_LT(write_until_refused(peer, most, question), most);
  EXPECT_TRUE(peer.ended());
}

TEST(HostileBounds, RefusalsOfCallsByAPeerThatReadsNothingEndItsLink) {
  const auto store = std::make_shared<MemoryStore>();
  const std::string name(255, 't');  // which each refusal names
  const auto target = join(store, name, {"unix", "basic"}, [](RawAgentOptions& o) {
    o.max_threads = 1;
    o.max_queued_calls = 1;
  });
  std::promise<void> go_on;
  target->serve("f", [&, gone_on = go_on.get_future().share()](const Request&, Reply reply) {
    gone_on.wait();
    reply.send({});
  });
  auto peer = raw_dial(store, name, raw_hello("mallory"));
  constexpr std::uint64_t at_once = 200, most = 5'000;  // a million refusals of some 400 bytes
  const auto requests = [](std::uint64_t number) {
    Bytes all;
    for (std::uint64_t id = at_once * number; id < at_once * (number + 1); ++id) {
      const auto one = request_frame(id, "f", {}, 0);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  };
  EXPECT_LT(write_until_refused(peer, most, requests), most);
  EXPECT_TRUE(peer.ended());
  go_on.set_value();
}

TEST(HostileBounds, PeersThatReadNothingKeepNoThread) {
  const auto store = std::make_shared<MemoryStore>();
  const auto target = join(store, "target", {"unix", "basic"}, [](RawAgentOptions& o) { o.max_threads = 2; });
  target->serve("f", [](const Request&, Reply reply) { reply.send({Bytes(40'000), {}, {}, {}}); });
  serve_echo(*target);
  ASSERT_TRUE(call_sync(*target, "target", "echo", message_of("x")).ok());
  const auto before = threads_of_this_process();
  constexpr std::size_t peers = 40, calls = 50;  // 2 MB for each, more than a socket holds
  std::vector<RawConnection> lazy;
  for (std::size_t i = 0; i < peers; ++i) {
    lazy.push_back(raw_dial(store, "target", raw_hello("lazy" + std::to_string(i), 100 + i)));
    for (std::uint64_t call = 1; call <= calls; ++call) ASSERT_TRUE(lazy.back().write(request_frame(call, "f")).ok());
  }
  EXPECT_TRUE(eventually([&] { return target->in_flight().second == 0; })) << "all calls have been answered";
  EXPECT_TRUE(eventually([&] { return threads_of_this_process() < before + peers / 2; })) << threads_of_this_process();
  for (auto& peer : lazy) {  // they get everything when they read
    for (std::size_t call = 0; call < calls; ++call) ASSERT_TRUE(peer.read(wire::Kind::reply).ok());
  }
}

TEST(HostileBounds, CallsToAPeerThatReadsNothingFailWithoutWaiting) {
  const auto store = std::make_shared<MemoryStore>();
  RawPeer lazy(store, "lazy");
  const auto caller = join(store, "caller", {"unix", "basic"},
                           [](RawAgentOptions& options) { options.max_bytes_in_flight = std::size_t{1} << 20; });
  std::vector<Call> calls;
  const auto call = [&] {
    calls.push_back(caller->call("lazy", "f", {Bytes(60'000), {}, {}, {}}, within(seconds(60))));
  };
  call();
  const auto accepted = lazy.accept();
  constexpr std::size_t most = 1000;  // 60 MB: the socket and the bound hold about 1.3
  const auto refused = [](const Call& each) { return each.done(); };
  while (calls.size() < most && std::none_of(calls.begin(), calls.end(), refused)) call();
  // Calls that were made before the link was up are sent, or refused, when it is.
  ASSERT_TRUE(eventually([&] { return std::any_of(calls.begin(), calls.end(), refused); }));
  const auto first = std::find_if(calls.begin(), calls.end(), refused);
  const auto status = first->take().status();
  EXPECT_EQ(status.code(), Code::resource_exhausted) << status.text();
}

// ---- Without memory

TEST(WithoutMemory, AHandlersCallFailsWithResourceExhaustedAndTheAgentGoesOn) {
  const auto store = std::make_shared<MemoryStore>();
  const auto target = join(store, "target"), caller = join(store, "caller");
  serve_echo(*target);
  target->serve("greedy", [](const Request&, const Reply&) { throw std::bad_alloc(); });
  target->serve("broken", [](const Request&, const Reply&) { throw std::runtime_error("no"); });
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(call_sync(*caller, "target", "greedy", {}).status().code(), Code::resource_exhausted);
    EXPECT_EQ(call_sync(*caller, "target", "broken", {}).status().code(), Code::internal);
    EXPECT_TRUE(call_sync(*caller, "target", "echo", message_of("x")).ok());
  }
}

/// Memory of the receiver that throws as soon as it is told to.
class ThrowingMemory final : public Memory {
 public:
  std::atomic<bool> throws{false};
  Buffer allocate(std::size_t bytes, Device device) override {
    if (throws) throw std::bad_alloc();
    return memory_->allocate(bytes, device);
  }

 private:
  std::shared_ptr<HostMemory> memory_ = std::make_shared<HostMemory>();
};

TEST(WithoutMemory, AReaderEndsTheLinkAndTheNextOneGoesOn) {
  const auto store = std::make_shared<MemoryStore>();
  const auto memory = std::make_shared<ThrowingMemory>();
  const auto target = join(store, "target", {"unix", "basic"},
                           [&](RawAgentOptions& options) { options.memory[DeviceType::cpu] = memory; });
  const auto caller = join(store, "caller", {"unix", "basic"});
  serve_echo(*target);
  ASSERT_TRUE(call_sync(*caller, "target", "echo", large(50'000)).ok());
  memory->throws = true;
  const auto failed = call_sync(*caller, "target", "echo", large(50'000), within(long_enough));
  EXPECT_FALSE(failed.ok());
  memory->throws = false;
  EXPECT_TRUE(eventually([&] { return call_sync(*caller, "target", "echo", large(50'000)).ok(); }));
}

TEST(WithoutMemory, AJobOfThePoolIsDroppedAndTheOthersRun) {
  const auto pool = std::make_shared<Pool>(PoolLimits{}, nullptr, [] {});
  pool->start();
  std::atomic<int> ran{0};
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(pool->submit([&] {
      ++ran;
      throw std::bad_alloc();
    }));
    ASSERT_TRUE(pool->submit([&] { ++ran; }));
  }
  EXPECT_TRUE(eventually([&] { return ran == 40; })) << ran;
  pool->stop(seconds(10));
}

}  // namespace
}  // namespace tensorferry
