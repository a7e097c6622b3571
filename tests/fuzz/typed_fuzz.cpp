// Fuzzes the arguments and results of typed C++ functions. Arbitrary bytes are read as values of the types that such
// functions take, or fail with one of TensorFerry's exceptions. detail::describe_arguments takes any bytes.
#include <array>
#include <cstdlib>

#include "rpc/cpp/reading.h"
#include "tensorferry/errors.h"
#include "tensorferry/values.h"

namespace {

using namespace tensorferry;

struct Step {
  Tensor observation;
  double reward = 0;
  std::vector<std::optional<bool>> flags;
};

}  // namespace

template <>
struct tensorferry::Value<Step> : tensorferry::Fields<"Step", &Step::observation, &Step::reward, &Step::flags> {};

namespace {

/// Returns three buffers: an empty one, one of host memory, and one whose bytes must not be accessed.
std::vector<Buffer> buffers() {
  static std::array<std::byte, 256> memory{};
  static std::byte nothing;
  return {Buffer{Device{}, &nothing, 0, nullptr, nullptr},
          Buffer{Device{}, memory.data(), memory.size(), nullptr, nullptr},
          Buffer{{DeviceType::cuda, 1}, reinterpret_cast<std::byte*>(4096), 1024, nullptr, nullptr}};
}

template <class T>
void look_at(const T& /*value*/) {}
void look_at(const Tensor& tensor) {
  if (tensor.device().type == DeviceType::cpu) static_cast<void>(tensor.clone());
}

template <class T>
void read(ValueReader& in) {
  look_at(Value<T>::read(in));
}

void read_some(ValueReader& in, std::uint8_t type) {
  switch (type % 8) {
    case 0:
      return read<std::vector<std::vector<std::string>>>(in);
    case 1:
      return read<std::map<std::string, std::tuple<int, std::uint64_t, double>>>(in);
    case 2:
      return read<Tensor>(in);
    case 3:
      return read<Step>(in);
    case 4:
      return read<std::optional<std::vector<std::byte>>>(in);
    case 5:
      return read<std::array<std::complex<float>, 2>>(in);
    case 6:
      return read<TensorOf<float>>(in);
    default:
      return read<std::vector<std::pair<std::int8_t, bool>>>(in);
  }
}

void read_request(const Received& message, std::uint8_t type) {
  detail::Reading reading(message, nullptr);
  const auto head = reading.request();
  ValueReader in(reading);
  if (head.packed) return;
  for (std::size_t i = 0; i < head.positional; ++i) read_some(in, static_cast<std::uint8_t>(type + i));
  const auto keywords = reading.keywords().size();
  for (auto i = keywords; i-- > 0 && keywords < 16;) {
    reading.go_to_keyword(i);
    read_some(in, type);
  }
  reading.finish();
}

void read_reply(const Received& message, std::uint8_t type) {
  detail::Reading reading(message, nullptr);
  reading.expect_result("f", "peer", &Value<Step>::name);
  if (reading.reply() == ReplyKind::exception) {
    static_cast<void>(reading.exception().describe());
    return;
  }
  ValueReader in(reading);
  read_some(in, type);
  reading.finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const Received message{Bytes(bytes + 2, bytes + size), buffers()};
  static_cast<void>(detail::describe_arguments(message));
  try {
    if (data[0] % 2 == 0) {
      read_request(message, data[1]);
    } else {
      read_reply(message, data[1]);
    }
  } catch (const Error&) {
  } catch (const detail::Mismatch&) {
  }
  return 0;
}
