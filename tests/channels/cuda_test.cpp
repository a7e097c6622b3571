#include "tests/channels/cuda_fixtures.h"

namespace tensorferry::conformance {

using CudaXthFixture = CudaXth<0>;
using CudaBasicFixture = CudaBasic<0>;
using CudaIpcChunksFixture = CudaIpcChunks<0>;
using CudaIpcFixture = CudaIpc<0>;

struct CudaBasicToCpuFixture : CudaBasicFixture {
  static DevicePair devices() { return {{DeviceType::cuda, 0}, {}}; }
};

struct CudaBasicFromCpuFixture : CudaBasicFixture {
  static DevicePair devices() { return {{}, {DeviceType::cuda, 0}}; }
};

}  // namespace tensorferry::conformance

INSTANTIATE_CHANNEL_SUITE(CudaXthFixture);
INSTANTIATE_CHANNEL_SUITE(CudaBasicFixture);
INSTANTIATE_CHANNEL_SUITE(CudaBasicToCpuFixture);
INSTANTIATE_CHANNEL_SUITE(CudaBasicFromCpuFixture);
INSTANTIATE_CHANNEL_SUITE(CudaIpcChunksFixture);
INSTANTIATE_CHANNEL_PROCESS_SUITE(CudaIpcFixture);
