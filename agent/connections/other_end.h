/// Who is at the other end of a link: the peer and its incarnation, its user, and the session.
///
/// Threads: incarnation() any; the mutex of Connections guards the rest. The name of peer() never changes, so any
/// thread may read it.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "agent/connections/session.h"
#include "agent/message.h"
#include "agent/wire/frame.h"

namespace tensorferry {

class OtherEnd final {
 public:
  /// `session`: the session that the link continues; null: the link goes to the incarnation that answers.
  OtherEnd(PeerInfo peer, std::shared_ptr<Session> session) : peer_(std::move(peer)), session_(std::move(session)) {}

  [[nodiscard]] const PeerInfo& peer() const noexcept { return peer_; }
  /// Returns the peer's incarnation; 0 until the link has had a connection.
  [[nodiscard]] std::uint64_t incarnation() const noexcept { return incarnation_.load(std::memory_order_acquire); }
  [[nodiscard]] const std::shared_ptr<Session>& session() const noexcept { return session_; }

  /// Returns the user at the other end of the link's connections, as the kernel tells; nullopt: the kernel does not
  /// know, or the link has had no connection.
  [[nodiscard]] std::optional<uid_t> user() const noexcept { return user_; }
  /// Returns whether a connection from `user` may belong to the link. All connections of a link have one user: a
  /// process of another one could state the peer's name and incarnation, and would get what this side gives to the
  /// peer's user.
  [[nodiscard]] bool may_be_of(std::optional<uid_t> user) const noexcept { return incarnation() == 0 || user == user_; }

  /// Returns whether a connection with this hello, from `user`, may belong to the link: it is of the same incarnation
  /// and user.
  [[nodiscard]] bool is_of(const wire::Hello& hello, std::optional<uid_t> user) const {
    return (incarnation() == 0 || incarnation() == hello.incarnation) && may_be_of(user);
  }
  /// Learns what the hello of such a connection says, and its user. Returns the session that it had. The caller drops
  /// that after it has released the mutex.
  [[nodiscard]] std::shared_ptr<Session> meet(const wire::Hello& hello, std::shared_ptr<Session> session,
                                              std::optional<uid_t> user) {
    session.swap(session_);
    if (incarnation() != 0) return session;
    user_ = user;
    peer_.rank = hello.rank;
    peer_.incarnation = hello.incarnation;
    incarnation_.store(hello.incarnation, std::memory_order_release);
    return session;
  }
  /// Parts with the session, if it is `dead`, and returns it. The caller drops it after it has released the mutex.
  std::shared_ptr<Session> part_with(const Session& dead) {
    return session_.get() == &dead ? std::move(session_) : nullptr;
  }

 private:
  PeerInfo peer_;
  std::atomic<std::uint64_t> incarnation_{0};
  std::optional<uid_t> user_;
  std::shared_ptr<Session> session_;
};

}  // namespace tensorferry
