/// The sender's end of shared memory with one peer: blocks to copy into, and how they come back.
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

#include "channels/background.h"
#include "channels/channel.h"
#include "channels/shared_memory.h"
#include "channels/shm/layout.h"
#include "channels/size_class.h"

namespace tensorferry::shm {

/// For all peers of a driver together.
struct Limits {
  std::size_t held_bytes = default_held_bytes();                 // by receivers; beyond it offers are refused
  std::size_t idle_bytes = std::size_t{1} << 30;                 // free blocks kept, however recently used
  std::size_t floor_bytes = std::size_t{64} << 20;               // free blocks kept, however long unused
  std::chrono::milliseconds idle_for = std::chrono::seconds(5);  // free ones beyond the floor are kept so long

  /// 4 GB, or a quarter of the machine's memory where that is less.
  static std::size_t default_held_bytes();
};

/// Counted over all peers.
struct Usage {
  std::atomic<std::size_t> held{0};  // blocks at receivers or on their way, whole
  std::atomic<std::size_t> idle{0};  // free blocks
};

/// The blocks lie in segments, of which each is one memfd: small ones many in one of up to 8 MB, so that a process
/// that holds a million of them has a thousand mappings; large ones alone. A segment is made and its pages are taken in
/// the background, because a fresh page costs more than the copy; meanwhile offers are refused. Its descriptor goes to
/// the peer once, and is closed.
///
/// A block has one of four states: free; being filled or at the receiver ("out"); given back, which the sender finds
/// out when it next looks; spent, when a forked child of the receiver may still see it. The receiver gives back by
/// writing a word and putting the block at the head of a list, both in shared memory, so no message is needed. What
/// stands there counts only where it names a block that is out, in its present generation: a peer that writes anything
/// else loses blocks, and one that gives back too early sees its own bytes change.
///
/// Thread-safe. The wire is used under the lock, and not after close().
class Blocks final : public std::enable_shared_from_this<Blocks> {
 public:
  /// `ledger`: as told to the peer. The last two outlive this object's calls.
  Blocks(Wire& wire, SharedMemory ledger, const Limits& limits, std::shared_ptr<Usage> usage, Background& background);
  ~Blocks();

  struct Block {
    std::byte* data = nullptr;
    Lending lending;
    ControlId after = 0;
    std::shared_ptr<void> keeps;  // the memory
  };
  /// A block of at least `bytes` (not 0) bytes, warm; or why there is none. `last_resort`: a cold one rather than none.
  std::variant<Block, Refusal> take(std::size_t bytes, bool last_resort);
  /// It was not sent.
  void put_back(const Lending& lending);

  /// The peer could not map the segment: its blocks are lent no more, and larger memory is asked for later.
  void unmapped(std::uint32_t slot, const std::string& why);
  /// Whether the peer has answered the probe in the ledger.
  [[nodiscard]] bool answered(std::uint64_t nonce) const;

  /// Frees what nobody copies into. Receivers keep what they hold.
  void close() noexcept;

 private:
  using Clock = Background::Clock;
  struct Segment;
  struct Class {
    std::vector<Segment*> open;  // with free blocks; the one that was used last comes last
    std::size_t bytes = 0;       // of all its segments
    bool growing = false;
    std::string failure;
    Clock::time_point retry_at;
  };

  struct Found {  // on the receiver's list
    Segment* segment;
    std::uint32_t block;
    bool spent;
  };

  void collect();
  void free(Segment& segment, std::uint32_t block, bool spent);
  void retire(std::uint32_t slot);
  std::uint32_t new_slot();
  void want_more(std::size_t index);
  void grow(std::size_t index, bool populate);
  void settle(std::size_t index, Result<SharedMemory> memory, Geometry geometry);
  [[nodiscard]] Geometry next_segment(std::size_t index) const;
  void trim();
  void trim_at(Clock::time_point when);

  Wire& wire_;
  const SharedMemory ledger_;
  const Limits limits_;
  const std::shared_ptr<Usage> usage_;
  Background& background_;
  const std::uint32_t born_in_;
  std::atomic<bool> ended_{false};  // for populating, which looks without the lock

  std::mutex mutex_;
  bool closed_ = false;
  bool trimming_ = false;       // a trim is to come
  bool trimming_soon_ = false;  // at once
  std::array<Class, size_class::count> classes_;
  std::vector<std::shared_ptr<Segment>> segments_;  // by slot; null: free
  std::vector<std::uint32_t> free_slots_;
  std::vector<Found> returned_;      // collect()'s, empty between
  std::uint32_t next_returned_ = 0;  // where it goes on
};

}  // namespace tensorferry::shm
