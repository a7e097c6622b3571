/// A StreamPort that is a socket.
#pragma once

#include <utility>

#include "agent/transport/port.h"

namespace tensorferry {

class SocketPort : public StreamPort {
 public:
  /// `socket` is non-blocking. `local`: a unix socket, else TCP.
  SocketPort(FileDescriptor socket, bool local) : socket_(std::move(socket)), local_(local) {}

  std::ptrdiff_t read(std::span<iovec> into, Descriptors& descriptors, std::size_t most) override;
  std::ptrdiff_t write(std::span<iovec> from, std::span<const FileDescriptor> descriptors) override;
  void shutdown() noexcept override;
  [[nodiscard]] int descriptor() const noexcept override { return socket_.get(); }
  [[nodiscard]] bool local() const noexcept override { return local_; }
  [[nodiscard]] int connect_error() noexcept override;
  [[nodiscard]] bool ended() const noexcept override;
  [[nodiscard]] std::size_t unread() const noexcept override;
  [[nodiscard]] BytesMoved moved() const noexcept override;
  void set_low_water_mark(int bytes) noexcept override;

 private:
  const FileDescriptor socket_;
  const bool local_;
};

}  // namespace tensorferry
