#include "tests/network/namespace.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/inet_diag.h>
#include <linux/netlink.h>
#include <linux/sock_diag.h>
#include <net/if.h>
#include <net/route.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

namespace tensorferry::testing {
namespace {

constexpr auto device = "eth0";
constexpr int queued_packets = 10000;  // in the device; the emulator must never be the reason for a loss

int check(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

FileDescriptor own_namespace() {
  return FileDescriptor(check(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC), "open the network namespace"));
}

/// Puts the thread back into its namespace, also after an exception.
class Return {
 public:
  Return() : before_(own_namespace()) {}
  ~Return() { ::setns(before_.get(), CLONE_NEWNET); }
  Return(const Return&) = delete;
  Return& operator=(const Return&) = delete;

 private:
  FileDescriptor before_;
};

ifreq request_for(const char* name) {
  ifreq request{};
  std::strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  return request;
}

sockaddr internet_address(const std::string& text) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  if (::inet_pton(AF_INET, text.c_str(), &address.sin_addr) != 1) throw std::invalid_argument(text);
  sockaddr out{};
  std::memcpy(&out, &address, sizeof out);
  return out;
}

template <class Change>
void set(int socket, const char* name, unsigned long what, Change change) {
  auto request = request_for(name);
  change(request);
  check(::ioctl(socket, what, &request), "set up a network interface");
}

void set_up(const std::string& address, int mtu) {
  const FileDescriptor any(check(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket"));
  const auto up = [](ifreq& request) { request.ifr_flags = IFF_UP | IFF_RUNNING; };
  set(any.get(), "lo", SIOCSIFFLAGS, up);
  set(any.get(), device, SIOCSIFADDR, [&](ifreq& request) { request.ifr_addr = internet_address(address); });
  set(any.get(), device, SIOCSIFNETMASK,
      [](ifreq& request) { request.ifr_netmask = internet_address("255.255.255.0"); });
  set(any.get(), device, SIOCSIFMTU, [&](ifreq& request) { request.ifr_mtu = mtu; });
  set(any.get(), device, SIOCSIFTXQLEN, [](ifreq& request) { request.ifr_qlen = queued_packets; });
  set(any.get(), device, SIOCSIFFLAGS, up);
  rtentry route{};
  route.rt_dst = route.rt_genmask = internet_address("0.0.0.0");
  route.rt_flags = RTF_UP;
  char name[IFNAMSIZ];
  std::strcpy(name, device);
  route.rt_dev = name;
  check(::ioctl(any.get(), SIOCADDRT, &route), "add the default route");
}

FileDescriptor open_tun(const char* name) {
  FileDescriptor tun(check(::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), "open /dev/net/tun"));
  auto request = request_for(name);
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  check(::ioctl(tun.get(), TUNSETIFF, &request), "make a TUN device");
  int header = sizeof(PacketHeader);
  check(::ioctl(tun.get(), TUNSETVNETHDRSZ, &header), "TUNSETVNETHDRSZ");
  return tun;
}

template <class Body>
void send_request(int socket, std::uint16_t type, std::uint16_t flags, const Body& body) {
  struct {
    nlmsghdr header;
    Body body;
  } request{};
  request.header.nlmsg_len = sizeof request;
  request.header.nlmsg_type = type;
  request.header.nlmsg_flags = static_cast<std::uint16_t>(NLM_F_REQUEST | flags);
  request.body = body;
  check(static_cast<int>(::send(socket, &request, sizeof request, 0)), "ask the kernel for sockets");
}

/// Returns the TCP sockets of a namespace that are not listening.
std::vector<inet_diag_sockid> connections(int socket) {
  inet_diag_req_v2 wanted{};
  wanted.sdiag_family = AF_INET;
  wanted.sdiag_protocol = IPPROTO_TCP;
  wanted.idiag_states = ~((1U << TCP_LISTEN) | (1U << TCP_TIME_WAIT) | (1U << TCP_CLOSE));
  send_request(socket, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, wanted);
  std::vector<inet_diag_sockid> found;
  alignas(nlmsghdr) char bytes[1 << 15];
  while (true) {
    auto left = static_cast<unsigned>(check(static_cast<int>(::recv(socket, bytes, sizeof bytes, 0)), "list sockets"));
    for (auto* message = reinterpret_cast<nlmsghdr*>(bytes); NLMSG_OK(message, left);
         message = NLMSG_NEXT(message, left)) {
      if (message->nlmsg_type == NLMSG_DONE) return found;
      if (message->nlmsg_type == NLMSG_ERROR) {
        errno = -static_cast<nlmsgerr*>(NLMSG_DATA(message))->error;
        check(-1, "list sockets");
      }
      found.push_back(static_cast<inet_diag_msg*>(NLMSG_DATA(message))->id);
    }
  }
}

/// Ends one connection as `ss -K` does. False: it has ended before.
bool destroy(int socket, const inet_diag_sockid& id) {
  inet_diag_req_v2 wanted{};
  wanted.sdiag_family = AF_INET;
  wanted.sdiag_protocol = IPPROTO_TCP;
  wanted.idiag_states = ~0U;
  wanted.id = id;
  send_request(socket, SOCK_DESTROY, NLM_F_ACK, wanted);
  alignas(nlmsghdr) char bytes[1 << 12];
  check(static_cast<int>(::recv(socket, bytes, sizeof bytes, 0)), "reset a connection");
  errno = -static_cast<nlmsgerr*>(NLMSG_DATA(reinterpret_cast<nlmsghdr*>(bytes)))->error;
  if (errno == ENOENT) return false;
  if (errno != 0) check(-1, "reset a connection (SOCK_DESTROY)");
  return true;
}

}  // namespace

NetworkNamespace::NetworkNamespace(const std::string& address, int mtu) {
  const Return later;
  check(::unshare(CLONE_NEWNET), "make a network namespace");
  namespace_ = own_namespace();
  tun_ = open_tun(device);
  set_up(address, mtu);
  diagnosis_ = FileDescriptor(check(::socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_SOCK_DIAG), "socket"));
}

void NetworkNamespace::add_unplugged_interface(const char* name, const std::string& address) {
  const Inside inside(*this);
  unplugged_.push_back(open_tun(name));
  const FileDescriptor any(check(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "socket"));
  set(any.get(), name, SIOCSIFADDR, [&](ifreq& request) { request.ifr_addr = internet_address(address); });
  set(any.get(), name, SIOCSIFNETMASK, [](ifreq& request) { request.ifr_netmask = internet_address("255.255.255.0"); });
  set(any.get(), name, SIOCSIFFLAGS, [](ifreq& request) { request.ifr_flags = IFF_UP | IFF_RUNNING; });
}

NetworkNamespace::Inside::Inside(const NetworkNamespace& where) : before_(own_namespace()) {
  check(::setns(where.fd(), CLONE_NEWNET), "enter a network namespace");
}

NetworkNamespace::Inside::~Inside() { ::setns(before_.get(), CLONE_NEWNET); }

void NetworkNamespace::set_offload(bool on) const {
  check(::ioctl(tun_.get(), TUNSETOFFLOAD, on ? TUN_F_CSUM | TUN_F_TSO4 : 0), "TUNSETOFFLOAD");
}

std::size_t NetworkNamespace::reset_connections(std::uint16_t spare) const {
  std::size_t count = 0;
  const auto port = htons(spare);
  for (const auto& id : connections(diagnosis_.get())) {
    if (spare != 0 && (id.idiag_sport == port || id.idiag_dport == port)) continue;
    count += destroy(diagnosis_.get(), id) ? 1 : 0;
  }
  return count;
}

}  // namespace tensorferry::testing
