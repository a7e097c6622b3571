/// The messages of one group: `post` sends bytes to a rank, `receive` takes them. Small data travels with the message.
/// The receiver fetches larger data by a call, whose reply lands in the receiver's own memory. A receiver of a step
/// knows that large data comes, so it makes that call at once, and the sender answers it when it posts.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "agent/agent.h"
#include "base/function.h"
#include "include/tensorferry/dtype.h"
#include "rpc/collectives/asked_data.h"
#include "rpc/collectives/messages.h"

namespace tensorferry::collectives {

/// Names a message: data of a step, or a send with a tag.
struct LetterKey {
  bool by_tag = false;
  std::uint64_t number = 0;
  auto operator<=>(const LetterKey&) const = default;
};

/// What is known of a message before its bytes are taken.
struct Letter {
  std::size_t from = 0;
  Fingerprint fingerprint;
  std::uint64_t bytes = 0;
  bool arrived = false;
};

/// A message that is being sent, or received. Completes once. Thread-safe.
class Delivery final {
 public:
  explicit Delivery(UniqueFunction<void(Status)> told = {}) : told_(std::move(told)) {}
  /// Waits until the operation has completed, and returns its status. If a limit ends the wait, returns the error of
  /// why_ended(); the operation then still runs: withdraw it before the memory is used otherwise.
  Status wait(const WaitLimits& limits);
  /// Waits without a limit.
  void wait_for_end();
  [[nodiscard]] bool done() const;
  [[nodiscard]] Status status() const;
  /// What has arrived; valid once done(). After an error, too, `arrived` tells whether it has.
  [[nodiscard]] Letter letter() const;
  /// Completes the operation; only the first call counts.
  void complete(Status status, Letter letter = {});

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  Status status_;
  Letter letter_;
  UniqueFunction<void(Status)> told_;
};

/// The messages of one rank of a group.
///
/// If the agent of a rank has died or left, messages to that rank and receives from it fail with ConnectionLost. A
/// small message that has arrived is received whatever becomes of its sender. Thread-safe. All functions return at
/// once.
class Mailbox final : public std::enable_shared_from_this<Mailbox> {
 public:
  /// The receiver fetches larger data.
  static constexpr std::size_t most_eager = std::size_t{64} << 10;
  static constexpr std::size_t any_rank = ~std::size_t{0};
  /// The bytes of messages of one rank that have arrived and were not received. A message counts least_counted at
  /// least.
  static constexpr std::size_t most_unreceived = std::size_t{1} << 30, least_counted = 512;

  Mailbox(RawAgent& agent, std::uint64_t group, std::size_t rank, std::vector<std::string> names);

  /// Errors name the ranks by these numbers. Called before anything else.
  void show_as(std::vector<std::size_t> ranks) { shown_ = std::move(ranks); }
  /// Returns a rank as errors name it.
  [[nodiscard]] std::string named(std::size_t rank) const;

  /// Sends bytes. The delivery completes when the receiver has the message, or, if it fetches the data, when the data
  /// is not read any more and, for a send, the receiver's fetch has ended. Until then the bytes must not change.
  std::shared_ptr<Delivery> post(std::size_t to, LetterKey key, std::span<const std::byte> data,
                                 const Fingerprint& fingerprint, UniqueFunction<void(Status)> told = {});
  /// Takes the next message of `key` from `from` into `destination`; with any_rank, the send that comes first from any
  /// rank. Sends of one rank and tag arrive in their order, and receives take them in theirs. InvalidArgument: the
  /// message has more bytes than `most`; or, with `dtype`, another dtype or fewer bytes. The message counts as received
  /// then. A sender whose data is still to be fetched gets the error too.
  std::shared_ptr<Delivery> receive(std::size_t from, LetterKey key, std::byte* destination, std::uint64_t most,
                                    UniqueFunction<void(Status)> told = {}, std::optional<DType> dtype = {});
  /// Takes data of a step, of which `bytes` bytes come. If they are more than most_eager, this rank tells the sender at
  /// once where it wants them, and a ProtocolError says that another number came.
  std::shared_ptr<Delivery> receive_exactly(std::size_t from, std::uint64_t step, std::byte* destination,
                                            std::uint64_t bytes);
  /// Drops the data of steps up to `number`, also data that arrives later: this rank receives none of it any more.
  void forget_steps(std::uint64_t number);
  /// Completes `delivery` with `why` unless it has completed. Returns when no thread touches its memory any more.
  void withdraw(const std::shared_ptr<Delivery>& delivery, const Status& why);
  /// `rank` has left the group, and has all that it takes in the operation that runs. So a message of a step to it
  /// counts as sent although its agent no longer answers.
  void let_go(std::size_t rank);
  [[nodiscard]] bool has_left(std::size_t rank) const;
  /// `rank` has left the group, so no operation of all ranks goes on. Ends, now and later, with `why`: the data of all
  /// steps, and sends to that rank and receives from it. Receives from any rank end when no other rank is left. A
  /// receive still takes a message of `rank` that has arrived with its bytes.
  void leave(std::size_t rank, const Status& why);
  /// Ends all deliveries, and all later ones, with `why`. `keep_arrived`: a receive still takes a send that has arrived
  /// with its bytes, because its sender has been told that it was sent.
  void fail(const Status& why, bool keep_arrived);

  /// Handles a Posted. ResourceExhausted, for its sender: most_unreceived bytes of that rank are here.
  Status deliver(const Posted& posted, Buffer data);
  /// Handles a FetchData from rank `to`. ResourceExhausted, for that rank: AskedData::most of its requests wait.
  void serve(std::size_t to, const FetchData& fetch, Reply reply);
  /// Returns how many requests of `rank` wait for data that this rank has not posted yet.
  [[nodiscard]] std::size_t asked_by(std::size_t rank) const;
  /// Handles a RefuseData from rank `to`.
  void refuse(std::size_t to, const RefuseData& refused);
  /// Handles a TakenData from rank `to`.
  void taken(std::size_t to, const TakenData& taken);

 private:
  struct Address {  // of a message that this rank sends
    std::size_t to = 0;
    LetterKey key;
    std::uint64_t sequence = 0;
    auto operator<=>(const Address&) const = default;
  };
  struct Arrived {
    Letter letter;
    Buffer data;
    std::shared_ptr<void> counted;  // while it lives, the message counts in unreceived_
  };
  struct Receiver {
    std::size_t from = 0;
    LetterKey key;
    std::uint64_t sequence = 0;  // with any_rank, from the match on
    std::byte* destination = nullptr;
    std::uint64_t most = 0;
    std::shared_ptr<Delivery> delivery;
    std::optional<DType> dtype{};  // then `most` is the size that the message must have
  };
  struct Line {  // the messages of one rank and key
    std::uint64_t next_sent = 0, next_claimed = 0;
    std::map<std::uint64_t, Arrived> arrived;  // by sequence
  };
  struct Offer {
    std::span<const std::byte> data;
    std::shared_ptr<Delivery> delivery;
    bool reading = false;  // the receiver has asked for it
    bool read = false;     // this side does not read it any more
    bool taken = false;    // the receiver's fetch has ended, or nothing waits for that
    Status withdrawn{};    // why, unless Ok: the receiver learns it when it fetches the data
  };
  /// Deliveries to complete when mutex_ is released.
  struct Over {
    std::vector<std::shared_ptr<Delivery>> failed;  // with the reason
    std::vector<std::shared_ptr<Delivery>> given;   // with Ok: the receiver was given the data, and says no more
    void complete(const Status& why) const;
  };
  /// Returns the error of a call to a rank. NotFound has the same cause as ConnectionLost here, because the rank was
  /// there when the group was formed: its agent has left, or it has left the group.
  [[nodiscard]] Status error_of_rank(const Status& status, std::size_t rank) const;
  /// Returns what a receiver learns that asks for data which never comes; `why`: Ok if there is no more to say.
  [[nodiscard]] Status withdrawn(const Status& why) const;
  /// Returns why no message of `key` goes to `rank` or comes from it any more, or Ok. Under mutex_.
  [[nodiscard]] Status ended(std::size_t rank, const LetterKey& key) const;
  /// Returns why the receiver cannot take the message, or Ok.
  [[nodiscard]] Status refusal(const Receiver& receiver, const Letter& letter) const;
  void tell_refused(const Receiver& receiver, const Letter& letter, const Status& why);
  /// Ends the receivers for which ended() is an error, and puts their deliveries into `out`. Under mutex_.
  void take_ended(Over& out);
  /// Takes the data that no receiver reads, if `wanted` its address, and puts its deliveries into `out`. Under mutex_.
  template <class Wanted>
  void take_unread(const Wanted& wanted, Over& out);
  /// Notes that a send is `read`, or `taken`; completes it if it is both.
  void note(const Address& address, bool Offer::*what);
  void tell_taken(std::size_t from, const LetterKey& key, std::uint64_t sequence);
  std::optional<std::pair<Receiver, Arrived>> match();
  void run_matches();
  void take(const Receiver& receiver, Arrived arrived);
  void fetch(const Receiver& receiver, const Letter& letter);

  RawAgent& agent_;
  const std::uint64_t group_;
  const std::size_t rank_;
  const std::vector<std::string> names_;
  std::vector<std::size_t> shown_;
  mutable std::mutex mutex_;
  const std::shared_ptr<std::vector<std::atomic<std::size_t>>> unreceived_;  // bytes, by rank
  std::map<std::pair<std::size_t, LetterKey>, Line> lines_, sent_;
  std::map<Address, Offer> offers_;  // data that the receivers fetch
  AskedData asked_;
  struct Fetch {
    Call call;
    bool by_tag = false;
  };
  struct Receives {
    std::list<Receiver> waiting;
    std::map<const Delivery*, std::shared_ptr<Delivery>> writing;  // to their memory now
    std::map<const Delivery*, Fetch> fetching;
  };
  Receives receives_;
  std::uint64_t forgotten_ = 0;
  /// Why transfers end.
  struct Endings {
    Status all, steps;
    bool keeps_arrived = true;
    std::map<std::size_t, Status> with_rank;  // ranks that have left
    std::set<std::size_t> gone;               // ranks that have left, or are leaving
  };
  Endings endings_;
};

}  // namespace tensorferry::collectives
