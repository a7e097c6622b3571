/// Another process of this host: whether it is still the one that it was, and its memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "channels/file_descriptor.h"
#include "channels/status.h"

namespace tensorferry::cma {

/// A process as others of its pid namespace see it.
struct Identity {
  std::int32_t pid = 0;
  std::uint64_t started = 0;  // clock ticks since the host booted: tells it from a later one of the same pid
  bool operator==(const Identity&) const = default;
};

/// This process; nullopt where /proc does not say, or belongs to another pid namespace.
std::optional<Identity> own_identity();

/// When a process began; nullopt: there is none of that pid, or /proc does not say.
std::optional<std::uint64_t> started_of(std::int32_t pid);

/// Why no process of this user may read another's memory under kernel.yama.ptrace_scope = `scope` (the most that it
/// lets through without CAP_SYS_PTRACE is a parent reading its children); nullopt: it may.
std::optional<std::string> scope_refusal(int scope, bool capable);
/// The same of this process.
std::optional<std::string> own_scope_refusal();

/// Whether process_vm_readv's `error` is the kernel's no, which will be the same for the next buffer.
bool is_refusal(int error) noexcept;
/// "the kernel does not let its memory be read (...)": what to do about it.
std::string text_of_refusal(int error);

/// Thread-safe. A forked child may use its copy.
class Process final {
 public:
  /// Finds it, and holds on to a pidfd, so that another process that is given the same pid is not taken for it.
  /// ConnectionLost: it has ended, or the pid is another process's.
  static Result<Process> find(Identity identity);

  /// Copies memory of it; what stands there may change meanwhile. 0, or errno: EFAULT where it has no such memory (of
  /// which a part may have been copied), EPERM where the kernel does not allow it, ESRCH where it has ended.
  /// Waits as long as it takes the kernel to get at the pages.
  [[nodiscard]] int read(std::byte* to, std::uint64_t from, std::size_t bytes) const;

  /// False: it has ended, so what was read last may be another's.
  [[nodiscard]] bool alive() const;

  [[nodiscard]] std::int32_t pid() const { return identity_.pid; }

 private:
  Process(Identity identity, FileDescriptor pidfd) : identity_(identity), pidfd_(std::move(pidfd)) {}

  Identity identity_;
  FileDescriptor pidfd_;  // empty on kernels before 5.3, where the start time alone tells
};

}  // namespace tensorferry::cma
