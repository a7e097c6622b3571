// The functions of the emulated driver. Callers find them through cuGetProcAddress_v2, as in libcuda.so.1.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/emulated_gpu/grid.h"
#include "tests/emulated_gpu/kernels.h"
#include "tests/emulated_gpu/machines.h"
#include "tests/emulated_gpu/memory.h"
#include "tests/emulated_gpu/streams.h"

// The exported functions, which the channels and their tests look up by name.
extern "C" {
CUresult emulated_begin_capture(CUstream, CUstreamCaptureMode) __asm__("cuStreamBeginCapture_v2");
CUresult emulated_end_capture(CUstream, CUgraph*) __asm__("cuStreamEndCapture");
CUresult emulated_graph_nodes(CUgraph, CUgraphNode*, std::size_t*) __asm__("cuGraphGetNodes");
CUresult emulated_graph_destroy(CUgraph) __asm__("cuGraphDestroy");
CUresult emulated_graph_instantiate(CUgraphExec*, CUgraph, unsigned long long) __asm__("cuGraphInstantiateWithFlags");
CUresult emulated_graph_exec_destroy(CUgraphExec) __asm__("cuGraphExecDestroy");
CUresult emulated_graph_launch(CUgraphExec, CUstream) __asm__("cuGraphLaunch");
CUresult emulated_memory_info(std::size_t*, std::size_t*) __asm__("cuMemGetInfo_v2");
CUresult emulated_address(const char*, void**, int, cuuint64_t,
                          CUdriverProcAddressQueryResult*) __asm__("cuGetProcAddress_v2");
/// Writes device memory as a network card does: a stream may read it before it is there, until the writes are flushed.
/// Returns false if the memory is not a device's.
bool emulated_card_write(CUdeviceptr to, const void* from, std::size_t bytes) __asm__("emulatedCardWrite");
/// What a card reads comes behind what it wrote: flushes the writes of cards.
void emulated_card_reads() __asm__("emulatedCardReads");
/// Makes the contexts of this process fail for good, as a kernel's illegal access does. No real driver has it.
void emulated_fail() __asm__("emulatedFail");
}

namespace emulated {
namespace {

template <class To, class From>
To as(From from) {
  return reinterpret_cast<To>(from);
}

/// The contexts of this process have failed: what enqueues work or asks for its end says so, and no work runs.
std::atomic<bool> failed{false};

bool says(const char* variable, std::string_view value) {
  const auto* const text = std::getenv(variable);
  return text != nullptr && text == value;
}

// ---- Devices and contexts

/// A context belongs to a device, by the driver's own number.
thread_local std::vector<CUcontext> contexts;

int device_of(CUcontext context) { return static_cast<int>(as<std::uintptr_t>(context)) - 1; }
int current_device() { return device_of(contexts.back()); }

/// Returns the driver's numbers of the devices that this process sees, by the process's own: CUDA_VISIBLE_DEVICES names
/// them, as far as it is a list of numbers.
const std::vector<int>& seen() {
  static const auto& once = *new std::vector<int>([] {
    std::vector<int> devices;
    const auto* const text = std::getenv("CUDA_VISIBLE_DEVICES");
    const auto* const number = std::getenv("EMULATED_GPUS");
    const int there = number == nullptr ? usual_devices : std::min(std::atoi(number), most_devices);
    if (text == nullptr) {
      for (int device = 0; device < there; ++device) devices.push_back(device);
      return devices;
    }
    std::istringstream list(text);
    for (std::string each; std::getline(list, each, ',');) {
      const int device = each.empty() ? -1 : std::atoi(each.c_str());
      if (device < 0 || device >= there) break;  // as the real driver: what follows is not seen
      devices.push_back(device);
    }
    return devices;
  }());
  return once;
}

/// Which devices reach one another's memory, by the driver's numbers: EMULATED_GPU_PEER_ACCESS=0 says that none do, and
/// =machine that those of the machine that is replayed do.
bool peers(int one, int two) {
  using Peers = std::array<std::array<bool, most_devices>, most_devices>;
  static const auto& all = *new Peers([] {
    const auto* const text = std::getenv("EMULATED_GPU_PEER_ACCESS");
    const std::string_view wanted = text == nullptr ? "" : text;
    const auto* const machine = wanted == "machine" ? this_machine() : nullptr;
    Peers out{};
    for (std::size_t from = 0; from < out.size(); ++from) {
      for (std::size_t to = 0; to < out.size(); ++to) {
        const bool recorded =
            machine != nullptr && std::max(from, to) < machine->addresses.size() && machine->has_peer_access(from, to);
        out.at(from).at(to) = wanted == "machine" ? recorded : wanted != "0";
      }
    }
    return out;
  }());
  return all.at(static_cast<std::size_t>(one)).at(static_cast<std::size_t>(two));
}

/// The devices whose allocated memory each device may access, as bits.
std::array<std::atomic<std::uint32_t>, most_devices> enabled{};

CUresult init(unsigned int) { return CUDA_SUCCESS; }

CUresult error_name(CUresult error, const char** name) {
  static thread_local std::string text;
  text = "CUDA_ERROR_" + std::to_string(static_cast<int>(error));
  *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : text.c_str();
  return CUDA_SUCCESS;
}

CUresult device_count(int* count) {
  *count = static_cast<int>(seen().size());
  return CUDA_SUCCESS;
}

CUresult device_get(CUdevice* device, int index) {
  if (index < 0 || static_cast<std::size_t>(index) >= seen().size()) return CUDA_ERROR_INVALID_DEVICE;
  *device = index;
  return CUDA_SUCCESS;
}

/// Returns the process's own number of a device; -1 if it does not see it.
int index_of(int number) {
  const auto found = std::find(seen().begin(), seen().end(), number);
  return found == seen().end() ? -1 : static_cast<int>(found - seen().begin());
}

/// Returns the driver's number of a device that the process has.
int number_of(CUdevice device) { return seen().at(static_cast<std::size_t>(device)); }

CUresult device_uuid(CUuuid* uuid, CUdevice device) {
  *uuid = {};
  uuid->bytes[0] = static_cast<char>(number_of(device) + 1);
  return CUDA_SUCCESS;
}

CUresult device_name(char* name, int size, CUdevice) {
  std::snprintf(name, static_cast<std::size_t>(size), "emulated GPU");
  return CUDA_SUCCESS;
}

/// The PCI addresses are those of the machine that is replayed.
CUresult device_attribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  const auto number = static_cast<std::size_t>(number_of(device));
  const auto* const machine = this_machine();
  auto place = Machine::Place{0, static_cast<unsigned>(number) + 1, 0};
  if (machine != nullptr && number < machine->addresses.size()) place = machine->place(number);
  *value = [&]() -> int {
    switch (attribute) {
      case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        return static_cast<int>(place.domain);
      case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        return static_cast<int>(place.bus);
      case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        return static_cast<int>(place.device);
      case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return 9;
      case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
        return says("EMULATED_GPU_DIRECT_RDMA", "0") ? 0 : 1;
      case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
        return says("EMULATED_GPU_DMABUF", "0") ? 0 : 1;
      case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
        return says("EMULATED_GPU_FLUSH", "ordered") ? CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
                                                     : CU_GPU_DIRECT_RDMA_WRITES_ORDERING_NONE;
      case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
        return says("EMULATED_GPU_FLUSH", "none") ? 0 : int{CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST};
      default:
        return 0;
    }
  }();
  return CUDA_SUCCESS;
}

CUresult can_access_peer(int* can, CUdevice device, CUdevice other) {
  *can = device != other && peers(number_of(device), number_of(other)) ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult p2p_attribute(int* value, CUdevice_P2PAttribute, CUdevice, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

std::atomic<std::uint64_t> retained{0};  // devices of which the process has a context, as bits

CUresult retain_context(CUcontext* context, CUdevice device) {
  retained |= std::uint64_t{1} << device;
  *context = as<CUcontext>(static_cast<std::uintptr_t>(number_of(device)) + 1);
  return CUDA_SUCCESS;
}

CUresult context_state(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = (retained >> device & 1) != 0 ? 1 : 0;
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

CUresult enable_peer(CUcontext context, unsigned int) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!peers(current_device(), device_of(context))) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const auto bit = 1U << device_of(context);
  const auto before = enabled.at(static_cast<std::size_t>(current_device())).fetch_or(bit);
  return (before & bit) == 0 ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

// ---- Streams, events and captures

Memory& memory() { return Memory::of_this_process(); }
Streams& streams() { return Streams::of_this_process(); }

/// Returns the stream of a handle. A null handle is the default stream of the current context's device, or of the first
/// device without one.
Stream* stream_of(CUstream stream) {
  if (stream != nullptr) return as<Stream*>(stream);
  return streams().default_stream(contexts.empty() ? 0 : current_device());
}

thread_local CUstreamCaptureMode capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

CUresult exchange_capture_mode(CUstreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return CUDA_SUCCESS;
}

/// Says whether this thread may make a call that is unsafe during a capture. If it may not, the capture is invalid.
bool forbidden() { return capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL && streams().invalidate_global(); }

/// Enqueues an operation, or records it in the graph if the stream is being captured; `recorded` then becomes true.
/// Fails if this thread has no context (CUDA_ERROR_INVALID_CONTEXT, as in the real driver).
CUresult put(CUstream stream, Operation operation, bool* recorded = nullptr) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  switch (streams().add(stream_of(stream), std::move(operation))) {
    case Enqueued::on_stream:
      return CUDA_SUCCESS;
    case Enqueued::in_graph:
      if (recorded != nullptr) *recorded = true;
      return CUDA_SUCCESS;
    case Enqueued::capture_invalid:
      return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    case Enqueued::capture_implicit:
      break;
  }
  return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
}

CUresult stream_create(CUstream* stream, unsigned int flags) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *stream = as<CUstream>(streams().make(current_device(), flags == CU_STREAM_DEFAULT));
  return CUDA_SUCCESS;
}

CUresult stream_destroy(CUstream stream) {
  streams().destroy(stream_of(stream));
  return CUDA_SUCCESS;
}

CUresult stream_query(CUstream stream) {
  if (failed) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (const auto capture = streams().capture_of(stream_of(stream))) {
    streams().invalidate(capture);
    return stream == nullptr ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return streams().idle(stream_of(stream)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult stream_is_capturing(CUstream stream, CUstreamCaptureStatus* status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  const auto capture = streams().capture_of(stream_of(stream));
  if (!capture) return CUDA_SUCCESS;
  if (stream == nullptr) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  *status = capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
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

CUresult stream_batch_values(CUstream stream, unsigned int count, CUstreamBatchMemOpParams* batch, unsigned int) {
  for (unsigned int i = 0; i < count; ++i) {
    const auto& each = batch[i];
    auto result = CUDA_ERROR_NOT_SUPPORTED;
    if (each.operation == CU_STREAM_MEM_OP_WRITE_VALUE_32) {
      result = stream_write_value(stream, each.writeValue.address, each.writeValue.value, each.writeValue.flags);
    } else if (each.operation == CU_STREAM_MEM_OP_WAIT_VALUE_32) {
      result = stream_wait_value(stream, each.waitValue.address, each.waitValue.value, each.waitValue.flags);
    }
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
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
  if (failed) return CUDA_ERROR_ILLEGAL_ADDRESS;
  auto point = std::make_shared<Point>();
  if (stream != nullptr) point->captured = streams().capture_of(stream_of(stream));
  if (point->captured) {
    as<Event*>(event)->last = point;
    return point->captured->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
  }
  const auto result = put(stream, [point] {
    point->at = std::chrono::steady_clock::now();
    return point->reached = true;
  });
  if (result == CUDA_SUCCESS) as<Event*>(event)->last = point;
  return result;
}

CUresult event_query(CUevent event) {
  if (failed) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (forbidden()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  const auto& last = as<Event*>(event)->last;
  if (last != nullptr && last->captured) return CUDA_ERROR_CAPTURED_EVENT;
  return last == nullptr || last->reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult event_elapsed(float* milliseconds, CUevent from, CUevent to) {
  const auto begin = as<Event*>(from)->last, end = as<Event*>(to)->last;
  if (!begin || !end) return CUDA_ERROR_INVALID_HANDLE;
  if (!begin->reached || !end->reached) return CUDA_ERROR_NOT_READY;
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - begin->at).count();
  return CUDA_SUCCESS;
}

/// A stream that waits for an event of a capture joins the capture. A captured stream may wait for no other event.
CUresult stream_wait_event(CUstream stream, CUevent event, unsigned int) {
  const auto last = as<Event*>(event)->last;
  if (!last) return CUDA_SUCCESS;
  const auto capture = stream == nullptr ? nullptr : streams().capture_of(stream_of(stream));
  if (last->captured && !capture) {
    streams().capture(stream_of(stream), last->captured);
    return CUDA_SUCCESS;
  }
  if (capture != last->captured) {
    streams().invalidate(capture);
    return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
  }
  if (capture) return CUDA_SUCCESS;
  return put(stream, [last] { return last->reached.load(); });
}

CUresult begin_capture(CUstream stream, CUstreamCaptureMode mode) {
  if (stream == nullptr) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  auto capture = std::make_shared<Capture>();
  capture->global = mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
  streams().capture(stream_of(stream), std::move(capture));
  return CUDA_SUCCESS;
}

CUresult end_capture(CUstream stream, CUgraph* graph) {
  *graph = nullptr;
  if (!streams().capture_of(stream_of(stream))) return CUDA_ERROR_ILLEGAL_STATE;
  auto ended = streams().end_capture(stream_of(stream));
  if (!ended) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  *graph = as<CUgraph>(ended.release());
  return CUDA_SUCCESS;
}

CUresult graph_nodes(CUgraph graph, CUgraphNode*, std::size_t* count) {
  *count = as<Graph*>(graph)->nodes.size();
  return CUDA_SUCCESS;
}

CUresult graph_destroy(CUgraph graph) {
  delete as<Graph*>(graph);
  return CUDA_SUCCESS;
}

CUresult graph_instantiate(CUgraphExec* executable, CUgraph graph, unsigned long long) {
  *executable = as<CUgraphExec>(new Graph(*as<Graph*>(graph)));
  return CUDA_SUCCESS;
}

CUresult graph_exec_destroy(CUgraphExec executable) {
  delete as<Graph*>(executable);
  return CUDA_SUCCESS;
}

CUresult graph_launch(CUgraphExec executable, CUstream stream) {
  for (const auto& node : as<Graph*>(executable)->nodes) {
    if (const auto result = put(stream, node); result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

// ---- Copies

/// Returns whether `device` may access all of these bytes. Host memory is everybody's. A mapping at reserved addresses
/// belongs to the devices to which access was given; peer access adds the others' cudaMalloc memory alone.
bool accessible(CUdeviceptr begin, std::size_t bytes, int device) {
  for (auto at = begin; at < begin + bytes;) {
    const auto range = memory().find(at);
    if (!range) return true;
    const bool given = (range->access & (1U << device)) != 0;
    const auto owner = static_cast<unsigned int>(range->pages->device);
    const bool peer = range->allocated && (enabled.at(static_cast<std::size_t>(device)).load() & (1U << owner)) != 0;
    if (!given && !peer) return false;
    at = range->begin + range->bytes;
  }
  return true;
}

/// Returns whether cudaMalloc or the host made this memory: then the driver copies between devices by itself.
bool allocated(CUdeviceptr address) {
  const auto range = memory().find(address);
  return !range || range->allocated;
}

CUresult enqueue_copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  std::vector<std::byte> staged;
  const auto* source = as<const std::byte*>(from);
  if (memory().pageable(from)) staged.assign(source, source + bytes);
  const auto point = std::make_shared<Point>();
  bool recorded = false;
  const auto result = put(
      stream,
      [=, staged = std::move(staged)] {
        if (!failed) std::memcpy(as<void*>(to), staged.empty() ? source : staged.data(), bytes);
        return point->reached = true;
      },
      &recorded);
  if (result == CUDA_SUCCESS && !recorded && memory().pageable(to)) {
    while (!point->reached) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  return result;
}

/// Enqueues a copy by the device of the stream. On return, a pageable source has been read, and a pageable destination
/// has been written.
CUresult copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  if (failed) return CUDA_ERROR_ILLEGAL_ADDRESS;
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  const int device = stream_of(stream)->device;
  const bool both = allocated(to) && allocated(from);
  if (!both && (!accessible(to, bytes, device) || !accessible(from, bytes, device))) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return enqueue_copy(to, from, bytes, stream);
}

/// Enqueues a copy in which each device accesses its own end.
CUresult copy_between(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, std::size_t bytes,
                      CUstream stream) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!accessible(to, bytes, device_of(to_context)) || !accessible(from, bytes, device_of(from_context)))
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  return enqueue_copy(to, from, bytes, stream);
}

/// From the host to a device alone.
CUresult copy_2d(const CUDA_MEMCPY2D* rows, CUstream stream) {
  if (rows->srcMemoryType != CU_MEMORYTYPE_HOST || rows->dstMemoryType != CU_MEMORYTYPE_DEVICE)
    return CUDA_ERROR_NOT_SUPPORTED;
  if (rows->srcPitch < rows->WidthInBytes || rows->dstPitch < rows->WidthInBytes) return CUDA_ERROR_INVALID_VALUE;
  for (std::size_t row = 0; row < rows->Height; ++row) {
    const auto from = as<CUdeviceptr>(rows->srcHost) + row * rows->srcPitch;
    const auto result = copy(rows->dstDevice + row * rows->dstPitch, from, rows->WidthInBytes, stream);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult set_bytes(CUdeviceptr to, unsigned char value, std::size_t bytes, CUstream stream) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (!accessible(to, bytes, stream_of(stream)->device)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return put(stream, [=] {
    if (!failed) std::memset(as<void*>(to), value, bytes);
    return true;
  });
}

// ---- Memory

CUresult allocate(CUdeviceptr* begin, std::size_t bytes) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (forbidden()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  streams().drain();
  const auto pages = memory().create(bytes, current_device());
  const auto at = pages ? memory().map(pages, current_device()) : std::nullopt;
  if (!at) return CUDA_ERROR_OUT_OF_MEMORY;
  *begin = *at;
  return CUDA_SUCCESS;
}

CUresult free(CUdeviceptr begin) {
  if (forbidden()) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  streams().drain();
  return memory().unmap(begin) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult memory_info(std::size_t* free, std::size_t* total) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  *total = device_bytes;
  *free = device_bytes - memory().used(current_device());
  return CUDA_SUCCESS;
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
        give(std::uint64_t{chunk ? range.pages->handles.load() : 0U});
        break;
      case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        give(int{known && range.allocated});
        break;
      case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        give(static_cast<void*>(nullptr));
        break;
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        give(known ? unsigned{CU_MEMORYTYPE_DEVICE} : 0U);
        break;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        give(known ? index_of(range.pages->device) : -2);  // as the real driver for memory that it does not know
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

// ---- Network cards

/// The writes of cards that are not visible yet.
struct CardWrites {
  struct Write {
    CUdeviceptr to;
    std::vector<std::byte> bytes;
  };
  std::mutex mutex;
  std::vector<Write> held;

  static CardWrites& of_this_process() {
    static auto& all = *new CardWrites;
    return all;
  }
  void flush() {
    const std::lock_guard lock(mutex);
    for (const auto& each : held) {
      if (memory().find(each.to)) std::memcpy(as<void*>(each.to), each.bytes.data(), each.bytes.size());
    }
    held.clear();
  }
};

CUresult flush_card_writes(CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (says("EMULATED_GPU_FLUSH", "none")) return CUDA_ERROR_NOT_SUPPORTED;
  CardWrites::of_this_process().flush();
  return CUDA_SUCCESS;
}

/// The descriptor is of no use: tests/emulated_verbs goes by the address.
CUresult range_handle(void* handle, CUdeviceptr begin, std::size_t bytes, CUmemRangeHandleType type,
                      unsigned long long) {
  constexpr CUdeviceptr page = 4096;
  if (says("EMULATED_GPU_DMABUF", "0")) return CUDA_ERROR_NOT_SUPPORTED;
  if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || bytes == 0 || begin % page != 0 || bytes % page != 0)
    return CUDA_ERROR_INVALID_VALUE;
  for (auto at = begin; at < begin + bytes;) {
    const auto range = memory().find(at);
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    at = range->begin + range->bytes;
  }
  const int descriptor = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return CUDA_ERROR_OUT_OF_MEMORY;
  std::memcpy(handle, &descriptor, sizeof descriptor);
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
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (theirs.process == ::getpid()) return CUDA_ERROR_INVALID_CONTEXT;
  const auto path = "/proc/" + std::to_string(theirs.process) + "/fd/" + std::to_string(theirs.descriptor);
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  const auto pages = descriptor < 0 ? nullptr : memory().import(descriptor);
  if (pages && pages->device != current_device() && !peers(current_device(), pages->device))
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  const auto at = pages ? memory().map(pages, current_device()) : std::nullopt;
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

CUresult create(CUmemGenericAllocationHandle* handle, std::size_t bytes, const CUmemAllocationProp* wanted,
                unsigned long long) {
  auto pages = memory().create(bytes, number_of(wanted->location.id));
  if (!pages) return CUDA_ERROR_OUT_OF_MEMORY;
  pages->handles = static_cast<unsigned int>(wanted->requestedHandleTypes);
  *handle = memory().add_handle(std::move(pages));
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  return memory().drop_handle(handle) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/// `alignment`: a power of two; 0: that of a page.
CUresult reserve(CUdeviceptr* begin, std::size_t bytes, std::size_t alignment, CUdeviceptr wanted, unsigned long long) {
  const auto all = bytes + alignment;
  auto* const at = ::mmap(as<void*>(wanted), all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto first = as<CUdeviceptr>(at);
  *begin = alignment == 0 ? first : (first + alignment - 1) & ~CUdeviceptr{alignment - 1};
  if (*begin != first) ::munmap(at, *begin - first);
  if (*begin + bytes != first + all) ::munmap(as<void*>(*begin + bytes), first + all - *begin - bytes);
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

/// Fails if a device cannot reach the memory's.
CUresult set_access(CUdeviceptr begin, std::size_t bytes, const CUmemAccessDesc* wanted, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const auto device = number_of(wanted[i].location.id);
    const auto range = memory().find(begin);
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    if (range->pages->device != device && !peers(device, range->pages->device)) return CUDA_ERROR_INVALID_DEVICE;
    if (!memory().grant(begin, bytes, device)) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}

// ---- Kernels

CUresult load_module(CUmodule* module, const void* image) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  std::string_view text(static_cast<const char*>(image));
  if (!text.starts_with(image_head)) return CUDA_ERROR_INVALID_IMAGE;
  text.remove_prefix(image_head.size());
  const auto end = text.find('\n');
  const auto* const kernels = kernels_of(text.substr(0, end), text.substr(end + 1));
  if (kernels == nullptr) return CUDA_ERROR_INVALID_IMAGE;
  *module = as<CUmodule>(const_cast<Kernels*>(kernels));
  return CUDA_SUCCESS;
}

/// A function of a module: the kernel that runs a whole grid, or the one that runs a block and meets other ranks.
struct Function {
  ReduceKernel reduce = nullptr;
  FlagKernel flags = nullptr;
};

CUresult module_function(CUfunction* function, CUmodule module, const char* name) {
  const auto& kernels = *as<const Kernels*>(module);
  const std::string_view wanted(name);
  Function found;
  if (wanted == "tensorferry_reduce") found.reduce = kernels.reduce;
  if (wanted == "tensorferry_one_shot") found.flags = kernels.one_shot;
  if (wanted == "tensorferry_two_shot") found.flags = kernels.two_shot;
  if (wanted == "tensorferry_exchange") found.flags = kernels.exchange;
  if (wanted == "tensorferry_reduce_pieces") found.flags = kernels.reduce_pieces;
  if (found.reduce == nullptr && found.flags == nullptr) return CUDA_ERROR_NOT_FOUND;
  *function = as<CUfunction>(new Function(found));  // lives as long as the process
  return CUDA_SUCCESS;
}

CUresult function_attribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = 512;
  return attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult launch_flags(FlagKernel kernel, const tensorferry::collectives::cuda::FlagArguments& arguments,
                      unsigned int blocks, unsigned int threads, CUstream stream) {
  const int device = stream_of(stream)->device;
  for (unsigned int rank = 0; rank < arguments.ranks; ++rank) {
    if (!accessible(as<CUdeviceptr>(arguments.halves[rank]), 1, device)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (!accessible(as<CUdeviceptr>(arguments.flags[rank]), 1, device)) return CUDA_ERROR_ILLEGAL_ADDRESS;
    const auto* const lent = arguments.lent[rank];
    if (lent != nullptr && !accessible(as<CUdeviceptr>(lent), 1, device)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  // A graph has a copy of this operation for each launch, and none of the copies has begun.
  return put(stream, [=, running = std::shared_ptr<RunningGrid>()]() mutable {
    if (failed) return true;
    if (!running) {
      const auto run_block = [=](unsigned int block) { kernel(arguments, block, blocks, threads); };
      running = std::make_shared<RunningGrid>(run_block, blocks);
    }
    return running->done();
  });
}

/// Runs the whole grid as one operation of the stream.
CUresult launch(CUfunction given, unsigned int blocks, unsigned int, unsigned int, unsigned int threads, unsigned int,
                unsigned int, unsigned int, CUstream stream, void** parameters, void**) {
  if (contexts.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  const auto& function = *as<const Function*>(given);
  if (function.flags != nullptr) {
    const auto& flags = *static_cast<const tensorferry::collectives::cuda::FlagArguments*>(parameters[0]);
    return launch_flags(function.flags, flags, blocks, threads, stream);
  }
  const auto arguments = *static_cast<const tensorferry::collectives::cuda::ReduceArguments*>(parameters[0]);
  const int device = stream_of(stream)->device;
  for (unsigned int rank = 0; rank < arguments.ranks; ++rank) {
    if (!accessible(as<CUdeviceptr>(arguments.inputs[rank]), 1, device)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  if (!accessible(as<CUdeviceptr>(arguments.out), 1, device)) return CUDA_ERROR_ILLEGAL_ADDRESS;
  return put(stream, [arguments, kernel = function.reduce] {
    kernel(arguments);
    return true;
  });
}

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
    ENTRY(cuDeviceGetName, device_name),
    ENTRY(cuDeviceGetAttribute, device_attribute),
    ENTRY(cuDeviceCanAccessPeer, can_access_peer),
    ENTRY(cuDeviceGetP2PAttribute, p2p_attribute),
    ENTRY(cuDevicePrimaryCtxRetain, retain_context),
    ENTRY(cuDevicePrimaryCtxGetState, context_state),
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
    ENTRY(cuStreamBatchMemOp, stream_batch_values),
    ENTRY(cuEventCreate, event_create),
    ENTRY(cuEventDestroy, event_destroy),
    ENTRY(cuEventRecord, event_record),
    ENTRY(cuEventQuery, event_query),
    ENTRY(cuEventElapsedTime, event_elapsed),
    ENTRY(cuMemAlloc, allocate),
    ENTRY(cuMemFree, free),
    ENTRY(cuMemcpyAsync, copy),
    ENTRY(cuMemcpyPeerAsync, copy_between),
    ENTRY(cuMemcpy2DAsync, copy_2d),
    ENTRY(cuMemsetD8Async, set_bytes),
    ENTRY(cuMemHostRegister, host_register),
    ENTRY(cuMemHostUnregister, host_unregister),
    ENTRY(cuMemHostGetDevicePointer, host_address),
    ENTRY(cuPointerGetAttributes, attributes),
    ENTRY(cuMemGetHandleForAddressRange, range_handle),
    ENTRY(cuFlushGPUDirectRDMAWrites, flush_card_writes),
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
    ENTRY(cuModuleLoadData, load_module),
    ENTRY(cuModuleGetFunction, module_function),
    ENTRY(cuFuncGetAttribute, function_attribute),
    ENTRY(cuLaunchKernel, launch),
};

}  // namespace
}  // namespace emulated

CUresult emulated_address(const char* name, void** found, int, cuuint64_t, CUdriverProcAddressQueryResult*) {
  *found = nullptr;
  const auto same = [&](const auto& entry) { return std::string_view(entry.name) == name; };
  const auto it = std::find_if(emulated::functions.begin(), emulated::functions.end(), same);
  *found = it == emulated::functions.end() ? nullptr : it->function;
  return *found == nullptr ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

void emulated_fail() { emulated::failed = true; }

bool emulated_card_write(CUdeviceptr to, const void* from, std::size_t bytes) {
  using emulated::CardWrites;
  if (!emulated::memory().find(to)) return false;
  auto& writes = CardWrites::of_this_process();
  {
    const auto* const begin = static_cast<const std::byte*>(from);
    const std::lock_guard lock(writes.mutex);
    writes.held.push_back({to, std::vector<std::byte>(begin, begin + bytes)});
  }
  if (emulated::says("EMULATED_GPU_FLUSH", "ordered")) writes.flush();
  return true;
}
void emulated_card_reads() { emulated::CardWrites::of_this_process().flush(); }

CUresult emulated_begin_capture(CUstream stream, CUstreamCaptureMode mode) {
  return emulated::begin_capture(stream, mode);
}
CUresult emulated_end_capture(CUstream stream, CUgraph* graph) { return emulated::end_capture(stream, graph); }
CUresult emulated_graph_nodes(CUgraph graph, CUgraphNode* nodes, std::size_t* count) {
  return emulated::graph_nodes(graph, nodes, count);
}
CUresult emulated_graph_destroy(CUgraph graph) { return emulated::graph_destroy(graph); }
CUresult emulated_graph_instantiate(CUgraphExec* executable, CUgraph graph, unsigned long long flags) {
  return emulated::graph_instantiate(executable, graph, flags);
}
CUresult emulated_graph_exec_destroy(CUgraphExec executable) { return emulated::graph_exec_destroy(executable); }
CUresult emulated_graph_launch(CUgraphExec executable, CUstream stream) {
  return emulated::graph_launch(executable, stream);
}
CUresult emulated_memory_info(std::size_t* free, std::size_t* total) { return emulated::memory_info(free, total); }
