/// The memory that the ranks of a process group have registered with a window, as one of them reaches it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "rpc/regions/service.h"

namespace tensorferry::collectives {

/// What a rank tells the others of the tensor that it registers; they gather it as int64 elements.
struct RegisteredTensor {
  std::int64_t state = 0;        // a value of `State`
  std::int64_t incarnation = 0;  // of the rank's agent
  std::int64_t region = 0;       // 0: the tensor has no elements
  std::int64_t elements = 0;
  std::int64_t dtype = 0;  // at::ScalarType
  enum State : std::int64_t { none, registered, refused };
};

/// Each rank's tensor: the own one, which is a region, and those of the others, which are opened when they are first
/// used. While it lives, or until drop(), peers may write to the own tensor, and its storage is kept. Thread-safe.
class WindowMemory final {
 public:
  /// Makes the tensor a region. InvalidArgument: no window takes it.
  static Result<std::shared_ptr<WindowMemory>> of(std::shared_ptr<regions::RegionService> service,
                                                  const at::Tensor& tensor);
  ~WindowMemory() { drop(); }
  WindowMemory(const WindowMemory&) = delete;
  WindowMemory& operator=(const WindowMemory&) = delete;

  [[nodiscard]] const at::Tensor& own() const noexcept { return own_; }
  [[nodiscard]] RegisteredTensor record() const;
  /// Sets what all ranks have told, and the names of their agents, before any other rank is reached.
  void set_ranks(std::size_t own_rank, std::vector<RegisteredTensor> told, std::vector<std::string> names);
  [[nodiscard]] const RegisteredTensor& at(std::size_t rank) const { return told_[rank]; }

  /// Copies `from` to the tensor of `rank`, from that element on; the caller has checked dtype and bounds. Errors:
  /// those of regions::RemoteRegion.
  Status write(std::size_t rank, std::int64_t element, const Buffer& from, const regions::TransferLimits& limits);
  /// Returns the tensor of a rank, whose memory this process maps. ChannelUnavailable: it cannot.
  Result<at::Tensor> map(std::size_t rank, const regions::TransferLimits& limits);
  /// Lets peers write no more: NotFound.
  void drop();

 private:
  WindowMemory(std::shared_ptr<regions::RegionService> service, at::Tensor tensor, std::uint64_t region)
      : service_(std::move(service)), own_(std::move(tensor)), region_(region) {}
  Result<std::shared_ptr<regions::RemoteRegion>> open(std::size_t rank, const regions::TransferLimits& limits);

  const std::shared_ptr<regions::RegionService> service_;
  const at::Tensor own_;
  const std::uint64_t region_;
  std::size_t own_rank_ = 0;
  std::vector<RegisteredTensor> told_;  // by rank
  std::vector<std::string> names_;      // by rank
  std::mutex mutex_;
  std::vector<std::shared_ptr<regions::RemoteRegion>> open_;  // by rank; guarded by mutex_
};

/// Returns the bytes of a contiguous tensor of the CPU; the buffer keeps the tensor.
Buffer bytes_of_cpu(const at::Tensor& tensor);

}  // namespace tensorferry::collectives
