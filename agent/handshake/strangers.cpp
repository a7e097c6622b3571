#include "agent/handshake/strangers.h"

#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "agent/handshake/auth.h"
#include "base/bytes.h"
#include "base/text.h"

namespace tensorferry {

Strangers::Held Strangers::admit(std::string from, std::function<void()> close) {
  if (size_ >= places_) (void)shed();
  auto place = std::make_shared<Place>(Place{std::move(from), std::move(close)});
  by_address_[place->from].push_back(place);
  ++size_;
  return place;
}

void Strangers::release(const Held& place) {
  const auto found = by_address_.find(place->from);
  if (found == by_address_.end()) return;
  const auto at = std::find(found->second.begin(), found->second.end(), place);
  if (at == found->second.end()) return;
  found->second.erase(at);
  --size_;
  if (found->second.empty()) by_address_.erase(found);
}

bool Strangers::shed() {
  const auto most = std::max_element(by_address_.begin(), by_address_.end(),
                                     [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
  if (most == by_address_.end()) return false;
  const auto oldest = most->second.front();
  release(oldest);
  oldest->close();
  return true;
}

void Strangers::close_all() {
  while (shed()) {
  }
}

std::size_t places_for_strangers() noexcept {
  constexpr std::size_t most = 512;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return most;
  return std::clamp<std::size_t>(limit.rlim_cur / 8, 1, most);
}

std::string stranger_address(int fd) {
  sockaddr_storage peer{};
  socklen_t size = sizeof peer;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0) return "?";
  if (peer.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(peer);
    return std::string(text_of(ByteView(reinterpret_cast<const std::byte*>(&v4.sin_addr), sizeof v4.sin_addr)));
  }
  if (peer.ss_family == AF_INET6) {
    constexpr std::size_t network_bytes = 8;  // a host may have any number of addresses in its /64
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(peer);
    return std::string(text_of(ByteView(reinterpret_cast<const std::byte*>(&v6.sin6_addr), network_bytes)));
  }
  const auto uid = unix_peer_uid(fd);
  return uid ? formatted("uid {}", *uid) : "?";
}

}  // namespace tensorferry
