/// The table of libibverbs functions that the channels for RDMA use. libibverbs is loaded at run time, so that one
/// build starts on machines with and without it. The build needs only its header.
///
/// The header's inline functions ibv_post_send, ibv_post_recv, ibv_poll_cq and ibv_req_notify_cq go through the
/// context, so they are called as they are. Every other function is called through this table: a direct call would link
/// libibverbs.
#pragma once

#include <infiniband/verbs.h>

#include <string>
#include <string_view>

#include "base/status.h"

namespace tensorferry::rdma {

/// Functions of libibverbs, named as in verbs.h without the prefix. Those marked optional may be null; if another one
/// is missing, verbs() returns null.
struct Verbs {
  decltype(&::ibv_get_device_list) get_device_list;
  decltype(&::ibv_free_device_list) free_device_list;
  decltype(&::ibv_get_device_name) get_device_name;
  decltype(&::ibv_open_device) open_device;
  decltype(&::ibv_close_device) close_device;
  decltype(&::ibv_query_device) query_device;
  decltype(&::ibv_query_port) query_port_compat;  // call rdma::query_port instead
  decltype(&::ibv_query_gid) query_gid;
  decltype(&::ibv_get_async_event) get_async_event;
  decltype(&::ibv_ack_async_event) ack_async_event;
  decltype(&::ibv_alloc_pd) alloc_pd;
  decltype(&::ibv_dealloc_pd) dealloc_pd;
  decltype(&::ibv_reg_mr) reg_mr;
  decltype(&::ibv_reg_mr_iova2)
      reg_mr_iova2;  // optional: takes IBV_ACCESS_RELAXED_ORDERING; call rdma::register_memory
  decltype(&::ibv_reg_dmabuf_mr) reg_dmabuf_mr;  // optional: rdma-core 34 and newer
  decltype(&::ibv_dereg_mr) dereg_mr;
  decltype(&::ibv_create_comp_channel) create_comp_channel;
  decltype(&::ibv_destroy_comp_channel) destroy_comp_channel;
  decltype(&::ibv_create_cq) create_cq;
  decltype(&::ibv_destroy_cq) destroy_cq;
  decltype(&::ibv_get_cq_event) get_cq_event;
  decltype(&::ibv_ack_cq_events) ack_cq_events;
  decltype(&::ibv_create_qp) create_qp;
  decltype(&::ibv_modify_qp) modify_qp;
  decltype(&::ibv_query_qp) query_qp;
  decltype(&::ibv_destroy_qp) destroy_qp;
  decltype(&::ibv_wc_status_str) wc_status_str;
  decltype(&::ibv_fork_init) fork_init;
};

/// Returns the functions of libibverbs, or null if it does not load or lacks one of them. The first call loads the
/// library: the path in TENSORFERRY_LIBIBVERBS, else libibverbs.so.1. It also calls ibv_fork_init, so that a fork never
/// moves registered memory away under a card. Opens no device. Thread-safe.
const Verbs* verbs();
/// Returns why verbs() is null, as a message for users; empty if it is not null. Thread-safe.
const std::string& why_missing();

/// Queries a port; `attributes` is overwritten. Returns 0, or the errno value. The exported function knows the fields
/// up to `flags`; those behind are zero.
int query_port(const Verbs& verbs, ibv_context* context, std::uint8_t port, ibv_port_attr& attributes);

/// Registers `bytes` bytes at `data` with the flags `access` (IBV_ACCESS_...). Asks for relaxed ordering if `access`
/// has IBV_ACCESS_RELAXED_ORDERING and the library knows it; a kernel or card that does not know it ignores it. Returns
/// null with errno set if it fails: ENOMEM if no more memory may be pinned, EFAULT if the memory is not mapped (or, for
/// a GPU's, no driver lends it to the card), EPERM if it may not be written.
ibv_mr* register_memory(const Verbs& verbs, ibv_pd* domain, void* data, std::size_t bytes, unsigned access);

/// Converts an errno value to a Status with the text "`what` failed: ...", in which `what` names the attempted
/// operation. 0 is Ok. ENOMEM is ResourceExhausted, and its text names `ulimit -l`; every other error is
/// ChannelUnavailable.
Status status_of(int error, std::string_view what);

}  // namespace tensorferry::rdma
