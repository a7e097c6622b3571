/// Agents of torch.distributed.rpc in C++ (tensorferry/torch_rpc.h).
#include <gtest/gtest.h>

#include "tensorferry/errors.h"
#include "tests/rpc/torch_rpc_pair.h"

namespace tensorferry::testing {
namespace {

TEST(CppRpcAgent, RunsOperatorsOfTorchAtItsPeer) {
  TorchRpcPair agents({}, {});
  EXPECT_TRUE(at::equal(agents.sum(at::ones({3}), at::full({3}, 2.0)), at::full({3}, 3.0)));
  EXPECT_THROW(agents.sum(at::ones({3}), at::ones({4})), std::exception);
}

TEST(CppRpcAgent, NeedsARank) {
  AgentOptions options;
  options.name = "worker";
  options.store = local_store();
  EXPECT_THROW(make_rpc_agent(std::move(options)), InvalidArgument);
}

}  // namespace
}  // namespace tensorferry::testing
