// Serves many CartPoles at once: a learner in another process sends one batch of actions, and gets one of observations.
#include <tensorferry/agent.h>

#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>

#include "cart_poles.h"

using tensorferry::TensorOf;

namespace {

struct Step {
  TensorOf<float> observations;  // [environments, 4]: where an episode ended, the first of the next
  TensorOf<bool> ended;          // [environments]
};

class Simulator {
 public:
  /// So many environments, at the beginning of their episodes.
  TensorOf<float> reset(int environments, std::int64_t seed) {
    if (environments < 1) throw tensorferry::InvalidArgument("at least one environment is needed");
    poles_ = std::make_unique<CartPoles>(environments, seed);
    return observations();
  }

  /// True pushes to the right.
  Step step(const TensorOf<bool>& actions) {
    if (!poles_ || actions.size() != poles_->size()) {
      throw tensorferry::InvalidArgument("an action is needed for each environment");
    }
    const auto pushes = actions.elements();
    auto ended = tensorferry::Tensor::empty({static_cast<std::int64_t>(poles_->size())}, tensorferry::DType::boolean);
    bool* const fell = ended.data<bool>();
    for (std::size_t i = 0; i < poles_->size(); ++i) fell[i] = poles_->step(i, pushes[i]);
    return {observations(), TensorOf<bool>(ended)};
  }

 private:
  [[nodiscard]] TensorOf<float> observations() const {
    const auto count = static_cast<std::int64_t>(poles_->size());
    auto all = tensorferry::Tensor::empty({count, CartPoles::parts}, tensorferry::DType::float32);
    auto* out = all.data<float>();
    for (std::size_t i = 0; i < poles_->size(); ++i) {
      for (const float part : poles_->state(i)) *out++ = part;
    }
    return TensorOf<float>(all);
  }

  std::unique_ptr<CartPoles> poles_;
};

}  // namespace

template <>
struct tensorferry::Value<Step> : tensorferry::Fields<"Step", &Step::observations, &Step::ended> {};

int main(int argc, char** argv) try {
  if (argc != 2) return std::fprintf(stderr, "usage: simulator HOST:PORT, where a store is served\n"), 2;
  Simulator simulator;

  tensorferry::AgentOptions options;
  options.name = "simulator";
  options.rendezvous = std::string("store://") + argv[1];
  options.prepare = [&](tensorferry::Agent& agent) {
    agent.serve("reset", [&](int environments, std::int64_t seed) { return simulator.reset(environments, seed); });
    agent.serve("step", [&](const TensorOf<bool>& actions) { return simulator.step(actions); });
  };
  const auto agent = tensorferry::Agent::join(options);
  agent->call("learner", "ready").get();
  while (std::getchar() != EOF) continue;  // until who started it closes its input, or ends
  return 0;
} catch (const tensorferry::Error& error) {
  return std::fprintf(stderr, "simulator: %s\n", error.what()), 1;
}
