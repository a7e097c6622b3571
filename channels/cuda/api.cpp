#include "channels/cuda/api.h"

#include <dlfcn.h>

#include "base/text.h"

namespace tensorferry::cuda {
namespace {

constexpr int version_asked = 12000;  // the version of the functions' signatures; drivers from CUDA 12 on have it

struct Loaded {
  Api api{};
  int devices = 0;
  std::string missing;
};

using GetProcAddress = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);

class Loader {
 public:
  explicit Loader(GetProcAddress get) : get_(get) {}

  template <class Function>
  void operator()(Function& function, const char* name) {
    void* found = nullptr;
    if (get_(name, &found, version_asked, CU_GET_PROC_ADDRESS_DEFAULT, nullptr) != CUDA_SUCCESS || found == nullptr) {
      if (missing.empty()) missing = formatted("the CUDA driver has no {}: it is older than CUDA 12", name);
      return;
    }
    function = reinterpret_cast<Function>(found);
  }

  std::string missing;

 private:
  GetProcAddress get_;
};

void load_devices(Loader& load, Api& api) {
  load(api.init, "cuInit");
  load(api.get_error_name, "cuGetErrorName");
  load(api.device_get_count, "cuDeviceGetCount");
  load(api.device_get, "cuDeviceGet");
  load(api.device_get_uuid, "cuDeviceGetUuid");
  load(api.device_get_attribute, "cuDeviceGetAttribute");
  load(api.device_can_access_peer, "cuDeviceCanAccessPeer");
  load(api.device_get_p2p_attribute, "cuDeviceGetP2PAttribute");
  load(api.primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  load(api.ctx_push_current, "cuCtxPushCurrent");
  load(api.ctx_pop_current, "cuCtxPopCurrent");
  load(api.ctx_enable_peer_access, "cuCtxEnablePeerAccess");
  load(api.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
}

void load_streams(Loader& load, Api& api) {
  load(api.stream_create, "cuStreamCreate");
  load(api.stream_destroy, "cuStreamDestroy");
  load(api.stream_query, "cuStreamQuery");
  load(api.stream_is_capturing, "cuStreamIsCapturing");
  load(api.stream_wait_event, "cuStreamWaitEvent");
  load(api.stream_wait_value, "cuStreamWaitValue32");
  load(api.stream_write_value, "cuStreamWriteValue32");
  load(api.event_create, "cuEventCreate");
  load(api.event_destroy, "cuEventDestroy");
  load(api.event_record, "cuEventRecord");
  load(api.event_query, "cuEventQuery");
  load(api.event_elapsed_time, "cuEventElapsedTime");
}

void load_memory(Loader& load, Api& api) {
  load(api.mem_alloc, "cuMemAlloc");
  load(api.mem_free, "cuMemFree");
  load(api.memcpy_async, "cuMemcpyAsync");
  load(api.memcpy_peer_async, "cuMemcpyPeerAsync");
  load(api.memset_async, "cuMemsetD8Async");
  load(api.host_register, "cuMemHostRegister");
  load(api.host_unregister, "cuMemHostUnregister");
  load(api.host_get_device_pointer, "cuMemHostGetDevicePointer");
  load(api.pointer_get_attributes, "cuPointerGetAttributes");
  load(api.ipc_get_mem_handle, "cuIpcGetMemHandle");
  load(api.ipc_open_mem_handle, "cuIpcOpenMemHandle");
  load(api.ipc_close_mem_handle, "cuIpcCloseMemHandle");
  load(api.mem_retain_allocation_handle, "cuMemRetainAllocationHandle");
  load(api.mem_export, "cuMemExportToShareableHandle");
  load(api.mem_import, "cuMemImportFromShareableHandle");
  load(api.mem_create, "cuMemCreate");
  load(api.mem_release, "cuMemRelease");
  load(api.mem_address_reserve, "cuMemAddressReserve");
  load(api.mem_address_free, "cuMemAddressFree");
  load(api.mem_map, "cuMemMap");
  load(api.mem_unmap, "cuMemUnmap");
  load(api.mem_set_access, "cuMemSetAccess");
}

Loaded load() {
  Loaded loaded;
  void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);  // stays open until the process ends
  if (library == nullptr) {
    loaded.missing = "no CUDA driver on this machine (libcuda.so.1 does not load)";
    return loaded;
  }
  const auto get = reinterpret_cast<GetProcAddress>(::dlsym(library, "cuGetProcAddress_v2"));
  if (get == nullptr) {
    loaded.missing = "the CUDA driver has no cuGetProcAddress_v2: it is older than CUDA 12";
    return loaded;
  }
  Loader loader(get);
  load_devices(loader, loaded.api);
  load_streams(loader, loaded.api);
  load_memory(loader, loaded.api);
  loaded.missing = loader.missing;
  if (!loaded.missing.empty()) return loaded;
  if (const auto failed = loaded.api.init(0); failed != CUDA_SUCCESS) {
    const char* name = nullptr;
    loaded.api.get_error_name(failed, &name);
    loaded.missing = formatted("the CUDA driver does not start: {}", name == nullptr ? "an unknown error" : name);
  } else if (loaded.api.device_get_count(&loaded.devices) != CUDA_SUCCESS || loaded.devices == 0) {
    loaded.devices = 0;
    loaded.missing = "this process sees no GPU";
  }
  return loaded;
}

const Loaded& loaded() {
  static const auto& once = *new Loaded(load());  // never destroyed: static destructors may still free device memory
  return once;
}

}  // namespace

const Api* api() { return loaded().missing.empty() ? &loaded().api : nullptr; }
const std::string& why_missing() { return loaded().missing; }
int devices() { return loaded().devices; }

std::string name_of(CUresult result) {
  const char* name = nullptr;
  if (api() != nullptr) api()->get_error_name(result, &name);
  return name == nullptr ? formatted("CUDA error {}", static_cast<int>(result)) : name;
}

Status status_of(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return {};
  const auto code = result == CUDA_ERROR_OUT_OF_MEMORY ? Code::resource_exhausted : Code::channel_unavailable;
  return {code, formatted("{} failed: {}", what, name_of(result))};
}

}  // namespace tensorferry::cuda
