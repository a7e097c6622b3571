/// A call of this agent, from the encoding of its request until its reply has been read.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

#include "rpc/member/member.h"

namespace tensorferry {

/// The call, the references in its request, and its number in the tables of references. If it is dropped before end(),
/// the agent takes back the references of a request that was not sent, and asks the peer about those of one that was.
/// Move-only; the member must outlive it.
class OutgoingCall {
 public:
  OutgoingCall() = default;
  OutgoingCall(OutgoingCall&& other) noexcept
      : call(std::move(other.call)),
        transfer_(std::move(other.transfer_)),
        references_(std::exchange(other.references_, nullptr)),
        number_(std::exchange(other.number_, 0)) {}
  OutgoingCall& operator=(OutgoingCall&& other) noexcept {
    end_number();
    call = std::move(other.call);
    transfer_ = std::move(other.transfer_);
    references_ = std::exchange(other.references_, nullptr);
    number_ = std::exchange(other.number_, 0);
    return *this;
  }
  ~OutgoingCall() { end_number(); }

  /// Gives the call its number. Without it, the reply must bring no references.
  void begin(const Member& member) {
    references_ = &member.references();
    number_ = references_->begin_call();
  }
  /// Returns the number, for begin_request(); 0 before begin().
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  /// Takes the references that the request carries.
  void carry(ReferenceTransfer transfer) { transfer_ = std::move(transfer); }
  /// Sends the request. May block, without releasing the runtime's lock, if the message has bytes and exceeds the bound
  /// on bytes in flight.
  void send(const Member& member, std::string_view peer, std::string_view function, Message message,
            RawCallOptions options) {
    transfer_.sent();
    call = member.agent().call(peer, function, std::move(message), std::move(options));
  }
  /// The same, but releases the runtime's lock if it may block.
  void start(const Member& member, std::string_view peer, std::string_view function, Message message,
             RawCallOptions options) {
    std::optional<Unlocked> unlocked;
    if (member.lock() != nullptr && message.bytes() != 0) unlocked.emplace(member.lock());
    send(member, peer, function, std::move(message), std::move(options));
  }
  /// Ends the call: its reply has been read, or has not come for the reason `status`. Idempotent.
  void end(const Status& status) {
    transfer_.ended(status);
    end_number();
  }

  Call call;

 private:
  void end_number() {
    if (references_ != nullptr) std::exchange(references_, nullptr)->end_call(number_);
  }

  ReferenceTransfer transfer_;
  References* references_ = nullptr;  // null: no number, or the call has ended
  std::uint64_t number_ = 0;
};

}  // namespace tensorferry
