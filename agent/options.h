/// The options of an agent.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "agent/executor.h"
#include "agent/message.h"
#include "agent/store.h"
#include "base/clock.h"
#include "channels/buffer.h"
#include "channels/registry.h"

namespace tensorferry {

class Network;

/// What an agent takes from its process: time, connections, threads. Tests give others.
struct Surroundings {
  Clock clock{};
  std::shared_ptr<Network> network{};  // null: the sockets of this host
  bool threads = true;                 // false: the agent works only inside RawAgent::step()
  std::uint64_t incarnation = 0;       // 0: random
};

struct RawAgentOptions {
  std::string name;
  int rank = -1;
  std::shared_ptr<Store> store;        // the key-value store in which agents find one another
  std::string prefix = "tensorferry";  // of the keys in the store
  std::string key;  // the cluster key; "": TENSORFERRY_KEY_FILE, TENSORFERRY_KEY, or none (one user on one host)
  Registry registry = Registry::built_in();
  std::string channels;                                  // see Registry::drivers; "": TENSORFERRY_CHANNELS
  std::vector<Device> devices{Device{}};                 // this agent's devices; always includes the CPU
  std::map<DeviceType, std::shared_ptr<Memory>> memory;  // receive memory; the agent makes the CPU's if it is missing
  std::shared_ptr<Executor> executor;
  int max_threads = 1024;  // handlers that run at once, without those that wait for a call of their own
  // Per peer: requests taken in whose handlers have not started, and the bytes of their payloads and buffers. They wait
  // up to their deadlines. Beyond a bound, requests fail with ResourceExhausted.
  int max_queued_calls = 65536;
  std::size_t max_queued_bytes = std::size_t{16} << 30;
  // Per peer, and in each direction: bytes of buffers that the peer has not taken. Beyond it a caller blocks, and no
  // further handler of the peer's requests starts.
  std::size_t max_bytes_in_flight = std::size_t{1} << 30;
  Milliseconds heartbeat{5000};      // between hosts; the link to a peer that is silent for three heartbeats ends
  Milliseconds peer_timeout{60000};  // a peer that cannot be reached for this long is dead
  std::string interface;             // "": TENSORFERRY_SOCKET_IFNAME, else the one that reaches the rendezvous
  std::string ports;                 // "": any; "7000" or "7000-7099"
  std::string reaches;               // the rendezvous's host, from which the interface is chosen; "": loopback
  Surroundings surroundings;
  bool unix_sockets = true;   // false: TCP also between processes of one host
  bool shared_memory = true;  // false: the agent shares no memory with peers: sockets carry every frame, and channels
                              // such as shm are left out unless `channels` names them
  std::string socket_dir;     // "": TENSORFERRY_SOCKET_DIR, else abstract sockets
  std::string tls;            // of TCP connections, see agent/transport/tls.h; "": TENSORFERRY_TLS, else off
  std::string trace;          // a file: leave() writes a trace of all calls beside it; "": TENSORFERRY_TRACE, else none
};

}  // namespace tensorferry
