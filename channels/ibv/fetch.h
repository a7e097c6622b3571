/// One pull of the ibv channel: reads a buffer from the peer's memory into this process's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/function.h"
#include "channels/buffer.h"
#include "channels/ibv/messages.h"
#include "channels/joined_ends.h"
#include "channels/rdma/peer_connection.h"
#include "channels/rdma/registrations.h"
#include "channels/rdma/staging_area.h"

namespace tensorferry::ibv {

/// Reads in pieces, over one lane or several. `ended` runs once, when the card no longer touches the memory: with Ok if
/// all bytes are there. It runs on the thread of completions, or inside start().
///
/// Held by a shared_ptr, which the reads hold too.
class CardFetch final : public std::enable_shared_from_this<CardFetch> {
 public:
  /// Takes back the memory with the outcome.
  using Ended = UniqueFunction<void(Status, Buffer)>;

  CardFetch(Buffer memory, KeyedSource source, Ended ended)
      : memory_(std::move(memory)), source_(std::move(source)), ended_(std::move(ended)) {}
  /// If the fetch was never started, it ends with an error.
  ~CardFetch();
  CardFetch(const CardFetch&) = delete;
  CardFetch& operator=(const CardFetch&) = delete;

  [[nodiscard]] const Buffer& memory() const { return memory_; }

  /// One queue pair with its keys for this buffer.
  struct Way {
    std::shared_ptr<rdma::QueuePair> pair;
    std::size_t card = 0;
    std::uint32_t remote_key = 0;
    std::size_t port = 0;  // of this end: index in LocalCards::ports
  };
  /// Returns the lanes for which a ticket has keys.
  static std::vector<Way> ways_to(const KeyedSource& source, const std::vector<rdma::PeerConnection::Lane>& lanes,
                                  const rdma::LocalCards& local);
  /// Keeps all ways for a buffer of more than `stripe_bytes` bytes, and otherwise the one with the least work.
  static void choose(std::vector<Way>& ways, std::uint64_t bytes, std::size_t stripe_bytes);

  /// Reads straight into the memory, which is registered with the cards of all `ways`. Call one of the two, once.
  void start(std::vector<Way> ways, std::shared_ptr<rdma::Registration> registration);
  /// Reads into `staging`, of `staging_bytes` bytes, and copies from there, as often as it takes.
  void start_staged(Way way, rdma::StagingArea::Piece staging, std::size_t staging_bytes);

  /// Returns the size of the pieces of a buffer: a quarter of it, within bounds. With several reads under way the
  /// peer's card answers one while this end's card places the bytes of another.
  static constexpr std::size_t piece_bytes(std::size_t bytes) {
    const auto pages = (bytes / 4 + 4095) / 4096;
    return std::clamp(pages * 4096, std::size_t{64} << 10, std::size_t{256} << 10);
  }

 private:
  void next_staged();
  void one_done(const Status& status);
  void end(Status status);

  Buffer memory_;
  const KeyedSource source_;
  Ended ended_;
  std::shared_ptr<rdma::Registration> registration_;
  JoinedEnds ends_;  // of the pieces

  // Of a staged fetch, whose steps follow one another:
  Way way_;
  rdma::StagingArea::Piece staging_;
  std::size_t staging_bytes_ = 0;
  std::size_t copied_ = 0;
};

}  // namespace tensorferry::ibv
