// One process of the job: the parameter server (rank 2), or a trainer (ranks 0 and 1).
//
//   trainer RANK STORE-PORT STEPS

#include <tensorferry/agent.h>
#include <tensorferry/c10d.h>
#include <tensorferry/torch.h>
#ifdef WITH_GPUS
#include <tensorferry/gpus.h>
#endif
#include <torch/torch.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr int trainers = 2;
constexpr std::int64_t users = 200;
constexpr std::int64_t items = 100;
constexpr std::int64_t width = 8;
constexpr std::int64_t batch = 256;

tensorferry::Devices devices() {
#ifdef WITH_GPUS
  return tensorferry::gpus();
#else
  return nullptr;
#endif
}
at::Device device() { return devices() ? at::Device(at::kCUDA, 0) : at::Device(at::kCPU); }

std::shared_ptr<tensorferry::Agent> join(int rank, const std::string& port, const std::string& name,
                                         std::function<void(tensorferry::Agent&)> prepare = {}) {
  tensorferry::AgentOptions options;
  options.name = name;
  options.rank = rank;
  options.world_size = trainers + 1;
  options.rendezvous = "store://127.0.0.1:" + port;
  options.devices = devices();
  options.prepare = std::move(prepare);
  return tensorferry::Agent::join(std::move(options));
}

/// The rows of the embeddings, and their optimiser: plain gradient descent.
class Table {
 public:
  explicit Table(at::Device where) : rows_(at::randn({users + items, width}, where) * 0.3) {}
  at::Tensor fetch(const at::Tensor& indices) {
    const std::lock_guard lock(mutex_);
    return rows_.index_select(0, indices);
  }
  void descend(const at::Tensor& indices, const at::Tensor& gradients, double rate) {
    const std::lock_guard lock(mutex_);
    rows_.index_add_(0, indices, gradients, -rate);
  }

 private:
  std::mutex mutex_;
  at::Tensor rows_;
};

void serve(const std::string& port) {
  const auto table = std::make_shared<Table>(device());
  // Served before the trainers can find the agent: their first calls may come while it still waits for the world.
  const auto agent = join(trainers, port, "server", [table](tensorferry::Agent& joining) {
    joining.serve("table", [agent = &joining, table] {
      return agent->share_object("Table", table, tensorferry::method("fetch", &Table::fetch, {"indices"}),
                                 tensorferry::method("descend", &Table::descend, {"indices", "gradients", "rate"}));
    });
  });
  agent->shutdown();
}

/// A user likes an item if their hidden tastes agree.
at::Tensor likes(const at::Tensor& who, const at::Tensor& what) {
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto tastes = at::randn({users + items, 3}, generator).to(who.device());
  return (tastes.index_select(0, who) * tastes.index_select(0, what)).sum(1).gt(0).to(at::kFloat);
}

void train(int rank, const std::string& port, int steps) {
  const auto agent = join(rank, port, "trainer" + std::to_string(rank));
  const auto table = agent->call<tensorferry::Object>("server", "table").get();
  auto group = tensorferry::make_process_group(agent, {"trainer0", "trainer1"});

  torch::manual_seed(rank);  // each rank begins with other parameters, and rank 0's win
  torch::nn::Sequential model(torch::nn::Linear(2 * width, 64), torch::nn::ReLU(), torch::nn::Linear(64, 1));
  model->to(device());
  const auto parameters = model->parameters();
  tensorferry::broadcast_coalesced(group, parameters);
  torch::optim::Adam optimizer(parameters, 1e-2);
  const auto hook = tensorferry::all_reduce_hook(group);

  double right = 0;
  int counted = 0;
  for (int step = 0; step < steps; ++step) {
    const auto who = at::randint(users, {batch}, at::TensorOptions(at::kLong).device(device()));
    const auto what = at::randint(users, users + items, {batch}, at::TensorOptions(at::kLong).device(device()));
    const auto indices = at::cat({who, what});
    auto rows = table.call<at::Tensor>("fetch", indices).get().requires_grad_(true);
    const auto out = model->forward(at::cat({rows.narrow(0, 0, batch), rows.narrow(0, batch, batch)}, 1)).squeeze(1);
    const auto wanted = likes(who, what);
    const auto loss = torch::nn::functional::binary_cross_entropy_with_logits(out, wanted);
    optimizer.zero_grad();
    loss.backward();
    auto pushed = table.call("descend", indices, rows.grad(), 20.0);
    tensorferry::reduce_gradients(parameters, *hook);
    optimizer.step();
    pushed.get();
    if (step >= steps - 20) {
      right += out.gt(0).to(at::kFloat).eq(wanted).to(at::kFloat).mean().item<double>();
      ++counted;
    }
  }
  std::printf("trainer %d on %s: accuracy of the last %d batches: %.3f\n", rank, device().str().c_str(), counted,
              right / counted);
  group->shutdown();
  group.reset();
  agent->shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> given(argv + 1, argv + argc);
  if (given.size() != 3) {
    std::fprintf(stderr, "usage: trainer RANK STORE-PORT STEPS\n");
    return 2;
  }
  const int rank = std::stoi(given[0]);
  try {
    if (rank == trainers) {
      serve(given[1]);
    } else {
      train(rank, given[1], std::stoi(given[2]));
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
  return 0;
}
