// A shared library that adds the channel `spool`, and a reduction, to all agents of the process that loads it: a C++
// program by tensorferry::load_plugin(), a Python program by tensorferry.load_plugin(). A program that is linked with
// this file instead needs no call.
#include <tensorferry/plugin.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include "spool_channel.h"

namespace {

std::string folder() {
  const char* const given = std::getenv("SPOOL_FOLDER");
  return given == nullptr ? "/tmp" : given;
}

/// log(exp(a) + exp(b)) of float32 elements.
void log_add_exp(void* accumulator, const void* other, std::size_t count, tensorferry::DType dtype) {
  if (dtype != tensorferry::DType::float32) throw std::invalid_argument("log_add_exp reduces float32");
  auto* const into = static_cast<float*>(accumulator);
  const auto* const from = static_cast<const float*>(other);
  for (std::size_t i = 0; i < count; ++i) {
    const auto most = std::fmax(into[i], from[i]);
    into[i] = most + std::log1p(std::exp(std::fmin(into[i], from[i]) - most));
  }
}

// Between shm (80) and xth (100). Each agent can change that: channels="spool:5".
const tensorferry::ChannelPlugin spool("spool", 90, [] { return std::make_unique<SpoolDriver>(folder()); });
const tensorferry::ReductionPlugin reduction("log_add_exp", log_add_exp);

}  // namespace

TENSORFERRY_PLUGIN
