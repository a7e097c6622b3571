/// The text of the headers from which NVRTC compiles the reduction kernels. CMake embeds them into the library.
#pragma once

#include <array>

namespace tensorferry::collectives::cuda {

struct EmbeddedHeader {
  const char* name;  // as in #include
  const char* text;
};
extern const std::array<EmbeddedHeader, 6> kernel_headers;

}  // namespace tensorferry::collectives::cuda
