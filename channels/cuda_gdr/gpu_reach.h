/// One-sided transfers of a GPU's memory: how the cards of a link reach it.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "channels/cuda_gdr/gdr_end.h"
#include "channels/ibv/card_transfers.h"

namespace tensorferry::cuda_gdr {

/// The memory of the GPU of one end of a channel. Memory for this process's own transfers is registered as for pulls
/// (GpuCards::registration), and exposed memory apart, byte by byte. Writes are flushed by way of the end's probe page
/// (Flush): so that does not keep a region exposed, and needs no right to read it. Thread-safe; may outlive the
/// channel.
class GpuReach final : public ibv::DeviceMemory {
 public:
  explicit GpuReach(std::shared_ptr<GdrEnd> end) : end_(std::move(end)) {}

  [[nodiscard]] Device device() const noexcept override;
  std::vector<std::size_t> nearest(const rdma::LocalCards& local, const std::vector<std::size_t>& ports) override;
  Result<std::shared_ptr<rdma::Registration>> reach(rdma::LocalCards& local, const Buffer& memory,
                                                    const std::vector<std::size_t>& cards) override;
  Result<std::shared_ptr<rdma::Registration>> expose(rdma::LocalCards& local, const Buffer& memory, rdma::Access access,
                                                     const std::vector<std::size_t>& cards,
                                                     std::shared_ptr<rdma::Registration> earlier) override;
  Result<ExposedMemory::Flush> flush(const std::shared_ptr<rdma::LocalCards>& local,
                                     const std::vector<std::size_t>& ports) override;

 private:
  const std::shared_ptr<GdrEnd> end_;
};

}  // namespace tensorferry::cuda_gdr
