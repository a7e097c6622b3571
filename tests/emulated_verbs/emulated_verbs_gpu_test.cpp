// GPU memory that emulated cards read and write: of a GPU if there is one, else of the emulated ones of
// tests/emulated_gpu.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>

#include "channels/cuda/api.h"
#include "tests/channels/rdma_ends.h"

namespace tensorferry::rdma {
namespace {

constexpr std::size_t bytes = std::size_t{3} << 20;

/// Memory of GPU 0.
class GpuMemory {
 public:
  GpuMemory() {
    const auto& api = *cuda::api();
    CUdevice device = 0;
    api.device_get(&device, 0);
    api.primary_ctx_retain(&context_, device);
    api.ctx_push_current(context_);
    api.stream_create(&stream_, CU_STREAM_NON_BLOCKING);
    if (api.mem_alloc(&address_, bytes) != CUDA_SUCCESS) throw std::runtime_error("no GPU memory");
  }
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;
  ~GpuMemory() {
    free();
    cuda::api()->stream_destroy(stream_);
    CUcontext popped = nullptr;
    cuda::api()->ctx_pop_current(&popped);
  }
  void free() {
    if (address_ != 0) cuda::api()->mem_free(address_);
    address_ = 0;
  }
  void copy_from(const std::vector<std::byte>& host) {
    copy(address_, reinterpret_cast<std::uintptr_t>(host.data()), host.size());
  }
  /// Reads what a card has written.
  void copy_to(std::vector<std::byte>& host) {
    ASSERT_EQ(cuda::api()->flush_gpu_direct_writes(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
                                                   CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER),
              CUDA_SUCCESS);
    copy(reinterpret_cast<std::uintptr_t>(host.data()), address_, host.size());
  }
  [[nodiscard]] CUdeviceptr address() const { return address_; }
  [[nodiscard]] void* data() const { return reinterpret_cast<void*>(address_); }

 private:
  void copy(CUdeviceptr to, CUdeviceptr from, std::size_t count) {
    ASSERT_EQ(cuda::api()->memcpy_async(to, from, count, stream_), CUDA_SUCCESS);
    while (cuda::api()->stream_query(stream_) == CUDA_ERROR_NOT_READY) std::this_thread::yield();
  }
  CUcontext context_ = nullptr;
  CUstream stream_ = nullptr;
  CUdeviceptr address_ = 0;
};

class EmulatedCardsWithGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (cuda::api() == nullptr) GTEST_SKIP() << cuda::why_missing();
    near = std::make_unique<End>();
    far = std::make_unique<End>();
    near->connect(far->address());
    far->connect(near->address());
    host = std::make_unique<Registered>(near->verbs(), near->domain(), bytes, End::all_rights);
    host->fill(1);
  }
  ibv_wc_status carry(ibv_wr_opcode opcode, std::uint64_t address, std::uint32_t key) {
    EXPECT_EQ(near->post(opcode, 1, host->piece(0, bytes), address, key), 0);
    return near->wait().status;
  }
  std::unique_ptr<End> near, far;
  std::unique_ptr<Registered> host;
};

TEST_F(EmulatedCardsWithGpu, MoveItsBytes) {
  GpuMemory gpu;
  ibv_mr* const region = register_memory(far->verbs(), far->domain(), gpu.data(), bytes, End::all_rights);
  ASSERT_NE(region, nullptr) << std::strerror(errno);
  ASSERT_EQ(carry(IBV_WR_RDMA_WRITE, gpu.address(), region->rkey), IBV_WC_SUCCESS);
  std::vector<std::byte> there(bytes);
  gpu.copy_to(there);
  EXPECT_EQ(there, host->bytes());
  host->fill(5);
  gpu.copy_from(host->bytes());
  const auto expected = host->bytes();
  host->fill(7);
  ASSERT_EQ(carry(IBV_WR_RDMA_READ, gpu.address(), region->rkey), IBV_WC_SUCCESS);
  EXPECT_EQ(host->bytes(), expected);
  EXPECT_EQ(far->verbs().dereg_mr(region), 0);
}

TEST_F(EmulatedCardsWithGpu, TakeItAsADmaBuf) {
  GpuMemory gpu;
  const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);  // the emulation goes by the address
  ibv_mr* const region = far->verbs().reg_dmabuf_mr(far->domain(), 0, bytes, gpu.address(), fd, End::all_rights);
  ::close(fd);
  ASSERT_NE(region, nullptr) << std::strerror(errno);
  EXPECT_EQ(carry(IBV_WR_RDMA_WRITE, gpu.address(), region->rkey), IBV_WC_SUCCESS);
  EXPECT_EQ(far->verbs().dereg_mr(region), 0);
}

TEST_F(EmulatedCardsWithGpu, NeverTouchAnAllocationThatCameLaterToTheAddress) {
  GpuMemory gpu;
  ibv_mr* const region = register_memory(far->verbs(), far->domain(), gpu.data(), bytes, End::all_rights);
  ASSERT_NE(region, nullptr);
  const auto address = gpu.address();
  gpu.free();
  const GpuMemory again;  // at the same address, where the driver gives it out again
  EXPECT_EQ(carry(IBV_WR_RDMA_WRITE, address, region->rkey), IBV_WC_REM_ACCESS_ERR);
  EXPECT_EQ(far->verbs().dereg_mr(region), 0);
}

TEST_F(EmulatedCardsWithGpu, RefuseItWhenNoDriverLendsIt) {
  const GpuMemory gpu;
  ::setenv("EMULATED_VERBS_PEERMEM", "0", 1);
  EXPECT_EQ(register_memory(far->verbs(), far->domain(), gpu.data(), bytes, End::all_rights), nullptr);
  EXPECT_EQ(errno, EFAULT);
  ::unsetenv("EMULATED_VERBS_PEERMEM");
  ::setenv("EMULATED_VERBS_DMABUF", "0", 1);
  EXPECT_EQ(far->verbs().reg_dmabuf_mr(far->domain(), 0, bytes, gpu.address(), 0, End::all_rights), nullptr);
  EXPECT_EQ(errno, EOPNOTSUPP);
  ::unsetenv("EMULATED_VERBS_DMABUF");
}

}  // namespace
}  // namespace tensorferry::rdma
