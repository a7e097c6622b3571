/// Remote objects: who owns them, who holds them, and the messages that keep each alive exactly as long as someone
/// holds it. docs/codec.md ("The reference protocol") has the rules and why they suffice.
///
/// An object lives at its owner. Every other agent that holds it has a *fork*, one for each time that the object was
/// passed to it, which the owner knows by number and holder. An agent that passes an object on makes the number of the
/// receiver's fork, and keeps its own hold until the receiver's is known to the owner. So an object is freed when no
/// fork and no local handle is left, never before, in whatever order messages arrive; and the forks of an agent that
/// died go with it.
///
/// Knows no torch, no Python and no agent: values are opaque, messages go through a `Network` (AgentNetwork in
/// agent_network.h over real agents; the tests' own delays, repeats and loses). What carries values, and the calls that
/// references ride in, are the layer's above, which tells References about both.
///
/// Threads: everything may be called from any thread at once. No completion, no `Network` function and no value's
/// destructor runs under a lock of ours; all may call in here again.
///
/// In a forked child handles and passages may be dropped, which does nothing: the holds are the parent's. Nothing else
/// may be called there.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "agent/agent.h"
#include "base/bytes.h"
#include "base/fork.h"
#include "base/function.h"
#include "base/status.h"
#include "rpc/core/reference_id.h"
#include "rpc/core/reference_mail.h"
#include "rpc/core/reference_tables.h"

namespace tensorferry {

class References;

/// One hold on an object. The user handle (shared_ptr) of the layer above: the hold ends when the last copy is gone.
class Reference {
 public:
  ~Reference();
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;

  [[nodiscard]] const AgentId& owner() const { return owner_; }
  [[nodiscard]] const RRefId& object() const { return ids_.object; }
  /// What a create request carries. `fork` is 0, 0 at the owner, whose own holds have no number.
  [[nodiscard]] const Creation& ids() const { return ids_; }
  [[nodiscard]] const std::string& type_hint() const { return type_hint_; }
  [[nodiscard]] bool is_owner() const { return local_; }

  /// Whether the owner knows of this hold (its own it always does).
  [[nodiscard]] bool confirmed() const;
  /// Ok, or why the object cannot be had any more: ConnectionLost with the owner's name, what its creation failed with,
  /// AgentClosed. Ask before a fetch; the owner's own outcome is not told here.
  [[nodiscard]] Status status() const;
  /// Runs once when confirmed, with Ok, or when it is known that it will not be, with status().
  void on_confirmed(UniqueFunction<void(Status)> completion) const;

 private:
  friend class References;
  friend class ReferenceTransfer;
  Reference(std::shared_ptr<References> references, AgentId owner, Creation ids, std::string type_hint, bool local)
      : references_(std::move(references)),
        owner_(std::move(owner)),
        ids_(ids),
        type_hint_(std::move(type_hint)),
        local_(local) {}

  const std::shared_ptr<References> references_;
  const AgentId owner_;
  const Creation ids_;
  const std::string type_hint_;
  const bool local_;
};

/// The references inside one message: made when its encoding begins, told how the message ended. Move-only.
class ReferenceTransfer {
 public:
  ReferenceTransfer() = default;  // carries none
  ReferenceTransfer(ReferenceTransfer&& other) noexcept = default;
  ReferenceTransfer& operator=(ReferenceTransfer&& other) noexcept;
  /// Not sent: takes all references back. Sent, and never told how it ended: as ended() with an error.
  ~ReferenceTransfer();

  /// The record that travels; once for each time that the message holds the reference. InvalidArgument: of another
  /// agent of this process; else the reference's status().
  Result<ReferenceRecord> add(const Reference& reference);
  [[nodiscard]] bool empty() const { return forks_.empty(); }

  /// The message is about to be given to the agent: from now on the receiver may have the references.
  void sent() { sent_ = true; }
  /// It was a request, and its call has ended so. On an error the receiver is asked whether it had come, and refuses
  /// the references if it comes later.
  void ended(const Status& status);
  /// It was the reply to the peer's call `call` (RequestHead::call), about to be given to the agent. A reply may be
  /// lost or dropped without anybody telling: after a while the caller is asked.
  void replied(std::uint64_t call);

 private:
  friend class References;
  ReferenceTransfer(std::shared_ptr<References> references, AgentId receiver)
      : references_(std::move(references)), receiver_(std::move(receiver)) {}
  void finish();

  /// There is something to tell, and this is not a forked child's copy: the parent tells.
  [[nodiscard]] bool telling() const;

  std::shared_ptr<References> references_;
  AgentId receiver_;
  std::vector<ForkId> forks_;
  bool sent_ = false;
};

/// The references of one agent. Handles keep it alive, so close() is what ends it.
class References final : public std::enable_shared_from_this<References> {
 public:
  /// Carries the protocol's messages.
  class Network {
   public:
    virtual ~Network() = default;
    /// Takes `message` to References::receive_mail at `peer` and its answer to `done`; an error where it is not known
    /// to have arrived (it may have; it may still). `done` runs once, on any thread, also inside send. Repeats and late
    /// arrivals do no harm.
    virtual void send(const AgentId& peer, Bytes message, UniqueFunction<void(Result<Bytes>)> done) = 0;
    /// Runs `what` once after `delay`; drops it when the network has ended.
    virtual void after(Milliseconds delay, UniqueFunction<void()> what) = 0;
  };

  struct Options {
    Milliseconds retry{100};  // after a message failed; doubled each time
    Milliseconds most_retry{5000};
    Milliseconds ask_after{5000};  // references that nobody has accepted are asked after
    Milliseconds give_up{15000};   // a peer that cannot be reached for so long (NotFound, ConnectionLost) is dead
  };

  static std::shared_ptr<References> make(AgentId self, std::shared_ptr<Network> network, Options options);
  static std::shared_ptr<References> make(AgentId self, std::shared_ptr<Network> network) {
    return make(std::move(self), std::move(network), Options{});
  }
  ~References();
  References(const References&) = delete;
  References& operator=(const References&) = delete;

  // ---- at the owner
  /// A new object of ours, with its value.
  std::shared_ptr<Reference> own(Outcome outcome, std::string type_hint = {});
  /// A request of `creator`'s asks for an object (RequestHead::creation). On an error it must not run, and the reply is
  /// that error: Cancelled (its creator has given it up), ConnectionLost (and is dead), ProtocolError.
  Status create(const AgentId& creator, const Creation& ids);
  /// What the object that create() admitted has become. Once.
  void fulfil(const RRefId& object, Outcome outcome);
  /// Completes with the outcome of an object of ours when it is there; also of one whose creation is still under way to
  /// us. NotFound: was freed, or never made. DeadlineExceeded: not there by `deadline`. Completes on the thread that
  /// makes it so, at once where it is so already.
  void fetch(const RRefId& object, std::optional<Clock::time_point> deadline,
             UniqueFunction<void(Result<Outcome>)> completion);

  // ---- at the creator
  /// A hold on an object that a request to `owner` will create: send its ids() with that request, then tell its end.
  /// The reference can be passed on at once.
  std::shared_ptr<Reference> begin_creation(const AgentId& owner, std::string type_hint = {});
  /// How the create request's call ended: Ok when the owner answered that it has run. On an error the creation is given
  /// up: if it should still happen, the object is freed at once.
  void end_creation(const Reference& reference, const Status& status);

  // ---- passing on
  /// For a message to `receiver`, whose incarnation must be known (RawAgent::find): its next life is not meant.
  ReferenceTransfer pass_to(AgentId receiver);
  /// The hold that came with a record inside a message of `sender`'s. Errors: Cancelled (the message's call had failed
  /// at the sender, who took the reference back), ProtocolError.
  Result<std::shared_ptr<Reference>> receive(const ReferenceRecord& record, const AgentId& sender);

  /// Brackets each call that may bring references back: the result goes with the request (begin_request's `call`), and
  /// end_call follows when the reply has been decoded or will not be. A few ns.
  std::uint64_t begin_call();
  void end_call(std::uint64_t call);

  // ---- from the network
  /// A message of `from`'s References; returns the answer. ProtocolError on bytes that are none.
  Result<Bytes> receive_mail(const AgentId& from, ByteView message);
  /// This life of that agent has ended: its forks are dropped, its objects are lost.
  void peer_lost(const AgentId& peer, const Status& why);

  // ---- and besides
  struct Counts {
    std::size_t objects = 0;                   // of ours, alive
    std::size_t forks = 0;                     // that others hold on them
    std::size_t passing = 0;                   // passed on by us, not yet accepted
    std::map<std::string, std::size_t> holds;  // of ours on others' objects, by owner's name
    bool operator==(const Counts&) const = default;
  };
  [[nodiscard]] Counts counts() const;
  /// Nothing is under way: no message waits for its answer, no hold for its confirmation, nothing passed on for being
  /// accepted. A graceful shutdown waits for it.
  [[nodiscard]] bool settled() const;

  /// Completes everything with AgentClosed and sends no more; objects are let go. Handles stay valid and are lost.
  /// Idempotent.
  void close();

 private:
  friend class Reference;
  friend class ReferenceTransfer;
  class Transaction;  // one hold of the lock, and what is to run after it
  using Objects = std::unordered_map<RRefId, references::Object>;
  using Holds = std::unordered_map<ForkId, references::Hold>;

  References(AgentId self, std::shared_ptr<Network> network, Options options);

  // For Reference and ReferenceTransfer.
  void drop(const Reference& reference);
  bool confirmed(const Reference& reference) const;
  Status status(const Reference& reference) const;
  void on_confirmed(const Reference& reference, UniqueFunction<void(Status)> completion);
  Result<ReferenceRecord> pass(const Reference& reference, const AgentId& receiver);
  void take_back(std::span<const ForkId> forks);
  void ended(std::span<const ForkId> forks, bool failed);
  void replied(std::span<const ForkId> forks, std::uint64_t call);

  // Objects (reference_objects.cpp).
  std::shared_ptr<Reference> local_handle(const RRefId& object, std::string type_hint);
  Objects::iterator find_or_await(const RRefId& object);
  std::string why_gone(const RRefId& object) const;
  void begin_running(Objects::iterator object);
  void finish(Transaction& transaction, Objects::iterator object, Result<Outcome> outcome);
  void free_if_unused(Transaction& transaction, Objects::iterator object);
  void expire(const RRefId& object, std::uint64_t waiter);

  // Holds and what is passed on (reference_holds.cpp).
  void lose(Transaction& transaction, references::Hold& hold, Status why);
  void confirm(Transaction& transaction, references::Hold& hold);
  void release_if_done(Transaction& transaction, Holds::iterator hold);
  void drop_child(Transaction& transaction, const ForkId& fork, bool accepted);
  void ask_later(Transaction& transaction);
  void ask_now();

  // Peers (reference_peers.cpp).
  references::Peer& peer_of(const AgentId& id);
  void post(Transaction& transaction, const AgentId& to, ReferenceOp op);
  void deliver(Transaction& transaction);
  void send_batch(Transaction& transaction, references::Peer& peer);
  void answered(const AgentId& peer, std::uint64_t number, const Result<Bytes>& answer);
  void send_again(const AgentId& peer, std::uint64_t number);
  ReferenceResult apply(Transaction& transaction, const AgentId& from, const ReferenceOp& op);
  ReferenceResult apply_fork(Transaction& transaction, const AgentId& from, const ReferenceOp& op);
  ReferenceResult apply_withdraw(const AgentId& from, const ReferenceOp& op);
  void apply_abandon(Transaction& transaction, const AgentId& from, const ReferenceOp& op);
  void apply_result(Transaction& transaction, const AgentId& from, const ReferenceOp& op,
                    const ReferenceResult& result);
  void lose_peer(Transaction& transaction, const AgentId& peer, const Status& why);

  [[nodiscard]] bool inherited() const noexcept { return process_ != tensorferry::forks(); }

  const std::uint32_t process_ = tensorferry::forks();  // the one that it belongs to
  const AgentId self_;
  const std::shared_ptr<Network> network_;
  const Options options_;

  mutable std::mutex mutex_;
  bool closed_ = false;
  std::uint64_t last_object_ = 0;  // of our own making, here
  std::uint64_t last_fork_ = 0;
  std::uint64_t last_waiter_ = 0;
  std::size_t awaited_ = 0;  // objects in that state
  bool asking_ = false;      // ask_now() is going to run
  Objects objects_;
  Holds holds_;
  std::unordered_map<ForkId, references::Child> children_;
  std::unordered_map<std::uint64_t, references::Peer> peers_;  // by incarnation
  references::RecentSet<std::uint64_t> dead_;                  // incarnations
  std::deque<ReferenceOp> to_self_;

  /// Calls under way, counted in groups of 1024 that began one after another; groups 4096 apart share a counter. A
  /// question after one call waits for its group: exact enough, and a call pays two increments for it.
  static constexpr std::size_t call_groups = 4096;
  [[nodiscard]] static std::size_t group_of(std::uint64_t call) { return (call / 1024) % call_groups; }
  std::atomic<std::uint64_t> last_call_{0};
  std::array<std::atomic<std::uint32_t>, call_groups> calls_{};
};

}  // namespace tensorferry
