/// A network namespace with one TUN device, and the means to end its TCP connections.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/file_descriptor.h"

namespace tensorferry::testing {

/// Stands before each packet that a TUN device hands out or takes: virtio_net_hdr of <linux/virtio_net.h>, which C++
/// cannot include.
struct PacketHeader {
  std::uint8_t flags = 0, segmentation = 0;  // 0: the packet is not larger than the MTU
  std::uint16_t header_bytes = 0, segment_bytes = 0, checksum_start = 0, checksum_offset = 0;
};

/// A network namespace. Its loopback interface is up, and its default route leads to a TUN device, "eth0".
///
/// The namespace has no name in the file system. The kernel removes it when this object and the last process inside
/// have ended, also after kill -9. Needs root. Constructors and functions throw std::system_error.
class NetworkNamespace {
 public:
  /// Makes the namespace and its device. `address` is the device's IPv4 address, with a netmask of 24 bits; `mtu` is
  /// its largest packet.
  NetworkNamespace(const std::string& address, int mtu);

  /// Moves the calling thread into the namespace while it lives. Threads and processes that it starts stay there.
  class Inside {
   public:
    explicit Inside(const NetworkNamespace& where);
    ~Inside();
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    FileDescriptor before_;
  };

  /// Adds an interface that is up and leads nowhere, with an IPv4 address and a netmask of 24 bits.
  void add_unplugged_interface(const char* name, const std::string& address);
  /// Returns a descriptor of the namespace, for setns(2).
  [[nodiscard]] int fd() const { return namespace_.get(); }
  /// Returns the descriptor of the TUN device. Each read and write is one IPv4 packet behind a PacketHeader.
  [[nodiscard]] int tun() const { return tun_.get(); }
  /// Sets whether the kernel may hand out TCP packets of up to 64 KB that it has not cut to the MTU, which costs much
  /// less time. The packets then come without checksums.
  void set_offload(bool on) const;

  /// Resets the TCP connections of this namespace, except those of the port `spare` (0: none). Both ends get an error.
  /// Returns their number.
  [[nodiscard]] std::size_t reset_connections(std::uint16_t spare = 0) const;

 private:
  FileDescriptor namespace_, tun_, diagnosis_;
  std::vector<FileDescriptor> unplugged_;  // TUN devices that nothing reads
};

}  // namespace tensorferry::testing
