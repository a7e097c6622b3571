#include "tests/channels/cuda_fixtures.h"

namespace tensorferry::conformance {

using CudaXthTwoFixture = CudaXth<1>;
using CudaXthChunksTwoFixture = CudaXthChunks<1>;
using CudaBasicTwoFixture = CudaBasic<1>;
using CudaIpcChunksTwoFixture = CudaIpcChunks<1>;
using CudaIpcTwoFixture = CudaIpc<1>;

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(CudaXthTwoFixture);
INSTANTIATE_CHANNEL_SUITE(CudaXthChunksTwoFixture);
INSTANTIATE_CHANNEL_SUITE(CudaBasicTwoFixture);
INSTANTIATE_CHANNEL_SUITE(CudaIpcChunksTwoFixture);
INSTANTIATE_CHANNEL_PROCESS_SUITE(CudaIpcTwoFixture);
