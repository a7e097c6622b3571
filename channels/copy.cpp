#include "channels/copy.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <chrono>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/fork.h"
#include "base/threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tensorferry {

namespace {

constexpr std::size_t line = 64;
constexpr std::size_t page = 4096;
constexpr std::size_t stride = 4 * page;  // one write-combining stream per page; more streams are no faster

#if defined(__x86_64__)

/// Copies whole strides to a destination aligned to a cache line. Four pages take turns, so that the memory banks do
/// too.
__attribute__((target("avx512f"))) void stream_avx512(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += stride) {
    for (std::size_t i = 0; i < page; i += 2 * line) {
      for (std::size_t p = 0; p < stride; p += page) {
        const auto* const source = from + at + p + i;
        auto* const target = to + at + p + i;
        _mm_prefetch(source + 4 * line, _MM_HINT_T0);
        _mm_prefetch(source + 5 * line, _MM_HINT_T0);
        const auto first = _mm512_loadu_si512(source);
        const auto second = _mm512_loadu_si512(source + line);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target), first);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(target + line), second);
      }
    }
  }
  _mm_sfence();  // atomics do not order non-temporal stores
}

__attribute__((target("avx2"))) void stream_avx2(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t half = line / 2;
  for (std::size_t at = 0; at < bytes; at += stride) {
    for (std::size_t i = 0; i < page; i += 2 * line) {
      for (std::size_t p = 0; p < stride; p += page) {
        const auto* const source = from + at + p + i;
        auto* const target = to + at + p + i;
        _mm_prefetch(source + 4 * line, _MM_HINT_T0);
        _mm_prefetch(source + 5 * line, _MM_HINT_T0);
        const auto first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
        const auto second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + half));
        const auto third = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 2 * half));
        const auto fourth = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 3 * half));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target), first);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + half), second);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 2 * half), third);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(target + 3 * half), fourth);
      }
    }
  }
  _mm_sfence();
}

#elif defined(__aarch64__)

/// Copies a line by two non-temporal stores of 32 bytes. A later store with release order waits for them as for others.
inline void stream_line(std::byte* to, const std::byte* from) {
  asm volatile(  // NOLINT(hicpp-no-assembler)
      "ldp q0, q1, [%[from]]\n\t"
      "ldp q2, q3, [%[from], #32]\n\t"
      "prfm pldl1strm, [%[from], #256]\n\t"
      "stnp q0, q1, [%[to]]\n\t"
      "stnp q2, q3, [%[to], #32]"
      :
      : [from] "r"(from), [to] "r"(to)
      : "v0", "v1", "v2", "v3", "memory");
}

void stream_neon(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += stride) {
    for (std::size_t i = 0; i < page; i += 2 * line) {
      for (std::size_t p = 0; p < stride; p += page) {
        stream_line(to + at + p + i, from + at + p + i);
        stream_line(to + at + p + i + line, from + at + p + i + line);
      }
    }
  }
}

#endif

/// Copies whole strides to a destination aligned to a cache line.
void stream([[maybe_unused]] std::byte* to, [[maybe_unused]] const std::byte* from, [[maybe_unused]] std::size_t bytes,
            [[maybe_unused]] Streaming streaming) {
#if defined(__x86_64__)
  (streaming == Streaming::avx512 ? stream_avx512 : stream_avx2)(to, from, bytes);
#elif defined(__aarch64__)
  stream_neon(to, from, bytes);
#endif
}

/// Returns how many threads of the machine run or wait for a core; nullopt if the system does not say.
std::optional<int> running_threads() noexcept {
  const FileDescriptor file(::open("/proc/loadavg", O_RDONLY | O_CLOEXEC));
  std::array<char, 128> text{};
  const auto got = file ? ::read(file.get(), text.data(), text.size()) : -1;
  if (got <= 0) return std::nullopt;
  const auto* at = text.data();
  const auto* const end = text.data() + got;
  for (int spaces = 0; spaces < 3; ++spaces) {  // "0.20 0.18 0.12 1/80 11206": the fourth field
    at = std::find(at, end, ' ');
    if (at != end) ++at;
  }
  int running = 0;
  if (std::from_chars(at, end, running).ec != std::errc()) return std::nullopt;
  return running;
}

/// Returns whether `more` further threads would each find a core that this process may use.
bool room_for(int more) noexcept {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
  const int cores = CPU_COUNT(&allowed);
  if (cores < 2) return false;
  // Each running thread is on one core: if fewer run than the cores that this process may use, one of those cores is
  // idle.
  auto running = running_threads();
  if (running && *running + more == cores + 1) {
    // Since Linux 6.12 a thread that falls asleep may stay in its core's queue, and in the count, until the core
    // chooses its next thread. If that was this thread's core, the core chooses now.
    ::sched_yield();
    running = running_threads();
  }
  return running && *running + more <= cores;
}

/// Returns the instructions for a copy of so many bytes.
Streaming streaming_for(std::size_t bytes, ReadBy reader) noexcept {
  static const auto best = best_streaming();
#if defined(__x86_64__)
  static const bool slow_to_take_back = __builtin_cpu_is("amd") != 0;
#else
  constexpr bool slow_to_take_back = false;
#endif
  const bool away = reader == ReadBy::another_core && slow_to_take_back;
  return bytes >= (away ? Copier::streams_away_from : Copier::streams_from) ? best : Streaming::none;
}

}  // namespace

Streaming best_streaming() noexcept {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return Streaming::avx512;
  if (__builtin_cpu_supports("avx2")) return Streaming::avx2;
  return Streaming::none;
#elif defined(__aarch64__)
  return Streaming::neon;
#else
  return Streaming::none;
#endif
}

std::string_view name_of(Streaming streaming) noexcept {
  switch (streaming) {
    case Streaming::none:
      break;
    case Streaming::avx2:
      return "avx2";
    case Streaming::avx512:
      return "avx512";
    case Streaming::neon:
      return "neon";
  }
  return "none";
}

void copy_streaming(std::byte* to, const std::byte* from, std::size_t bytes, Streaming streaming) noexcept {
  if (streaming != Streaming::none && bytes >= 2 * stride) {
    const auto head = (line - reinterpret_cast<std::uintptr_t>(to) % line) % line;
    std::memcpy(to, from, head);
    const auto middle = (bytes - head) / stride * stride;
    stream(to + head, from + head, middle, streaming);
    to += head + middle;
    from += head + middle;
    bytes -= head + middle;
  }
  if (bytes > 0) std::memcpy(to, from, bytes);
}

bool Copier::Work::step() {
  const auto at = next.fetch_add(chunk, std::memory_order_relaxed);
  if (at >= total) return false;
  call(target, at, std::min(chunk, total - at));
  return true;
}

/// Runs the second thread, and holds the work that it may join.
struct Copier::Helper {
  static constexpr std::chrono::seconds idle_for{2};
  static constexpr int parts_per_load_check = 4;  // reading the load costs about ten microseconds

  /// Offers the work to the thread, and starts the thread if there is none.
  void offer(Work& offered) {
    const std::lock_guard lock(mutex);
    work = &offered;
    if (!alive) {
      if (thread.joinable()) thread.join();  // returns at once: its function is about to return
      try {
        thread = start_thread([this] { run(); });
        alive = true;
      } catch (const std::system_error&) {
        return;  // the caller works alone
      }
    }
    changed.notify_all();
  }

  /// Returns when the thread has left the work and can no longer join it.
  void withdraw() {
    std::unique_lock lock(mutex);
    work = nullptr;
    changed.wait(lock, [&] { return !busy; });
  }

  void run() {
    std::unique_lock lock(mutex);
    while (changed.wait_for(lock, idle_for, [&] { return work != nullptr || ended; }) && !ended) {
      auto& mine = *std::exchange(work, nullptr);
      busy = true;
      lock.unlock();
      for (int parts = 1; mine.step(); ++parts) {
        if (parts % parts_per_load_check == 0 && !room_for(0)) break;
      }
      lock.lock();
      busy = false;
      changed.notify_all();
    }
    alive = false;
  }

  void end() {
    {
      const std::lock_guard lock(mutex);
      ended = true;
      changed.notify_all();
    }
    if (thread.joinable()) thread.join();
  }

  const std::uint32_t born_in = forks();
  std::mutex in_use;  // held by the caller whose work the thread may join
  std::mutex mutex;
  std::condition_variable changed;
  Work* work = nullptr;
  bool busy = false;
  bool alive = false;
  bool ended = false;
  std::thread thread;
};

Copier::Copier(ReadBy reader) : reader_(reader), helper_(std::make_unique<Helper>()) {}

Copier::~Copier() {
  if (helper_->born_in == forks()) {
    helper_->end();
  } else {
    (void)helper_.release();  // leaked: its thread is the parent's, and its locks may be held for ever
  }
}

void Copier::run(Work work) {
  const bool may_share = helper_->born_in == forks() && work.total > work.chunk;
  bool helped = false;
  int steps = 0, look_at = 0;
  do {
    // The process that waits for the bytes may spin for a while before it sleeps, so the caller looks again, ever more
    // rarely.
    if (may_share && !helped && steps == look_at) {
      helped = room_for(1) && helper_->in_use.try_lock();
      if (helped) helper_->offer(work);
      look_at = 2 * look_at + 1;
    }
    ++steps;
  } while (work.step());
  if (!helped) return;
  helper_->withdraw();
  helper_->in_use.unlock();
}

void Copier::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  const auto how = streaming_for(bytes, reader_);
  if (bytes < shares_from) return copy_streaming(to, from, bytes, how);
  const std::size_t chunk = bytes >= streams_from ? std::size_t{1} << 20 : std::size_t{512} << 10;
  in_parts(bytes, chunk, [&](std::size_t at, std::size_t n) { copy_streaming(to + at, from + at, n, how); });
}

void Copier::copy(std::span<const Piece> pieces) {
  std::size_t total = 0;
  for (const auto& piece : pieces) total += piece.bytes;
  if (pieces.size() == 1 || total < shares_from) {
    for (const auto& piece : pieces) copy(piece.to, piece.from, piece.bytes);
    return;
  }
  const auto how = streaming_for(total, reader_);
  constexpr std::size_t most = std::size_t{1} << 20;
  std::vector<Piece> cut;  // none above `most`, so that two threads end at about the same time
  cut.reserve(pieces.size() + total / most);
  for (const auto& piece : pieces) {
    for (std::size_t at = 0; at < piece.bytes; at += most)
      cut.push_back({piece.to + at, piece.from + at, std::min(most, piece.bytes - at)});
  }
  const auto at_once = std::max<std::size_t>(1, cut.size() * most / total);
  in_parts(cut.size(), at_once, [&](std::size_t first, std::size_t count) {
    for (const auto& piece : std::span(cut).subspan(first, count))
      copy_streaming(piece.to, piece.from, piece.bytes, how);
  });
}

}  // namespace tensorferry
