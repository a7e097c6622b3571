/// Copies between host memory, as fast as the machine goes: which instructions, and when a second thread is worth it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <type_traits>

namespace tensorferry {

/// Which instructions copy past the caches. `best_streaming()` is what this processor has.
enum class Streaming : std::uint8_t { none, avx2, avx512 };
Streaming best_streaming() noexcept;
/// "none", "avx2", "avx512".
std::string_view name_of(Streaming streaming) noexcept;

/// Copies bytes that do not overlap by stores that leave the caches alone, four pages interleaved with prefetch: twice
/// as fast as memcpy where nothing of it is in a cache, and slower where the destination is read soon from one. On
/// return the bytes are visible to whoever synchronises with this thread. `streaming` none, or one that this processor
/// lacks at build time: memcpy.
void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes, Streaming streaming) noexcept;

/// Large pieces of work on one thread, and on a second one while a core of the machine is idle: a second thread that
/// takes the core of the process that waits for the bytes makes them later.
///
/// Thread-safe; one piece of work at a time has the second thread, the others go alone. The thread starts at first need
/// and ends after some idle seconds. In a forked child there is none.
class Copier final {
 public:
  static constexpr std::size_t streams_from = std::size_t{16} << 20;  // below, what is copied is read from caches
  static constexpr std::size_t shares_from = std::size_t{4} << 20;    // below, a wake-up costs more than it saves

  Copier();
  ~Copier();  // waits for the thread; no work may be under way
  Copier(const Copier&) = delete;
  Copier& operator=(const Copier&) = delete;

  /// Copies bytes that do not overlap; returns when all are there.
  void copy(std::byte* to, const std::byte* from, std::size_t bytes);

  /// Calls `part(offset, bytes)` for pieces of `chunk` bytes (the last may be shorter) that make up `total`, each once,
  /// in no order, from this thread and perhaps a second one; returns when all have returned. `part` must not throw.
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
    /// One piece; false: none is left.
    bool step();
  };
  struct Helper;

  void run(Work work);

  std::unique_ptr<Helper> helper_;
};

}  // namespace tensorferry
