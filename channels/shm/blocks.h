/// The sender's pool of shared memory blocks for one peer: lends blocks, and collects those that the receiver returns.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "base/background.h"
#include "base/mutex.h"
#include "base/shared_memory.h"
#include "channels/channel.h"
#include "channels/shm/layout.h"
#include "channels/size_class.h"

namespace tensorferry::shm {

/// Bounds for all peers of a driver together.
struct Limits {
  std::size_t held_bytes = default_held_bytes();                 // most that receivers hold; beyond, offers are refused
  std::size_t idle_bytes = std::size_t{1} << 30;                 // most free blocks, even if used recently
  std::size_t floor_bytes = std::size_t{64} << 20;               // free blocks to keep, however long unused
  std::chrono::milliseconds idle_for = std::chrono::seconds(5);  // how long to keep free blocks beyond floor_bytes

  /// Returns 4 GiB, or a quarter of the machine's memory if that is less.
  static std::size_t default_held_bytes();
};

/// Counts bytes of blocks over all peers of a driver.
struct Usage {
  std::atomic<std::size_t> held{0};  // whole blocks that receivers hold or that are on their way
  std::atomic<std::size_t> idle{0};  // free blocks
};

/// The blocks of one channel end.
///
/// Segments: the blocks lie in segments, and each segment is one memfd. Small blocks share a segment of up to 8 MiB, so
/// a process that holds a million of them has about a thousand mappings. A large block has a segment of its own. The
/// background thread creates a segment and populates its pages, because a fresh page costs more than the copy;
/// meanwhile the pool refuses offers. The segment's descriptor goes to the peer once, and is then closed.
///
/// States: a block is in one of four states.
///   - free;
///   - out: the sender is filling it, or the receiver has it;
///   - returned: the sender sees this when it next reads the list of returned blocks;
///   - spent: a forked child of the receiver may still see it, so the sender never lends it again.
///
/// Return: the receiver writes the block's word and puts the block at the head of a list. Both are in shared memory, so
/// no message is needed. The sender ignores an entry that does not name a block that is out, in its present generation.
/// A peer that writes anything else only loses blocks. A peer that returns a block too early sees its own bytes change.
///
/// Thread-safe. The pool uses the wire under its lock, and not after close(). In a forked child the destructor does
/// nothing.
class Blocks final : public std::enable_shared_from_this<Blocks> {
 public:
  /// `ledger` is the page that the peer was told of. `wire` must be valid until close(), and `background` longer than
  /// any call of this object.
  Blocks(Wire& wire, SharedMemory ledger, const Limits& limits, std::shared_ptr<Usage> usage, Background& background);
  ~Blocks();

  struct Block {
    std::byte* data = nullptr;
    Lending lending;
    ControlId after = 0;
    std::shared_ptr<void> keeps;  // owns the mapping
    bool near = false;            // the receiver last returned a block on the core of this thread
  };
  /// Returns a warm block of at least `bytes` bytes (not 0), or the reason why there is none. If there is none and
  /// `last_resort` is true, creates a segment on the calling thread.
  std::variant<Block, Refusal> take(std::size_t bytes, bool last_resort);
  /// Frees a block whose ticket was not sent.
  void put_back(const Lending& lending);

  /// Handles a segment that the peer could not map: lends no more of its blocks, and waits 1 s before it creates
  /// another segment of that block size in the background.
  void unmapped(std::uint32_t slot, const std::string& why);
  /// Returns whether the peer has answered the nonce in the ledger.
  [[nodiscard]] bool answered(std::uint64_t nonce) const;

  /// Drops all segments; the background thread unmaps them. A segment stays mapped while a `Block` of it exists.
  /// Receivers keep the blocks that they hold.
  void close() noexcept;

 private:
  using Clock = std::chrono::steady_clock;
  struct Segment;
  struct Class {
    std::vector<Segment*> open;  // segments with free blocks; the one that was used last comes last
    std::size_t bytes = 0;       // of the blocks of all segments
    bool growing = false;        // the background thread is creating a segment
    std::string failure;         // why there is no more memory; empty: no failure
    Clock::time_point retry_at;
  };

  struct Found {  // an entry of the list of returned blocks
    Segment* segment;
    std::uint32_t block;
    bool spent;
  };

  void collect();
  void free(Segment& segment, std::uint32_t block, bool spent);
  void retire(std::uint32_t slot);
  std::uint32_t new_slot();
  void want_more(std::size_t index);
  void grow(std::size_t index);
  void install(std::size_t index, Result<SharedMemory> memory, Geometry geometry);
  [[nodiscard]] Geometry next_segment(std::size_t index) const;
  void trim();
  void trim_at(Clock::time_point when);

  Wire& wire_;
  const SharedMemory ledger_;
  const Limits limits_;
  const std::shared_ptr<Usage> usage_;
  Background& background_;
  const std::uint32_t born_in_;
  std::atomic<bool> ended_{false};  // closed_, for grow(), which reads it without the lock

  Mutex mutex_;
  bool closed_ = false;
  struct Trims {
    bool later = false;  // one is scheduled after Limits::idle_for
    bool now = false;    // one is scheduled at once
  };
  Trims trims_;
  std::array<Class, size_class::count> classes_;
  std::vector<std::shared_ptr<Segment>> segments_;  // by slot; null: free
  std::vector<std::uint32_t> free_slots_;
  std::vector<Found> returned_;      // scratch space of collect(), empty between its calls
  std::uint32_t next_returned_ = 0;  // number() of the entry at which collect() goes on; 0: none
};

}  // namespace tensorferry::shm
