/// A socket of this host at which a rank receives a file descriptor from another rank of its group.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

#include "base/file_descriptor.h"
#include "base/status.h"

namespace tensorferry::collectives::cuda {

/// An abstract unix socket for datagrams, so sender and receiver never wait for each other to connect. Any process of
/// the host may send to it. What counts is therefore a datagram that repeats the address's word, which the group alone
/// knows.
///
/// Not thread-safe.
class DescriptorBox final {
 public:
  /// How another rank finds the box. Plain bytes, told in a step of the group.
  struct Address {
    std::array<char, 48> name{};  // of the abstract socket, without the null byte before it; ends with a null byte
    std::uint64_t word = 0;
  };

  DescriptorBox() = default;
  /// Opens a box under a random name. ResourceExhausted: the system gives no socket.
  static Result<DescriptorBox> open();

  [[nodiscard]] const Address& address() const { return address_; }
  /// Returns the descriptor that was sent to this box. Waits until `until` at most. ChannelUnavailable: none has come,
  /// for example because the sender is in another network namespace.
  [[nodiscard]] Result<FileDescriptor> take(std::chrono::steady_clock::time_point until);

  /// Sends a duplicate of `descriptor` to another rank's box. Never waits. ChannelUnavailable says why that fails.
  static Status send(int descriptor, const Address& to);

 private:
  FileDescriptor socket_;
  Address address_;
};

}  // namespace tensorferry::collectives::cuda
