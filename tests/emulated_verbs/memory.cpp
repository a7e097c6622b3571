#include "tests/emulated_verbs/memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <mutex>

namespace tensorferry::emulated_verbs {
namespace {

constexpr std::uint32_t remote_bit = 0x80000000U;  // set in rkeys
constexpr unsigned remote_rights = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

/// Returns whether all pages of the range are mapped readable and, if asked for, writable.
bool is_mapped(std::uint64_t start, std::uint64_t bytes, bool writable) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> maps(std::fopen("/proc/self/maps", "re"), &std::fclose);
  if (maps == nullptr) return true;
  char line[512];
  std::uint64_t reached = start;
  while (reached < start + bytes && std::fgets(line, sizeof line, maps.get()) != nullptr) {
    std::uint64_t from = 0, to = 0;
    char flags[5] = {};
    if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &from, &to, flags) != 3 || to <= reached) continue;
    if (from > reached || flags[0] != 'r' || (writable && flags[1] != 'w')) return false;
    reached = to;
  }
  return reached >= start + bytes;
}

// The kernel copies, so that memory that is mapped no more fails instead of ending the process.
bool copy_out(std::byte* to, const std::byte* from, std::size_t bytes) {
  const iovec local{to, bytes}, other{const_cast<std::byte*>(from), bytes};
  return ::process_vm_readv(::getpid(), &local, 1, &other, 1, 0) == static_cast<ssize_t>(bytes);
}

bool copy_in(std::byte* to, const std::byte* from, std::size_t bytes) {
  const iovec local{const_cast<std::byte*>(from), bytes}, other{to, bytes};
  return ::process_vm_writev(::getpid(), &local, 1, &other, 1, 0) == static_cast<ssize_t>(bytes);
}

}  // namespace

Region* Memory::add(ibv_pd* domain, void* data, std::size_t bytes, std::uint64_t start, unsigned rights) {
  const bool writes = (rights & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) != 0;
  if (bytes == 0 || (writes && (rights & IBV_ACCESS_LOCAL_WRITE) == 0)) return errno = EINVAL, nullptr;
  auto region = std::make_unique<Region>();
  region->gpu = Gpu::find(data, bytes);
  if (region->gpu) {
    if (!Gpu::peer_memory()) return errno = EFAULT, nullptr;
  } else if (!is_mapped(reinterpret_cast<std::uintptr_t>(data), bytes, (rights & IBV_ACCESS_LOCAL_WRITE) != 0)) {
    return errno = EFAULT, nullptr;
  }
  region->data = static_cast<std::byte*>(data);
  region->start = start;
  region->rights = rights;
  return insert(std::move(region), domain, bytes);
}

Region* Memory::add_dma_buf(ibv_pd* domain, int fd, std::size_t bytes, std::uint64_t start, unsigned rights) {
  if (!Gpu::dma_buf()) return errno = EOPNOTSUPP, nullptr;
  if (::lseek(fd, 0, SEEK_CUR) < 0 && errno == EBADF) return nullptr;
  auto* const data = reinterpret_cast<std::byte*>(start);
  auto region = std::make_unique<Region>();
  region->gpu = Gpu::find(data, bytes);
  if (bytes == 0 || !region->gpu) return errno = EINVAL, nullptr;
  region->data = data;
  region->start = start;
  region->rights = rights;
  return insert(std::move(region), domain, bytes);
}

Region* Memory::insert(std::unique_ptr<Region> region, ibv_pd* domain, std::size_t bytes) {
  const std::unique_lock lock(mutex_);
  if (bytes_ + bytes > limit_) return errno = ENOMEM, nullptr;
  bytes_ += bytes;
  last_key_ += 0x101;  // a card's keys do not count by one either
  region->context = domain->context;
  region->pd = domain;
  region->addr = region->data;
  region->length = bytes;
  region->handle = last_key_;
  region->lkey = last_key_ & ~remote_bit;
  region->rkey = (region->rights & remote_rights) != 0 ? region->lkey | remote_bit : 0;
  auto* const raw = region.get();
  regions_[raw->lkey] = raw;
  if (raw->rkey != 0) regions_[raw->rkey] = raw;
  all_[raw] = std::move(region);
  return raw;
}

void Memory::remove(Region* region) {
  const std::unique_lock lock(mutex_);
  const auto found = all_.find(region);
  if (found == all_.end()) return;
  bytes_ -= region->length;
  std::erase_if(regions_, [&](const auto& entry) { return entry.second == region; });
  all_.erase(found);
}

bool Memory::revoke(std::uint32_t key) {
  const std::unique_lock lock(mutex_);
  const auto found = regions_.find(key);
  if (found == regions_.end()) return false;
  std::erase_if(regions_, [region = found->second](const auto& entry) { return entry.second == region; });
  return true;
}

std::uint64_t Memory::bytes() const {
  const std::shared_lock lock(mutex_);
  return bytes_;
}

bool Memory::used(const ibv_pd* domain) const {
  const std::shared_lock lock(mutex_);
  return std::any_of(all_.begin(), all_.end(), [&](const auto& entry) { return entry.first->pd == domain; });
}

const Region* Memory::find(const Span& span, unsigned rights) const {
  const auto found = regions_.find(span.key);
  if (found == regions_.end()) return nullptr;
  const Region& region = *found->second;
  const bool remote = (span.key & remote_bit) != 0;
  if (remote != ((rights & remote_rights) != 0) || region.pd != span.domain) return nullptr;
  if ((region.rights & rights) != rights) return nullptr;
  if (span.start < region.start || span.start - region.start > region.length) return nullptr;
  if (span.bytes > region.length - (span.start - region.start)) return nullptr;
  return &region;
}

bool Memory::allows(const Span& span, unsigned rights) const {
  const std::shared_lock lock(mutex_);
  return span.bytes == 0 || find(span, rights) != nullptr;
}

bool Memory::read(const Span& span, unsigned rights, std::byte* to) const {
  if (span.bytes == 0) return true;
  const std::shared_lock lock(mutex_);
  const Region* const region = find(span, rights);
  if (region == nullptr) return false;
  const auto* const from = region->data + (span.start - region->start);
  return region->gpu ? region->gpu.read(to, from, span.bytes) : copy_out(to, from, span.bytes);
}

bool Memory::write(const Span& span, unsigned rights, const std::byte* from) const {
  if (span.bytes == 0) return true;
  const std::shared_lock lock(mutex_);
  const Region* const region = find(span, rights);
  if (region == nullptr) return false;
  auto* const to = region->data + (span.start - region->start);
  if (region->gpu) return region->gpu.write(to, from, span.bytes);
  // Cards write in any order. The last piece first shows a program that looks at the last byte instead of a completion.
  constexpr std::uint64_t piece = 4096;
  for (auto end = span.bytes; end > 0;) {
    const auto begin = (end - 1) / piece * piece;
    if (!copy_in(to + begin, from + begin, end - begin)) return false;
    end = begin;
  }
  return true;
}

}  // namespace tensorferry::emulated_verbs
