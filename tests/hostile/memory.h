/// Memory that the hostile peer shares with an agent, and changes under its reader.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/hostile/connection.h"
#include "tests/hostile/random.h"

namespace hostile {

/// A mapping, and its descriptor if this process made the memory. Unmaps when destroyed.
class SharedPages {
 public:
  /// Makes a memfd as the protocol wants it: sealed against shrinking, growing and further seals.
  static std::shared_ptr<SharedPages> make(std::size_t bytes);
  /// Maps memory that the agent has sent; null if that fails.
  static std::shared_ptr<SharedPages> map(Descriptor received, std::size_t bytes);
  ~SharedPages();
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;

  template <class T>
  std::atomic_ref<T> at(std::size_t offset) {
    return std::atomic_ref<T>(*reinterpret_cast<T*>(data_ + offset));
  }
  [[nodiscard]] char* data() const { return data_; }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  [[nodiscard]] int descriptor() const { return descriptor_.get(); }

 private:
  SharedPages(Descriptor descriptor, char* data, std::size_t bytes);
  Descriptor descriptor_;
  char* data_;
  std::size_t bytes_;
};

/// Returns a descriptor that is no memory of the protocol: of another type, of another size, or without seals.
Descriptor wrong_descriptor(Random& random);

/// Writes random words into memory that is shared with the agent, on a thread of its own, as long as it exists.
class Meddler {
 public:
  explicit Meddler(std::uint64_t seed);
  ~Meddler();
  /// Meddles with these pages, of which another owner exists, within the first `bytes` bytes.
  void add(const std::shared_ptr<SharedPages>& pages, std::size_t bytes);

 private:
  void run(std::uint64_t seed);

  struct Victim {
    std::weak_ptr<SharedPages> pages;
    std::size_t bytes;
  };
  std::mutex mutex_;
  std::vector<Victim> victims_;
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

}  // namespace hostile
