#include "tests/hostile/memory.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <utility>

namespace hostile {
namespace {

Descriptor memory(std::size_t bytes, int seals) {
  Descriptor made(::memfd_create("hostile", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (::ftruncate(made.get(), static_cast<off_t>(bytes)) != 0 || ::fcntl(made.get(), F_ADD_SEALS, seals) != 0)
    return Descriptor();
  return made;
}

char* mapped(const Descriptor& descriptor, std::size_t bytes) {
  auto* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor.get(), 0);
  return data == MAP_FAILED ? nullptr : static_cast<char*>(data);
}

/// Keeps the one end of a pair of descriptors.
Descriptor first_of(std::array<int, 2> pair) {
  ::close(pair[1]);
  return Descriptor(pair[0]);
}

}  // namespace

SharedPages::SharedPages(Descriptor descriptor, char* data, std::size_t bytes)
    : descriptor_(std::move(descriptor)), data_(data), bytes_(bytes) {}

SharedPages::~SharedPages() { ::munmap(data_, bytes_); }

std::shared_ptr<SharedPages> SharedPages::make(std::size_t bytes) {
  auto descriptor = memory(bytes, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  auto* const data = mapped(descriptor, bytes);
  if (data == nullptr) return nullptr;
  return std::shared_ptr<SharedPages>(new SharedPages(std::move(descriptor), data, bytes));
}

std::shared_ptr<SharedPages> SharedPages::map(Descriptor received, std::size_t bytes) {
  auto* const data = mapped(received, bytes);
  if (data == nullptr) return nullptr;
  return std::shared_ptr<SharedPages>(new SharedPages(Descriptor(), data, bytes));
}

Descriptor wrong_descriptor(Random& random) {
  std::array<int, 2> pair{-1, -1};
  switch (random.below(11)) {
    case 0:
      return ::pipe2(pair.data(), O_CLOEXEC) == 0 ? first_of(pair) : Descriptor();
    case 1:
      ::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair.data());
      return first_of(pair);
    case 2:
      return Descriptor(::open("/dev/null", O_RDWR | O_CLOEXEC));
    case 3:
      return Descriptor(::eventfd(0, EFD_CLOEXEC));
    case 4:
      return Descriptor(::open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    case 5:
      return Descriptor(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
    case 6:
      return Descriptor(::open("/proc/self", O_PATH | O_CLOEXEC));
    case 7:
      return Descriptor(::epoll_create1(EPOLL_CLOEXEC));
    case 8:
      return Descriptor(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC));
    case 9:
      return memory(4096, 0);  // it could shrink
    default:
      return memory(std::size_t{1} << random.below(20), F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
  }
}

Meddler::Meddler(std::uint64_t seed) : thread_([this, seed] { run(seed); }) {}

Meddler::~Meddler() {
  ends_ = true;
  thread_.join();
}

void Meddler::add(const std::shared_ptr<SharedPages>& pages, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  victims_.push_back({pages, bytes});
}

void Meddler::run(std::uint64_t seed) {
  Random random(seed);
  while (!ends_) {
    {
      const std::lock_guard lock(mutex_);
      std::erase_if(victims_, [](const Victim& each) { return each.pages.expired(); });
      for (const auto& [weak, bytes] : victims_) {
        const auto pages = weak.lock();
        if (!pages) continue;
        auto word = pages->at<std::uint64_t>(random.below(bytes / 8) * 8);
        const auto before = word.load();
        word = random.one_in(2) ? random.edge() : before + random.below(64);
        if (random.one_in(4)) word = before;  // wrong for a moment
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50 + random.below(400)));
  }
}

}  // namespace hostile
