#include "tests/emulated_gpu/memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

namespace emulated {
namespace {

void* map_shared(void* at, std::size_t bytes, int descriptor) {
  const int fixed = at == nullptr ? 0 : MAP_FIXED;
  return ::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | fixed, descriptor, 0);
}

constexpr std::string_view name = "emulated GPU ";

/// Returns the device of pages from any process: their file's name says it.
int device_of(int descriptor) {
  std::array<char, 64> link{};
  const auto path = "/proc/self/fd/" + std::to_string(descriptor);
  if (::readlink(path.c_str(), link.data(), link.size() - 1) < 0) return 0;
  const std::string_view file(link.data());
  const auto at = file.find(name);
  return at == std::string_view::npos ? 0 : std::atoi(file.substr(at + name.size()).data());
}

}  // namespace

Pages::~Pages() { ::close(descriptor); }

Memory& Memory::of_this_process() {
  static auto& memory = *new Memory;
  return memory;
}

PagesPtr Memory::create(std::size_t bytes, int device) {
  if (bytes == 0 || used(device) + bytes > device_bytes) return nullptr;
  const int descriptor = ::memfd_create((std::string(name) + std::to_string(device)).c_str(), MFD_CLOEXEC);
  if (descriptor < 0) return nullptr;
  if (::ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) {
    ::close(descriptor);
    return nullptr;
  }
  return import(descriptor);
}

PagesPtr Memory::import(int descriptor) {
  struct stat file {};
  if (::fstat(descriptor, &file) != 0) {
    ::close(descriptor);
    return nullptr;
  }
  const std::lock_guard lock(mutex_);
  auto& known = known_[file.st_ino];
  if (auto same = known.lock()) {
    ::close(descriptor);
    return same;
  }
  auto pages = std::make_shared<Pages>(descriptor, static_cast<std::size_t>(file.st_size), device_of(descriptor));
  known = pages;
  return pages;
}

std::optional<std::uintptr_t> Memory::map(const PagesPtr& pages, int device) {
  const std::lock_guard lock(mutex_);
  auto* const at = map_shared(nullptr, pages->bytes, pages->descriptor);
  if (at == MAP_FAILED) return std::nullopt;
  const auto begin = reinterpret_cast<std::uintptr_t>(at);
  ranges_[begin] = {begin, pages->bytes, next_++, pages, true, 1U << device};
  return begin;
}

bool Memory::map_at(std::uintptr_t begin, std::size_t bytes, const PagesPtr& pages) {
  const std::lock_guard lock(mutex_);
  if (bytes > pages->bytes) return false;
  if (map_shared(reinterpret_cast<void*>(begin), bytes, pages->descriptor) == MAP_FAILED) return false;
  ranges_[begin] = {begin, bytes, next_++, pages, false, 0};
  return true;
}

bool Memory::unmap(std::uintptr_t begin) {
  PagesPtr last;
  const std::lock_guard lock(mutex_);
  const auto it = ranges_.find(begin);
  if (it == ranges_.end()) return false;
  auto* const at = reinterpret_cast<void*>(begin);
  constexpr int hole = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  const bool gone = it->second.allocated ? ::munmap(at, it->second.bytes) == 0
                                         : ::mmap(at, it->second.bytes, PROT_NONE, hole, -1, 0) != MAP_FAILED;
  if (!gone) return false;
  last = std::move(it->second.pages);
  ranges_.erase(it);
  return true;
}

std::optional<Range> Memory::find(std::uintptr_t address) {
  const std::lock_guard lock(mutex_);
  auto it = ranges_.upper_bound(address);
  if (it == ranges_.begin()) return std::nullopt;
  --it;
  if (address - it->second.begin >= it->second.bytes) return std::nullopt;
  return it->second;
}

bool Memory::grant(std::uintptr_t begin, std::size_t bytes, int device) {
  const std::lock_guard lock(mutex_);
  for (const auto end = begin + bytes; begin < end;) {
    const auto it = ranges_.find(begin);
    if (it == ranges_.end() || it->second.allocated || it->second.bytes > end - begin) return false;
    it->second.access |= 1U << device;
    begin += it->second.bytes;
  }
  return true;
}

std::size_t Memory::used(int device) {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  std::erase_if(known_, [](const auto& each) { return each.second.expired(); });
  for (const auto& [number, weak] : known_) {
    if (const auto pages = weak.lock(); pages && pages->device == device) bytes += pages->bytes;
  }
  return bytes;
}

void Memory::lock(std::uintptr_t begin, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  locked_[begin] = bytes;
}

bool Memory::unlock(std::uintptr_t begin) {
  const std::lock_guard lock(mutex_);
  return locked_.erase(begin) == 1;
}

bool Memory::pageable(std::uintptr_t address) {
  if (find(address)) return false;
  const std::lock_guard lock(mutex_);
  auto it = locked_.upper_bound(address);
  return it == locked_.begin() || address - std::prev(it)->first >= std::prev(it)->second;
}

std::uint64_t Memory::add_handle(PagesPtr pages) {
  const std::lock_guard lock(mutex_);
  handles_.emplace(next_, std::move(pages));
  return next_++;
}

PagesPtr Memory::handle(std::uint64_t handle) {
  const std::lock_guard lock(mutex_);
  const auto it = handles_.find(handle);
  return it == handles_.end() ? nullptr : it->second;
}

bool Memory::drop_handle(std::uint64_t handle) {
  PagesPtr last;
  const std::lock_guard lock(mutex_);
  const auto it = handles_.find(handle);
  if (it == handles_.end()) return false;
  last = std::move(it->second);
  handles_.erase(it);
  return true;
}

}  // namespace emulated
