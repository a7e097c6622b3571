/// `cma` (cross memory attach): the receiver copies out of the sender's memory, by the kernel. One copy, and no memory
/// of the channel's own.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string_view>
#include <variant>

#include "channels/channel.h"

namespace tensorferry {

namespace cma {

struct Options {
  std::size_t least_bytes = std::size_t{16} << 10;  // smaller buffers are refused, but as a last resort
  bool within_process = false;                      // also reaches this process itself: for tests
};

}  // namespace cma

/// CPU memory to CPU memory of another process of the same user, in the same pid and user namespace of one host, where
/// the kernel lets each read the other's memory (as a debugger may). Any transport: nothing but bytes travels.
///
/// `open` has each end read a word of the other's memory that the reader has just made up, so a peer that names another
/// process than its own is found out. The word stays there while the channel is open and is gone before the first
/// source is released at its end; the receiver reads it again after each buffer, and looks whether the process is
/// alive: bytes that were read from a process that has ended or begun something else, or from memory that may have been
/// given back, end as ConnectionLost.
///
/// `released` runs when the receiver acknowledged, or on withdraw or close. A buffer that the kernel does not let be
/// read (memory of a device; a rule that was set meanwhile) is sent as the link's bulk data instead, at the receiver's
/// word; after a refusal that will not pass the pair falls away (Wire::ready), and others carry.
///
/// `pull` copies on the caller's thread, from some MB on with a second one while a core is idle. A peer that answers
/// its own page faults (userfaultfd) can make it wait for as long as the peer lives.
///
/// A forked child cannot use the driver or its channels; they leave alone there what is its parent's.
class CmaDriver final : public Driver {
 public:
  explicit CmaDriver(cma::Options options = {});
  ~CmaDriver() override;

  [[nodiscard]] std::string_view name() const override { return "cma"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tensorferry
