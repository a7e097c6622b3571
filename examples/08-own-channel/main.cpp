// Two processes with an agent each. One sends a tensor to the other over the channel `spool` of this program.
#include <sys/wait.h>
#include <tensorferry/agent.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "spool_channel.h"

namespace {

std::shared_ptr<tensorferry::Agent> join(int rank, std::uint16_t port, const std::string& folder) {
  tensorferry::AgentOptions options;
  options.name = rank == 0 ? "sender" : "receiver";
  options.rank = rank;
  options.world_size = 2;
  options.store = tensorferry::connect_store("127.0.0.1", port);
  options.register_channels = [&](tensorferry::Registry& channels) {
    // Above the priority of shm (80), so that it carries what it takes.
    channels.add("spool", 90, [folder] { return std::make_unique<SpoolDriver>(folder); });
  };
  options.prepare = [&](tensorferry::Agent& agent) {
    agent.serve("sum", [](const tensorferry::TensorOf<float>& values) {
      double sum = 0;
      for (const float value : values.elements()) sum += value;
      return sum;
    });
  };
  return tensorferry::Agent::join(options);
}

void send(std::uint16_t port, const std::string& folder) {
  const auto agent = join(0, port, folder);
  const auto ones = tensorferry::Tensor::from_vector(std::vector<float>(1 << 20, 1.0F));
  tensorferry::CallOptions options;
  options.require = "spool";  // the call fails if another channel would carry the tensor
  const auto sum = agent->call_with<double>(options, "receiver", "sum", ones).get();
  std::printf("the sum of 4 MiB of ones that went by spool: %.0f\n", sum);
  std::printf("%s", agent->explain("receiver").c_str());
  agent->shutdown();
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string folder = argc == 2 ? argv[1] : "/tmp";
  std::array<int, 2> to_child{};
  if (::pipe(to_child.data()) != 0) return std::perror("pipe"), 1;
  std::uint16_t port = 0;
  const auto child = ::fork();  // before this process has threads
  if (child == 0) {
    ::close(to_child[1]);
    if (::read(to_child[0], &port, sizeof port) != sizeof port) return 1;  // the parent has ended
    join(1, port, folder)->shutdown();
    return 0;
  }
  ::close(to_child[0]);
  const tensorferry::StoreServer store;
  port = store.port();
  if (::write(to_child[1], &port, sizeof port) != sizeof port) return 1;
  send(port, folder);
  int status = 0;
  ::waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
} catch (const tensorferry::Error& error) {
  return std::fprintf(stderr, "own_channel: %s\n", error.what()), 1;
}
