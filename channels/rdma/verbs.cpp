#include "channels/rdma/verbs.h"

#include <dlfcn.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/environment.h"
#include "base/symbols.h"
#include "base/text.h"

namespace tensorferry::rdma {
namespace {

struct LoadedVerbs {
  Verbs verbs{};
  std::string missing;
};

void load_devices(Symbols& load, Verbs& verbs) {
  load(verbs.get_device_list, "ibv_get_device_list");
  load(verbs.free_device_list, "ibv_free_device_list");
  load(verbs.get_device_name, "ibv_get_device_name");
  load(verbs.open_device, "ibv_open_device");
  load(verbs.close_device, "ibv_close_device");
  load(verbs.query_device, "ibv_query_device");
  load(verbs.query_port_compat, "ibv_query_port");
  load(verbs.query_gid, "ibv_query_gid");
  load(verbs.get_async_event, "ibv_get_async_event");
  load(verbs.ack_async_event, "ibv_ack_async_event");
  load(verbs.wc_status_str, "ibv_wc_status_str");
  load(verbs.fork_init, "ibv_fork_init");
}

void load_memory(Symbols& load, Verbs& verbs) {
  load(verbs.alloc_pd, "ibv_alloc_pd");
  load(verbs.dealloc_pd, "ibv_dealloc_pd");
  load(verbs.reg_mr, "ibv_reg_mr");
  load.optional(verbs.reg_mr_iova2, "ibv_reg_mr_iova2");
  load.optional(verbs.reg_dmabuf_mr, "ibv_reg_dmabuf_mr");
  load(verbs.dereg_mr, "ibv_dereg_mr");
}

void load_queues(Symbols& load, Verbs& verbs) {
  load(verbs.create_comp_channel, "ibv_create_comp_channel");
  load(verbs.destroy_comp_channel, "ibv_destroy_comp_channel");
  load(verbs.create_cq, "ibv_create_cq");
  load(verbs.destroy_cq, "ibv_destroy_cq");
  load(verbs.get_cq_event, "ibv_get_cq_event");
  load(verbs.ack_cq_events, "ibv_ack_cq_events");
  load(verbs.create_qp, "ibv_create_qp");
  load(verbs.modify_qp, "ibv_modify_qp");
  load(verbs.query_qp, "ibv_query_qp");
  load(verbs.destroy_qp, "ibv_destroy_qp");
}

LoadedVerbs load_verbs() {
  LoadedVerbs loaded;
  std::string path(environment::libibverbs.value());
  if (path.empty()) path = "libibverbs.so.1";
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);  // stays open until the process ends
  if (library == nullptr) {
    const char* const why = ::dlerror();
    loaded.missing = formatted("libibverbs does not load ({}): install libibverbs1 and ibverbs-providers, or rdma-core",
                               why == nullptr ? path : std::string(why));
    return loaded;
  }
  Symbols load(path, library);
  load_devices(load, loaded.verbs);
  load_memory(load, loaded.verbs);
  load_queues(load, loaded.verbs);
  loaded.missing = load.missing();
  // Before any registration. On a kernel that copies pinned pages at a fork (5.12 and newer) it does nothing. It fails
  // if another library of this process has registered memory already; then that library has decided about forks.
  if (loaded.missing.empty()) (void)loaded.verbs.fork_init();
  return loaded;
}

const LoadedVerbs& loaded_verbs() {
  static const LoadedVerbs loaded = load_verbs();
  return loaded;
}

}  // namespace

const Verbs* verbs() { return loaded_verbs().missing.empty() ? &loaded_verbs().verbs : nullptr; }

const std::string& why_missing() { return loaded_verbs().missing; }

int query_port(const Verbs& verbs, ibv_context* context, std::uint8_t port, ibv_port_attr& attributes) {
  std::memset(&attributes, 0, sizeof attributes);
  return verbs.query_port_compat(context, port, reinterpret_cast<_compat_ibv_port_attr*>(&attributes));
}

ibv_mr* register_memory(const Verbs& verbs, ibv_pd* domain, void* data, std::size_t bytes, unsigned access) {
  if ((access & IBV_ACCESS_OPTIONAL_RANGE) != 0 && verbs.reg_mr_iova2 != nullptr) {
    return verbs.reg_mr_iova2(domain, data, bytes, reinterpret_cast<std::uintptr_t>(data), access);
  }
  return verbs.reg_mr(domain, data, bytes,
                      static_cast<int>(access & ~static_cast<unsigned>(IBV_ACCESS_OPTIONAL_RANGE)));
}

Status status_of(int error, std::string_view what) {
  if (error == 0) return {};
  const std::string why = std::generic_category().message(error);
  if (error == ENOMEM) {
    return {Code::resource_exhausted,
            formatted("{} failed: {}. If memory is free, the limit of locked memory is too low: raise `ulimit -l`",
                      what, why)};
  }
  return {Code::channel_unavailable, formatted("{} failed: {}", what, why)};
}

}  // namespace tensorferry::rdma
