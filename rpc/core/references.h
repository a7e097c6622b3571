/// Distributed reference counting of remote objects: tracks their owners and holders, and keeps each object alive
/// exactly as long as an agent holds it. docs/codec.md ("The reference protocol") has the rules and a proof.
///
/// An object lives at its owner. Every other agent that holds it has a *fork*, one for each time that the object was
/// passed to it. The owner knows each fork by its number and its holder. An agent that passes an object on makes the
/// number of the receiver's fork, and keeps its own hold until the owner knows of the receiver's. So the owner frees an
/// object when no fork and no local handle is left, and never before. Messages may arrive in any order. When an agent
/// dies, the owner drops its forks.
///
/// Knows no torch, no Python and no agent. Values are opaque, and messages go through a `Network`: AgentNetwork
/// (agent_network.h) in agents, a simulated one in tests. The layer above carries the values, makes the calls that hold
/// references, and reports both here.
///
/// Threads: any thread may call any function at any time. Completions, `Network` functions and destructors of values
/// run under no lock of this class, and may call it again.
///
/// In a forked child, handles and transfers may be dropped, which does nothing, because the parent has the holds. The
/// child must call nothing else.
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

/// Counts calls, in groups of 1024 consecutive numbers; groups 4096 apart share a counter. A peer that asks about one
/// call is answered `maybe` until the call's whole group has ended. That is precise enough, and costs a call two atomic
/// increments.
class CallsUnderWay final {
 public:
  /// Returns the number of a call that begins.
  std::uint64_t begin() {
    const auto call = last_.fetch_add(1, std::memory_order_relaxed) + 1;
    of_group(call).fetch_add(1, std::memory_order_relaxed);
    return call;
  }
  void end(std::uint64_t call) { of_group(call).fetch_sub(1, std::memory_order_release); }
  [[nodiscard]] bool may_be(std::uint64_t call) { return of_group(call).load(std::memory_order_acquire) != 0; }

 private:
  static constexpr std::size_t groups = 4096;
  [[nodiscard]] std::atomic<std::uint32_t>& of_group(std::uint64_t call) { return counts_[(call / 1024) % groups]; }

  std::atomic<std::uint64_t> last_{0};
  std::array<std::atomic<std::uint32_t>, groups> counts_{};
};

class References;

/// One hold on an object. The layer above shares it as a shared_ptr; the hold ends when the last copy is destroyed.
class Reference {
 public:
  ~Reference();
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;

  [[nodiscard]] const AgentId& owner() const { return owner_; }
  [[nodiscard]] const RRefId& object() const { return ids_.object; }
  /// Returns the ids that a create request carries. At the owner `fork` is 0, 0, because its own holds have no number.
  [[nodiscard]] const Creation& ids() const { return ids_; }
  [[nodiscard]] const std::string& type_hint() const { return type_hint_; }
  [[nodiscard]] bool is_owner() const { return local_; }

  /// Returns whether the owner knows of this hold. Always true at the owner.
  [[nodiscard]] bool confirmed() const;
  /// Returns Ok, or why the object is lost: ConnectionLost with the owner's name, the error of the object's creation,
  /// or AgentClosed. Call it before a fetch. Always Ok at the owner: fetch() gives the object's outcome there.
  [[nodiscard]] Status status() const;
  /// Runs `completion` once: with Ok when the owner has confirmed the hold, or with status() when the hold is lost.
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

/// The references inside one message. It is made when the message's encoding begins, and learns how the message ended.
/// Move-only.
class ReferenceTransfer {
 public:
  ReferenceTransfer() = default;  // carries none
  ReferenceTransfer(ReferenceTransfer&& other) noexcept = default;
  ReferenceTransfer& operator=(ReferenceTransfer&& other) noexcept;
  /// If the message was not sent, takes all references back. If it was sent, and neither ended() nor replied() was
  /// called, acts as ended() with an error.
  ~ReferenceTransfer();

  /// Returns the record to send. Call it once for each time that the message holds the reference. InvalidArgument: the
  /// reference belongs to another agent of this process. Otherwise fails with the reference's status().
  Result<ReferenceRecord> add(const Reference& reference);
  [[nodiscard]] bool empty() const { return forks_.empty(); }

  /// Call it before the message goes to the agent: from then on the receiver may have the references.
  void sent() { sent_ = true; }
  /// The message was a request, and its call has ended with `status`. On an error, asks the receiver whether it has the
  /// references; if not, the receiver refuses them from then on.
  void ended(const Status& status);
  /// The message is the reply to the peer's call `call` (RequestHead::call), and goes to the agent next. A reply may be
  /// lost or dropped without notice, so this side asks the caller after a while.
  void replied(std::uint64_t call);

 private:
  friend class References;
  ReferenceTransfer(std::shared_ptr<References> references, AgentId receiver)
      : references_(std::move(references)), receiver_(std::move(receiver)) {}
  void finish();

  /// Returns whether there are references to report. False in a forked child: the parent reports them.
  [[nodiscard]] bool must_report() const;

  std::shared_ptr<References> references_;
  AgentId receiver_;
  std::vector<ForkId> forks_;
  bool sent_ = false;
};

/// The reference tables of one agent. Handles keep the object alive; close() ends its work.
class References final : public std::enable_shared_from_this<References> {
 public:
  /// Carries the protocol's messages.
  class Network {
   public:
    virtual ~Network() = default;
    /// Delivers `message` to References::receive_mail at `peer`, and its answer to `done`. After an error the message
    /// may have arrived, or may still arrive. `done` runs once, on any thread, perhaps inside send(). The protocol
    /// tolerates repeated and late messages.
    virtual void send(const AgentId& peer, Bytes message, UniqueFunction<void(Result<Bytes>)> done) = 0;
    /// Runs `what` once after `delay`; drops it if the network ends before.
    virtual void after(Milliseconds delay, UniqueFunction<void()> what) = 0;
    /// Returns the clock of deadlines.
    [[nodiscard]] virtual Clock clock() const { return {}; }
  };

  /// Bounds what one peer can make this agent keep. Beyond them its operations are refused.
  static constexpr std::size_t most_forks_of_a_peer = std::size_t{1} << 20;
  /// Of objects that it names and whose create request has not come. There are normally no more of them than creations
  /// under way.
  static constexpr std::size_t most_awaited_of_a_peer = std::size_t{1} << 16;

  struct Options {
    Milliseconds retry{100};  // after a message failed; doubled each time
    Milliseconds most_retry{5000};
    Milliseconds ask_after{5000};  // then the receiver of an unaccepted reference is asked about it
    Milliseconds give_up{15000};   // a peer that cannot be reached (NotFound, ConnectionLost) for this long is dead
    /// The key of the nonces of the objects that this agent creates. 0, 0: a random one. A simulation sets it, so that
    /// its runs repeat.
    std::array<std::uint64_t, 2> secret{};
  };

  static std::shared_ptr<References> make(AgentId self, std::shared_ptr<Network> network, Options options);
  static std::shared_ptr<References> make(AgentId self, std::shared_ptr<Network> network) {
    return make(std::move(self), std::move(network), Options{});
  }
  ~References();
  References(const References&) = delete;
  References& operator=(const References&) = delete;

  // ---- at the owner
  /// Makes an object of this agent that has its value already.
  std::shared_ptr<Reference> own(Outcome outcome, std::string type_hint = {});
  /// Registers the object that a request of `creator` asks for (RequestHead::creation). On an error the request must
  /// not run, and is answered with that error: Cancelled (the creator has given the creation up), ConnectionLost (the
  /// creator is dead), PermissionDenied (the fork is not the creator's), ProtocolError, ResourceExhausted.
  Status create(const AgentId& creator, const Creation& ids);
  /// Returns whether a request for this object has come before, and the object is still there: the creator's connection
  /// was lost, and the request comes again. It must not run; fetch() tells how the first one ends.
  [[nodiscard]] bool comes_again(const AgentId& creator, const Creation& ids) const;
  /// Stores the outcome of an object that create() registered, or the error for its users. Call it once.
  void fulfil(const RRefId& object, Result<Outcome> outcome);
  /// Returns whether the agent `user` may use an object of this agent by its hold `fork`: Ok if a holder of the object
  /// gave that fork to this incarnation of `user`, which includes the object's creator; or if `user` is this agent.
  /// PermissionDenied, with the names of the object and the user, otherwise. The fork proves it by itself, so this
  /// holds before the owner has heard of the fork, and also after the user has let go of it, as long as the object
  /// lives.
  [[nodiscard]] Status may_use(const AgentId& user, const RRefId& object, const ForkId& fork) const;
  /// Completes with the outcome of an object of this agent, when there is one. Also waits for an object whose create
  /// request has not come yet. NotFound: the object was freed, or never made. DeadlineExceeded: there was no outcome by
  /// `deadline`. Cancelled: `by`, the hold that the fetch uses, is the creator's, and the creator has given the
  /// creation up. Completes at once if the outcome is known, else on the thread that provides it.
  void fetch(const RRefId& object, std::optional<Clock::time_point> deadline,
             UniqueFunction<void(Result<Outcome>)> completion, const ForkId& by = {});

  // ---- at the creator
  /// Makes a hold on an object that a request to `owner` will create. The caller sends its ids() with that request, and
  /// calls end_creation() when the call has ended. The reference can be passed on at once.
  std::shared_ptr<Reference> begin_creation(const AgentId& owner, std::string type_hint = {});
  /// Reports how the create request's call ended: Ok if the owner answered that it has run. An error gives the creation
  /// up: if the owner makes the object nevertheless, it frees the object at once.
  void end_creation(const Reference& reference, const Status& status);

  // ---- passing on
  /// Returns an empty transfer for a message to `receiver`. Its incarnation must be known (RawAgent::find), because a
  /// later incarnation must not take the references.
  ReferenceTransfer pass_to(AgentId receiver);
  /// Returns the hold that came with a record in a message from `sender`. Errors: Cancelled (the message's call failed
  /// at the sender, which took the reference back), NotFound (the object is gone), PermissionDenied (the sender does
  /// not hold the object, or made the fork for another agent), ProtocolError.
  Result<std::shared_ptr<Reference>> receive(const ReferenceRecord& record, const AgentId& sender);

  /// Begins a call whose reply may bring references. The returned number travels with the request (begin_request's
  /// `call`). Call end_call() when the reply has been decoded, or will not be. Takes a few ns.
  std::uint64_t begin_call();
  void end_call(std::uint64_t call);

  // ---- from the network
  /// Handles a message from the References of `from`, and returns the answer. ProtocolError: the message is malformed.
  Result<Bytes> receive_mail(const AgentId& from, ByteView message);
  /// Handles the end of an incarnation of a peer: drops its forks, and marks holds on its objects as lost.
  void peer_lost(const AgentId& peer, const Status& why);

  // ---- and besides
  struct Counts {
    std::size_t objects = 0;                   // objects of this agent
    std::size_t forks = 0;                     // peers' forks of them
    std::size_t passing = 0;                   // forks that this agent made and that are not accepted yet
    std::map<std::string, std::size_t> holds;  // holds on peers' objects, by the owner's name
    bool operator==(const Counts&) const = default;
  };
  [[nodiscard]] Counts counts() const;
  /// Returns whether nothing is under way: every message has been answered, every hold confirmed, and every reference
  /// that was passed on accepted. A graceful shutdown waits for it.
  [[nodiscard]] bool settled() const;

  /// Completes all waiters with AgentClosed, drops all objects, and sends nothing more. Handles stay valid, and count
  /// as lost. Idempotent.
  void close();

 private:
  friend class Reference;
  friend class ReferenceTransfer;
  class Transaction;  // holds the lock for one operation (reference_transaction.h)
  using Objects = std::unordered_map<RRefId, references::OwnedObject>;
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

  [[nodiscard]] std::uint64_t nonce_of(std::uint64_t owner, std::uint64_t object) const;

  // Objects (reference_objects.cpp).
  std::shared_ptr<Reference> local_handle(const RRefId& object, std::string type_hint);
  Objects::iterator find_or_await(const RRefId& object, const AgentId* named_by);
  void end_awaiting(references::OwnedObject& object);
  Status add_fork(references::OwnedObject& object, const ForkId& fork, const AgentId& holder);
  void drop_fork(references::OwnedObject& object, const ForkId& fork);
  std::string why_gone(const RRefId& object) const;
  /// Returns why the record of a reference that has arrived is not taken; Ok: it may be. Under the lock.
  Status judge(const ReferenceRecord& record, const AgentId& sender) const;
  void begin_running(Objects::iterator object);
  void finish(Transaction& transaction, Objects::iterator object, Result<Outcome> outcome);
  void free_if_unused(Transaction& transaction, Objects::iterator object);
  void expire(const RRefId& object, std::uint64_t waiter);
  void give_up(Transaction& transaction, references::OwnedObject& object, const ForkId& by, const Status& why);

  // Holds, and forks on their way to a receiver (reference_holds.cpp).
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

  const std::uint32_t process_ = tensorferry::forks();  // tells a forked child's copy from the original
  const AgentId self_;
  const std::shared_ptr<Network> network_;
  const Options options_;

  mutable std::mutex mutex_;
  bool closed_ = false;
  struct LastNumbers {
    std::uint64_t object = 0;  // of those that this agent made itself
    std::uint64_t fork = 0;
    std::uint64_t waiter = 0;
  };
  LastNumbers last_;
  std::size_t awaited_ = 0;  // objects in state `awaited`
  Objects objects_;
  Holds holds_;
  references::Passing passing_;
  std::unordered_map<std::uint64_t, references::Peer> peers_;  // by incarnation
  references::Past past_;
  std::deque<ReferenceOp> to_self_;

  CallsUnderWay calls_;
};

}  // namespace tensorferry
