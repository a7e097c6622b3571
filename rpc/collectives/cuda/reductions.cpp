#include "rpc/collectives/cuda/reductions.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "base/text.h"
#include "channels/cuda/device.h"

namespace tensorferry::collectives::cuda {
namespace {

namespace driver = tensorferry::cuda;
using driver::api;

constexpr std::size_t vector_bytes = 16;  // which a thread reads at once
constexpr unsigned threads = 512;         // of a block, as the kernel's bounds say
constexpr unsigned blocks_at_once = 4;    // of a multiprocessor: 2048 threads

struct Properties {
  int capability = 0;  // 90: 9.0
  unsigned processors = 1;
};

Result<Properties> ask_for_properties(int device) {
  CUdevice handle = 0;
  int major = 0, minor = 0, processors = 0;
  auto result = api()->device_get(&handle, device);
  const auto ask = [&](int& value, CUdevice_attribute attribute) {
    if (result == CUDA_SUCCESS) result = api()->device_get_attribute(&value, attribute, handle);
  };
  ask(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
  ask(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  ask(processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  if (result != CUDA_SUCCESS) return driver::status_of(result, "asking for the GPU's properties");
  return Properties{10 * major + minor, static_cast<unsigned>(std::max(1, processors))};
}

/// Asks the driver once for each device: every operation needs them.
Result<Properties> properties_of(int device) {
  static auto& mutex = *new std::mutex;
  static auto& known = *new std::map<int, Properties>;
  const std::lock_guard lock(mutex);
  if (const auto it = known.find(device); it != known.end()) return it->second;
  auto asked = ask_for_properties(device);
  if (asked.ok()) known.emplace(device, *asked);
  return asked;
}

/// Values that are made at their first use, and kept until the process ends. Who makes one holds up only those who want
/// the same one. A failure is not kept. Thread-safe.
template <class Key, class Value>
class MadeOnce {
 public:
  /// `make` returns a Result<Value>.
  template <class Make>
  Result<const Value*> get(const Key& key, const Make& make) {
    auto& slot = slot_of(key);
    const std::lock_guard lock(slot.mutex);
    if (!slot.value) {
      auto made = make();
      if (!made.ok()) return made.status();
      slot.value.emplace(std::move(*made));
    }
    return &*slot.value;
  }

 private:
  struct Slot {
    std::mutex mutex;
    std::optional<Value> value;
  };
  Slot& slot_of(const Key& key) {
    const std::lock_guard lock(mutex_);
    return slots_[key];  // stays where it is
  }
  std::mutex mutex_;
  std::map<Key, Slot> slots_;
};

Result<CUfunction> load(int device, const std::vector<char>& image, const char* name) {
  const driver::DeviceGuard here(device);
  if (!here.status().ok()) return here.status();
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  auto result = api()->module_load_data(&module, image.data());
  if (result == CUDA_SUCCESS) result = api()->module_get_function(&function, module, name);
  // The driver may load a function at its first launch, and wait for the context's kernels then. One of them may wait
  // for other ranks. Asking for an attribute loads the function now.
  int most_threads = 0;
  if (result == CUDA_SUCCESS) {
    result = api()->func_get_attribute(&most_threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function);
  }
  if (result != CUDA_SUCCESS) return driver::status_of(result, "loading the reduction kernel");
  return function;
}

Result<KernelLaunch> find_kernel(int device, DType dtype, const ReduceOp& op, std::size_t ranks, KernelProgram program,
                                 const char* name) {
  const auto types = kernel_types(dtype, op.kind);
  if (types.element.empty()) {
    return Status(Code::invalid_argument,
                  formatted("the reduction {} of {} does not run on a GPU", name_of(op.kind), name_of(dtype)));
  }
  const auto properties = properties_of(device);
  if (!properties.ok()) return properties.status();
  KernelLaunch out;
  out.parts = types.parts;
  out.item = size_of(dtype);
  out.ranks = static_cast<unsigned>(ranks);
  out.most_blocks = blocks_at_once * properties->processors;
  out.factor = op.factor;
  // The names are those of constants. To compile takes up to a second, so GPUs of one kind share what is compiled.
  using Names = std::tuple<std::string_view, std::string_view, std::string_view, std::size_t>;
  static auto& images = *new MadeOnce<std::pair<int, Names>, std::vector<char>>;
  static auto& functions = *new MadeOnce<std::pair<int, Names>, CUfunction>;
  const Names names(name, types.element, types.combination, ranks);
  const auto capability = properties->capability;
  const auto function = functions.get({device, names}, [&]() -> Result<CUfunction> {
    const auto image =
        images.get({capability, names}, [&] { return compile_kernels(program, types, capability, out.ranks, name); });
    return image.ok() ? load(device, **image, name) : image.status();
  });
  if (!function.ok()) return function.status();
  out.function = **function;
  return out;
}

/// Returns how many blocks of `threads` threads a kernel needs for so many bytes, if each thread takes `rounds`
/// vectors.
unsigned blocks_for(std::size_t bytes, std::size_t rounds, unsigned most) {
  const auto vectors = (bytes + vector_bytes - 1) / vector_bytes, each = threads * rounds;
  return static_cast<unsigned>(std::clamp<std::size_t>((vectors + each - 1) / each, 1, most));
}

/// Fills in what the kernel knows of itself, and returns how many blocks it needs: the same at every rank.
unsigned complete(FlagArguments& arguments, const KernelLaunch& of) {
  const auto blocks = blocks_for(arguments.count * of.item, 1, most_flag_blocks);
  arguments.count *= of.parts;
  arguments.factor = of.factor;
  arguments.ranks = of.ranks;
  return blocks;
}

template <class Arguments>
CUresult launch_with(const KernelLaunch& of, unsigned blocks, Arguments arguments, CUstream stream) {
  std::array<void*, 1> parameters{&arguments};
  return api()->launch_kernel(of.function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters.data(), nullptr);
}

}  // namespace

Result<ReductionKernel> ReductionKernel::find(int device, DType dtype, const ReduceOp& op, std::size_t ranks) {
  const auto found = find_kernel(device, dtype, op, ranks, KernelProgram::reduce, "tensorferry_reduce");
  if (!found.ok()) return found.status();
  return ReductionKernel(*found);
}

CUresult ReductionKernel::launch(ReduceArguments arguments, CUstream stream) const {
  const auto blocks = blocks_for(arguments.count * of_.item, 1, of_.most_blocks);
  arguments.count *= of_.parts;
  arguments.factor = of_.factor;
  arguments.ranks = of_.ranks;
  return launch_with(of_, blocks, arguments, stream);
}

Result<FlagKernel> FlagKernel::find(int device, DType dtype, const ReduceOp& op, std::size_t ranks, Kind kind) {
  constexpr std::array names{"tensorferry_one_shot", "tensorferry_two_shot", "tensorferry_exchange",
                             "tensorferry_reduce_pieces"};
  const auto found =
      find_kernel(device, dtype, op, ranks, KernelProgram::flags, names.at(static_cast<std::size_t>(kind)));
  if (!found.ok()) return found.status();
  return FlagKernel(*found);
}

Result<FlagKernel> FlagKernel::find_exchange(int device, std::size_t item, std::size_t ranks) {
  const auto dtype = item == 1 ? DType::uint8 : item == 2 ? DType::uint16 : item == 4 ? DType::uint32 : DType::uint64;
  return find(device, dtype, Reduction::bor, ranks, Kind::exchange);  // it reduces nothing
}

bool FlagKernel::exist_for(int device) {
  constexpr int has_ordered_words = 70;  // ld.acquire and st.release
  const auto properties = properties_of(device);
  return properties.ok() && properties->capability >= has_ordered_words;
}

CUresult FlagKernel::launch(FlagArguments arguments, CUstream stream) const {
  const auto blocks = complete(arguments, of_);
  for (auto& each : arguments.given) each *= of_.parts;
  for (auto& each : arguments.taken) each *= of_.parts;
  return launch_with(of_, blocks, arguments, stream);
}

}  // namespace tensorferry::collectives::cuda
