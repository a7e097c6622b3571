#include "python/csrc/agent.h"
#include "python/csrc/codec.h"
#include "python/csrc/collectives.h"
#include "python/csrc/data_parallel.h"
#include "python/csrc/deadline.h"
#include "python/csrc/future.h"
#include "python/csrc/inbox.h"
#include "python/csrc/plugins.h"
#include "python/csrc/publish.h"
#include "python/csrc/references.h"
#include "python/csrc/regions.h"
#include "python/csrc/registered.h"
#include "python/csrc/served.h"
#include "python/csrc/share.h"

// Each file binds one concept. The Python files of the package give the bindings their public names.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace tensorferry::python;
  bind_codec(module);
  bind_inbox(module);
  bind_future(module);
  bind_references(module);
  bind_share(module);
  bind_registered(module);
  bind_agent(module);
  bind_regions(module);
  bind_publish(module);
  bind_plugins(module);
  bind_collectives(module);
  bind_data_parallel(module);
  bind_deadline(module);
  bind_served(module);
  bind_testing(module);
}
