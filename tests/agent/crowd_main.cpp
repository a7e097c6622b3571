// Many agents in one process, for tests of an agent with many peers:
//
//   agent_crowd PORT PREFIX COUNT tcp|ring READY_FD
//
// Agents PREFIX0, PREFIX1, ... join through the store at 127.0.0.1:PORT, and each calls "echo" of the agent "hub" once.
// Then writes a line to READY_FD, and serves until a signal kills it.
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "agent/rendezvous/tcp_store.h"
#include "tests/agent/agents.h"
#include "tests/agent/descriptor_limit.h"

using namespace tensorferry;
using namespace tensorferry::testing;

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // this process dies with the test that started it
  raise_descriptor_limit();
  auto store = connect_tcp_store("127.0.0.1", static_cast<std::uint16_t>(std::atoi(argv[1])), "", long_enough);
  if (!store) return 3;
  std::vector<std::shared_ptr<RawAgent>> agents;
  for (int i = 0; i < std::atoi(argv[3]); ++i) {
    agents.push_back(join(*store, argv[2] + std::to_string(i), Ways{argv[4], "basic"}));
    if (!agents.back()) return 4;
    serve_echo(*agents.back());
    const auto reply = call_sync(*agents.back(), "hub", "echo", message_of("m"), within(long_enough));
    if (!reply.ok()) {
      std::fprintf(stderr, "%s%d: %s\n", argv[2], i, reply.status().text().c_str());
      return 5;
    }
  }
  if (::write(std::atoi(argv[5]), "ready\n", 6) != 6) return 6;
  while (true) ::pause();
}
