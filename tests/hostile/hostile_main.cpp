// A peer that has the key and means harm: it sends generated frames to one agent.
//
//   hostile_peer UNIX_ADDRESS TCP_ADDRESS KEY FRAMES SEED
//
// Prints what it has done, and exits with 0 if the agent has read that many frames, or 1 if it cannot be reached.
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/hostile/memory.h"
#include "tests/hostile/random.h"
#include "tests/hostile/session.h"

namespace {

using namespace hostile;

/// Begins a link under one of a few names. Waits a minute at least for an agent that is busy with other handshakes.
std::unique_ptr<Session> begin(const Target& target, Random& random, Meddler& meddler, Score& score) {
  for (int attempt = 0; attempt < 6000; ++attempt) {
    auto session =
        std::make_unique<Session>(target, random, meddler, score, "mallory" + std::to_string(random.below(4)));
    if (session->begin()) return session;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return nullptr;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) return 2;
  std::signal(SIGPIPE, SIG_IGN);
  const Target target{argv[1], argv[2], argv[3]};
  const auto frames = std::strtoull(argv[4], nullptr, 10);
  const auto seed = std::strtoull(argv[5], nullptr, 10);
  Random random(seed);
  Meddler meddler(seed + 1);
  Score score;
  std::vector<std::unique_ptr<Session>> sessions(3);
  while (score.frames < frames) {
    auto& session = sessions[random.below(sessions.size())];
    if (!session || random.one_in(40)) {
      session.reset();
      session = begin(target, random, meddler, score);
      if (!session) return 1;
    }
    if (!session->attack(1 + random.below(64))) session.reset();
  }
  std::printf(
      "seed %llu: %llu frames, %llu of them broken, %llu in rings, over %llu links; %llu replies, %llu calls back\n",
      static_cast<unsigned long long>(seed), static_cast<unsigned long long>(score.frames),
      static_cast<unsigned long long>(score.broken), static_cast<unsigned long long>(score.in_rings),
      static_cast<unsigned long long>(score.links), static_cast<unsigned long long>(score.replies),
      static_cast<unsigned long long>(score.calls_back));
  return 0;
}
