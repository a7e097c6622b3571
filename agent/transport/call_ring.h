/// One direction of calls through memory that caller and callee share. The memory holds:
///   - a ring of request frames;
///   - a slot for each call's reply;
///   - the done list: slots that the callee answered while no thread waited for them.
///
/// The link's socket stays in use. It carries everything that does not fit (a full ring, a long reply, bytes behind a
/// frame), file descriptors, and the news that the peer has died. Each side copies and checks the bytes that the peer
/// wrote before it uses them.
///
/// Threads: any thread may call any function at any time, unless the function says otherwise.
///
/// A slot's word is generation << 4 | state. A free slot belongs to the caller. The callee changes the word once per
/// call, by compare-and-swap, when it answers. The caller reuses a slot only after the answer has come or the link has
/// ended, so a late answer never overwrites the reply of the slot's next call:
///
///     free -> pending                                  the caller has reserved the slot
///     pending, watched -> sleeping                     a thread of the caller sleeps on the word
///     sleeping -> pending                              a thread has ended its wait before the call completed
///     pending -> watched                               no thread waits; the callee must put the slot in the done list
///     pending, sleeping, watched -> full | by_socket   the callee has answered
///     pending, sleeping, watched -> abandoned          the caller has given up
///     abandoned -> late                                the callee has answered nevertheless
///     full, by_socket, late -> free                    the caller has taken the answer
///
/// tests/models/slot.pml checks these transitions, together with the threads that poll, cancel and free a slot.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/futex.h"
#include "base/shared_memory.h"
#include "base/status.h"

namespace tensorferry {

/// Identifies one use of one slot.
struct SlotId {
  std::uint32_t index = 0;
  std::uint32_t generation = 0;
};

class CallRing final {
 public:
  static constexpr std::uint32_t slots = 1024;
  static constexpr std::size_t ring_bytes = 256 * 1024;
  static constexpr std::size_t most_reply = 4096 - 64;  // bytes of the largest frame that fits a slot
  static constexpr std::size_t most_request = 64 * 1024 + 64;

  enum class Ended : std::uint32_t { no, left, otherwise };
  enum class State : std::uint32_t { free, pending, sleeping, watched, full, by_socket, abandoned, late };

  /// Creates the memory, on the caller's side. Fails as SharedMemory::create does.
  static Result<std::shared_ptr<CallRing>> create(std::uint64_t nonce);
  /// Maps the memory, on the callee's side. Fails as SharedMemory::map does, and with ProtocolError if the memory does
  /// not begin with `nonce`.
  static Result<std::shared_ptr<CallRing>> map(FileDescriptor fd, std::uint64_t nonce);
  static std::size_t memory_bytes() { return sizeof(Layout); }
  /// Returns a descriptor for the callee to map. Fails after close_descriptor().
  [[nodiscard]] Result<FileDescriptor> share() const { return memory_.share(); }
  /// Closes the descriptor once the callee has mapped the memory, so that no other process can.
  void close_descriptor() noexcept { memory_.close_descriptor(); }

  // ---- Caller
  /// Returns a slot in state pending, or nullopt if all slots are taken.
  std::optional<SlotId> reserve();
  /// Frees a slot whose request was never pushed.
  void unreserve(SlotId slot);
  /// Copies a request into the ring; the callee answers it into `slot`. Returns false if the ring has no room.
  bool push(SlotId slot, ByteView frame);
  /// Returns the state of the slot's call: free if another call has the slot by now.
  [[nodiscard]] State state(SlotId slot) const;
  /// Changes pending or watched to sleeping, then sleeps until the word changes or `clock` comes to `until`. May return
  /// early. Returns at once if the slot is in another state. Returns false if a signal interrupted the sleep.
  bool sleep(SlotId slot, std::optional<Clock::time_point> until, const Clock& clock = {});
  /// Changes sleeping to pending, because a thread ends its wait without the answer, and wakes the slot's other
  /// sleepers, so that they sleep again. Call it after sleep(): else the callee takes the slot for one with a sleeper.
  void stop_sleeping(SlotId slot);
  /// Changes pending to watched. Returns false if the slot is not pending: for example, the callee has answered, or a
  /// thread sleeps on it.
  bool watch(SlotId slot);
  /// Copies the reply out of a full slot and frees the slot. Returns nullopt if the slot is not full, if another thread
  /// has taken the reply, or if the reply is longer than a slot; only the last sets `valid` to false.
  std::optional<Bytes> take(SlotId slot, bool& valid);
  /// Returns true if the call has lost the slot: a thread has taken the answer, or the caller has given it up.
  [[nodiscard]] bool taken(SlotId slot);
  /// Returns the CPU on which the callee answered. Valid for a full slot.
  [[nodiscard]] int cpu_of(SlotId slot) const { return shared_.slot[slot.index].cpu.load(std::memory_order_relaxed); }
  /// Frees a slot in state by_socket. Does nothing if another thread has freed it.
  void take_by_socket(SlotId slot);
  /// Gives up the call and wakes the threads that sleep on the slot. If the answer has come already, frees the slot,
  /// and returns the reply as take() does: the buffers that it names wait for this side.
  std::optional<Bytes> abandon(SlotId slot, bool& valid);
  /// Returns whether the callee has stopped serving, and why.
  [[nodiscard]] Ended ended() const { return shared_.ended.load(std::memory_order_relaxed); }
  /// Wakes every thread that sleeps on a slot, because the link has ended.
  void wake_all();
  /// Frees abandoned slots that the callee has answered meanwhile. The tick calls this.
  void reclaim();
  /// Removes the next slot from the done list and returns it; nullopt if the list is empty. If the peer wrote a bad
  /// entry, the SlotId belongs to no call. One thread at a time.
  std::optional<SlotId> next_done();
  [[nodiscard]] bool any_done() const;
  /// Gives the pages of requests and replies back to the system, at both sides, if no call was made since the last
  /// invocation and none is in flight. The next call takes new ones. One thread at a time.
  void give_back_if_idle();

  // ---- Callee
  [[nodiscard]] bool empty() const;
  /// Returns the function number of the first request, or nullopt if the ring is empty. Only a hint of what the request
  /// needs: the caller may change the memory, and another thread may pop the request.
  [[nodiscard]] std::optional<std::uint32_t> peek_function();
  struct Request {
    SlotId slot;
    std::size_t bytes;
    int cpu;  // on which the caller sent the request
  };
  /// Removes the first request and copies it into `into`. Returns nullopt if the ring is empty or another thread pops.
  /// Also returns nullopt, with `valid` false, if the ring holds bytes that no caller writes: the link must then end.
  std::optional<Request> pop(std::span<std::byte> into, bool& valid);
  enum class Answered : std::uint8_t { quietly, must_ring, too_late };
  /// Writes the reply, of at most `most_reply` bytes, and wakes the threads that sleep on the slot.
  ///   - quietly: nothing is left to do;
  ///   - must_ring: the slot is in the done list, and the callee must ring the caller's doorbell;
  ///   - too_late: the caller had given up, so the reply is dropped.
  Answered answer(SlotId slot, ByteView frame);
  /// Tells the caller that the callee stops serving. The caller reads this at its next call, before the socket tells.
  void end(Ended how) { shared_.ended.store(how, std::memory_order_seq_cst); }

  /// Tells the caller that the reply comes by socket. Call this before sending the reply.
  Answered answer_by_socket(SlotId slot);

 private:
  struct alignas(64) ReplySlot {
    std::atomic<std::uint32_t> word;
    std::atomic<std::int32_t> cpu;
    std::atomic<std::uint32_t> length;
    std::array<std::byte, most_reply> bytes;
  };
  static_assert(sizeof(ReplySlot) == 4096);
  struct Layout {
    std::uint64_t nonce;
    std::atomic<Ended> ended;                            // written by the callee
    alignas(64) std::atomic<std::uint64_t> head;         // written by the caller
    alignas(64) std::atomic<std::uint64_t> tail;         // written by the callee
    alignas(64) std::atomic<std::uint64_t> done_head;    // written by the callee
    alignas(64) std::atomic<std::uint64_t> done_tail;    // written by the caller
    std::array<std::atomic<std::uint64_t>, slots> done;  // generation << 32 | index
    alignas(64) std::array<std::byte, ring_bytes> ring;
    alignas(4096) std::array<ReplySlot, slots> slot;
  };

  explicit CallRing(SharedMemory memory);
  Answered change(SlotId slot, State to);
  bool end_call(SlotId slot);
  void release(std::uint32_t index);
  void copy_in(std::uint64_t at, ByteView bytes);
  void copy_out(std::uint64_t at, std::span<std::byte> into) const;

  SharedMemory memory_;
  Layout& shared_;

  std::mutex push_mutex_;  // caller: one push at a time
  std::mutex slot_mutex_;  // caller: guards the free list, generations_ and abandoned_
  std::array<std::uint32_t, slots> generations_{};
  std::array<std::uint32_t, slots> free_{};
  std::uint32_t free_count_ = slots;
  std::array<bool, slots> abandoned_{};  // and not answered yet
  std::uint32_t abandoned_count_ = 0;
  std::uint64_t last_head_ = 0;  // in give_back_if_idle()
  bool gave_back_ = true;        // nothing was used yet
  std::mutex pop_mutex_;         // callee: one pop at a time
  std::mutex done_mutex_;        // callee: one append to the done list at a time
};

}  // namespace tensorferry
