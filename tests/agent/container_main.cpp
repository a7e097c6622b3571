/// Starts an agent (peer_main.cpp) in a container. Arguments: the store's folder, the sockets' folder, the agent's
/// name, and a descriptor that takes "ready\n".
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "tests/agent/forked.h"

namespace tensorferry::testing {
namespace {

constexpr int apart = CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWNET | CLONE_NEWNS;

bool write_file(const char* name, const std::string& text) {
  std::ofstream file(name);
  file << text << std::flush;
  return file.good();
}

/// Moves this process into new namespaces. If that needs a user namespace, makes one too, and maps the user and the
/// group to themselves.
bool go_apart() {
  if (::unshare(apart) == 0) return true;
  const auto uid = std::to_string(::geteuid()), gid = std::to_string(::getegid());
  return ::unshare(apart | CLONE_NEWUSER) == 0 && write_file("/proc/self/setgroups", "deny") &&
         write_file("/proc/self/uid_map", uid + " " + uid + " 1") &&
         write_file("/proc/self/gid_map", gid + " " + gid + " 1");
}

/// Sets up the mounts and the loopback interface, as a container's runtime does before it starts a program.
void furnish() {
  ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
  ::mount("proc", "/proc", "proc", 0, nullptr);
  const int any = ::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  ifreq loopback{};
  std::strcpy(loopback.ifr_name, "lo");
  loopback.ifr_flags = IFF_UP | IFF_RUNNING;
  ::ioctl(any, SIOCSIFFLAGS, &loopback);
  ::close(any);
}

/// Is process 1 of the container: an init, which starts the agent, and reaps.
[[noreturn]] void be_init(char** arguments) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  furnish();
  if (::fork() == 0) {
    ::setenv("TENSORFERRY_SOCKET_DIR", arguments[2], 1);
    ::execl(PEER_BINARY, PEER_BINARY, arguments[1], arguments[3], "ring", "", arguments[4], "5000",
            static_cast<char*>(nullptr));
    ::_exit(127);
  }
  ::close(std::stoi(arguments[4]));
  while (true) {  // until the signal ends it
    if (::wait(nullptr) < 0) ::usleep(10'000);
  }
}

}  // namespace
}  // namespace tensorferry::testing

int main(int count, char** arguments) {
  using namespace tensorferry::testing;
  if (count != 5) return 2;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (!go_apart()) return not_allowed;
  const auto init = ::fork();
  if (init == 0) be_init(arguments);
  ::close(std::stoi(arguments[4]));
  int status = 0;
  ::waitpid(init, &status, 0);
  return 1;
}
