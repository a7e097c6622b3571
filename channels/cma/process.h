/// A process of this host: reads its memory, and checks that it is still the same process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/file_descriptor.h"
#include "base/record.h"
#include "base/status.h"

namespace tensorferry::cma {

/// Identifies a process within its pid namespace.
struct Identity {
  std::int32_t pid = 0;
  std::uint64_t started = 0;  // clock ticks since the host booted: differs from that of a later process of the same pid
  static constexpr std::tuple fields{&Identity::pid, &Identity::started};
  bool operator==(const Identity&) const = default;
};

/// Returns the identity of this process, or nullopt if /proc is missing or belongs to another pid namespace.
std::optional<Identity> own_identity();

/// Returns when a process began, or nullopt if no process has that pid or /proc is missing.
std::optional<std::uint64_t> started_of(std::int32_t pid);

/// Returns why processes of one user may not read each other's memory under kernel.yama.ptrace_scope = `scope`, or
/// nullopt if they may. `capable` says whether this process has CAP_SYS_PTRACE: without it, a scope above 0 lets at
/// most a parent read its children.
std::optional<std::string> scope_refusal(int scope, bool capable);
/// Returns the same for this process and this kernel.
std::optional<std::string> own_scope_refusal();

/// Returns whether process_vm_readv's `error` is a refusal of the kernel that the next buffer would meet too.
bool is_refusal(int error) noexcept;
/// Returns "the kernel does not allow reads of the other process's memory (...)", with advice for the user.
std::string text_of_refusal(int error);

/// A handle of one process. Thread-safe. A forked child may use its copy.
class Process final {
 public:
  /// Finds the process and holds a pidfd, so that a later process of the same pid is not taken for it. Fails with
  /// ConnectionLost if the process has ended, also if another process has its pid.
  static Result<Process> find(Identity identity);

  /// Copies memory of the process, which may change the bytes meanwhile. Returns 0 or an errno value:
  ///   - EFAULT: the process has no such memory; a part may have been copied;
  ///   - EPERM: the kernel does not allow it;
  ///   - ESRCH: the process has ended.
  /// Blocks until the kernel has the pages.
  [[nodiscard]] int read(std::byte* to, std::uint64_t from, std::size_t bytes) const;

  /// Returns false if the process has ended: the bytes of the last read() may then be another process's.
  [[nodiscard]] bool alive() const;

  [[nodiscard]] std::int32_t pid() const { return identity_.pid; }

 private:
  Process(Identity identity, FileDescriptor pidfd) : identity_(identity), pidfd_(std::move(pidfd)) {}

  Identity identity_;
  FileDescriptor pidfd_;  // empty if the kernel gives none (before Linux 5.3): alive() then compares start times
};

}  // namespace tensorferry::cma
