/// A store in a folder that processes share, for processes without a common network. Each key is one file. Writers and
/// counters hold a file lock; readers take none.
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "agent/store.h"
#include "base/file_descriptor.h"

namespace tensorferry::testing {

class FolderStore final : public Store {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) {}

  Status set(std::string_view key, ByteView value) override {
    const Lock lock(*this);
    write(file_of(key), text_of(value));
    return {};
  }

  Result<Bytes> get(std::string_view key, std::chrono::milliseconds timeout) override {
    const auto until = std::chrono::steady_clock::now() + timeout;
    while (true) {
      std::ifstream file(file_of(key), std::ios::binary);
      if (file) {
        const std::string text{std::istreambuf_iterator<char>(file), {}};
        const auto bytes = view_of(text);
        return Bytes(bytes.begin(), bytes.end());
      }
      if (std::chrono::steady_clock::now() >= until) return Status(Code::deadline_exceeded, std::string(key));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  Result<std::int64_t> add(std::string_view key, std::int64_t amount) override {
    const Lock lock(*this);
    const auto file = file_of(key) + ".count";
    std::int64_t sum = 0;
    std::ifstream(file) >> sum;
    sum += amount;
    write(file, std::to_string(sum));
    return sum;
  }

  [[nodiscard]] bool loopback() const override { return true; }

 private:
  struct Lock {
    explicit Lock(const FolderStore& store)
        : file(::open((store.folder_ + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
      ::flock(file.get(), LOCK_EX);
    }
    FileDescriptor file;  // closing it releases the lock
  };

  [[nodiscard]] std::string file_of(std::string_view key) const {
    std::string name = folder_ + "/";
    for (const char c : key) {
      char hex[3];
      std::snprintf(hex, sizeof hex, "%02x", static_cast<unsigned char>(c));
      name += hex;
    }
    return name;
  }
  /// Replaces the file atomically, because readers take no lock.
  static void write(const std::string& file, std::string_view text) {
    std::ofstream(file + ".new", std::ios::binary) << text;
    std::error_code gone;  // an agent may write to the end, when the test has removed the folder
    std::filesystem::rename(file + ".new", file, gone);
  }

  const std::string folder_;
};

}  // namespace tensorferry::testing
