/// Chunks in host memory that another channel of the link carries, such as `ibv`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/mutex.h"
#include "base/status.h"
#include "channels/cuda_basic/messages.h"
#include "channels/wire_use.h"

namespace tensorferry::cuda_basic {

/// Both ends of the carried chunks of one channel. For each chunk the sender makes an offer to the carrier
/// (Wire::carrier), and passes the ticket by a ChunkOffer message. The receiver pulls it when it knows the chunk's
/// destination, and answers with ChunkRead. If there is no carrier at this moment, or it refuses, the chunk goes as
/// bulk data, and the message says so. A carrier that fails under a chunk fetches it again by itself, or fails the
/// pull.
///
/// A chunk's memory stays with the sender until the carrier no longer reads it and the receiver has answered. So a
/// sender, which has at most `most` chunks in flight, leaves at most so many messages at the receiver.
///
/// Thread-safe; runs callbacks with no lock held.
class CarriedChunks final : public std::enable_shared_from_this<CarriedChunks> {
 public:
  static constexpr std::size_t most = 8;  // chunks in flight in one direction
  /// Smaller buffers are as fast as bulk data, which needs no answer.
  static constexpr std::size_t least_bytes = std::size_t{64} << 10;

  using End = std::function<void(const Status&)>;

  explicit CarriedChunks(std::shared_ptr<WireUse> wire) : wire_(std::move(wire)) {}

  /// Returns the name of the carrier that takes a chunk now; "": there is none.
  [[nodiscard]] std::string carrier() const;

  /// Sends a chunk. `sent` runs when its memory is no longer read.
  void send(std::uint64_t number, const Buffer& bytes, const End& sent);
  /// Receives the chunk of this number into memory of its size; null memory: drops the bytes.
  void receive(std::uint64_t number, const Buffer& into, const End& received);

  /// Returns whether the peer has offered the chunk of this number, which was not received yet.
  [[nodiscard]] bool is_offered(std::uint64_t number) const;

  /// Handles the peer's messages. ProtocolError: the peer names a chunk twice, or too many chunks.
  Status on(ChunkOffer chunk);
  void on(const ChunkRead& read);

  /// The link has ended with `status`: ends the chunks that wait for the peer. A chunk that a carrier holds ends when
  /// the carrier lets go. Later calls do nothing.
  void close(const Status& status);

 private:
  [[nodiscard]] std::optional<std::uint64_t> next_sent(std::uint64_t least);
  struct Sent {
    End end;
    Channel* carrier = nullptr;  // null: as bulk data
    Ticket ticket;
    bool told = false;      // the peer has its ticket
    bool released = false;  // nothing reads its memory
    bool read = false;      // the peer has answered
  };
  struct Awaited {
    Buffer into;
    End received;
  };

  void tell(Wire& wire, std::uint64_t number, const Buffer& bytes);
  void fetch(const ChunkOffer& chunk, const Buffer& into, const End& received);
  void answer(std::uint64_t number);
  void released(std::uint64_t number, const Status& status);
  void end_if_over(std::uint64_t number, const Status& status);

  const std::shared_ptr<WireUse> wire_;
  mutable Mutex mutex_;  // guards the members below
  Status closed_;
  std::map<std::uint64_t, Sent> sent_;
  std::map<std::uint64_t, ChunkOffer> told_;  // by the peer, whose destinations are not known yet
  std::map<std::uint64_t, Awaited> awaited_;
};

}  // namespace tensorferry::cuda_basic
