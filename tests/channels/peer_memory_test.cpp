// The memory of a peer's GPU, of which the peer tells a false size or address. A kernel that leaves the memory
// would end all work of this process on the GPU.
#include "channels/cuda/peer_memory.h"

#include <gtest/gtest.h>

#include "channels/cuda/device.h"
#include "tests/conformance/cuda_memory.h"

namespace tensorferry::testing {
namespace {

using cuda::api;
using cuda::BufferOffer;
using cuda::offer_of;
using cuda::PeerMemory;

constexpr std::size_t bytes = std::size_t{8} << 20;

class PeerMemories : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto missing = conformance::why_no_cuda(1);
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

Code code_of(const BufferOffer& offer, std::uint64_t at_least) {
  return PeerMemory::open(offer, 0, at_least).status().code();
}

TEST_F(PeerMemories, OfThisProcessHaveTheBytesThatTheDriverKnows) {
  const cuda::DeviceGuard here(0);
  CUdeviceptr address = 0;
  ASSERT_EQ(api()->mem_alloc(&address, bytes), CUDA_SUCCESS);
  auto offer = offer_of(address, 0);
  ASSERT_TRUE(offer.ok()) << offer.status().text();
  EXPECT_EQ(code_of(*offer, bytes), Code::ok);
  EXPECT_EQ(code_of(*offer, 1000 * bytes), Code::channel_unavailable);
  offer->address = 4096;
  EXPECT_EQ(code_of(*offer, 8), Code::channel_unavailable);
  api()->mem_free(address);
}

}  // namespace
}  // namespace tensorferry::testing
