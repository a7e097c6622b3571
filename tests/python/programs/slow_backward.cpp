// Preloaded into processes that run torch's distributed autograd: makes the first request of a backward pass in a
// process late by SLOW_BACKWARD_MS milliseconds, where torch forgets the calls that it has to wait for.
#include <dlfcn.h>

#include <chrono>
#include <cstdlib>
#include <thread>

// torch::distributed::autograd::DistAutogradContext::clearOutstandingRpcs()
extern "C" __attribute__((visibility("default"))) void
_ZN5torch11distributed8autograd19DistAutogradContext20clearOutstandingRpcsEv(void* context) {
  static const auto torchs = reinterpret_cast<void (*)(void*)>(
      dlsym(dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD),
            "_ZN5torch11distributed8autograd19DistAutogradContext20clearOutstandingRpcsEv"));
  const char* const late = std::getenv("SLOW_BACKWARD_MS");
  std::this_thread::sleep_for(std::chrono::milliseconds(late == nullptr ? 0 : std::atoi(late)));
  torchs(context);
}
