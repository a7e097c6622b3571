/// The receiver's tickets that name no chunk yet, because the sender's memory was busy when the buffer was offered.
#pragma once

#include "channels/cuda_basic/messages.h"
#include "channels/cuda_basic/transfer.h"
#include "channels/later_tickets.h"

namespace tensorferry::cuda_basic {

/// Joins the tickets of FlowKind::later with the messages that announce the buffers' chunks.
using LaterTickets = tensorferry::LaterTickets<Transfer, Announced>;
static_assert(LaterTickets::most == Queue::most);

}  // namespace tensorferry::cuda_basic
