/// Whether a rank can read the memory of another one.
#pragma once

#include <functional>
#include <string>

#include "base/status.h"
#include "rpc/collectives/messages.h"

namespace tensorferry::collectives {

/// Returns why the process of `own`, which is this one, cannot read the memory of the process that `other` names; "":
/// it can. `check`: whether that is the process of `other` by the kernel's word (RawAgent::check_process); asked before
/// the process is touched.
std::string why_unreadable(const MemberRecord& own, const MemberRecord& other,
                           const std::function<Status(const MemberRecord& other)>& check);

}  // namespace tensorferry::collectives
