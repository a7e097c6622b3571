/// A StreamPort whose bytes travel as TLS 1.3 over the TCP socket of another one.
///
/// OpenSSL reads and writes buffers of this object alone, and the port moves these to and from the socket in few system
/// calls. So a read never waits for room to write, nor a write for bytes to read. If the kernel has TLS, it takes the
/// connection over after the handshake (kernel_tls.h).
///
/// With OpenSSL, the descriptor counts as readable exactly if read() may get on, although decrypted bytes may wait
/// here: as long as any do, one byte of what they came from stays in the socket.
///
/// Threads: as StreamPort's. One lock guards both directions, because OpenSSL's object has one state. The kernel needs
/// none.
#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "agent/transport/port.h"
#include "agent/transport/tls.h"
#include "base/bytes.h"

namespace tensorferry {

class TlsPort final : public StreamPort {
 public:
  /// `under`: a connected TCP socket. `side`: of this end. The handshake comes next: see advance().
  static Result<std::unique_ptr<TlsPort>> make(std::shared_ptr<Tls> tls, Side side, std::unique_ptr<StreamPort> under);
  ~TlsPort() override;

  /// What advance() waits for, if anything.
  enum class Awaits : std::uint8_t { nothing, readable, writable };
  /// Goes on with the handshake as far as the socket allows. Call it until it awaits nothing: then the handshake has
  /// ended, well or as failure() says. No other function reads or writes before.
  ///
  /// Errors of failure(): Unauthenticated: the peer does not use TLS, or has another form, key or CA, or one end has
  /// refused the other's certificate (the text says why); ConnectionLost: the peer has closed the connection;
  /// ProtocolError.
  Awaits advance();
  /// Returns whether any bytes of the peer have come.
  [[nodiscard]] bool heard() const;
  /// Returns whether the kernel encrypts and decrypts. Does not change once advance() awaits nothing.
  [[nodiscard]] bool by_kernel() const noexcept { return by_kernel_; }

  std::ptrdiff_t read(std::span<iovec> into, Descriptors& descriptors, std::size_t most) override;
  /// With OpenSSL: after EAGAIN the next call must begin with the same bytes: they are encrypted already. The memory of
  /// all bytes must be readable: unlike the kernel, a cipher cannot report EFAULT.
  std::ptrdiff_t write(std::span<iovec> from, std::span<const FileDescriptor> descriptors) override;
  void shutdown() noexcept override { under_->shutdown(); }
  [[nodiscard]] int descriptor() const noexcept override { return under_->descriptor(); }
  [[nodiscard]] bool local() const noexcept override { return false; }
  [[nodiscard]] int connect_error() noexcept override { return under_->connect_error(); }
  [[nodiscard]] bool ended() const noexcept override { return under_->ended(); }
  [[nodiscard]] std::size_t unread() const noexcept override;
  [[nodiscard]] BytesMoved moved() const noexcept override { return under_->moved(); }
  /// Does nothing: part of a record may wait here, so the socket need not get as many bytes as are missing.
  void set_low_water_mark(int) noexcept override {}
  [[nodiscard]] Status failure() const override;

 private:
  /// OpenSSL's view of this object.
  struct Bio;
  struct SslFree {
    void operator()(SSL* ssl) const noexcept;
  };
  /// Encrypted bytes that have come. Those that OpenSSL has not taken stand from `begin` to `end`.
  struct Fetched {
    Bytes bytes;
    std::size_t begin = 0, end = 0;
    std::size_t in_socket = 0;  // how many of the bytes up to `end` are still in the socket, too
  };
  TlsPort(std::shared_ptr<Tls> tls, Side side, std::unique_ptr<StreamPort> under);

  std::ptrdiff_t fetch();
  void release_fetched();
  bool flush();
  std::size_t encrypt(std::span<iovec> from);
  bool speaks_tls();
  void conclude();
  void hand_to_kernel();
  std::ptrdiff_t read_by_kernel(std::span<iovec> into);
  void fail_handshake();
  void fail(Status why);
  void drain() noexcept;
  [[nodiscard]] Status describe_failure();

  const std::shared_ptr<Tls> tls_;
  const Side side_;
  const std::unique_ptr<StreamPort> under_;
  bool by_kernel_ = false;  // written by advance() alone

  mutable std::mutex mutex_;  // guards all that follows
  std::unique_ptr<SSL, SslFree> ssl_;
  Fetched in_;
  Bytes out_;  // encrypted bytes that the socket has not taken begin at out_begin_
  std::size_t out_begin_ = 0;
  std::size_t owed_ = 0;  // bytes of the caller in out_ that write() has not reported
  Bytes record_;          // joins small pieces
  TlsNotes notes_;
  bool open_ = false;  // the handshake has ended well
  Status failure_;
};

}  // namespace tensorferry
