/// One reliable connection (RC queue pair) between a port of this host and a port of a peer's.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "base/function.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "channels/rdma/cards.h"
#include "channels/rdma/open_card.h"
#include "channels/rdma/options.h"

namespace tensorferry::rdma {

/// Where a queue pair is, as its peer has to know it.
struct QueuePairAddress {
  Gid gid{};
  std::uint16_t lid = 0;
  std::uint8_t mtu = 0;            // an ibv_mtu
  std::uint32_t number = 0;        // of the queue pair
  std::uint32_t first_packet = 0;  // the sequence number of the first packet that it sends
};

/// Reads the peer's memory, and lets the peer read this process's. By lists it also writes the peer's. The registration
/// of memory decides what a peer may do with it (Access).
///
/// Credits: at most `Options::queue_depth` reads and writes are with the card, and further ones wait here. So neither
/// the send queue nor the completion queue, which has a place for each, overruns.
///
/// Messages: a queue pair takes none. If the peer sends one, or writes with an immediate, the queue pair fails.
///
/// Life: `make`, `connect`, `read` and `run`, `fail`. A failed queue pair stays failed. It fails by itself if a packet
/// of its own gets no answer in a few times of `Options::timeout`, and if the card refuses a read or write of the
/// peer's. Its reads complete with the failure when the card has given them back, so that the card no longer touches
/// their memory. The thread of completions (CompletionThread) keeps every queue pair, and destroys it.
///
/// Thread-safe. `destroy` belongs to the thread of completions.
class QueuePair final {
 public:
  /// Runs once, when the queue pair has failed, on the thread that noticed it and with no lock held.
  using Failed = UniqueFunction<void(const Status&)>;

  /// Makes a queue pair on `port` of `card`. ChannelUnavailable or ResourceExhausted if the card makes none.
  static Result<std::shared_ptr<QueuePair>> make(std::shared_ptr<OpenCard> card, const CardPort& port,
                                                 const Options& options, Failed failed);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  [[nodiscard]] const QueuePairAddress& address() const noexcept { return address_; }
  [[nodiscard]] const OpenCard& card() const noexcept { return *card_; }
  [[nodiscard]] std::uint8_t port() const noexcept { return port_.number; }

  /// Connects to the peer's queue pair. From then on the peer can read and write, if its own is connected. Call
  /// it once.
  Status connect(const QueuePairAddress& theirs);

  /// One read of at most `most_read` bytes.
  static constexpr std::uint32_t most_read = std::uint32_t{1} << 30;
  struct Read {
    std::byte* to = nullptr;
    std::uint32_t local_key = 0;
    std::uint64_t from = 0;
    std::uint32_t remote_key = 0;
    std::uint32_t bytes = 0;
  };
  /// Reads the peer's memory. `done` runs when the bytes are there, or with an error when the card no longer touches
  /// `to`: on the thread of completions, or inside the call if the queue pair has failed.
  void read(const Read& read, Completion done);

  /// One of a list of reads and writes of the peer's memory.
  struct Step {
    Read place;  // of a write, `to` is the source
    bool writes = false;
    bool fenced = false;  // begins when the bytes of all reads before it are there
  };
  /// Does the steps, which the card begins in this order, by one post for as many as it has places for at a time.
  /// `done` runs once, where that of read() does, when the card touches none of the memory any more: with Ok if it has
  /// done all. The peer's card refuses a step that its keys do not allow; that fails the queue pair.
  void run(std::vector<Step> steps, Completion done);

  /// Fails the queue pair. When it returns, the peer reads and writes nothing through it any more.
  void fail(const Status& why);
  [[nodiscard]] bool failed() const noexcept { return !live_.load(std::memory_order_acquire); }
  /// Returns the reads and writes that are with the card or wait for it.
  [[nodiscard]] std::size_t outstanding() const noexcept { return outstanding_.load(std::memory_order_relaxed); }

  /// Returns whether reads are with the card.
  [[nodiscard]] bool awaits() const noexcept { return reads_.load(std::memory_order_relaxed) > 0; }

  /// Takes completions from the card and runs their `done`. Returns whether there was any.
  bool poll();
  /// The card has announced a completion: asks it to announce the next one.
  void announced() noexcept;
  /// Gives the queue pair back to the card, and completes what the card still held.
  void destroy();

 private:
  /// A list under way; guarded by mutex_.
  struct List {
    std::vector<Step> steps;
    std::size_t posted = 0;
    std::size_t left = 0;  // that have not ended
    bool failed = false;
    Completion done;
  };
  struct Waiting {  // a read, or a list that the card has not taken whole
    Read read;
    Completion done;
    std::shared_ptr<List> list = nullptr;
  };
  struct WithCard {
    Completion done;
    bool reads = false;
    std::shared_ptr<List> list = nullptr;  // of which it is a step
  };
  struct Ended {
    Completion done;
    bool ok = false;
  };

  QueuePair(std::shared_ptr<OpenCard> card, const CardPort& port, const Options& options, Failed failed);

  Status create();
  Status modify(ibv_qp_attr& attributes, int mask, const char* to);
  bool post(const Read& read, Completion& done);
  bool post(const std::shared_ptr<List>& list);
  /// Hands what waits to the card, as far as it has places. Returns false, with errno set, if the card takes no work.
  bool post_waiting();
  /// Notes that `steps` of a list have ended; adds its completion to `ended` if they were the last ones.
  static void end_steps(List& list, std::size_t steps, bool ok, std::vector<Ended>& ended);
  /// Drops what waits; adds completions that have no more work with the card.
  void drop_waiting(std::vector<Completion>& dropped);
  bool post_receive();
  void run_failed(std::vector<Completion> dropped, const Status& why, bool first);
  [[nodiscard]] Status failure_of(std::string_view what, ibv_wc_status status) const;
  [[nodiscard]] Status received(ibv_wc_status status) const;
  [[nodiscard]] Status queue_failed() const;
  [[nodiscard]] Status no_work_taken() const;

  const std::shared_ptr<OpenCard> card_;
  const CardPort port_;
  const Options options_;
  QueuePairAddress address_;
  ibv_cq* completions_ = nullptr;
  ibv_qp* pair_ = nullptr;

  std::atomic<bool> live_{true};
  std::atomic<std::size_t> outstanding_{0};
  std::atomic<std::size_t> reads_{0};  // with the card

  mutable Mutex mutex_;  // guards the members below, and the posting of work
  Failed failed_;
  Status failure_;
  std::vector<WithCard> with_card_;  // by the number of the work request
  std::vector<std::size_t> free_;    // unused numbers
  std::deque<Waiting> waiting_;
};

}  // namespace tensorferry::rdma
