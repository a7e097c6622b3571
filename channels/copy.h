/// Copies host memory as fast as the machine can: chooses the instructions, and decides when a second thread helps.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <type_traits>

namespace tensorferry {

/// Instructions that copy past the caches. `best_streaming()` returns the best that this processor has.
enum class Streaming : std::uint8_t { none, avx2, avx512, neon };
Streaming best_streaming() noexcept;
/// Returns "none", "avx2", "avx512" or "neon".
std::string_view name_of(Streaming streaming) noexcept;

/// Copies bytes that do not overlap by stores that bypass the caches, four pages interleaved with prefetch. It is twice
/// as fast as memcpy if none of the bytes is in a cache, and slower if the destination is soon read from a cache. On
/// return the bytes are visible to every thread or process that synchronises with this thread.
///
/// The processor must support `streaming`. If it is none, and below 32 KB, this is memcpy.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes, Streaming streaming) noexcept;

/// Which core reads what a Copier copies: probably the one that copies, or another one, on which a peer runs.
enum class ReadBy : std::uint8_t { this_core, another_core };

/// Runs large pieces of work on the calling thread, and on a second one while the machine has an idle core. If the
/// second thread took the core of the process that waits for the bytes, that process would get them later.
///
/// Thread-safe. The second thread helps one piece of work at a time; other callers work alone. It starts at first need
/// and ends after two idle seconds. In a forked child there is no second thread.
class Copier final {
 public:
  static constexpr std::size_t streams_from = std::size_t{16} << 20;  // smaller copies are soon read from a cache
  /// For another core, on AMD's processors. They take some 6 ns to write to a line that another core has read, five
  /// times as long as past the caches (Zen 4), and memory that goes to and fro between two cores has such lines alone.
  static constexpr std::size_t streams_away_from = std::size_t{32} << 10;
  static constexpr std::size_t shares_from = std::size_t{4} << 20;  // below, a wake-up costs more than it saves

  explicit Copier(ReadBy reader = ReadBy::this_core);
  ~Copier();  // waits for the thread; no work may be under way
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  /// Copies bytes that do not overlap; returns when all are copied.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);
  /// Does several copies as if they were one of all their bytes: together they may be worth a second thread.
  struct Piece {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
  };
  void copy(std::span<const Piece> pieces);

  /// Calls `part(offset, bytes)` for pieces of `chunk` bytes (the last may be shorter) that make up `total`. It calls
  /// it once for each piece, in no order, from this thread and perhaps the second one. Returns when all calls have
  /// returned. `part` must not throw.
  template <class Part>
  void in_parts(std::size_t total, std::size_t chunk, Part&& part) {
    using Target = std::remove_reference_t<Part>;
    run({&part, [](void* target, std::size_t at, std::size_t n) { (*static_cast<Target*>(target))(at, n); }, total,
         chunk});
  }

 private:
  struct Work {
    void* target;
    void (*call)(void* target, std::size_t offset, std::size_t bytes);
    std::size_t total;
    std::size_t chunk;
    std::atomic<std::size_t> next = 0;

    Work(void* t, void (*c)(void*, std::size_t, std::size_t), std::size_t all, std::size_t piece)
        : target(t), call(c), total(all), chunk(piece) {}
    /// Runs one piece; returns false if none is left.
    bool step();
  };
  struct Helper;

  void run(Work work);

  const ReadBy reader_;
  std::unique_ptr<Helper> helper_;
};

}  // namespace tensorferry
