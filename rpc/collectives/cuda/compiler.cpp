#include "rpc/collectives/cuda/compiler.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <set>
#include <span>

#include "base/symbols.h"
#include "base/text.h"
#include "channels/cuda/api.h"
#include "rpc/collectives/cuda/kernel_source.h"

namespace tensorferry::collectives::cuda {
namespace {

// ---- types

std::string_view real_combination(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
      return "Sum";
    case Reduction::average:
      return "Average";
    case Reduction::product:
      return "Product";
    case Reduction::min:
      return "Min";
    case Reduction::max:
      return "Max";
    case Reduction::premultiplied_sum:
      return "PremultipliedSum";
    default:
      return {};
  }
}

KernelTypes real(std::string_view element, Reduction reduction) {
  const auto combination = real_combination(reduction);
  return combination.empty() ? KernelTypes{} : KernelTypes{element, combination};
}

/// `bits` has the sums, products and bits of a signed type without its undefined overflow.
KernelTypes integer(std::string_view element, std::string_view bits, std::string_view average, Reduction reduction) {
  switch (reduction) {
    case Reduction::average:
      return {bits, average};
    case Reduction::min:
    case Reduction::max:
      return {element, real_combination(reduction)};
    case Reduction::sum:
    case Reduction::product:
      return {bits, real_combination(reduction)};
    case Reduction::band:
      return {bits, "And"};
    case Reduction::bor:
      return {bits, "Or"};
    case Reduction::bxor:
      return {bits, "Xor"};
    default:
      return {};
  }
}

KernelTypes complex(std::string_view part, std::string_view pair, Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::average:
    case Reduction::premultiplied_sum:
      return {part, real_combination(reduction), 2};
    case Reduction::product:
      return {pair, "Product"};
    default:
      return {};
  }
}

KernelTypes boolean(Reduction reduction) {
  switch (reduction) {
    case Reduction::sum:
    case Reduction::max:
    case Reduction::bor:
      return {"Boolean", "Or"};
    case Reduction::product:
    case Reduction::min:
    case Reduction::band:
      return {"Boolean", "And"};
    case Reduction::bxor:
      return {"Boolean", "Xor"};
    default:
      return {};
  }
}

// ---- NVRTC

/// NVRTC's functions, named as in nvrtc.h without the prefix. That header is not needed to build. A result of 0 is
/// success.
struct Nvrtc {
  using Program = void*;
  int (*version)(int* major, int* minor) = nullptr;
  const char* (*get_error_string)(int result) = nullptr;
  int (*create_program)(Program*, const char* source, const char* name, int headers, const char* const* texts,
                        const char* const* names) = nullptr;
  int (*destroy_program)(Program*) = nullptr;
  int (*compile_program)(Program, int options, const char* const* texts) = nullptr;
  int (*get_cubin_size)(Program, std::size_t*) = nullptr;
  int (*get_cubin)(Program, char*) = nullptr;
  int (*get_program_log_size)(Program, std::size_t*) = nullptr;
  int (*get_program_log)(Program, char*) = nullptr;
};

/// What this process has loaded of CUDA.
struct LoadedCuda {
  int runtime = 0;  // the major version of the runtime library; 0: none
  // In which wheels have NVRTC: beside the runtime, or in the package of its own that CUDA 12 has.
  std::set<std::string> folders{"/usr/local/cuda/lib64"};
};

LoadedCuda loaded_cuda() {
  LoadedCuda out;
  ::dl_iterate_phdr(
      [](::dl_phdr_info* library, std::size_t, void* to) {
        constexpr std::string_view runtime = "libcudart.so.";
        const std::string_view path(library->dlpi_name);
        auto& found = *static_cast<LoadedCuda*>(to);
        const auto slash = path.rfind('/');
        if (slash == std::string_view::npos) return 0;
        const std::string folder(path.substr(0, slash));
        const auto file = path.substr(slash + 1);
        if (file.starts_with(runtime)) {
          const auto version = file.substr(runtime.size());
          std::from_chars(version.data(), version.data() + version.size(), found.runtime);
          found.folders.insert(folder);
          found.folders.insert(folder + "/../../cuda_nvrtc/lib");
        } else if (file.starts_with("libtorch") || file.starts_with("libc10")) {
          found.folders.insert(folder);
          found.folders.insert(folder + "/../../nvidia/cu13/lib");
          found.folders.insert(folder + "/../../nvidia/cuda_nvrtc/lib");
        }
        return 0;
      },
      &out);
  return out;
}

/// Returns the major version of CUDA that the driver supports; 0 without a driver.
int driver_version() {
  decltype(&::cuDriverGetVersion) get = nullptr;
  tensorferry::cuda::driver_functions(12000).optional(get, "cuDriverGetVersion");
  int version = 0;
  return get != nullptr && get(&version) == CUDA_SUCCESS ? version / 1000 : 0;
}

void* open_library(const LoadedCuda& cuda, const std::vector<int>& versions) {
  for (const auto version : versions) {
    const auto name = formatted("libnvrtc.so.{}", version);
    if (auto* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    for (const auto& folder : cuda.folders) {
      if (auto* library = ::dlopen((folder + "/" + name).c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    }
  }
  return nullptr;
}

struct LoadedCompiler {
  Nvrtc functions;
  std::string missing;
};

LoadedCompiler load() {
  LoadedCompiler out;
  const auto cuda = loaded_cuda();
  const auto versions = nvrtc_versions(cuda.runtime, driver_version());
  auto* const library = open_library(cuda, versions);  // stays open until the process ends
  if (library == nullptr) {
    const auto best = versions.empty() ? 12 : versions.front();
    out.missing = formatted(
        "there is no NVRTC to compile kernels with (libnvrtc.so.{}): install nvidia-cuda-nvrtc{}, or put its folder in "
        "LD_LIBRARY_PATH",
        best, best == 12 ? "-cu12" : "");
    return out;
  }
  Symbols find("NVRTC", library);
  find(out.functions.version, "nvrtcVersion");
  find(out.functions.get_error_string, "nvrtcGetErrorString");
  find(out.functions.create_program, "nvrtcCreateProgram");
  find(out.functions.destroy_program, "nvrtcDestroyProgram");
  find(out.functions.compile_program, "nvrtcCompileProgram");
  find(out.functions.get_cubin_size, "nvrtcGetCUBINSize");
  find(out.functions.get_cubin, "nvrtcGetCUBIN");
  find(out.functions.get_program_log_size, "nvrtcGetProgramLogSize");
  find(out.functions.get_program_log, "nvrtcGetProgramLog");
  out.missing = find.missing();
  return out;
}

const LoadedCompiler& loaded() {
  static const auto& once = *new LoadedCompiler(load());
  return once;
}

// ---- programs

/// A kernel of a program: each thread makes this call with the kernel's arguments `a`.
struct Kernel {
  std::string_view name, arguments, call;
};

constexpr std::array reduce_kernels{
    Kernel{"tensorferry_reduce", "ReduceArguments",
           "reduce<Element, Combination>(a, ranks, std::size_t{blockIdx.x} * blockDim.x + threadIdx.x,"
           " std::size_t{gridDim.x} * blockDim.x)"},
};
constexpr std::array flag_kernels{
    Kernel{"tensorferry_one_shot", "FlagArguments",
           "reduce_in_one_shot<Element, Combination>(a, ranks, ThreadBlock())"},
    Kernel{"tensorferry_two_shot", "FlagArguments",
           "reduce_in_two_shots<Element, Combination>(a, ranks, ThreadBlock())"},
    Kernel{"tensorferry_exchange", "FlagArguments", "exchange<Element>(a, ranks, ThreadBlock())"},
    Kernel{"tensorferry_reduce_pieces", "FlagArguments",
           "reduce_pieces<Element, Combination>(a, ranks, ThreadBlock())"},
};

struct ProgramParts {
  std::string_view header;
  std::span<const Kernel> kernels;
};

ProgramParts parts_of(KernelProgram program) {
  switch (program) {
    case KernelProgram::reduce:
      return {"reduce_kernel.h", reduce_kernels};
    case KernelProgram::flags:
      return {"flag_kernels.h", flag_kernels};
  }
  return {};
}

/// Returns the source of a program with the kernel of this name, or with all of its kernels if `name` is empty.
std::string source_of(KernelProgram program, const KernelTypes& types, unsigned ranks, std::string_view name) {
  const auto parts = parts_of(program);
  auto out = formatted(
      "#include \"rpc/collectives/cuda/{}\"\n"
      "namespace tensorferry::collectives::cuda {\n"
      "using Element = {};\n"
      "using Combination = {};\n"
      "constexpr unsigned ranks = {};\n",
      parts.header, types.element, types.combination, ranks);
  for (const auto& kernel : parts.kernels) {
    if (!name.empty() && kernel.name != name) continue;
    out += formatted("extern \"C\" __global__ void __launch_bounds__(512) {}(const {} a) { {}; }\n", kernel.name,
                     kernel.arguments, kernel.call);
  }
  return out + "}\n";
}

/// A program of NVRTC, destroyed with its owner.
class Program final {
 public:
  Program(const Nvrtc& nvrtc, const std::string& source) : nvrtc_(nvrtc) {
    // NVRTC has no standard headers. Two small ones are enough for the kernel.
    std::vector<const char*> names{"cstddef", "cstdint"};
    std::vector<const char*> texts{
        "#pragma once\nnamespace std { using size_t = decltype(sizeof 0); }\n",
        "#pragma once\nnamespace std {\n"
        "using int8_t = signed char; using int16_t = short; using int32_t = int; using int64_t = long long;\n"
        "using uint8_t = unsigned char; using uint16_t = unsigned short; using uint32_t = unsigned int;\n"
        "using uint64_t = unsigned long long;\n}\n"};
    for (const auto& [name, text] : kernel_headers) {
      names.push_back(name);
      texts.push_back(text);
    }
    result_ = nvrtc_.create_program(&program_, source.c_str(), "tensorferry.cu", static_cast<int>(names.size()),
                                    texts.data(), names.data());
  }
  ~Program() {
    if (program_ != nullptr) nvrtc_.destroy_program(&program_);
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  Result<std::vector<char>> compile(const std::vector<std::string>& options) {
    std::vector<const char*> texts;
    for (const auto& option : options) texts.push_back(option.c_str());
    if (result_ == 0) result_ = nvrtc_.compile_program(program_, static_cast<int>(texts.size()), texts.data());
    std::size_t size = 0;
    if (result_ == 0) result_ = nvrtc_.get_cubin_size(program_, &size);
    std::vector<char> image(size);
    if (result_ == 0) result_ = nvrtc_.get_cubin(program_, image.data());
    if (result_ == 0) return image;
    int major = 0, minor = 0;
    nvrtc_.version(&major, &minor);
    return Status(Code::channel_unavailable, formatted("NVRTC {}.{} does not compile the kernel ({}): {}", major, minor,
                                                       nvrtc_.get_error_string(result_), first_line_of_log()));
  }

 private:
  std::string first_line_of_log() {
    std::size_t size = 0;
    if (program_ == nullptr || nvrtc_.get_program_log_size(program_, &size) != 0 || size == 0) return "it has no log";
    std::string log(size, '\0');
    nvrtc_.get_program_log(program_, log.data());
    return log.substr(0, std::min(log.find('\n'), log.find('\0')));
  }

  const Nvrtc& nvrtc_;
  Nvrtc::Program program_ = nullptr;
  int result_ = 0;
};

}  // namespace

KernelTypes kernel_types(DType dtype, Reduction reduction) noexcept {
  switch (dtype) {
    case DType::boolean:
      return boolean(reduction);
    case DType::uint8:
      return integer("std::uint8_t", "std::uint8_t", "IntegerAverage<std::uint8_t>", reduction);
    case DType::int8:
      return integer("std::int8_t", "std::uint8_t", "IntegerAverage<std::int8_t>", reduction);
    case DType::uint16:
      return integer("std::uint16_t", "std::uint16_t", "IntegerAverage<std::uint16_t>", reduction);
    case DType::int16:
      return integer("std::int16_t", "std::uint16_t", "IntegerAverage<std::int16_t>", reduction);
    case DType::uint32:
      return integer("std::uint32_t", "std::uint32_t", "IntegerAverage<std::uint32_t>", reduction);
    case DType::int32:
      return integer("std::int32_t", "std::uint32_t", "IntegerAverage<std::int32_t>", reduction);
    case DType::uint64:
      return integer("std::uint64_t", "std::uint64_t", "IntegerAverage<std::uint64_t>", reduction);
    case DType::int64:
      return integer("std::int64_t", "std::uint64_t", "IntegerAverage<std::int64_t>", reduction);
    case DType::float16:
      return real("Half", reduction);
    case DType::bfloat16:
      return real("BrainFloat", reduction);
    case DType::float32:
      return real("float", reduction);
    case DType::float64:
      return real("double", reduction);
    case DType::float8_e5m2:
      return real("Float8E5M2", reduction);
    case DType::float8_e4m3fn:
      return real("Float8E4M3", reduction);
    case DType::float8_e5m2fnuz:
      return real("Float8E5M2Fnuz", reduction);
    case DType::float8_e4m3fnuz:
      return real("Float8E4M3Fnuz", reduction);
    case DType::complex32:
      return complex("Half", "Pair<Half>", reduction);
    case DType::complex64:
      return complex("float", "Pair<float>", reduction);
    case DType::complex128:
      return complex("double", "Pair<double>", reduction);
    default:
      return {};
  }
}

std::vector<int> nvrtc_versions(int runtime, int driver) {
  std::vector<int> out;
  for (const auto version : {runtime, 13, 12}) {
    const bool is_known = version == 13 || version == 12;
    if (is_known && (driver == 0 || version <= driver) && std::ranges::find(out, version) == out.end()) {
      out.push_back(version);
    }
  }
  return out;
}

Result<std::vector<char>> compile_kernels(KernelProgram program, const KernelTypes& types, int capability,
                                          unsigned ranks, std::string_view kernel) {
  if (!loaded().missing.empty()) return Status(Code::channel_unavailable, loaded().missing);
  Program compiled(loaded().functions, source_of(program, types, ranks, kernel));
  return compiled.compile({
      "--std=c++17",
      "--device-as-default-execution-space",
      "--fmad=false",  // every processor must compute the same bits
      formatted("--gpu-architecture=sm_{}", capability),
  });
}

}  // namespace tensorferry::collectives::cuda
