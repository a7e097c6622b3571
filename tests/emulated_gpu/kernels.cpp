#include "tests/emulated_gpu/kernels.h"

#include <map>
#include <string>
#include <utility>

#include "rpc/collectives/cuda/flag_kernels.h"

namespace emulated {
namespace {

namespace group = tensorferry::collectives;
using namespace group;  // NOLINT(google-build-using-namespace): the kernels' types have the names that NVRTC gets

template <class T, class Combination>
void run(const group::cuda::ReduceArguments& arguments) {
  group::cuda::reduce<T, Combination>(arguments, arguments.ranks, 0, 1);
}

template <class T, class Combination>
void one_shot(const group::cuda::FlagArguments& arguments, unsigned block, unsigned blocks, unsigned threads) {
  group::cuda::reduce_in_one_shot<T, Combination>(arguments, arguments.ranks, {block, blocks, threads});
}

template <class T, class Combination>
void two_shot(const group::cuda::FlagArguments& arguments, unsigned block, unsigned blocks, unsigned threads) {
  group::cuda::reduce_in_two_shots<T, Combination>(arguments, arguments.ranks, {block, blocks, threads});
}

template <class T, class Combination>
void exchange(const group::cuda::FlagArguments& arguments, unsigned block, unsigned blocks, unsigned threads) {
  group::cuda::exchange<T>(arguments, arguments.ranks, {block, blocks, threads});
}

template <class T, class Combination>
void reduce_pieces(const group::cuda::FlagArguments& arguments, unsigned block, unsigned blocks, unsigned threads) {
  group::cuda::reduce_pieces<T, Combination>(arguments, arguments.ranks, {block, blocks, threads});
}

using Table = std::map<std::pair<std::string_view, std::string_view>, Kernels>;

#define KERNEL(element, combination)                                                                   \
  table[{#element, #combination}] = {&run<element, combination>, /* NOLINT: a type */                  \
                                     &one_shot<element, combination>, &two_shot<element, combination>, \
                                     &exchange<element, combination>, &reduce_pieces<element, combination>}
#define REAL(element)       \
  KERNEL(element, Sum);     \
  KERNEL(element, Average); \
  KERNEL(element, Product); \
  KERNEL(element, Min);     \
  KERNEL(element, Max);     \
  KERNEL(element, PremultipliedSum)
#define INTEGER(element, bits)           \
  KERNEL(bits, Sum);                     \
  KERNEL(bits, IntegerAverage<element>); \
  KERNEL(bits, Product);                 \
  KERNEL(element, Min);                  \
  KERNEL(element, Max);                  \
  KERNEL(bits, And);                     \
  KERNEL(bits, Or);                      \
  KERNEL(bits, Xor)

Table make_table() {
  Table table;
  REAL(float);
  REAL(double);
  REAL(Half);
  REAL(BrainFloat);
  REAL(Float8E5M2);
  REAL(Float8E4M3);
  REAL(Float8E5M2Fnuz);
  REAL(Float8E4M3Fnuz);
  INTEGER(std::uint8_t, std::uint8_t);
  INTEGER(std::int8_t, std::uint8_t);
  INTEGER(std::uint16_t, std::uint16_t);
  INTEGER(std::int16_t, std::uint16_t);
  INTEGER(std::uint32_t, std::uint32_t);
  INTEGER(std::int32_t, std::uint32_t);
  INTEGER(std::uint64_t, std::uint64_t);
  INTEGER(std::int64_t, std::uint64_t);
  KERNEL(Pair<Half>, Product);
  KERNEL(Pair<float>, Product);
  KERNEL(Pair<double>, Product);
  KERNEL(Boolean, Or);
  KERNEL(Boolean, And);
  KERNEL(Boolean, Xor);
  return table;
}

}  // namespace

const Kernels* kernels_of(std::string_view element, std::string_view combination) {
  static const auto& table = *new Table(make_table());
  const auto it = table.find({element, combination});
  return it == table.end() ? nullptr : &it->second;
}

}  // namespace emulated
