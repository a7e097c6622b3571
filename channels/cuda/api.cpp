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

void load_devices(Symbols& load, Api& api) {
  load(api.init, "cuInit");
  load(api.get_error_name, "cuGetErrorName");
  load(api.device_get_count, "cuDeviceGetCount");
  load(api.device_get, "cuDeviceGet");
  load(api.device_get_uuid, "cuDeviceGetUuid");
  load(api.device_get_name, "cuDeviceGetName");
  load(api.device_get_attribute, "cuDeviceGetAttribute");
  load(api.device_can_access_peer, "cuDeviceCanAccessPeer");
  load(api.device_get_p2p_attribute, "cuDeviceGetP2PAttribute");
  load(api.primary_ctx_retain, "cuDevicePrimaryCtxRetain");
  load(api.primary_ctx_get_state, "cuDevicePrimaryCtxGetState");
  load(api.ctx_push_current, "cuCtxPushCurrent");
  load(api.ctx_pop_current, "cuCtxPopCurrent");
  load(api.ctx_enable_peer_access, "cuCtxEnablePeerAccess");
  load(api.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
}

void load_streams(Symbols& load, Api& api) {
  load(api.stream_create, "cuStreamCreate");
  load(api.stream_destroy, "cuStreamDestroy");
  load(api.stream_query, "cuStreamQuery");
  load(api.stream_is_capturing, "cuStreamIsCapturing");
  load(api.stream_wait_event, "cuStreamWaitEvent");
  load(api.stream_wait_value, "cuStreamWaitValue32");
  load(api.stream_write_value, "cuStreamWriteValue32");
  load(api.stream_batch_values, "cuStreamBatchMemOp");
  load(api.event_create, "cuEventCreate");
  load(api.event_destroy, "cuEventDestroy");
  load(api.event_record, "cuEventRecord");
  load(api.event_query, "cuEventQuery");
  load(api.event_elapsed_time, "cuEventElapsedTime");
}

void load_memory(Symbols& load, Api& api) {
  load(api.mem_alloc, "cuMemAlloc");
  load(api.mem_free, "cuMemFree");
  load(api.memcpy_async, "cuMemcpyAsync");
  load(api.memcpy_peer_async, "cuMemcpyPeerAsync");
  load(api.memcpy_2d_async, "cuMemcpy2DAsync");
  load(api.memset_async, "cuMemsetD8Async");
  load(api.host_register, "cuMemHostRegister");
  load(api.host_unregister, "cuMemHostUnregister");
  load(api.host_get_device_pointer, "cuMemHostGetDevicePointer");
  load(api.pointer_get_attributes, "cuPointerGetAttributes");
  load(api.mem_get_range_handle, "cuMemGetHandleForAddressRange");
  load(api.flush_gpu_direct_writes, "cuFlushGPUDirectRDMAWrites");
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

void load_kernels(Symbols& load, Api& api) {
  load(api.module_load_data, "cuModuleLoadData");
  load(api.module_get_function, "cuModuleGetFunction");
  load(api.func_get_attribute, "cuFuncGetAttribute");
  load(api.launch_kernel, "cuLaunchKernel");
}

/// Loads the driver at the first call. It stays loaded until the process ends.
void* library() {
  static void* const handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return handle;
}

Loaded load() {
  Loaded loaded;
  if (library() == nullptr) {
    loaded.missing = "no CUDA driver on this machine (libcuda.so.1 does not load)";
    return loaded;
  }
  auto load = driver_functions(version_asked);
  load_devices(load, loaded.api);
  load_streams(load, loaded.api);
  load_memory(load, loaded.api);
  load_kernels(load, loaded.api);
  if (!load.missing().empty()) loaded.missing = load.missing() + ": it is older than CUDA 12";
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

Symbols driver_functions(int version) {
  using GetProcAddress = CUresult (*)(const char*, void**, int, cuuint64_t, CUdriverProcAddressQueryResult*);
  GetProcAddress get = nullptr;
  if (library() != nullptr) get = reinterpret_cast<GetProcAddress>(::dlsym(library(), "cuGetProcAddress_v2"));
  return {"the CUDA driver", [get, version](const char* name) -> void* {
            void* found = nullptr;
            if (get == nullptr || get(name, &found, version, CU_GET_PROC_ADDRESS_DEFAULT, nullptr) != CUDA_SUCCESS)
              return nullptr;
            return found;
          }};
}

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
