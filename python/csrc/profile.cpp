#include "python/csrc/profile.h"

#include <exception>
#include <utility>

#include "rpc/core/envelope.h"

namespace tensorferry::python {

CallRange::CallRange(at::StepCallbacks callbacks, const std::string& name, std::int64_t sequence)
    : name_(name), record_(std::move(callbacks)) {
  record_._setAsync();
  record_.before(std::string_view(name_), sequence);
}

CallRange::~CallRange() {
  const at::ThreadLocalStateGuard there(begun_in_);
  record_.end();
}

std::string CallRange::name_of(std::string_view what, std::string_view function, std::string_view caller,
                               std::string_view callee) {
  const auto parts = parse_function(function);
  std::string name(what);
  name += '#';
  if (parts && parts->kind == FunctionKind::python) {
    name += std::string(parts->scope) + '.' + std::string(parts->name);
  } else {
    name += function;
  }
  return name + '(' + std::string(caller) + " -> " + std::string(callee) + ')';
}

std::int64_t CallRange::sequence_of(std::uint64_t incarnation, std::uint64_t call) {
  auto mixed = incarnation ^ (call * 0x9e3779b97f4a7c15ULL);
  mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9ULL;
  mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebULL;
  return static_cast<std::int64_t>((mixed ^ (mixed >> 31)) >>
                                   11);  // 53 bits: traces are JSON, whose numbers are doubles
}

}  // namespace tensorferry::python
