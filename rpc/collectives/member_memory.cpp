#include "rpc/collectives/member_memory.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/text.h"
#include "channels/cma/process.h"

namespace tensorferry::collectives {

std::string why_unreadable(const MemberRecord& own, const MemberRecord& other,
                           const std::function<Status(const MemberRecord& other)>& check) {
  const auto& host = other.host;
  const auto why = [&](std::string_view text) {
    return formatted("\"{}\" cannot read the memory of \"{}\": {}", own.name, other.name, text);
  };
  if (host.process.pid == 0) return why("/proc does not tell its pid");
  if (other.name == own.name) return {};
  if (host.uid != own.host.uid) return why("it has another user");
  if (host.pid_namespace != own.host.pid_namespace) return why("it has another pid namespace");
  if (host.user_namespace != own.host.user_namespace) return why("it has another user namespace");
  if (const auto checked = check(other); !checked.ok()) return why(checked.what());
  auto process = cma::Process::find(host.process);
  if (!process.ok()) return why(process.status().what());
  std::uint64_t word = 0;
  const auto error = process->read(reinterpret_cast<std::byte*>(&word), host.probe_address, sizeof word);
  if (error != 0) return why(cma::text_of_refusal(error));
  return word == host.probe_word ? std::string() : why("it is another process");
}

}  // namespace tensorferry::collectives
