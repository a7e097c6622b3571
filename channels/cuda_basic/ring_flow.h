/// One direction of a cuda_basic channel at one end, by ring.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "channels/cuda/watcher.h"
#include "channels/cuda_basic/ring.h"
#include "channels/cuda_basic/transfer.h"

namespace tensorferry::cuda_basic {

/// The bytes between this end's memory and the ring, one transfer after another. The watcher's thread sees which chunks
/// are due; where this end's memory is a GPU's it puts them on a stream of the flow's own, and tells the other end of
/// each that has been copied; else it copies them itself. (Words that the stream sets itself would come no sooner and
/// cost the engines more: 6 us a chunk by one stream, where events cost 3, on an H200. Two streams in turn hide that at
/// one end, and then get into each other's way.)
///
/// No stream ever waits for what a peer's host has yet to do. Such a stream makes whatever the driver synchronises with
/// it (cudaMalloc, page-locking) wait for the peer too; and where two processes wait so for each other, for ever.
///
/// Thread-safe; runs completions with no lock held.
class RingFlow final : public std::enable_shared_from_this<RingFlow> {
 public:
  /// `broken`, of the sender's: runs when its GPU can copy no more. The numbers of what is lost come no more either, so
  /// all transfers end with that error, and the other end must be told.
  explicit RingFlow(Direction direction, Device device, Completion broken = {})
      : direction_(direction), device_(device), broken_(std::move(broken)) {}
  ~RingFlow();
  RingFlow(const RingFlow&) = delete;
  RingFlow& operator=(const RingFlow&) = delete;

  /// Before the first transfer.
  void use(std::shared_ptr<Ring> ring);

  /// Begins at once, as far as there is room. Returns the number of the first chunk, by which the other end receives.
  std::uint64_t send(Transfer transfer);
  /// What has that number. `landed` runs when the last chunk is on its way in the order of the memory's stream.
  void receive(std::uint64_t first, Transfer transfer);

  /// Ends the transfers that have not, with `status`: at once, or when what is being copied is.
  void close(const Status& status);

 private:
  struct Flying {
    Ring::Chunk place;
    cuda::Event copied;
    DrivenPtr driven;
  };
  /// What a turn came to, to be told with no lock held.
  struct News {
    std::vector<DrivenPtr> landed, over;
    Status broken;
    bool any = false;
  };

  [[nodiscard]] bool on_gpu() const { return device_.type == DeviceType::cuda; }
  void start(const DrivenPtr& driven, const Status& taken, std::unique_lock<std::mutex> lock);
  cuda::Watcher::Progress turn(std::size_t most);
  [[nodiscard]] bool next_is_there() const;
  void begin_chunk(std::unique_lock<std::mutex>& lock, News& news);
  Status copy_on_stream(const Queue::Chunk& chunk, Ring::Chunk place, News& news);
  void end_chunk(Ring::Chunk place, const DrivenPtr& driven, const Status& copied, News& news);
  void stop(const Status& status, News& news);

  const Direction direction_;
  const Device device_;

  std::mutex mutex_;  // guards what follows
  Completion broken_;
  CUstream stream_ = nullptr;  // GPU: made at first use
  std::shared_ptr<Ring> ring_;
  Queue queue_{0};
  std::deque<Flying> flying_;  // being copied, in the stream's order
  bool taking_turns_ = false;
};

}  // namespace tensorferry::cuda_basic
