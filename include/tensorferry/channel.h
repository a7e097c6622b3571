/// What a channel of a program's own is written with: the interfaces Driver, Channel and Wire, the Registry that an
/// agent takes its channels from, and the tools that parse a peer's bytes and run completions.
///
///     options.register_channels = [](tensorferry::Registry& channels) {   // AgentOptions
///       channels.add("spool", /*priority=*/90, [] { return std::make_unique<SpoolDriver>("/scratch"); });
///     };
///
/// The headers below are the contracts; tensorferry/channels/channel.h is the one to read first. They are a part of the
/// interface that a minor version may change (docs/compatibility.md). docs/guides/add-a-channel.md has the steps.
#pragma once

// An installed copy of these headers lies in tensorferry/base and tensorferry/channels, and includes them from there.
#include "base/bytes.h"
#include "base/file_descriptor.h"
#include "base/status.h"
#include "base/text.h"
#include "channels/channel.h"
#include "channels/completion.h"
#include "channels/registry.h"
