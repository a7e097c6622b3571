/// Tests of `cuda_gdr` with emulated cards (tests/emulated_verbs) and a GPU, emulated (tests/emulated_gpu) or real,
/// both ends in one process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "channels/allocations.h"
#include "channels/cuda/device.h"
#include "channels/cuda/invalidate.h"
#include "channels/cuda_gdr/cuda_gdr_channel.h"
#include "channels/cuda_gdr/messages.h"
#include "channels/ibv/ibv_channel.h"
#include "channels/rdma/cards.h"
#include "channels/rdma/shared_cards.h"
#include "channels/shared_state.h"
#include "tests/channels/blocked_stream.h"
#include "tests/channels/card_link.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::conformance {

namespace {

constexpr Device gpu{DeviceType::cuda, 0};

/// Returns why this machine has no pair of GPU and card; empty: it has one. A child looks, because this process may
/// have to fork, which a process that has used CUDA must not.
std::string missing() {
  if (auto reason = why_no_cuda(1); !reason.empty()) return reason;
  static const std::string found = [] {
    std::array<int, 2> pipe{};
    if (::pipe(pipe.data()) != 0) throw std::runtime_error("no pipe");
    const auto child = ::fork();
    if (child == 0) {
      const auto descriptor = CudaGdrDriver().descriptor(gpu);
      const auto* refusal = std::get_if<Refusal>(&descriptor);
      if (refusal != nullptr) (void)!::write(pipe[1], refusal->reason.data(), refusal->reason.size());
      ::_exit(0);
    }
    ::close(pipe[1]);
    std::string reason;
    std::array<char, 256> read{};
    for (ssize_t bytes = 0; (bytes = ::read(pipe[0], read.data(), read.size())) > 0;)
      reason.append(read.data(), static_cast<std::size_t>(bytes));
    ::close(pipe[0]);
    ::waitpid(child, nullptr, 0);
    return reason;
  }();
  return found;
}

bool is_emulated() { return driver_function<void (*)()>("emulatedCardReads") != nullptr; }

}  // namespace

struct CudaGdrFixture {
  static constexpr auto name = "cuda_gdr";
  static Drivers drivers() { return {std::make_unique<CudaGdrDriver>(), std::make_unique<CudaGdrDriver>()}; }
  static DevicePair devices() { return {gpu, gpu}; }
  static std::unique_ptr<DeviceMemory> memory(Device device) { return memory_of(device); }
  static Traits traits() { return {.forks = false, .missing = missing()}; }
};

/// With memory like torch's expandable segments.
struct CudaGdrChunksFixture : CudaGdrFixture {
  static std::unique_ptr<DeviceMemory> memory(Device device) { return cuda_memory(device.index, CudaKind::chunks); }
};

namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::size_t megabyte = 1 << 20;

void settle() { std::this_thread::sleep_for(std::chrono::milliseconds(50)); }

/// Sets a variable of the environment for a scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* const name_;
};

/// An allocation of its own, as by cudaMalloc, that no allocator reports.
class Allocated {
 public:
  explicit Allocated(std::size_t bytes) {
    const cuda::DeviceGuard here(0);
    EXPECT_EQ(cuda::api()->mem_alloc(&begin_, bytes), CUDA_SUCCESS);
    bytes_ = bytes;
  }
  ~Allocated() {
    const cuda::DeviceGuard here(0);
    cuda::api()->mem_free(begin_);
  }
  Allocated(const Allocated&) = delete;
  Allocated& operator=(const Allocated&) = delete;

  [[nodiscard]] Buffer buffer(Stream stream) const {
    return {gpu, reinterpret_cast<std::byte*>(begin_), bytes_, stream, nullptr};
  }

 private:
  CUdeviceptr begin_ = 0;
  std::size_t bytes_ = 0;
};

std::vector<rdma::PortKey> keys_of(const Ticket& ticket) {
  const auto parsed = decode<cuda_gdr::CudaGdrTicket>(ticket.opaque).value();
  if (const auto* source = std::get_if<ibv::KeyedSource>(&parsed)) return source->keys;
  return std::get<cuda_gdr::BusySource>(parsed).keys;
}
bool busy(const Ticket& ticket) {
  return std::holds_alternative<cuda_gdr::BusySource>(decode<cuda_gdr::CudaGdrTicket>(ticket.opaque).value());
}

class CudaGdr : public CardLink {
 protected:
  void SetUp() override {
    if (const auto reason = missing(); !reason.empty()) GTEST_SKIP() << reason;
    memory = cuda_memory(0);
    connect();
  }
  void TearDown() override {
    disconnect();
    if (cards.registered_bytes == nullptr) return;
    // An event of a stream may still refer to the channel.
    EXPECT_TRUE(eventually([&] { return cards.registered_bytes() == 0; })) << cards.registered_bytes();
    EXPECT_EQ(cards.queue_pairs(), 0U);
  }
  void open(const cuda_gdr::CudaGdrOptions& options = {}) {
    disconnect();
    one = std::make_unique<CudaGdrDriver>(options);
    other = std::make_unique<CudaGdrDriver>(options);
    pair = std::make_unique<WirePair>(*one, *other, DevicePair{gpu, gpu}, *memory, *memory);
  }
  void connect(const cuda_gdr::CudaGdrOptions& options = {}) {
    open(options);
    wait_until_usable();
  }
  void disconnect() {
    pair.reset();
    one.reset();
    other.reset();
  }
  bool carries_now() {
    for (auto* end : {&a(), &b()}) {
      Letter letter(*end);
      if (!end->wait_ready()->ok() || !letter.offer(memory->filled(megabyte, 1))) return false;
    }
    return true;
  }

  std::unique_ptr<CudaGdrDriver> one, other;
};

TEST_F(CudaGdr, BuffersOfAllSizesComeByTheCard) {
  forbid_bulk();
  std::uint32_t seed = 0;
  for (const auto bytes :
       {1UL, 8UL, 4095UL, 4096UL, 65536UL, megabyte - 1, megabyte + 1, 9 * megabyte, 70 * megabyte}) {
    expect_carries(memory->filled(bytes, seed), seed);
    ++seed;
  }
}

TEST_F(CudaGdr, ExplainsWhichPortsCarry) { EXPECT_THAT(a().channel().describe(), HasSubstr(" port 1, ")); }

// ---- Registration

TEST_F(CudaGdr, MemoryIsRegisteredByTheModuleWhereThereIsNoDmaBuf) {
  for (const auto* const variable : {"EMULATED_GPU_DMABUF", "EMULATED_VERBS_DMABUF"}) {
    const Variable without(variable, "0");
    connect();
    forbid_bulk();
    expect_carries(memory->filled(3 * megabyte, 5), 5);
  }
}

TEST_F(CudaGdr, MemoryIsRegisteredAsDmaBufWhereTheModuleIsNotLoaded) {
  const Variable without("EMULATED_VERBS_PEERMEM", "0");
  connect();
  forbid_bulk();
  expect_carries(memory->filled(3 * megabyte, 5), 5);
}

TEST_F(CudaGdr, WithNeitherThePairSaysWhatIsMissingAndWhatToDo) {
  const Variable no_dma_buf("EMULATED_VERBS_DMABUF", "0"), no_module("EMULATED_VERBS_PEERMEM", "0");
  open();
  const auto ready = a().wait_ready();
  ASSERT_TRUE(ready && !ready->ok());
  EXPECT_THAT(ready->text(), AllOf(HasSubstr("by dma-buf"), HasSubstr("nvidia-peermem"), HasSubstr("modprobe")));
}

TEST_F(CudaGdr, AGpuWithoutGpuDirectHasNoDescriptor) {
  if (cards.revoke == nullptr || !is_emulated()) GTEST_SKIP() << "the GPU is not emulated";
  const Variable without("EMULATED_GPU_DIRECT_RDMA", "0");
  const auto descriptor = CudaGdrDriver().descriptor(gpu);
  ASSERT_TRUE(std::holds_alternative<Refusal>(descriptor));
  EXPECT_THAT(std::get<Refusal>(descriptor).reason, HasSubstr("GPUDirect"));
}

TEST_F(CudaGdr, AnAllocationIsRegisteredInTheBackgroundWhileOtherChannelsCarry) {
  Letter letter(a());
  letter.only_channel = false;
  const auto buffer = memory->filled(megabyte, 1);
  auto offer = a().channel().offer(buffer, Sharing::by_value, letter, {});
  ASSERT_TRUE(std::holds_alternative<Refusal>(offer));
  EXPECT_THAT(std::get<Refusal>(offer).reason, HasSubstr("being registered"));
  EXPECT_TRUE(std::get<Refusal>(offer).passing);
  ASSERT_TRUE(eventually([&] {
    auto again = a().channel().offer(buffer, Sharing::by_value, letter, {});
    const auto* const ticket = std::get_if<Ticket>(&again);
    if (ticket != nullptr) a().channel().withdraw(*ticket);
    return ticket != nullptr;
  }));
}

TEST_F(CudaGdr, MemoryThatIsFreedAndAllocatedAnewAtItsAddressIsReadAsItIsNow) {
  forbid_bulk();
  const void* address = nullptr;
  int reused = 0;
  for (std::uint32_t i = 0; i < 5; ++i) {
    const auto stream = memory->allocate(1).stream;
    const Allocated allocated(4 * megabyte);
    const auto buffer = allocated.buffer(stream);
    reused += buffer.data == address ? 1 : 0;
    address = buffer.data;
    memory->fill(buffer, i);
    expect_carries(buffer, i);
  }
  EXPECT_GT(reused, 0) << "the driver gave no address twice: this test has shown nothing";
}

TEST_F(CudaGdr, MemoryThatItsAllocatorGivesBackIsDeregistered) {
  if (cards.registered_bytes == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const Allocated allocated(4 * megabyte);
  const auto buffer = allocated.buffer(memory->allocate(1).stream);
  memory->fill(buffer, 1);
  expect_carries(memory->filled(4 * megabyte, 1), 1);  // registers the receiver's memory
  const auto before = cards.registered_bytes();
  expect_carries(buffer, 1);
  EXPECT_GE(cards.registered_bytes(), before + 4 * megabyte) << "kept";
  invalidate_cuda_memory(buffer.data, buffer.bytes);
  EXPECT_TRUE(eventually([&] { return cards.registered_bytes() <= before; }));
}

TEST_F(CudaGdr, ABufferWhoseRegistrationWasRevokedArrivesByTheSocketAndTheQueuePairsAreMadeAnew) {
  if (cards.revoke == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const Allocated allocated(3 * megabyte);
  const auto buffer = allocated.buffer(memory->allocate(1).stream);
  memory->fill(buffer, 4);
  Letter letter(a());
  ASSERT_TRUE(letter.offer(buffer)) << letter.refusal;
  for (const auto& key : keys_of(letter.tickets.front())) (void)cards.revoke(key.key);
  letter.send();
  expect_arrives(3 * megabyte, 4);
  EXPECT_EQ(letter.released.front().wait_name(), "Ok");
  ASSERT_TRUE(eventually([&] { return carries_now(); }));
}

TEST_F(CudaGdr, WithoutRightsToPinTheBufferIsRefusedWithTheReason) {
  if (cards.limit_memory == nullptr) GTEST_SKIP() << "the cards are not emulated";
  cards.limit_memory(cards.registered_bytes());
  Letter letter(a());
  EXPECT_FALSE(letter.offer(memory->filled(3 * megabyte, 1)));
  EXPECT_THAT(letter.refusal, HasSubstr("ulimit -l"));
  cards.limit_memory(~std::uint64_t{0});
}

TEST_F(CudaGdr, APullIntoMemoryThatCannotBeRegisteredComesByTheSocket) {
  if (cards.limit_memory == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const Allocated source(5 * megabyte);
  const auto buffer = source.buffer(memory->allocate(1).stream);
  memory->fill(buffer, 2);
  Letter letter(a());
  ASSERT_TRUE(letter.offer(buffer)) << letter.refusal;
  cards.limit_memory(cards.registered_bytes());
  letter.send();
  expect_arrives(5 * megabyte, 2);
  cards.limit_memory(~std::uint64_t{0});
}

TEST_F(CudaGdr, APartIsRegisteredIfTheWholeAllocationIsTooLarge) {
  if (cards.limit_memory == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const Allocated large(100 * megabyte);
  auto part = large.buffer(memory->allocate(1).stream);
  part.bytes = 2 * megabyte;
  memory->fill(part, 7);
  expect_carries(memory->filled(1, 1), 1);  // registers the receiver's memory
  cards.limit_memory(cards.registered_bytes() + 20 * megabyte);
  forbid_bulk();
  expect_carries(part, 7);
  cards.limit_memory(~std::uint64_t{0});
}

// ---- The order of streams

TEST_F(CudaGdr, ABufferIsReadOnlyWhenTheSendersStreamHasWrittenIt) {
  forbid_bulk();
  const auto buffer = memory->filled(2 * megabyte, 1), late = memory->filled(2 * megabyte, 9);
  const Blocked kernel;
  auto source = buffer;
  source.stream = kernel.get();
  {
    const cuda::DeviceGuard here(0);
    ASSERT_EQ(cuda::api()->memcpy_async(cuda::address_of(buffer.data), cuda::address_of(late.data), buffer.bytes,
                                        kernel.get()),
              CUDA_SUCCESS);
  }
  Letter letter(a());
  ASSERT_TRUE(letter.offer(source)) << letter.refusal;
  EXPECT_TRUE(busy(letter.tickets.front()));
  letter.send();
  // A buffer behind it does not wait.
  const auto next = a().send(memory->filled(megabyte, 3));
  EXPECT_EQ(next.wait_name(), "Ok");
  EXPECT_EQ(letter.released.front().runs(), 0);
  kernel.let_go();
  expect_arrives(2 * megabyte, 9);
  expect_arrives(megabyte, 3);
  EXPECT_EQ(letter.released.front().wait_name(), "Ok");
}

TEST_F(CudaGdr, ABusyBufferThatIsWithdrawnIsReleasedAndNeverAnnounced) {
  for (const bool reached : {false, true}) {
    auto source = memory->filled(megabyte, 1);  // before the kernel: the driver may wait for all streams
    const Blocked kernel;
    source.stream = kernel.get();
    Letter letter(a());
    ASSERT_TRUE(letter.offer(source)) << letter.refusal;
    if (reached) {
      kernel.let_go();
      settle();
    }
    letter.drop();
    EXPECT_EQ(letter.released.front().runs(), 1);
  }
  settle();
  expect_carries(memory->filled(megabyte, 2), 2);
}

TEST_F(CudaGdr, ABusyBufferThatIsDiscardedIsReleased) {
  b().behave({.on_message = [&](Arrivals& arrivals) {
    for (auto& arrival : arrivals) b().discard(arrival);
  }});
  auto source = memory->filled(megabyte, 1);
  const Blocked kernel;
  source.stream = kernel.get();
  const auto released = a().send(source);
  EXPECT_EQ(released.wait_name(), "Ok");
  kernel.let_go();
  settle();
  Letter letter(a());
  ASSERT_TRUE(letter.offer(memory->filled(megabyte, 2))) << letter.refusal;
  Into sink(memory->allocate(megabyte));
  Outcome landed, consumed;
  b().channel().pull(letter.tickets.front(), sink, landed.completion(), consumed.completion());
  EXPECT_EQ(landed.wait_name(), "Ok");
  EXPECT_TRUE(memory->holds(sink.buffer, 2));
}

TEST_F(CudaGdr, ABusyBufferEndsWithTheLink) {
  auto source = memory->filled(megabyte, 1);
  const Blocked kernel;
  source.stream = kernel.get();
  const auto released = a().send(source);
  settle();
  a().close(Status(Code::agent_closed, "closed by the test"));
  EXPECT_NE(released.wait_name(), "nothing");
  const auto arrivals = b().receive(std::chrono::seconds(1));
  for (const auto& arrival : arrivals) EXPECT_NE(arrival->landed.wait_name(), "Ok");
  kernel.let_go();
}

TEST_F(CudaGdr, MemoryThatAStreamStillUsesIsWrittenAfterIt) {
  forbid_bulk();
  Letter letter(a());
  ASSERT_TRUE(letter.offer(memory->filled(megabyte, 4))) << letter.refusal;
  const auto old = memory->filled(megabyte, 5), copy = memory->allocate(megabyte);
  const Blocked kernel;
  {
    const cuda::DeviceGuard here(0);  // the stream reads the memory before
    ASSERT_EQ(
        cuda::api()->memcpy_async(cuda::address_of(copy.data), cuda::address_of(old.data), megabyte, kernel.get()),
        CUDA_SUCCESS);
  }
  auto into = old;
  into.stream = kernel.get();
  Into sink(into);
  std::atomic<bool> ended{false}, early{false};
  Outcome landed, consumed;
  b().channel().pull(letter.tickets.front(), sink, landed.completion([&](const Status&) { early = !ended; }),
                     consumed.completion());
  expect_carries(memory->filled(megabyte, 6), 6);  // behind it on the same queue pairs
  ended = true;
  kernel.let_go();
  EXPECT_EQ(landed.wait_name(), "Ok");
  EXPECT_FALSE(early);
  EXPECT_TRUE(memory->holds(into, 4));
  EXPECT_TRUE(memory->holds(copy, 5)) << "the stream read the memory before it was written";
}

/// The emulated GPU shows a card's bytes only after a flush, or when a card has read them.
TEST_F(CudaGdr, WhatACardHasWrittenIsFlushedBeforeTheBufferLands) {
  for (const auto* const means : {"driver", "none", "ordered"}) {
    const Variable flush("EMULATED_GPU_FLUSH", means);
    connect();
    forbid_bulk();
    for (std::uint32_t i = 0; i < 10; ++i) expect_carries(memory->filled(megabyte + i, i), i);
    expect_carries(memory->filled(9 * megabyte, 77), 77);
  }
}

// ---- Failures

TEST_F(CudaGdr, BuffersUnderWayWhenThePortGoesDownArriveAndThePairIsUsableAgainWhenItIsUp) {
  if (cards.set_port == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto ports = std::get<std::vector<rdma::CardPort>>(rdma::usable_ports({}));
  const auto set_ports = [&](int up) {
    for (const auto& port : ports) ASSERT_EQ(cards.set_port(port.device.c_str(), port.number, up), 0);
  };
  cards.stall(1);
  const auto released = a().send(memory->filled(8 * megabyte, 6));
  ASSERT_TRUE(eventually([&] { return cards.stalled() > 0; }));
  set_ports(0);
  expect_arrives(8 * megabyte, 6);
  EXPECT_EQ(released.wait_name(), "Ok");
  cards.stall(0);
  ASSERT_TRUE(eventually([&] { return !carries_now(); }));
  set_ports(1);
  ASSERT_TRUE(eventually([&] { return carries_now(); }));
  forbid_bulk();
  expect_carries(memory->filled(8 * megabyte, 7), 7);
}

TEST_F(CudaGdr, AQueuePairThatFailsInTheMiddleLosesNoBuffer) {
  if (cards.fail_queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  for (std::uint32_t round = 0; round < 3; ++round) {
    std::vector<Outcome> released;
    for (std::uint32_t i = 0; i < 10; ++i) released.push_back(a().send(memory->filled(2 * megabyte, i)));
    EXPECT_EQ(cards.fail_queue_pairs(1), 1U);
    for (std::uint32_t i = 0; i < 10; ++i) expect_arrives(2 * megabyte, i);
    for (const auto& each : released) EXPECT_EQ(each.wait_name(), "Ok");
    ASSERT_TRUE(eventually([&] { return carries_now(); }));
  }
}

// ---- Cards

/// One end of a link with three channels: `ibv`, and two pairs of GPUs.
struct EndOfThree {
  explicit EndOfThree(const char* peer) : to(peer) {}
  void open(std::size_t channel, DeviceMemory& memory, WireEnd::Sockets sockets) {
    const auto devices = channel == 0 ? DevicePair{} : DevicePair{gpu, {DeviceType::cuda, 0}};
    auto& driver = channel == 0 ? static_cast<Driver&>(ibv) : gdr;
    ends[channel] = std::make_unique<WireEnd>(to, driver, devices, memory, std::move(sockets), &of_link);
    ends[channel]->start();
  }
  const std::string to;
  std::shared_ptr<rdma::SharedCards> shared = std::make_shared<rdma::SharedCards>();
  IbvDriver ibv{{}, shared};
  CudaGdrDriver gdr{{}, shared};
  SharedState of_link;
  std::array<std::unique_ptr<WireEnd>, 3> ends;
};

TEST_F(CudaGdr, AllPairsOfALinkAndIbvShareTheQueuePairs) {
  if (cards.queue_pairs == nullptr) GTEST_SKIP() << "the cards are not emulated";
  const auto of_one_channel = cards.queue_pairs();
  disconnect();
  const auto host = cpu_memory();
  EndOfThree one_end("b"), other_end("a");
  std::array<std::pair<WireEnd::Sockets, WireEnd::Sockets>, 3> sockets{connected_sockets(), connected_sockets(),
                                                                       connected_sockets()};
  const auto memory_for = [&](std::size_t channel) -> DeviceMemory& { return channel == 0 ? *host : *memory; };
  for (const std::size_t channel : {0, 1, 2})
    one_end.open(channel, memory_for(channel), std::move(sockets[channel].first));
  for (const std::size_t channel : {2, 1, 0})
    other_end.open(channel, memory_for(channel), std::move(sockets[channel].second));
  for (std::size_t channel = 0; channel < 3; ++channel) {
    auto& from = *one_end.ends[channel];
    auto& to = *other_end.ends[channel];
    ASSERT_TRUE(from.wait_ready()->ok() && to.wait_ready()->ok());
    const auto released = from.send(memory_for(channel).filled(3 * megabyte, 1));
    const auto arrivals = to.receive();
    ASSERT_EQ(arrivals.size(), 1U);
    EXPECT_TRUE(memory_for(channel).holds(arrivals.front()->buffer, 1));
    EXPECT_EQ(released.wait_name(), "Ok");
  }
  EXPECT_EQ(cards.queue_pairs(), of_one_channel);
  for (auto* end : {&one_end, &other_end}) {
    for (auto& each : end->ends) each->finish();
  }
}

TEST_F(CudaGdr, AGpuIsReadThroughTheCardsThatAreNearestToIt) {
  const auto ports = std::get<std::vector<rdma::CardPort>>(rdma::usable_ports({}));
  if (cards.queue_pairs == nullptr || ports.size() < 4) GTEST_SKIP() << "needs several emulated cards";
  if (!is_emulated()) GTEST_SKIP() << "the GPU is not emulated";
  const auto sysfs = ports.front().pci_path.substr(0, ports.front().pci_path.find("/devices/"));
  const auto place = rdma::pci_path_of("0000:01:00.0", sysfs);  // where the emulated GPU 0 is
  ASSERT_NE(place, "");
  std::vector<std::string> near;
  for (const auto& port : rdma::nearest(ports, place)) near.push_back(port.device);
  ASSERT_LT(near.size(), ports.size());
  ASSERT_NE(near.front(), ports.front().device) << "the first card would be taken anyway";
  connect({.sysfs = sysfs});
  forbid_bulk();
  for (const std::size_t bytes : {megabyte / 2, 6 * megabyte}) {
    Letter letter(a());
    ASSERT_TRUE(letter.offer(memory->filled(bytes, 3))) << letter.refusal;
    for (const auto& key : keys_of(letter.tickets.front()))
      EXPECT_THAT(near, ::testing::Contains(ports.at(key.port).device));
    letter.send();
    expect_arrives(bytes, 3);
  }
}

}  // namespace
}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(CudaGdrFixture);
INSTANTIATE_CHANNEL_SUITE(CudaGdrChunksFixture);
