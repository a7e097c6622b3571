// An agent in a C++ program: functions that Python calls, and functions of Python's that it calls.
#include <tensorferry/agent.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

using tensorferry::TensorOf;

namespace {

/// The mean of the elements.
double mean(const TensorOf<float>& values) {
  if (values.size() == 0) throw tensorferry::InvalidArgument("the mean of no values");
  double sum = 0;
  for (const float value : values.elements()) sum += value;
  return sum / static_cast<double>(values.size());
}

std::map<std::string, int> count_words(const std::string& text) {
  std::map<std::string, int> counts;
  for (std::size_t at = 0; at < text.size();) {
    const auto end = std::min(text.find(' ', at), text.size());
    if (end > at) ++counts[text.substr(at, end - at)];
    at = end + 1;
  }
  return counts;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 2) return std::fprintf(stderr, "usage: embed HOST:PORT, where a store is served\n"), 2;

  tensorferry::AgentOptions options;
  options.name = "cpp";
  options.rendezvous = std::string("store://") + argv[1];
  options.prepare = [&](tensorferry::Agent& agent) {
    agent.serve("mean", &mean, {"values"});
    agent.serve("count_words", &count_words, {"text"});
  };
  const auto agent = tensorferry::Agent::join(options);

  const auto values = tensorferry::Tensor::from_vector(std::vector<float>{1, 2, 3});
  std::printf("C++ called weigh() of Python: %.1f\n", agent->call<double>("python", "weigh", values, 0.5).get());
  try {
    agent->call<double>("python", "weigh", std::string("no tensor"), 0.5).get();
  } catch (const tensorferry::RemoteError& error) {
    std::printf("C++ was told of Python's exception: %s\n", std::string(error.what()).substr(0, 60).c_str());
  }
  // Versions of tensors that Python publishes: on one host they are read in place, and the next one is waited for.
  const auto offsets = agent->subscribe("python", "offsets");
  auto version = offsets.latest();
  agent->call("python", "next_offsets").get();
  version = offsets.wait(version.number());
  std::printf("C++ read version %d of what Python published: %.1f\n", static_cast<int>(version.number()),
              mean(version.tensor("offsets")));
  std::fflush(stdout);
  agent->call("python", "ready").get();
  while (std::getchar() != EOF) continue;  // until who started it closes its input, or ends
  return 0;
} catch (const tensorferry::Error& error) {
  return std::fprintf(stderr, "embed: %s\n", error.what()), 1;
}
