/// One direction of calling through memory that caller and callee share: a ring of request frames, a slot for each
/// call's reply, and a list of slots that were filled while nobody waited for them.
///
/// The socket beside it stays: it carries what does not fit (a full ring, a long reply, bytes behind a frame), file
/// descriptors, and the peer's death. Nothing that the peer writes is used before it has been copied and checked.
///
/// A slot's word is generation << 4 | state. It belongs to the caller while free; the callee changes it once a call, by
/// compare-and-swap, when it answers. The caller never uses a slot again before its answer has come or the link has
/// ended, so an answer never writes over the next call's:
///
///     free -> pending -> sleeping        the caller's thread sleeps on the word
///             pending -> watched         nobody waits; the callee is to put the slot into the done list
///     pending, sleeping, watched -> full | by_socket   the callee has answered
///     pending, sleeping, watched -> abandoned          the caller gave up
///     abandoned -> late                                the callee has answered all the same
///     full, by_socket, late -> free                    the caller has taken it
///
/// tests/models/slot.pml checks this together with who looks at a slot, and when.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "agent/futex.h"
#include "channels/bytes.h"
#include "channels/shared_memory.h"
#include "channels/status.h"

namespace tensorferry {

/// Names one use of one slot.
struct SlotId {
  std::uint32_t index = 0;
  std::uint32_t generation = 0;
};

class CallRing final {
 public:
  static constexpr std::uint32_t slots = 1024;
  static constexpr std::size_t ring_bytes = 256 * 1024;
  static constexpr std::size_t most_reply = 4096 - 64;  // bytes of a frame that fits a slot
  static constexpr std::size_t most_request = 64 * 1024 + 64;

  enum class Ended : std::uint32_t { no, left, otherwise };
  enum class State : std::uint32_t { free, pending, sleeping, watched, full, by_socket, abandoned, late };

  /// The caller's side makes the memory; the callee maps it.
  static Result<std::shared_ptr<CallRing>> create(std::uint64_t nonce);
  /// ProtocolError: not such memory, or of another nonce.
  static Result<std::shared_ptr<CallRing>> map(FileDescriptor fd, std::uint64_t nonce);
  static std::size_t memory_bytes() { return sizeof(Layout); }
  [[nodiscard]] Result<FileDescriptor> share() const { return memory_.share(); }
  /// The callee has mapped it: nobody else gets it.
  void seclude() noexcept { memory_.seclude(); }

  // ---- Caller
  /// A slot in state pending; nullopt: all are taken.
  std::optional<SlotId> reserve();
  /// Gives back a slot whose request was never pushed.
  void unreserve(SlotId slot);
  /// Copies a request in, for the callee to answer into `slot`. False: no room.
  bool push(SlotId slot, ByteView frame);
  /// What the slot's call has come to; free where it is another call's by now.
  [[nodiscard]] State state(SlotId slot) const;
  /// pending or watched -> sleeping, then sleeps until the word changes. False: a signal interrupted it.
  bool sleep(SlotId slot, FutexDeadline until);
  /// pending -> watched. False: it has been answered already, or a thread sleeps on it.
  bool watch(SlotId slot);
  /// Copies the reply of a full slot and frees it. nullopt: somebody else has, or a length that no reply has (`valid`
  /// false).
  std::optional<Bytes> take(SlotId slot, bool& valid);
  /// The slot is not this call's any more: its answer has been taken, or given up.
  [[nodiscard]] bool taken(SlotId slot);
  /// Where the callee ran when it answered. Of a slot that is full.
  [[nodiscard]] int cpu_of(SlotId slot) const { return shared_.slot[slot.index].cpu.load(std::memory_order_relaxed); }
  /// A slot that was answered by socket is free again.
  void take_by_socket(SlotId slot);
  /// The caller has given up; a thread that sleeps on the slot wakes.
  void abandon(SlotId slot);
  /// The callee has said that it serves no more.
  [[nodiscard]] Ended ended() const { return shared_.ended.load(std::memory_order_relaxed); }
  /// Wakes every thread that sleeps on a slot: the link has ended.
  void wake_all();
  /// Frees abandoned slots whose answers have come. For the tick.
  void reclaim();
  /// Slots answered while they were watched. To one thread at a time.
  std::optional<SlotId> next_done();
  [[nodiscard]] bool any_done() const;

  // ---- Callee
  [[nodiscard]] bool empty() const;
  /// The function number of the request in front, for a look at what it needs; a hint only. nullopt: empty.
  [[nodiscard]] std::optional<std::uint32_t> peek_function();
  struct Request {
    SlotId slot;
    std::size_t bytes;
    int cpu;  // the caller ran there
  };
  /// Copies the request in front into `into`. nullopt: empty, or another thread is at it; or bytes that no caller
  /// writes (`valid` false: the link must end).
  std::optional<Request> pop(std::span<std::byte> into, bool& valid);
  enum class Answered : std::uint8_t { quietly, to_watcher, too_late };
  /// The reply, of at most `most_reply` bytes; wakes whoever sleeps on the slot. to_watcher: ring the caller's
  /// doorbell.
  Answered answer(SlotId slot, ByteView frame);
  /// Serves no more: the caller finds out at its next call, before the socket tells.
  void end(Ended how) { shared_.ended.store(how, std::memory_order_seq_cst); }

  /// Says that the reply goes by socket instead. Before it is sent.
  Answered answer_by_socket(SlotId slot);

 private:
  struct alignas(64) Slot {
    std::atomic<std::uint32_t> word;
    std::atomic<std::int32_t> cpu;
    std::uint32_t length;
    std::array<std::byte, most_reply> bytes;
  };
  static_assert(sizeof(Slot) == 4096);
  struct Layout {
    std::uint64_t nonce;
    std::atomic<Ended> ended;                            // the callee's
    alignas(64) std::atomic<std::uint64_t> head;         // the caller's
    alignas(64) std::atomic<std::uint64_t> tail;         // the callee's
    alignas(64) std::atomic<std::uint64_t> done_head;    // the callee's
    alignas(64) std::atomic<std::uint64_t> done_tail;    // the caller's
    std::array<std::atomic<std::uint64_t>, slots> done;  // generation << 32 | index
    alignas(64) std::array<std::byte, ring_bytes> ring;
    alignas(4096) std::array<Slot, slots> slot;
  };

  explicit CallRing(SharedMemory memory);
  Answered change(SlotId slot, State to);
  void release(std::uint32_t index);
  void copy_in(std::uint64_t at, ByteView bytes);
  void copy_out(std::uint64_t at, std::span<std::byte> into) const;

  SharedMemory memory_;
  Layout& shared_;

  std::mutex push_mutex_;  // the caller's
  std::mutex slot_mutex_;  // the caller's: guards the free list, generations and what was abandoned
  std::array<std::uint32_t, slots> generations_{};
  std::array<std::uint32_t, slots> free_{};
  std::uint32_t free_count_ = slots;
  std::array<bool, slots> abandoned_{};  // and has not come back
  std::uint32_t abandoned_count_ = 0;
  std::mutex pop_mutex_;   // the callee's
  std::mutex done_mutex_;  // the callee's
};

}  // namespace tensorferry
