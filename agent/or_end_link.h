/// What a link does with a step of its work that has no memory.
#pragma once

#include "base/out_of_memory.h"

namespace tensorferry {

/// Runs `step`. If there is no memory for it, ends `link`, because the peer may know of a part of the step, or wait for
/// the rest.
template <class AnyLink, class Step>
void or_end_link(AnyLink& link, const Step& step) {
  out_of_memory::run_or(step, [&] { link.fail(out_of_memory::status()); });
}

}  // namespace tensorferry
