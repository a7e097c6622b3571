/// One direction of a cuda_basic channel at one end, by ring.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "channels/cuda/watcher.h"
#include "channels/cuda_basic/flow.h"
#include "channels/cuda_basic/ring.h"

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
/// `landed` runs when the last chunk is on its way in the order of the memory's stream.
class RingFlow final : public Flow, public std::enable_shared_from_this<RingFlow> {
 public:
  explicit RingFlow(Direction direction, Device device, Completion broken = {})
      : Flow(direction, device, std::move(broken), 0) {}

  /// Before the first transfer.
  void use(std::shared_ptr<Ring> ring);
  /// The sender's GB/s in the fastest transfer so far of those that the receiver's pace shows in; 0: there was none.
  [[nodiscard]] double speed() const { return speed_.load(); }

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

  void go_on() override;
  cuda::Watcher::Progress turn(std::size_t most);
  [[nodiscard]] bool next_is_there() const;
  void begin_chunk(std::unique_lock<std::mutex>& lock, News& news);
  Status copy_on_stream(const Queue::Chunk& chunk, Ring::Chunk place, News& news);
  void end_chunk(Ring::Chunk place, const DrivenPtr& driven, const Status& copied, News& news);
  void stop(const Status& status, News& news);
  void time(Driven& driven);

  std::atomic<double> speed_{0};
  std::shared_ptr<Ring> ring_;  // this and the rest: guarded by mutex_
  std::deque<Flying> flying_;   // being copied, in the stream's order
  bool taking_turns_ = false;
};

}  // namespace tensorferry::cuda_basic
