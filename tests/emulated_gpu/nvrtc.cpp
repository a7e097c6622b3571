// The emulated NVRTC: a program's image names the types that its source defines, and the emulated driver has the
// kernel.
#include <atomic>
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>

#include "tests/emulated_gpu/kernels.h"

namespace {

struct Program {
  std::string image, log;
};

std::atomic<int> compilations{0};

constexpr int success = 0, compilation_failed = 6;

Program& program_of(void* handle) { return *static_cast<Program*>(handle); }

/// Returns what the source defines as `name`: "using NAME = TYPE;". Empty: nothing.
std::string_view type_in(std::string_view source, std::string_view name) {
  const std::string before = "\nusing " + std::string(name) + " = ";
  const auto at = source.find(before);
  if (at == std::string_view::npos) return {};
  const auto type = source.substr(at + before.size());
  return type.substr(0, type.find(';'));
}

}  // namespace

extern "C" {

/// Returns how many programs this process has compiled.
int emulatedCompilations() { return compilations; }

int nvrtcVersion(int* major, int* minor) {
  *major = 13;
  *minor = 0;
  return success;
}
const char* nvrtcGetErrorString(int result) { return result == success ? "NVRTC_SUCCESS" : "NVRTC_ERROR_COMPILATION"; }

int nvrtcCreateProgram(void** program, const char* source, const char*, int, const char* const*, const char* const*) {
  auto& made = *new Program;
  const auto element = type_in(source, "Element"), combination = type_in(source, "Combination");
  if (element.empty() || combination.empty()) {
    made.log = "error: the emulated NVRTC finds no types";
  } else {
    made.image = std::string(emulated::image_head) + std::string(element) + "\n" + std::string(combination);
  }
  *program = &made;
  return success;
}
int nvrtcDestroyProgram(void** program) {
  delete &program_of(*program);
  *program = nullptr;
  return success;
}

int nvrtcCompileProgram(void* program, int, const char* const*) {
  ++compilations;
  return program_of(program).image.empty() ? compilation_failed : success;
}

int nvrtcGetCUBINSize(void* program, std::size_t* size) {
  *size = program_of(program).image.size() + 1;
  return success;
}
int nvrtcGetCUBIN(void* program, char* to) {
  std::memcpy(to, program_of(program).image.c_str(), program_of(program).image.size() + 1);
  return success;
}
int nvrtcGetProgramLogSize(void* program, std::size_t* size) {
  *size = program_of(program).log.size() + 1;
  return success;
}
int nvrtcGetProgramLog(void* program, char* to) {
  std::memcpy(to, program_of(program).log.c_str(), program_of(program).log.size() + 1);
  return success;
}

}  // extern "C"
