/// One direction of a cuda_basic channel at one end: what its two ways, by ring and as bulk data, have in common.
#pragma once

#include <cstdint>
#include <mutex>

#include "channels/cuda_basic/transfer.h"

namespace tensorferry::cuda_basic {

/// Thread-safe; runs completions with no lock held.
class Flow {
 public:
  virtual ~Flow();
  Flow(const Flow&) = delete;
  Flow& operator=(const Flow&) = delete;

  /// Begins at once, as far as there is room. Returns the number of the first chunk, by which the other end receives.
  std::uint64_t send(Transfer transfer);
  /// What has that number.
  void receive(std::uint64_t first, Transfer transfer);
  /// Ends the transfers that have not, with `status`: at once, or when what is being copied is.
  void close(const Status& status);

 protected:
  /// `broken`, of the sender's: runs when its GPU can copy no more. The numbers of what is lost come no more either, so
  /// all transfers end with that error, and the other end must be told. `first`: the number of the first chunk of all.
  Flow(Direction direction, Device device, Completion broken, std::uint64_t first)
      : direction_(direction), device_(device), broken_(std::move(broken)), queue_(first) {}

  /// There is a transfer more in the queue. Runs with no lock held.
  virtual void go_on() = 0;

  [[nodiscard]] bool on_gpu() const { return device_.type == DeviceType::cuda; }
  /// What is put on the flow's stream from now on comes behind what the transfer's memory waits for. Inside OnDevice.
  Status order_behind(const Transfer& transfer);

  const Direction direction_;
  const Device device_;
  std::mutex mutex_;  // guards what follows
  Completion broken_;
  Queue queue_;
  CUstream stream_ = nullptr;  // GPU: made at first use

 private:
  void start(const DrivenPtr& driven, const Status& taken);
};

}  // namespace tensorferry::cuda_basic
