#include "converters/cuda.h"

// Weak: in a C++ program that links tensorferry::cuda, the functions of cuda.cpp take their places.
#define TENSORFERRY_UNLESS_CUDA __attribute__((weak))

namespace tensorferry {

TENSORFERRY_UNLESS_CUDA std::shared_ptr<Converter> make_cuda_converter(bool (*)()) { return nullptr; }
TENSORFERRY_UNLESS_CUDA int gpu_count() { return 0; }
TENSORFERRY_UNLESS_CUDA void report_released_memory() {}
TENSORFERRY_UNLESS_CUDA Status refusal_of_capture(const c10::Stream&) { return {}; }
TENSORFERRY_UNLESS_CUDA bool has_happened(const c10::Event& event) { return event.query(); }
TENSORFERRY_UNLESS_CUDA void* native_handle(const c10::Stream&) { return nullptr; }

}  // namespace tensorferry
