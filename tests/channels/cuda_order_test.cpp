/// Tests of the order of streams, and of streams when the other end is gone. A stream that waits for a word in host
/// memory stands for a long kernel.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <thread>

#include "channels/cuda/event_poller.h"
#include "channels/cuda/pinned.h"
#include "channels/cuda_basic/cuda_basic_channel.h"
#include "channels/cuda_ipc/cuda_ipc_channel.h"
#include "channels/cuda_xth/cuda_xth_channel.h"
#include "tests/agent/patience.h"
#include "tests/channels/blocked_stream.h"
#include "tests/conformance/channel_suite.h"
#include "tests/conformance/child.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::conformance {
namespace {

using cuda::api;
using cuda::DeviceGuard;
using tensorferry::testing::eventually;

constexpr Device gpu{DeviceType::cuda, 0};
constexpr std::size_t megabyte = 1 << 20;

/// Lets a blocked stream go after 60 s, on its own thread. had_to() then tells the test that a call waited for the
/// stream.
class Rescuer {
 public:
  explicit Rescuer(const Blocked& kernel)
      : thread_([this, &kernel, over = over_.get_future()] {
          if (over.wait_for(std::chrono::seconds(60)) == std::future_status::ready) return;
          had_to_ = true;
          kernel.let_go();
        }) {}
  ~Rescuer() {
    over_.set_value();
    thread_.join();
  }
  Rescuer(const Rescuer&) = delete;
  Rescuer& operator=(const Rescuer&) = delete;

  [[nodiscard]] bool had_to() const { return had_to_; }

 private:
  std::promise<void> over_;
  std::atomic<bool> had_to_{false};
  std::thread thread_;
};

/// Both ends are on the first GPU. Their memory is like that of expandable segments, which cuda_ipc can map twice in
/// one process.
template <class DriverOf>
class CudaOrder : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
    memory_a = cuda_memory(0, CudaKind::chunks);
    memory_b = cuda_memory(0, CudaKind::chunks);
    driver_a = DriverOf::make();
    driver_b = DriverOf::make();
    open();
    memory_b->filled(4 * megabyte, 0);  // ahead of time: an allocation may wait in the driver until a kernel ends
  }
  void open() {
    pair = std::make_unique<WirePair>(*driver_a, *driver_b, DevicePair{gpu, gpu}, *memory_a, *memory_b);
    ASSERT_EQ(pair->a->wait_ready().value_or(Status(Code::internal, "")).text(), "Ok");
    ASSERT_EQ(pair->b->wait_ready().value_or(Status(Code::internal, "")).text(), "Ok");
  }

  std::unique_ptr<DeviceMemory> memory_a, memory_b;
  std::unique_ptr<Driver> driver_a, driver_b;
  std::unique_ptr<WirePair> pair;
};

struct Xth {
  static std::unique_ptr<Driver> make() { return std::make_unique<CudaXthDriver>(); }
};
struct Ipc {
  static std::unique_ptr<Driver> make() {
    return std::make_unique<CudaIpcDriver>(cuda_ipc::CudaIpcOptions{.within_process = true});
  }
};
struct IpcOnHost {
  static std::unique_ptr<Driver> make() {
    return std::make_unique<CudaIpcDriver>(
        cuda_ipc::CudaIpcOptions{.within_process = true, .wait = cuda_ipc::CudaIpcOptions::Wait::on_host});
  }
};
struct Basic {
  static std::unique_ptr<Driver> make() { return std::make_unique<CudaBasicDriver>(); }
};
using OrderedDrivers = ::testing::Types<Xth, Ipc, IpcOnHost, Basic>;
TYPED_TEST_SUITE(CudaOrder, OrderedDrivers);

TYPED_TEST(CudaOrder, BytesOfAPendingKernelArriveAfterIt) {
  for (const auto& [bytes, by_default] :
       {std::pair{std::size_t{4096}, false}, {std::size_t{4096}, true}, {3 * megabyte, false}}) {
    auto source = this->memory_a->filled(bytes, 1);
    const Blocked kernel(by_default ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING);
    source.stream = by_default ? nullptr : kernel.get();
    {
      const DeviceGuard here(0);
      ASSERT_EQ(api()->memset_async(cuda::address_of(source.data), 0x5a, bytes, kernel.get()), CUDA_SUCCESS);
    }
    std::promise<void> pulled;
    this->pair->b->behave({.before_pull = [&](Arrival&) { pulled.set_value(); }});
    const auto released = this->pair->a->send(source);
    pulled.get_future().wait();
    this->pair->b->behave({});
    EXPECT_EQ(released.runs(), 0) << "the source was given back before it was read";
    kernel.let_go();
    const auto arrivals = this->pair->b->receive();
    ASSERT_EQ(arrivals.size(), 1u);
    EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok");
    std::vector<std::byte> found(bytes);
    const DeviceGuard here(0);
    auto* const stream = static_cast<CUstream>(arrivals.front()->buffer.stream);
    ASSERT_EQ(api()->memcpy_async(cuda::address_of(found.data()), cuda::address_of(arrivals.front()->buffer.data),
                                  bytes, stream),
              CUDA_SUCCESS);
    while (api()->stream_query(stream) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
    EXPECT_EQ(found, std::vector<std::byte>(bytes, std::byte{0x5a}));
    EXPECT_EQ(released.wait_name(), "Ok");
  }
}

TYPED_TEST(CudaOrder, MemoryThatAKernelStillUsesIsNotReceivedInto) {
  const auto source = this->memory_a->filled(megabyte, 7);
  auto destination = this->memory_b->filled(megabyte, 1);
  auto read_by_it = this->memory_b->allocate(megabyte);
  const Blocked kernel;
  {
    const DeviceGuard here(0);
    ASSERT_EQ(api()->memcpy_async(cuda::address_of(read_by_it.data), cuda::address_of(destination.data), megabyte,
                                  kernel.get()),
              CUDA_SUCCESS);
  }
  destination.stream = read_by_it.stream = kernel.get();
  Into into(destination);
  Outcome landed, consumed;
  std::promise<void> pulled;
  Letter letter(*this->pair->a);
  ASSERT_TRUE(letter.offer(source)) << letter.refusal;
  this->pair->b->behave({.on_message = [&](Arrivals& arrivals) {
    this->pair->b->channel().pull(arrivals.front()->ticket, into, landed.completion(), consumed.completion());
    pulled.set_value();
  }});
  letter.send();
  pulled.get_future().wait();
  kernel.let_go();
  EXPECT_EQ(landed.wait_name(), "Ok");
  EXPECT_EQ(consumed.wait_name(), "Ok");
  EXPECT_TRUE(this->memory_b->holds(destination, 7));
  EXPECT_TRUE(this->memory_b->holds(read_by_it, 1));
}

/// Driver calls that lock pages, map or allocate memory may wait for all kernels. Meanwhile they hold a lock that every
/// other call to the driver needs.
TYPED_TEST(CudaOrder, OpeningAChannelDuringAKernelDoesNotWaitForTheGpu) {
  const auto source = this->memory_a->filled(megabyte, 5);
  this->pair.reset();
  const Blocked kernel;
  const Rescuer rescuer(kernel);
  this->open();
  const auto released = this->pair->a->send(source);
  const auto arrivals = this->pair->b->receive();
  ASSERT_EQ(arrivals.size(), 1U) << "the message did not come, or its pull did not end; the release: "
                                 << released.wait_name();
  EXPECT_EQ(arrivals.at(0)->landed.wait_name(), "Ok");
  EXPECT_EQ(released.wait_name(), "Ok");
  EXPECT_FALSE(rescuer.had_to()) << "until the kernel ended";
  kernel.let_go();
  EXPECT_TRUE(this->memory_b->holds(arrivals.at(0)->buffer, 5));
}

/// poll_now() may take an event from the poller's thread that has just been woken for it.
TEST(CudaPoller, AnEventThatIsAddedWhileItsThreadSleepsIsNotForgotten) {
  if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
  auto& poller = cuda::EventPoller::of_this_process();
  for (int i = 0; i < 20; ++i) {
    const Blocked kernel;
    std::this_thread::sleep_for(std::chrono::milliseconds(15));  // the thread has nothing to poll, and sleeps
    std::promise<Status> polled;
    {
      const DeviceGuard here(0);
      poller.when_done(cuda::Watch::loosely, 0, kernel.get(),
                       [&](Status status) { polled.set_value(std::move(status)); });
    }
    poller.poll_now();
    kernel.let_go();
    auto done = polled.get_future();
    const bool came = done.wait_for(patience) == std::future_status::ready;
    poller.poll_now();  // ends the use of `polled` if not
    ASSERT_TRUE(came) << "in round " << i;
    EXPECT_TRUE(done.get().ok());
  }
}

TYPED_TEST(CudaOrder, ACapturingStreamIsRefusedAndItsCaptureContinues) {
  auto source = this->memory_a->allocate(4096);
  CUstream stream = nullptr;
  const DeviceGuard here(0);
  ASSERT_EQ(api()->stream_create(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const auto begin = driver_function<decltype(&::cuStreamBeginCapture)>("cuStreamBeginCapture_v2");
  const auto end = driver_function<decltype(&::cuStreamEndCapture)>("cuStreamEndCapture");
  ASSERT_EQ(begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
  source.stream = stream;
  Letter letter(*this->pair->a);
  EXPECT_FALSE(letter.offer(source));
  EXPECT_NE(letter.refusal.find("captured"), std::string::npos) << letter.refusal;
  CUgraph graph = nullptr;
  ASSERT_EQ(end(stream, &graph), CUDA_SUCCESS);
  driver_function<decltype(&::cuGraphDestroy)>("cuGraphDestroy")(graph);
  api()->stream_destroy(stream);
}

/// `out=` may name memory on a stream that is captured when the bytes come. A copy would become a node of the graph:
/// it would not run now, and each replay would read memory that is long freed.
TYPED_TEST(CudaOrder, ABufferForACapturingStreamFailsAndTheGraphStaysEmpty) {
  const auto source = this->memory_a->filled(megabyte, 7);
  auto destination = this->memory_b->filled(megabyte, 1);
  CUstream stream = nullptr;
  const DeviceGuard here(0);
  ASSERT_EQ(api()->stream_create(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);
  const auto begin = driver_function<decltype(&::cuStreamBeginCapture)>("cuStreamBeginCapture_v2");
  const auto end = driver_function<decltype(&::cuStreamEndCapture)>("cuStreamEndCapture");
  const auto nodes_of = driver_function<decltype(&::cuGraphGetNodes)>("cuGraphGetNodes");
  const auto destroy = driver_function<decltype(&::cuGraphDestroy)>("cuGraphDestroy");
  destination.stream = stream;
  Into into(destination);
  this->pair->b->behave({.on_message = [&](Arrivals& arrivals) {
    // In this mode alone, another thread may end the capture.
    EXPECT_EQ(begin(stream, CU_STREAM_CAPTURE_MODE_RELAXED), CUDA_SUCCESS);
    this->pair->b->channel().pull(arrivals.front()->ticket, into, arrivals.front()->landed.completion(),
                                  arrivals.front()->consumed.completion());
  }});
  Letter letter(*this->pair->a);
  ASSERT_TRUE(letter.offer(source)) << letter.refusal;
  letter.send();
  const auto refused = this->pair->b->receive();
  ASSERT_EQ(refused.size(), 1U);
  const auto status = refused.front()->landed.wait();
  ASSERT_TRUE(status.has_value());
  EXPECT_EQ(status->code(), Code::channel_unavailable);
  EXPECT_NE(status->what().find("captured"), std::string_view::npos) << status->text();
  CUgraph graph = nullptr;
  ASSERT_EQ(end(stream, &graph), CUDA_SUCCESS);
  std::size_t nodes = 99;
  EXPECT_EQ(nodes_of(graph, nullptr, &nodes), CUDA_SUCCESS);
  EXPECT_EQ(nodes, 0U);
  destroy(graph);
  api()->stream_destroy(stream);
  this->pair->b->behave({});
  EXPECT_TRUE(this->memory_b->holds(Buffer{gpu, destination.data, megabyte, nullptr, {}}, 1));
  const auto next = this->pair->a->send(this->memory_a->filled(megabyte, 8));
  const auto arrivals = this->pair->b->receive();
  ASSERT_EQ(arrivals.size(), 1U);
  EXPECT_EQ(arrivals.front()->landed.wait_name(), "Ok") << "later buffers arrive";
  EXPECT_TRUE(this->memory_b->holds(arrivals.front()->buffer, 8));
  EXPECT_EQ(next.wait_name(), "Ok");
}

TYPED_TEST(CudaOrder, ACaptureThatTheDefaultStreamWouldWaitForIsRefusedAndContinues) {
  auto source = this->memory_a->allocate(4096);
  const auto begin = driver_function<decltype(&::cuStreamBeginCapture)>("cuStreamBeginCapture_v2");
  const auto end = driver_function<decltype(&::cuStreamEndCapture)>("cuStreamEndCapture");
  for (const auto flags : {CU_STREAM_DEFAULT, CU_STREAM_NON_BLOCKING}) {
    CUstream stream = nullptr;
    const DeviceGuard here(0);
    ASSERT_EQ(api()->stream_create(&stream, flags), CUDA_SUCCESS);
    ASSERT_EQ(begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL), CUDA_SUCCESS);
    source.stream = nullptr;
    {
      Letter letter(*this->pair->a);
      EXPECT_EQ(letter.offer(source), flags == CU_STREAM_NON_BLOCKING) << letter.refusal;
    }
    CUgraph graph = nullptr;
    ASSERT_EQ(end(stream, &graph), CUDA_SUCCESS);
    driver_function<decltype(&::cuGraphDestroy)>("cuGraphDestroy")(graph);
    api()->stream_destroy(stream);
  }
}

/// The sender's stream writes its word when its kernel has ended, which may be long after the link has ended.
using CudaIpcOrder = CudaOrder<Ipc>;
TEST_F(CudaIpcOrder, ALinkThatEndsBeforeASendersKernelDoesNotDisturbIt) {
  auto source = memory_a->filled(megabyte, 1);
  const Blocked kernel;
  source.stream = kernel.get();
  const Rescuer rescuer(kernel);
  std::promise<void> pulled;
  pair->b->behave({.on_message = [&](Arrivals& arrivals) {
    pair->b->pull(arrivals.front());
    pulled.set_value();
  }});
  const auto released = pair->a->send(source);
  pulled.get_future().wait();  // the other end waits for the word
  pair.reset();
  EXPECT_FALSE(rescuer.had_to()) << "until the kernel ended";
  EXPECT_NE(released.wait_name(), "nothing");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // so that background threads have freed their part
  kernel.let_go();
  const DeviceGuard here(0);
  while (api()->stream_query(kernel.get()) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
  EXPECT_EQ(api()->stream_query(kernel.get()), CUDA_SUCCESS);
  source.stream = nullptr;
  EXPECT_TRUE(memory_a->holds(source, 1));
}

/// Unlocking pages may make all threads wait for a kernel.
TEST(CudaPinned, PagesOfPastOwnersAreKeptUpToABound) {
  if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
  const auto lock_and_drop = [](std::size_t bytes) {
    const auto pages = cuda::Pinned::lock(*SharedMemory::create(bytes), 0);
    EXPECT_TRUE(pages.ok());
    return pages->data();
  };
  const auto mapped = [](std::byte* address) {
    unsigned char in_core = 0;
    return ::mincore(address, 4096, &in_core) == 0;
  };
  constexpr auto many = cuda::Pinned::most_kept + 4096;
  lock_and_drop(many);  // so many that pages kept by earlier tests are unlocked too
  auto* const few = lock_and_drop(4096);
  await_background();  // which unlocks pages
  EXPECT_TRUE(mapped(few));
  auto* const last = lock_and_drop(many);
  EXPECT_TRUE(eventually([&] { return !mapped(few); }));
  EXPECT_TRUE(eventually([&] { return !mapped(last); }));
}

/// A sender's process that is killed while its kernel still runs, and the receiver of its buffer here.
class CudaIpcSender : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const auto why = why_no_cuda(1); !why.empty()) GTEST_SKIP() << why;
  }
  static int send_behind_a_kernel(WireEnd::Sockets sockets) {
    const auto memory = cuda_memory(0);
    CudaIpcDriver driver;
    WireEnd end("parent", driver, {gpu, gpu}, *memory, std::move(sockets));
    end.start();
    (void)end.wait_ready();
    auto source = memory->filled(megabyte, 1);
    if (end.send(source).wait_name() != "Ok") return 1;  // the receiver has mapped its memory
    const Blocked kernel;
    source.stream = kernel.get();
    end.send(source);
    std::this_thread::sleep_for(std::chrono::minutes(1));
    return 0;
  }
  /// Pulls the buffer that the sender's kernel still writes.
  void pull(cuda_ipc::CudaIpcOptions::Wait wait) {
    auto [mine, theirs] = connected_sockets();
    child.emplace(std::move(theirs), mine, send_behind_a_kernel);
    memory = cuda_memory(0);
    driver.emplace(cuda_ipc::CudaIpcOptions{.wait = wait});
    end.emplace("child", *driver, DevicePair{gpu, gpu}, *memory, std::move(mine));
    std::promise<void> pulled;
    end->behave({.on_message = [&, came = 0](Arrivals& arrivals) mutable {  // before the child can send
      end->pull(arrivals.front());
      if (++came != 2) return;
      arrival = arrivals.front();
      pulled.set_value();
    }});
    end->start();
    ASSERT_TRUE(end->wait_ready().has_value());
    pulled.get_future().wait();
  }
  void kill_it_and_expect_that_the_gpu_is_free() {
    child->kill();
    const auto killed = std::chrono::steady_clock::now();
    ASSERT_TRUE(arrival->consumed.wait().has_value());
    EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(10));
    end->finish();
    // This process can still use the GPU: it allocates, computes and frees.
    const auto again = cuda_memory(0);
    const auto buffer = again->filled(200 * megabyte, 9);
    EXPECT_TRUE(again->holds(buffer, 9));
  }

  std::optional<Child> child;
  std::unique_ptr<DeviceMemory> memory;
  std::optional<CudaIpcDriver> driver;
  std::optional<WireEnd> end;
  std::shared_ptr<Arrival> arrival;
};

TEST_F(CudaIpcSender, AStreamThatWaitsForAKilledSenderResumes) {
  ASSERT_NO_FATAL_FAILURE(pull(cuda_ipc::CudaIpcOptions::Wait::by_stream));
  ASSERT_EQ(arrival->landed.wait_name(), "Ok");
  EXPECT_EQ(arrival->consumed.runs(), 0);
  kill_it_and_expect_that_the_gpu_is_free();
}

TEST_F(CudaIpcSender, APullThatWaitsForAKilledSenderFailsAndTheStreamIsFree) {
  ASSERT_NO_FATAL_FAILURE(pull(cuda_ipc::CudaIpcOptions::Wait::on_host));
  EXPECT_EQ(arrival->landed.runs(), 0);
  EXPECT_EQ(arrival->consumed.runs(), 0);
  {
    const DeviceGuard here(0);
    EXPECT_EQ(api()->stream_query(static_cast<CUstream>(arrival->buffer.stream)), CUDA_SUCCESS)
        << "the stream waits for the sender";
  }
  kill_it_and_expect_that_the_gpu_is_free();
  EXPECT_EQ(arrival->landed.wait_name(), "ConnectionLost");
}

}  // namespace
}  // namespace tensorferry::conformance
