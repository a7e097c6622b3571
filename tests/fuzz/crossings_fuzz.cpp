/// Fuzzes the text of crossings, which rank 0 of a group sends, and the file in which they are kept.
#include <cstdint>
#include <string_view>

#include "rpc/collectives/choose.h"
#include "rpc/collectives/tuning.h"
#include "tests/fuzz/must.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tensorferry;
  using namespace tensorferry::collectives;
  using fuzzing::must;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto parsed = parse_crossings(text); parsed.ok()) {
    for (const auto& [operation, rows] : *parsed) {
      must(!rows.empty() && rows.back().up_to == CrossingRow::unbounded);
      for (std::size_t i = 1; i < rows.size(); ++i) must(rows[i - 1].up_to < rows[i].up_to);
      for (const std::size_t bytes : {std::size_t{0}, rows.front().up_to, CrossingRow::unbounded}) {
        const auto chosen = choose({operation, bytes, 4, {true, true}}, {}, *parsed);
        must(!name_of(chosen).empty());
      }
    }
  }
  (void)find_crossings(text, {"one host", "x", 2, "1"});
  return 0;
}
