/// The `cma` channel (cross memory attach): the receiver lets the kernel copy a buffer out of the sender's memory. It
/// copies once, and needs no memory of its own.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

namespace cma {

struct CmaOptions {
  std::size_t least_bytes = std::size_t{16} << 10;  // smaller buffers are refused, unless cma is the last resort
  bool within_process = false;                      // also reach this process itself; for tests
};

}  // namespace cma

/// Carries CPU memory to CPU memory of another process of the same user, in the same pid and user namespace of one
/// host, if the kernel lets each process read the other's memory (as it lets a debugger). Works over any connection,
/// because the channel passes no descriptors.
///
/// Probe: each end draws a random word and asks the peer to write its complement in the peer's memory. Each end then
/// reads the word there. So a peer that names a process other than its own fails the probe.
///
/// Trust in the bytes: the word stays while the channel is open. close() changes it before it releases the first
/// source. After each buffer the receiver reads the word again, and checks that the process is alive. The pull fails
/// with ConnectionLost if the process has ended or has replaced its memory, or if the sender may have freed the source.
///
/// Release: `released` runs when the receiver has acknowledged, or on withdraw or close.
///
/// Fallback: the kernel may refuse to read a buffer, for example memory of a device, or by a rule that was set
/// meanwhile. The receiver then asks the sender to send it as the link's bulk data. If the refusal is permanent, the
/// pair also fails (Wire::ready), and other channels carry later buffers.
///
/// Threads: `pull` copies on the caller's thread. From 4 MiB on a second thread helps while a core is idle. A peer that
/// handles its own page faults (userfaultfd) can make `pull` wait for as long as the peer lives.
///
/// A forked child cannot use the driver or its channels. In the child they leave the parent's resources alone.
class CmaDriver final : public Driver {
 public:
  explicit CmaDriver(cma::CmaOptions options = {});
  ~CmaDriver() override;

  [[nodiscard]] std::string_view name() const override { return "cma"; }
  [[nodiscard]] bool within_one_user() const override { return true; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tensorferry
