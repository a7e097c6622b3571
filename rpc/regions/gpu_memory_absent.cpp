#include "base/text.h"
#include "rpc/regions/gpu_memory.h"

namespace tensorferry::regions {
namespace {

Status no_cuda() { return {Code::channel_unavailable, "TensorFerry was built without CUDA"}; }

}  // namespace

Status check_memory(const Buffer& memory) {
  if (memory.device == Device{}) return {};
  return {Code::invalid_argument,
          formatted("a region of memory on {}: TensorFerry was built without CUDA", text_of(memory.device))};
}

GpuPlace place_of(const Buffer&) { return {}; }
std::optional<std::uint8_t> gpu_in_use() { return std::nullopt; }
Result<Buffer> map_gpu_memory(const GpuPlace&, std::uint64_t, int) { return no_cuda(); }
Result<std::shared_ptr<LockedWords>> lock_words(const Buffer&, int) { return no_cuda(); }
Status copy_runs(const Buffer&, std::uint64_t, const std::vector<std::uint64_t>&, std::byte*, bool) {
  return no_cuda();
}
Status copy_to_host(const Buffer&, const std::vector<HostCopy>&) { return no_cuda(); }

}  // namespace tensorferry::regions
