/// The table of CUDA driver functions that the cuda channels use. libcuda is loaded at run time, so that one build
/// starts on machines with and without a GPU. The build needs only the toolkit's header.
#pragma once

#include <cuda.h>

#include <string>

#include "base/status.h"
#include "base/symbols.h"

namespace tensorferry::cuda {

/// Driver functions, named as in cuda.h without the prefix. If one of them is missing, api() returns null.
struct Api {
  decltype(&::cuInit) init;
  decltype(&::cuGetErrorName) get_error_name;
  decltype(&::cuDeviceGetCount) device_get_count;
  decltype(&::cuDeviceGet) device_get;
  decltype(&::cuDeviceGetUuid) device_get_uuid;
  decltype(&::cuDeviceGetName) device_get_name;
  decltype(&::cuDeviceGetAttribute) device_get_attribute;
  decltype(&::cuDeviceCanAccessPeer) device_can_access_peer;
  decltype(&::cuDeviceGetP2PAttribute) device_get_p2p_attribute;
  decltype(&::cuDevicePrimaryCtxRetain) primary_ctx_retain;
  decltype(&::cuDevicePrimaryCtxGetState) primary_ctx_get_state;
  decltype(&::cuCtxPushCurrent) ctx_push_current;
  decltype(&::cuCtxPopCurrent) ctx_pop_current;
  decltype(&::cuCtxEnablePeerAccess) ctx_enable_peer_access;
  decltype(&::cuThreadExchangeStreamCaptureMode) exchange_capture_mode;
  decltype(&::cuStreamCreate) stream_create;
  decltype(&::cuStreamDestroy) stream_destroy;
  decltype(&::cuStreamQuery) stream_query;
  decltype(&::cuStreamIsCapturing) stream_is_capturing;
  decltype(&::cuStreamWaitEvent) stream_wait_event;
  decltype(&::cuStreamWaitValue32) stream_wait_value;
  decltype(&::cuStreamWriteValue32) stream_write_value;
  decltype(&::cuStreamBatchMemOp) stream_batch_values;
  decltype(&::cuEventCreate) event_create;
  decltype(&::cuEventDestroy) event_destroy;
  decltype(&::cuEventRecord) event_record;
  decltype(&::cuEventQuery) event_query;
  decltype(&::cuEventElapsedTime) event_elapsed_time;
  decltype(&::cuMemAlloc) mem_alloc;
  decltype(&::cuMemFree) mem_free;
  decltype(&::cuMemcpyAsync) memcpy_async;
  decltype(&::cuMemcpyPeerAsync) memcpy_peer_async;
  decltype(&::cuMemcpy2DAsync) memcpy_2d_async;
  decltype(&::cuMemsetD8Async) memset_async;
  decltype(&::cuMemHostRegister) host_register;
  decltype(&::cuMemHostUnregister) host_unregister;
  decltype(&::cuMemHostGetDevicePointer) host_get_device_pointer;
  decltype(&::cuPointerGetAttributes) pointer_get_attributes;
  decltype(&::cuMemGetHandleForAddressRange) mem_get_range_handle;
  decltype(&::cuFlushGPUDirectRDMAWrites) flush_gpu_direct_writes;
  decltype(&::cuIpcGetMemHandle) ipc_get_mem_handle;
  decltype(&::cuIpcOpenMemHandle) ipc_open_mem_handle;
  decltype(&::cuIpcCloseMemHandle) ipc_close_mem_handle;
  decltype(&::cuMemRetainAllocationHandle) mem_retain_allocation_handle;
  decltype(&::cuMemExportToShareableHandle) mem_export;
  decltype(&::cuMemImportFromShareableHandle) mem_import;
  decltype(&::cuMemCreate) mem_create;
  decltype(&::cuMemRelease) mem_release;
  decltype(&::cuMemAddressReserve) mem_address_reserve;
  decltype(&::cuMemAddressFree) mem_address_free;
  decltype(&::cuMemMap) mem_map;
  decltype(&::cuMemUnmap) mem_unmap;
  decltype(&::cuMemSetAccess) mem_set_access;
  decltype(&::cuModuleLoadData) module_load_data;
  decltype(&::cuModuleGetFunction) module_get_function;
  decltype(&::cuFuncGetAttribute) func_get_attribute;
  decltype(&::cuLaunchKernel) launch_kernel;
};

/// Returns the driver's functions, or null if there is no usable CUDA driver: none is installed, it is older than CUDA
/// 12, it does not start, or this process sees no GPU. The first call loads and initialises the driver, and creates no
/// context. Thread-safe.
const Api* api();
/// Returns why api() is null, as a message for users; empty if it is not null. Thread-safe.
const std::string& why_missing();

/// Looks up further functions of the driver, with the signatures that they have in this version of CUDA (12010: 12.1).
/// Finds nothing without a driver.
Symbols driver_functions(int version);

/// Returns how many devices this process sees; 0 without a driver.
int devices();

/// Returns the driver's name of a result: "CUDA_ERROR_OUT_OF_MEMORY".
std::string name_of(CUresult result);

/// Converts a driver result to a Status with the text "`what` failed: CUDA_ERROR_...", in which `what` names the
/// attempted operation. CUDA_SUCCESS is Ok, CUDA_ERROR_OUT_OF_MEMORY is ResourceExhausted, every other error is
/// ChannelUnavailable.
Status status_of(CUresult result, const char* what);

}  // namespace tensorferry::cuda
