/// One reliable connection (RC queue pair) between a port of this host and a port of a peer's.
#pragma once

#include <infiniband/verbs.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/function.h"
#include "base/mutex.h"
#include "base/status.h"
#include "channels/buffer.h"
#include "channels/rdma/cards.h"
#include "channels/rdma/inbox.h"
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

/// Reads the peer's memory, and lets the peer read this process's. Writes small buffers into the peer's inbox, and
/// takes those that the peer writes into this process's. A peer can write its inbox (Inbox) and nothing else, because
/// no other memory is registered for writing; without an inbox the queue pair lets it write nothing.
///
/// Credits:
/// - At most `Options::queue_depth` reads and writes are with the card; further reads wait here, and further writes are
///   refused. So neither the send queue nor its completion queue, which has a place for each, overruns.
/// - A write with an immediate takes a receive request of the peer's. The peer posts a new one when it has polled the
///   completion, and its completion queue has a place for each, so that one does not overrun either. If a peer writes
///   more than it has credit for (Outbox), its own card lets the write wait (RNR).
///
/// Writes are numbered from 1, and the immediate is the number's lower half. A queue pair delivers in order, so an
/// immediate with any other number fails the queue pair.
///
/// Wake-ups: completions of reads and writes wake the thread of completions. A write that arrives wakes it only if a
/// take() waits, or if the writer asks for it (every so often, so that receive requests are posted again). Otherwise
/// take() finds it.
///
/// Life: `make`, `receive_into`, `connect`, `read` and `write`, `fail`. A failed queue pair stays failed. It fails by
/// itself if a packet of its own gets no answer in a few times of `Options::timeout`, and if the card refuses a read of
/// the peer's. Its reads complete with the failure when the card has given them back, so that the card no longer
/// touches their memory. The thread of completions (CompletionThread) keeps every queue pair, and destroys it.
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

  /// Lets the peer write into `inbox`. Call it before `connect`, once. Fails if this end lets no peer write
  /// (Options::write_bytes).
  Status receive_into(std::shared_ptr<Inbox> inbox);
  /// Returns the inbox; null if there is none.
  [[nodiscard]] std::shared_ptr<Inbox> inbox() const;
  /// Returns how many writes of the peer may be open at once.
  [[nodiscard]] std::uint16_t receives() const noexcept { return receives_; }

  /// Connects to the peer's queue pair. From then on the peer can read, if its own is connected. Call it once.
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
    Read place;           // of a write, `to` is the source
    bool writes = false;  // no receive request of the peer's is taken
    bool fenced = false;  // begins when the bytes of all reads before it are there
  };
  /// Does the steps, which the card begins in this order, by one post for as many as it has places for at a time.
  /// `done` runs once, where that of read() does, when the card touches none of the memory any more: with Ok if it has
  /// done all. The peer's card refuses a step that its keys do not allow; that fails the queue pair.
  void run(std::vector<Step> steps, Completion done);

  /// One write into the peer's inbox.
  struct Write {
    const std::byte* from = nullptr;
    std::uint32_t local_key = 0;
    std::uint64_t to = 0;
    std::uint32_t remote_key = 0;
    std::uint32_t bytes = 0;
    std::uint32_t wakes_every = 1;  // each write whose number this divides wakes the peer's thread of completions
  };
  /// Writes into the peer's inbox and returns the number of the write. `done` runs when the card no longer reads
  /// `from`, on a thread that polls; an error says that the bytes may not have arrived. Few bytes travel in the work
  /// request.
  ///
  /// Returns nullopt, and drops `done`, if the queue pair has failed, or if reads are ahead that the write would have
  /// to wait for: the card has no place, or as many reads under way as it may have.
  std::optional<std::uint64_t> write(const Write& write, Completion done);

  /// Calls `taker` with the bytes of the peer's write `number`, which lie at `offset` in the inbox: inside the call if
  /// they have arrived, otherwise on a thread that polls. With an error if the queue pair fails first, or has no inbox.
  void take(std::uint64_t number, std::uint64_t offset, Inbox::Taker taker);

  /// Fails the queue pair. When it returns, the peer reads and writes nothing through it any more.
  void fail(const Status& why);
  [[nodiscard]] bool failed() const noexcept { return !live_.load(std::memory_order_acquire); }
  /// Returns the reads and writes that are with the card or wait for it.
  [[nodiscard]] std::size_t outstanding() const noexcept { return outstanding_.load(std::memory_order_relaxed); }

  /// Returns whether reads are with the card, or takes wait for a write of the peer's.
  [[nodiscard]] bool awaits() const noexcept;

  /// Takes completions from the card and runs their `done`, and the takers of what has arrived. Returns whether there
  /// was any.
  bool poll();
  /// The card has announced completions of this queue: asks it to announce the next one.
  void announced(const ibv_cq* queue) noexcept;
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
  bool post(ibv_send_wr& request, Completion& done);
  bool post(const std::shared_ptr<List>& list);
  /// Hands what waits to the card, as far as it has places. Returns false, with errno set, if the card takes no work.
  bool post_waiting();
  /// Notes that `steps` of a list have ended; adds its completion to `ended` if they were the last ones.
  static void end_steps(List& list, std::size_t steps, bool ok, std::vector<Ended>& ended);
  /// Drops what waits; adds completions that have no more work with the card.
  void drop_waiting(std::vector<Completion>& dropped);
  bool post_receive();
  bool poll_requests();
  bool poll_arrivals();
  void notify_of_arrivals() noexcept;
  void run_failed(std::vector<Completion> dropped, const Status& why, bool first);
  [[nodiscard]] Status failure_of(std::string_view what, ibv_wc_status status) const;
  [[nodiscard]] Status queue_failed() const;
  [[nodiscard]] Status no_work_taken() const;

  const std::shared_ptr<OpenCard> card_;
  const CardPort port_;
  const Options options_;
  QueuePairAddress address_;
  std::uint32_t inline_bytes_ = 0;  // so many bytes fit into a work request
  std::uint16_t receives_ = 0;
  ibv_cq* completions_ = nullptr;  // of this end's reads and writes
  ibv_cq* arrivals_ = nullptr;     // of the peer's writes, and of a receive request that says when the pair has failed
  ibv_qp* pair_ = nullptr;

  std::atomic<bool> live_{true};
  std::atomic<std::size_t> outstanding_{0};
  std::atomic<std::size_t> reads_{0};             // with the card
  std::atomic<const Inbox*> has_inbox_{nullptr};  // `inbox_`, to be read without the lock

  mutable Mutex mutex_;  // guards the members below, and the posting of work
  Failed failed_;
  Status failure_;
  std::vector<WithCard> with_card_;  // by the number of the work request
  std::vector<std::size_t> free_;    // unused numbers
  std::deque<Waiting> waiting_;
  std::size_t most_reads_ = 1;  // that the card has under way at once
  std::uint64_t written_ = 0;   // the number of the last write
  std::uint64_t arrived_ = 0;   // the number of the peer's last write
  std::shared_ptr<Inbox> inbox_;
};

}  // namespace tensorferry::rdma
