#include "tests/emulated_gpu/multicast.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <string>
#include <string_view>

namespace emulated {
namespace {

constexpr std::string_view name = "emulated multicast object";

}  // namespace

/// In memory that all processes map. A process's numbers of its descriptors lead others to the memory that it has
/// bound.
struct Multicast::State {
  struct Bound {
    std::atomic<std::uint32_t> bind;  // counts; even: unbound
    std::atomic<int> process, descriptor;
  };
  std::uint32_t devices;
  std::uint32_t handle_types;
  std::uint64_t bytes;
  std::atomic<std::uint32_t> added;  // bits
  std::array<Bound, most_devices> bound;
};

PagesPtr Multicast::create(unsigned int devices, std::size_t bytes, unsigned int handle_types) {
  const int descriptor = ::memfd_create(std::string(name).c_str(), MFD_CLOEXEC);
  if (descriptor < 0) return nullptr;
  auto* const at = ::ftruncate(descriptor, sizeof(State)) == 0
                       ? ::mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0)
                       : MAP_FAILED;
  if (at == MAP_FAILED) {
    ::close(descriptor);
    return nullptr;
  }
  auto& state = *static_cast<State*>(at);
  state.devices = devices;
  state.handle_types = handle_types;
  state.bytes = bytes;
  ::munmap(at, sizeof(State));
  return Memory::of_this_process().import(descriptor);
}

std::shared_ptr<Multicast> Multicast::find(int descriptor) {
  std::array<char, 64> link{};
  const auto path = "/proc/self/fd/" + std::to_string(descriptor);
  if (::readlink(path.c_str(), link.data(), link.size() - 1) < 0) return nullptr;
  if (std::string_view(link.data()).find(name) == std::string_view::npos) return nullptr;
  auto* const at = ::mmap(nullptr, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) return nullptr;
  return std::shared_ptr<Multicast>(new Multicast(static_cast<State*>(at)));
}

Multicast::~Multicast() {
  for (auto& each : mapped_) unmap(each);
  ::munmap(state_, sizeof(State));
}

std::size_t Multicast::bytes() const { return state_->bytes; }
unsigned int Multicast::handle_types() const { return state_->handle_types; }
bool Multicast::has(int device) const { return (state_->added.load() >> static_cast<unsigned>(device) & 1U) != 0; }
bool Multicast::complete() const {
  return static_cast<std::uint32_t>(std::popcount(state_->added.load())) == state_->devices;
}

bool Multicast::add(int device) {
  if (complete()) return false;
  const auto bit = 1U << static_cast<unsigned>(device);
  return (state_->added.fetch_or(bit) & bit) == 0;
}

bool Multicast::bind(const PagesPtr& memory) {
  const std::lock_guard lock(mutex_);
  const auto device = static_cast<std::size_t>(memory->device);
  auto& there = state_->bound.at(device);
  if (there.bind.load() % 2 != 0) return false;
  bound_.at(device) = memory;
  there.process = ::getpid();
  there.descriptor = memory->descriptor;
  there.bind.fetch_add(1);
  return true;
}

bool Multicast::unbind(int device) {
  const std::lock_guard lock(mutex_);
  auto& held = bound_.at(static_cast<std::size_t>(device));
  if (!held) return false;
  state_->bound.at(static_cast<std::size_t>(device)).bind.fetch_add(1);
  held.reset();
  return true;
}

void Multicast::unmap(Mapped& mapped) {
  if (mapped.at != nullptr) ::munmap(mapped.at, mapped.bytes);
  mapped = {};
}

std::vector<std::byte*> Multicast::replicas() {
  const std::lock_guard lock(mutex_);
  std::vector<std::byte*> out;
  for (int device = 0; device < most_devices; ++device) {
    if (!has(device)) continue;
    const auto& there = state_->bound.at(static_cast<std::size_t>(device));
    auto& here = mapped_.at(static_cast<std::size_t>(device));
    const auto bind = there.bind.load();
    if (bind % 2 == 0) return {};
    if (here.bind != bind) {
      unmap(here);
      const auto path = "/proc/" + std::to_string(there.process) + "/fd/" + std::to_string(there.descriptor);
      const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
      if (descriptor < 0) return {};
      auto* const at = ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
      ::close(descriptor);
      if (at == MAP_FAILED) return {};
      here = {bind, static_cast<std::byte*>(at), bytes()};
    }
    out.push_back(here.at);
  }
  return out;
}

}  // namespace emulated
