/// Agents of C++ programs for tests: several agents in one process, which join through a store in memory.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <string>

#include "tensorferry/agent.h"

namespace tensorferry::testing {

using namespace std::chrono_literals;

inline constexpr auto patience = 30s;

inline std::shared_ptr<Agent> join(const std::shared_ptr<Store>& store, const std::string& name,
                                   std::function<void(Agent&)> prepare = {}) {
  AgentOptions options;
  options.name = name;
  options.store = store;
  options.prepare = std::move(prepare);
  return Agent::join(std::move(options));
}

/// Returns the text of the E that `function` throws. If it throws none, returns "" and the test fails.
template <class E, class F>
std::string thrown_by(F function) {
  try {
    function();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw something else: " << error.what();
    return "";
  }
  ADD_FAILURE() << "threw nothing";
  return "";
}

/// Two agents, "sim" and "trainer".
class TypedAgents : public ::testing::Test {
 protected:
  std::shared_ptr<Store> store = local_store();
  std::shared_ptr<Agent> sim = join(store, "sim");
  std::shared_ptr<Agent> trainer = join(store, "trainer");
};

}  // namespace tensorferry::testing
