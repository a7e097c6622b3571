#include "base/host.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <fstream>
#include <random>

#include "base/text.h"

namespace tensorferry {

std::string boot_id() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id;
}

std::uint64_t own_namespace(const char* kind) {
  struct stat about {};
  return ::stat(formatted("/proc/self/ns/{}", kind).c_str(), &about) == 0 ? about.st_ino : 0;
}

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

std::uint64_t random_word() {
  std::uint64_t word = 0;
  if (::getrandom(&word, sizeof word, 0) == static_cast<ssize_t>(sizeof word)) return word;
  std::random_device cpu;  // for a kernel or a sandbox without getrandom
  return std::uint64_t{cpu()} << 32 | cpu();
}

}  // namespace tensorferry
