/// How a tensor is described to peers of either language, which read a region or a publication of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tensorferry/tensor.h"

namespace tensorferry::detail {

/// A dtype, a shape and strides.
struct TensorForm {
  DType dtype = DType::float32;
  Tensor::Shape shape, strides;
  [[nodiscard]] bool is_row_major() const;
};

/// Describes a tensor: dtype, sizes, strides.
std::string form_of(const Tensor& tensor);
/// Reads what a peer sent. Returns nullopt if it describes no tensor of that many bytes.
std::optional<TensorForm> parse_form(std::string_view form, std::uint64_t bytes);

}  // namespace tensorferry::detail
