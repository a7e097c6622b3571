/// The sockets of the test's own process: a test ends connections as a failing network does.
#pragma once

#include <dirent.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

namespace tensorferry::testing {

inline std::vector<int> sockets_of_this_process() {
  std::vector<int> all;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (const auto* entry = ::readdir(folder)) {
    const int fd = std::atoi(entry->d_name);
    int type = 0;
    socklen_t size = sizeof type;
    if (::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM) all.push_back(fd);
  }
  ::closedir(folder);
  return all;
}

inline bool listens(int fd) {
  int accepts = 0;
  socklen_t size = sizeof accepts;
  return ::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &accepts, &size) == 0 && accepts != 0;
}

/// Ends every connection of this process, as a failing network does. The agents find out by themselves.
inline void sever_connections() {
  for (const int fd : sockets_of_this_process()) {
    if (!listens(fd)) ::shutdown(fd, SHUT_RDWR);
  }
}

/// Makes the agent with this TCP address unreachable for new connections.
inline void stop_listening(const std::string& address) {
  const auto port = static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1)));
  for (const int fd : sockets_of_this_process()) {
    sockaddr_storage at{};
    socklen_t size = sizeof at;
    if (!listens(fd) || ::getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size) != 0) continue;
    if (at.ss_family == AF_INET && reinterpret_cast<sockaddr_in&>(at).sin_port == htons(port))
      ::shutdown(fd, SHUT_RDWR);
  }
}

}  // namespace tensorferry::testing
