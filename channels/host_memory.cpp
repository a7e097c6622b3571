#include "channels/host_memory.h"

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>

#include "base/fork.h"
#include "channels/allocations.h"
#include "channels/size_class.h"

#if defined(__SANITIZE_ADDRESS__)
#define TENSORFERRY_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TENSORFERRY_ASAN 1
#endif
#endif
#ifdef TENSORFERRY_ASAN
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) ((void)(address), (void)(size))
#endif

namespace tensorferry {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t page = 4096;
constexpr std::size_t cache_line = 64;
constexpr std::size_t huge_page = std::size_t{2} << 20;
constexpr std::size_t mapped_from = std::size_t{64} << 10;  // below, malloc's own caches are as good as mapped pages

constexpr auto classes = size_class::count;
constexpr std::size_t class_bytes(std::size_t index) { return size_class::bytes_of(index); }

/// Maps `bytes` bytes; returns null if the system has none.
std::byte* map_pages(std::size_t bytes) {
  const auto slack = bytes >= huge_page ? huge_page : 0;  // a huge page begins at a multiple of its size
  void* mapped = ::mmap(nullptr, bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  auto* const begin = static_cast<std::byte*>(mapped);
  if (slack == 0) return begin;

  const auto before = (huge_page - reinterpret_cast<std::uintptr_t>(begin) % huge_page) % huge_page;
  if (before > 0) ::munmap(begin, before);
  if (slack > before) ::munmap(begin + before + bytes, slack - before);
  ::madvise(begin + before, bytes, MADV_HUGEPAGE);  // fails harmlessly on a kernel without huge pages
  return begin + before;
}

std::byte* obtain(std::size_t bytes) {
  // Aligned to a cache line, not to a page: for page alignment malloc would lose a page for each block of 5 KB.
  return bytes < mapped_from ? static_cast<std::byte*>(std::aligned_alloc(cache_line, bytes)) : map_pages(bytes);
}

/// Allocates from malloc, in one piece with the reference count.
Buffer small_buffer(std::size_t bytes, Device device) {
  auto memory = std::make_shared_for_overwrite<std::byte[]>(bytes + cache_line);
  const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.get()) % cache_line;
  auto* const data = memory.get() + (cache_line - misaligned) % cache_line;
  return {device, data, bytes, nullptr, std::move(memory)};
}

}  // namespace

/// Holds the idle blocks. Each held block owns it too, so it lives until the last one has come back.
struct HostMemory::Pool {
  /// A piece of memory of one size class, with its links in the list of idle blocks.
  struct Block {
    explicit Block(std::size_t i);
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block();

    const std::size_t index;
    std::byte* const data;         // null if the system had none
    std::uint64_t generation = 0;  // in Allocations; 0: malloc's, which is not there
    Clock::time_point idle_since;
    Block* newer = nullptr;
    Block* older = nullptr;
  };
  /// The idle blocks of one size.
  struct Class {
    std::mutex mutex;
    Block* newest = nullptr;
    Block* oldest = nullptr;
  };
  /// A block that a receiver holds; returns to the pool when the last holder drops it.
  struct Held {
    Held(std::shared_ptr<Pool> p, std::unique_ptr<Block> b) noexcept;
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;
    ~Held();

    const std::shared_ptr<Pool> pool;
    std::unique_ptr<Block> block;
  };

  explicit Pool(Limits l) : limits(l) {}
  ~Pool() {
    if (ours()) drain();
  }

  /// Returns false in a forked child.
  [[nodiscard]] bool ours() const { return forks() == born_in; }
  /// Returns the idle block of this class that was used last; null if none is idle.
  std::unique_ptr<Block> take(std::size_t index);
  /// Keeps a block for reuse; frees it if enough is idle or the pool has ended.
  void give_back(std::unique_ptr<Block> block) noexcept;
  void trim();
  /// Frees the idle blocks, and from now on every block that comes back.
  void end() {
    ended.store(true, std::memory_order_relaxed);
    drain();
  }

  const Limits limits;
  const std::uint32_t born_in = forks();
  std::array<Class, classes> by_size;
  std::atomic<std::size_t> held{0};
  std::atomic<std::size_t> idle{0};
  std::atomic<bool> ended{false};

 private:
  void drain() {
    for (std::size_t index = 0; index < classes; ++index) {
      while (take(index)) continue;
    }
  }
};

HostMemory::Pool::Block::Block(std::size_t i) : index(i), data(obtain(class_bytes(i))) {
  const auto bytes = class_bytes(index);
  if (data != nullptr && bytes >= mapped_from)
    generation = Allocations::of_this_process().add(data, bytes, Allocations::Kind::receives);
}

HostMemory::Pool::Block::~Block() {
  if (data == nullptr) return;
  const auto bytes = class_bytes(index);
  if (generation != 0) Allocations::of_this_process().remove(data, generation);
  ASAN_UNPOISON_MEMORY_REGION(data, bytes);
  if (bytes < mapped_from) {
    std::free(data);
  } else {
    ::munmap(data, bytes);
  }
}

HostMemory::Pool::Held::Held(std::shared_ptr<Pool> p, std::unique_ptr<Block> b) noexcept
    : pool(std::move(p)), block(std::move(b)) {
  ASAN_UNPOISON_MEMORY_REGION(block->data, class_bytes(block->index));
  pool->held.fetch_add(class_bytes(block->index), std::memory_order_relaxed);
}

HostMemory::Pool::Held::~Held() {
  if (pool->ours()) {
    pool->held.fetch_sub(class_bytes(block->index), std::memory_order_relaxed);
    pool->give_back(std::move(block));
  } else {
    (void)block.release();  // leaked: it is the parent's, and in this child the locks may be held for ever
  }
}

std::unique_ptr<HostMemory::Pool::Block> HostMemory::Pool::take(std::size_t index) {
  auto& of = by_size[index];
  std::unique_ptr<Block> block;
  {
    std::lock_guard lock(of.mutex);
    block.reset(of.newest);
    if (!block) return nullptr;
    of.newest = block->older;
    (of.newest ? of.newest->newer : of.oldest) = nullptr;
  }
  idle.fetch_sub(class_bytes(index), std::memory_order_relaxed);
  return block;
}

void HostMemory::Pool::give_back(std::unique_ptr<Block> block) noexcept {
  const auto bytes = class_bytes(block->index);
  if (idle.fetch_add(bytes, std::memory_order_relaxed) + bytes <= limits.idle_bytes) {
    block->idle_since = Clock::now();
    ASAN_POISON_MEMORY_REGION(block->data, bytes);
    auto& of = by_size[block->index];
    std::lock_guard lock(of.mutex);
    if (!ended.load(std::memory_order_relaxed)) {  // end() sets it before it takes this lock for the last time
      block->newer = nullptr;
      block->older = of.newest;
      (of.newest ? of.newest->newer : of.oldest) = block.get();
      of.newest = block.release();
      return;
    }
  }
  idle.fetch_sub(bytes, std::memory_order_relaxed);
}

void HostMemory::Pool::trim() {
  const auto expired = Clock::now() - limits.idle_for;
  for (std::size_t index = classes; index-- > 0;) {  // large ones first: fewer calls for the same bytes
    auto& of = by_size[index];
    while (idle.load(std::memory_order_relaxed) > limits.floor_bytes) {
      std::unique_ptr<Block> block;
      {
        std::lock_guard lock(of.mutex);
        if (of.oldest == nullptr || of.oldest->idle_since > expired) break;
        block.reset(of.oldest);
        of.oldest = block->newer;
        (of.oldest ? of.oldest->older : of.newest) = nullptr;
      }
      idle.fetch_sub(class_bytes(index), std::memory_order_relaxed);
    }
  }
}

HostMemory::HostMemory() : HostMemory(Limits()) {}
HostMemory::HostMemory(Limits limits) : pool_(std::make_shared<Pool>(limits)) {}
HostMemory::~HostMemory() {
  if (pool_->ours()) pool_->end();
}

Buffer HostMemory::allocate(std::size_t bytes, Device device) {
  if (device.type != DeviceType::cpu || bytes > size_class::largest) return {};
  try {
    if (bytes < page || !pool_->ours()) return small_buffer(bytes, device);
    auto block = pool_->take(size_class::of(bytes));
    if (!block) block = std::make_unique<Pool::Block>(size_class::of(bytes));
    auto* const data = block->data;
    if (data == nullptr) return {};
    return {device, data, bytes, nullptr, std::make_shared<Pool::Held>(pool_, std::move(block))};
  } catch (const std::bad_alloc&) {
    return {};
  }
}

void HostMemory::trim() {
  if (pool_->ours()) pool_->trim();
}

HostMemory::Usage HostMemory::usage() const {
  return {pool_->held.load(std::memory_order_relaxed), pool_->idle.load(std::memory_order_relaxed)};
}

}  // namespace tensorferry
