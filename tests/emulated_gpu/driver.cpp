// The functions of the emulated driver. Callers find them through cuGetProcAddress_v2, as in libcuda.so.1.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "tests/emulated_gpu/memory.h"
#include "tests/emulated_gpu/streams.h"

// The exported functions, which the channels and their tests look up by name.
extern "C" {
CUresult emulated_begin_capture(CUstream, CUstreamCaptureMode) __asm__("cuStreamBeginCapture_v2");
CUresult emulated_end_capture(CUstream, CUgraph*) __asm__("cuStreamEndCapture");
CUresult emulated_memory_info(std::size_t*, std::size_t*) __asm__("cuMemGetInfo_v2");
CUresult emulated_address(const char*, void**, int, cuuint64_t,
                          CUdriverProcAddressQueryResult*) __asm__("cuGetProcAddress_v2");
}

namespace emulated {
namespace {

template <class To, class From>
To as(From from) {
  return reinterpret_cast<To>(from);
}

// ---- Devices and contexts

constexpr int devices = 2;

thread_local std::vector<CUcontext> contexts;

CUresult init(unsigned int) { return CUDA_SUCCESS; }

CUresult error_name(CUresult error, const char** name) {
  static thread_local std::string text;
  text = "CUDA_ERROR_" + std::to_string(static_cast<int>(error));
  *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : text.c_str();
  return CUDA_SUCCESS;
}

CUresult device_count(int* count) {
  *count = devices;
  return CUDA_SUCCESS;
}

CUresult device_get(CUdevice* device, int index) {
  if (index < 0 || index >= devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = index;
  return CUDA_SUCCESS;
}

CUresult device_uuid(CUuuid* uuid, CUdevice device) {
  *uuid = {};
  uuid->bytes[0] = static_cast<char>(device + 1);
  return CUDA_SUCCESS;
}

CUresult device_attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult can_access_peer(int* can, CUdevice, CUdevice) {
  *can = 1;
  return CUDA_SUCCESS;
}

CUresult p2p_attribute(int* value, CUdevice_P2PAttribute, CUdevice, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult retain_context(CUcontext* context, CUdevice device) {
  *context = as<CUcontext>(static_cast<std::uintptr_t>(device) + 1);
  return CUDA_SUCCESS;
}

CUresult push_context(CUcontext context) {
  contexts.push_back(context);
  return CUDA_SUCCESS;
}

CUresult pop_context(CUcontext* context) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *context = contexts.back();
  contexts.pop_back();
  return CUDA_SUCCESS;
}

CUresult enable_peer(CUcontext, unsigned int) { return CUDA_SUCCESS; }
CUresult exchange_capture_mode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }

// ---- Streams and events

Memory& memory() { return Memory::of_this_process(); }
Streams& streams() { return Streams::of_this_process(); }
Stream* stream_of(CUstream stream) { return stream == nullptr ? streams().default_stream() : as<Stream*>(stream); }

/// Enqueues an operation. Fails if this thread has no context (CUDA_ERROR_INVALID_CONTEXT, as in the real driver) or if
/// the stream is being captured.
CUresult put(CUstream stream, Operation operation) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  auto* const on = stream_of(stream);
  if (streams().capturing(on)) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  streams().add(on, std::move(operation));
  return CUDA_SUCCESS;
}

CUresult stream_create(CUstream* stream, unsigned int flags) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *stream = as<CUstream>(streams().make(flags == CU_STREAM_DEFAULT));
  return CUDA_SUCCESS;
}

CUresult stream_destroy(CUstream stream) {
  streams().destroy(stream_of(stream));
  return CUDA_SUCCESS;
}

CUresult stream_query(CUstream stream) {
  if (streams().capturing(stream_of(stream))) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  return streams().idle(stream_of(stream)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult stream_is_capturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (!streams().capturing(stream_of(stream))) return CUDA_SUCCESS;
  if (stream == nullptr) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  return CUDA_SUCCESS;
}

std::atomic<std::uint32_t>& word_at(CUdeviceptr address) { return *as<std::atomic<std::uint32_t>*>(address); }

CUresult stream_wait_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int flags) {
  if (flags != CU_STREAM_WAIT_VALUE_GEQ) return CUDA_ERROR_NOT_SUPPORTED;
  return put(stream, [address, value] {
    return static_cast<std::int32_t>(word_at(address).load(std::memory_order_acquire) - value) >= 0;
  });
}

CUresult stream_write_value(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned int) {
  return put(stream, [address, value] {
    word_at(address).store(value, std::memory_order_release);
    return true;
  });
}

struct Event {
  PointPtr last;  // the point of the last record; null if there was none
};

CUresult event_create(CUevent* event, unsigned int) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *event = as<CUevent>(new Event);
  return CUDA_SUCCESS;
}

CUresult event_destroy(CUevent event) {
  delete as<Event*>(event);
  return CUDA_SUCCESS;
}

CUresult event_record(CUevent event, CUstream stream) {
  auto point = std::make_shared<Point>();
  const auto result = put(stream, [point] {
    point->at = std::chrono::steady_clock::now();
    return point->reached = true;
  });
  if (result == CUDA_SUCCESS) as<Event*>(event)->last = point;
  return result;
}

CUresult event_query(CUevent event) {
  const auto& last = as<Event*>(event)->last;
  return last == nullptr || last->reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult event_elapsed(float* milliseconds, CUevent from, CUevent to) {
  const auto begin = as<Event*>(from)->last, end = as<Event*>(to)->last;
  if (!begin || !end) return CUDA_ERROR_INVALID_HANDLE;
  if (!begin->reached || !end->reached) return CUDA_ERROR_NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return CUDA_SUCCESS;
}

CUresult stream_wait_event(CUstream stream, CUevent event, unsigned int) {
  const auto last = as<Event*>(event)->last;
  if (!last) return CUDA_SUCCESS;
  return put(stream, [last] { return last->reached.load(); });
}

/// Enqueues a copy. On return, a pageable source has been read, and a pageable destination has been written.
CUresult copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  std::vector<std::byte> staged;
  const auto* source = as<const std::byte*>(from);
  if (memory().pageable(from)) staged.assign(source, source + bytes);
  const auto point = std::make_shared<Point>();
  const auto result = put(stream, [=, staged = std::move(staged)] {
    std::memcpy(as<void*>(to), staged.empty() ? source : staged.data(), bytes);
    return point->reached = true;
  });
  if (result == CUDA_SUCCESS && memory().pageable(to)) {
    while (!point->reached) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return result;
}

CUresult set_bytes(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream stream) {
  return put(stream, [=] {
    std::memset(as<void*>(to), value, bytes);
    return true;
  });
}

// ---- Memory

CUresult allocate(CUdeviceptr* begin, std::size_t bytes) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  streams().drain();
  const auto pages = memory().create(bytes);
  const auto at = pages ? memory().map(pages, true) : std::nullopt;
  if (!at) return CUDA_ERROR_OUT_OF_MEMORY;
  *begin = *at;
  return CUDA_SUCCESS;
}

CUresult free(CUdeviceptr begin) {
  streams().drain();
  return memory().unmap(begin) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult host_register(void* host, std::size_t bytes, unsigned int) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  memory().lock(as<std::uintptr_t>(host), bytes);
  return CUDA_SUCCESS;
}
CUresult host_unregister(void* host) {
  streams().drain();
  return memory().unlock(as<std::uintptr_t>(host)) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult host_address(CUdeviceptr* address, void* host, unsigned int) {
  *address = as<CUdeviceptr>(host);
  return CUDA_SUCCESS;
}

CUresult attributes(unsigned int count, CUpointer_attribute* names, void** values, CUdeviceptr address) {
  const auto found = memory().find(address);
  const auto range = found.value_or(Range());
  const bool known = found.has_value(), chunk = known && !range.allocated;
  for (unsigned int i = 0; i < count; ++i) {
    const auto give = [&](auto value) { std::memcpy(values[i], &value, sizeof value); };
    switch (names[i]) {
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        give(CUdeviceptr(range.begin));
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        give(range.bytes);
        break;
      case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        give(range.id);
        break;
      case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        give(std::uint64_t{chunk ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE});
        break;
      case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        give(int{known && range.allocated});
        break;
      case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        give(static_cast<void*>(nullptr));
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

/// The contents of an IPC handle. A process of the same user opens the memory through /proc/PID/fd.
struct IpcHandle {
  pid_t process;
  int descriptor;
};
static_assert(sizeof(IpcHandle) <= sizeof(CUipcMemHandle));

CUresult get_ipc_handle(CUipcMemHandle* handle, CUdeviceptr address) {
  const auto range = memory().find(address);
  if (!range || !range->allocated) return CUDA_ERROR_INVALID_VALUE;
  *handle = {};
  const IpcHandle ours{::getpid(), range->pages->descriptor};
  std::memcpy(handle, &ours, sizeof ours);
  return CUDA_SUCCESS;
}

CUresult open_ipc_handle(CUdeviceptr* begin, CUipcMemHandle handle, unsigned int) {
  IpcHandle theirs{};
  std::memcpy(&theirs, &handle, sizeof theirs);
  if (theirs.process == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  const auto path = "/proc/" + std::to_string(theirs.process) + "/fd/" + std::to_string(theirs.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  const auto pages = descriptor < 0 ? nullptr : memory().import(descriptor);
  const auto at = pages ? memory().map(pages, true) : std::nullopt;
  if (!at) return CUDA_ERROR_INVALID_VALUE;
  *begin = *at;
  return CUDA_SUCCESS;
}

CUresult close_ipc_handle(CUdeviceptr begin) {
  streams().drain();
  return memory().unmap(begin) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult retain_handle(CUmemGenericAllocationHandle* handle, void* address) {
  const auto range = memory().find(as<std::uintptr_t>(address));
  if (!range || range->allocated) return CUDA_ERROR_INVALID_VALUE;
  *handle = memory().add_handle(range->pages);
  return CUDA_SUCCESS;
}

CUresult export_handle(void* descriptor, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType,
                       unsigned long long) {
  const auto pages = memory().handle(handle);
  const int copy = pages ? ::fcntl(pages->descriptor, F_DUPFD_CLOEXEC, 0) : -1;
  if (copy < 0) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(descriptor, &copy, sizeof copy);
  return CUDA_SUCCESS;
}

CUresult import_handle(CUmemGenericAllocationHandle* handle, void* descriptor, CUmemAllocationHandleType) {
  const int copy = ::fcntl(static_cast<int>(as<std::intptr_t>(descriptor)), F_DUPFD_CLOEXEC, 0);
  const auto pages = copy < 0 ? nullptr : memory().import(copy);
  if (!pages) return CUDA_ERROR_INVALID_VALUE;
  *handle = memory().add_handle(pages);
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp*,
                unsigned long long) {
  auto pages = memory().create(bytes);
  if (!pages) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = memory().add_handle(std::move(pages));
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  return memory().drop_handle(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult reserve(CUdeviceptr* begin, std::size_t bytes, std::size_t, CUdeviceptr, unsigned long long) {
  auto* const at = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *begin = as<CUdeviceptr>(at);
  return CUDA_SUCCESS;
}

CUresult free_reserved(CUdeviceptr begin, std::size_t bytes) {
  return ::munmap(as<void*>(begin), bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult map(CUdeviceptr begin, std::size_t bytes, std::size_t, CUmemGenericAllocationHandle handle,
             unsigned long long) {
  const auto pages = memory().handle(handle);
  return pages && memory().map_at(begin, bytes, pages) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult unmap(CUdeviceptr begin, std::size_t) {
  return memory().unmap(begin) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult set_access(CUdeviceptr, std::size_t, const CUmemAccessDesc*, std::size_t) { return CUDA_SUCCESS; }

// ---- The table

struct Entry {
  const char* name;
  void* function;
};

#define ENTRY(name, function) \
  Entry { #name, as<void*>(static_cast<decltype(&::name)>(&(function))) }

const std::array functions{
    ENTRY(cuInit, init),
    ENTRY(cuGetErrorName, error_name),
    ENTRY(cuDeviceGetCount, device_count),
    ENTRY(cuDeviceGet, device_get),
    ENTRY(cuDeviceGetUuid, device_uuid),
    ENTRY(cuDeviceGetAttribute, device_attribute),
    ENTRY(cuDeviceCanAccessPeer, can_access_peer),
    ENTRY(cuDeviceGetP2PAttribute, p2p_attribute),
    ENTRY(cuDevicePrimaryCtxRetain, retain_context),
    ENTRY(cuCtxPushCurrent, push_context),
    ENTRY(cuCtxPopCurrent, pop_context),
    ENTRY(cuCtxEnablePeerAccess, enable_peer),
    ENTRY(cuThreadExchangeStreamCaptureMode, exchange_capture_mode),
    ENTRY(cuStreamCreate, stream_create),
    ENTRY(cuStreamDestroy, stream_destroy),
    ENTRY(cuStreamQuery, stream_query),
    ENTRY(cuStreamIsCapturing, stream_is_capturing),
    ENTRY(cuStreamWaitEvent, stream_wait_event),
    ENTRY(cuStreamWaitValue32, stream_wait_value),
    ENTRY(cuStreamWriteValue32, stream_write_value),
    ENTRY(cuEventCreate, event_create),
    ENTRY(cuEventDestroy, event_destroy),
    ENTRY(cuEventRecord, event_record),
    ENTRY(cuEventQuery, event_query),
    ENTRY(cuEventElapsedTime, event_elapsed),
    ENTRY(cuMemAlloc, allocate),
    ENTRY(cuMemFree, free),
    ENTRY(cuMemcpyAsync, copy),
    ENTRY(cuMemsetD8Async, set_bytes),
    ENTRY(cuMemHostRegister, host_register),
    ENTRY(cuMemHostUnregister, host_unregister),
    ENTRY(cuMemHostGetDevicePointer, host_address),
    ENTRY(cuPointerGetAttributes, attributes),
    ENTRY(cuIpcGetMemHandle, get_ipc_handle),
    ENTRY(cuIpcOpenMemHandle, open_ipc_handle),
    ENTRY(cuIpcCloseMemHandle, close_ipc_handle),
    ENTRY(cuMemRetainAllocationHandle, retain_handle),
    ENTRY(cuMemExportToShareableHandle, export_handle),
    ENTRY(cuMemImportFromShareableHandle, import_handle),
    ENTRY(cuMemCreate, create),
    ENTRY(cuMemRelease, release),
    ENTRY(cuMemAddressReserve, reserve),
    ENTRY(cuMemAddressFree, free_reserved),
    ENTRY(cuMemMap, map),
    ENTRY(cuMemUnmap, unmap),
    ENTRY(cuMemSetAccess, set_access),
};

}  // namespace
}  // namespace emulated

CUresult emulated_address(const char* name, void** found, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
  const auto same = [&](const auto& entry) { return std::string_view(entry.name) == name; };
  const auto it = std::find_if(emulated::functions.begin(), emulated::functions.end(), same);
  *found = it == emulated::functions.end() ? nullptr : it->function;
  return *found == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult emulated_begin_capture(CUstream stream, CUstreamCaptureMode) {
  emulated::streams().capture(emulated::stream_of(stream), true);
  return CUDA_SUCCESS;
}

CUresult emulated_end_capture(CUstream stream, CUgraph*) {
  emulated::streams().capture(emulated::stream_of(stream), false);
  return CUDA_SUCCESS;
}

CUresult emulated_memory_info(std::size_t* free, std::size_t* total) {
  *total = emulated::device_bytes;
  *free = emulated::device_bytes - emulated::memory().used();
  return CUDA_SUCCESS;
}
