#include "channels/cma/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <string_view>
#include <utility>

#include "base/text.h"

namespace tensorferry::cma {

namespace {

std::optional<std::uint64_t> started_by(const std::string& stat_file) {
  const FileDescriptor file(::open(stat_file.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 1024> text{};
  const auto got = file ? ::read(file.get(), text.data(), text.size()) : -1;
  if (got <= 0) return std::nullopt;
  std::string_view left(text.data(), static_cast<std::size_t>(got));
  const auto name_end = left.rfind(')');  // the name may hold any characters, also ") "
  if (name_end == std::string_view::npos) return std::nullopt;
  left.remove_prefix(name_end);
  for (int field = 2; field < 22; ++field) {
    const auto space = left.find(' ');
    if (space == std::string_view::npos) return std::nullopt;
    left.remove_prefix(space + 1);
  }
  std::uint64_t started = 0;
  if (std::from_chars(left.data(), left.data() + left.size(), started).ec != std::errc()) return std::nullopt;
  return started;
}

/// Returns whether this process has CAP_SYS_PTRACE.
bool may_trace_any() {
  constexpr int cap_sys_ptrace = 19;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    constexpr std::string_view key = "CapEff:\t";
    if (!line.starts_with(key)) continue;
    std::uint64_t set = 0;
    std::from_chars(line.data() + key.size(), line.data() + line.size(), set, 16);
    return (set >> cap_sys_ptrace & 1) != 0;
  }
  return false;
}

}  // namespace

std::optional<Identity> own_identity() {
  std::array<char, 32> link{};
  const auto length = ::readlink("/proc/self", link.data(), link.size() - 1);
  std::int32_t named = 0;
  if (length <= 0 || std::from_chars(link.data(), link.data() + length, named).ec != std::errc()) return std::nullopt;
  const auto started = started_by("/proc/self/stat");
  if (named != ::getpid() || !started) return std::nullopt;
  return Identity{named, *started};
}

std::optional<std::uint64_t> started_of(std::int32_t pid) { return started_by(formatted("/proc/{}/stat", pid)); }

std::optional<std::string> scope_refusal(int scope, bool capable) {
  if (scope <= 0 || (scope < 3 && capable)) return std::nullopt;
  return formatted("kernel.yama.ptrace_scope is {}, so processes may not read each other's memory: set it to 0{}",
                   scope, scope < 3 ? ", or give both processes CAP_SYS_PTRACE" : " and reboot");
}

std::optional<std::string> own_scope_refusal() {
  int scope = 0;
  if (!(std::ifstream("/proc/sys/kernel/yama/ptrace_scope") >> scope)) return std::nullopt;  // a kernel without Yama
  return scope_refusal(scope, may_trace_any());
}

bool is_refusal(int error) noexcept { return error == EPERM || error == EACCES || error == ENOSYS; }

std::string text_of_refusal(int error) {
  return formatted(
      "the kernel does not allow reads of the other process's memory (process_vm_readv: {}): allow them (in a "
      "container: "
      "--cap-add=SYS_PTRACE, and a seccomp profile that permits process_vm_readv), or let other channels carry",
      std::strerror(error));
}

Result<Process> Process::find(Identity identity) {
  const auto gone = [&](std::string_view why) {
    return Status(Code::connection_lost, formatted("process {} {}", identity.pid, why));
  };
  if (identity.pid <= 0) return gone("does not exist");
  FileDescriptor pidfd(static_cast<int>(::syscall(SYS_pidfd_open, identity.pid, 0)));
  if (!pidfd && errno == ESRCH) return gone("has ended");
  // Reads the start time after opening the pidfd: if the start time matches, the pidfd refers to that process, or to an
  // earlier one of the same pid that has ended, and alive() is false.
  const auto started = started_of(identity.pid);
  if (!started) return gone("has ended");
  if (*started != identity.started) return gone("is a later process with the same pid: the peer has ended");
  return Process(identity, std::move(pidfd));
}

int Process::read(std::byte* to, std::uint64_t from, std::size_t bytes) const {
  while (bytes > 0) {
    const iovec local{to, bytes};
    const iovec remote{reinterpret_cast<void*>(from), bytes};  // NOLINT(performance-no-int-to-ptr): a remote address
    const auto got = ::process_vm_readv(identity_.pid, &local, 1, &remote, 1, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return errno;
    if (got == 0) return EFAULT;
    to += got;
    from += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::size_t>(got);
  }
  return 0;
}

bool Process::alive() const {
  if (!pidfd_) return started_of(identity_.pid) == identity_.started;
  pollfd ended{pidfd_.get(), POLLIN, 0};
  return ::poll(&ended, 1, 0) <= 0;  // a signal that interrupts it says nothing
}

}  // namespace tensorferry::cma
