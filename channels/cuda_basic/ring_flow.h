/// Carries one direction of a cuda_basic channel through the ring, at one end.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/mutex.h"
#include "channels/cuda/event_poller.h"
#include "channels/cuda_basic/flow.h"
#include "channels/cuda_basic/ring.h"

namespace tensorferry::cuda_basic {

/// Copies the bytes between this end's memory and the ring, one transfer after another. A thread polls the ring's words
/// for chunks that can be copied. If this end's memory is a GPU's, it is the event poller's thread, which enqueues
/// their copies on the flow's own stream, and sets the other end's word after each. Else a poller's thread of its own
/// copies the bytes itself. If the flow is idle on a GPU, the thread that adds a transfer starts its first two chunks.
///
/// The stream does not set the words itself (cuStreamWriteValue32). Such words would arrive no sooner, and would cost
/// the copy engine 6 us a chunk on an H200, against 3 us for events. Two alternating streams hide that cost at one end,
/// but then delay each other.
///
/// No stream ever waits for an action of the peer's host. If one did, every driver call that synchronises with the
/// stream (cudaMalloc, page-locking) would wait for the peer too, and two processes could deadlock on each other.
///
/// `landed` runs when the copy of the last chunk is enqueued and the memory's stream waits for it; on the CPU, when the
/// bytes are copied. If the receiver's memory is busy when its first chunk has come, the chunk waits a little, as long
/// as no other transfer waits behind it; then the transfer takes the detour, and `landed` runs when its copy is done.
class RingFlow final : public Flow, public std::enable_shared_from_this<RingFlow> {
 public:
  explicit RingFlow(Direction direction, Device device, Completion broken = {}, std::shared_ptr<Detour> detour = {})
      : Flow(direction, device, std::move(broken), std::move(detour)) {}

  /// How long a chunk for busy memory waits if no other transfer waits behind it.
  static constexpr std::chrono::milliseconds most_wait{1};

  /// Sets the ring; does nothing if there is one.
  void use(std::shared_ptr<Ring> ring);
  /// Sends a buffer as send() does; returns nullopt, and leaves `transfer` as it is, if there is no ring.
  std::optional<std::uint64_t> send_by_ring(Transfer& transfer);
  /// Drops the ring if no chunk is under way in it, at either end, and returns it; null otherwise. Until the next
  /// use(), nothing is sent or received here.
  std::shared_ptr<Ring> retire();
  /// Returns the number of the next chunk. It does not change while there is no ring.
  [[nodiscard]] std::uint64_t next();
  /// Returns whether there is no ring, or a transfer was added within the last `time`.
  [[nodiscard]] bool used_within(std::chrono::steady_clock::duration time);
  /// Returns the sender's GB/s in the fastest transfer so far; 0 if there was none. Only transfers of at least
  /// 2 * Ring::slots chunks count, because shorter ones do not show the receiver's pace.
  [[nodiscard]] double speed() const { return speed_.load(); }

 private:
  /// A chunk whose copy is on the stream.
  struct CopyInFlight {
    Ring::Chunk at;
    cuda::GpuEvent copied;
    DrivenPtr driven;
  };
  /// The result of one poll(); its completions run with no lock held.
  struct PollResult {
    std::vector<DrivenPtr> landed, over;
    Status broken;
    bool any = false;
  };

  void advance() override;
  /// Ends the chunks whose copies are done, begins at most `most` others, and runs completions.
  cuda::EventPoller::Progress poll(std::size_t most);
  [[nodiscard]] bool next_is_there() const;
  [[nodiscard]] bool next_waits_for_memory();
  /// Begins the next chunk. Releases the lock while the host copies.
  void begin_chunk(std::unique_lock<Mutex>& lock, PollResult& progress);
  Status copy_on_stream(const Queue::Chunk& chunk, Ring::Chunk at, PollResult& progress);
  void copy_on_host(const Queue::Chunk& chunk, Ring::Chunk at);
  void end_chunk(Ring::Chunk at, const DrivenPtr& driven, const Status& copied, PollResult& progress);
  /// Fails all transfers of this direction.
  void stop(const Status& status, PollResult& progress);
  void time(Driven& driven);

  std::atomic<double> speed_{0};
  std::shared_ptr<Ring> ring_;          // this and the rest: guarded by mutex_
  std::deque<CopyInFlight> in_flight_;  // copies in flight, in stream order
  std::size_t on_host_ = 0;             // chunks of diverted transfers that another thread copies
  bool polled_ = false;
  std::chrono::steady_clock::time_point used_;
};

}  // namespace tensorferry::cuda_basic
