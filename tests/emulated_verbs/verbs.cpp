// The functions that libibverbs exports, by the names of verbs.h, and the controls of tests.
#include <infiniband/verbs.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "tests/emulated_verbs/completion_queue.h"
#include "tests/emulated_verbs/host.h"
#include "tests/emulated_verbs/limits.h"
#include "tests/emulated_verbs/memory.h"
#include "tests/emulated_verbs/queue_pair.h"

// The names of some functions are macros too; in parentheses they are the functions.
namespace {

using namespace tensorferry::emulated_verbs;

int post_send(ibv_qp* pair, ibv_send_wr* work, ibv_send_wr** bad) {
  return static_cast<QueuePair*>(pair)->post_send(work, bad);
}
int post_recv(ibv_qp* pair, ibv_recv_wr* work, ibv_recv_wr** bad) {
  return static_cast<QueuePair*>(pair)->post_recv(work, bad);
}
int poll_cq(ibv_cq* queue, int count, ibv_wc* entries) {
  return static_cast<CompletionQueue*>(queue)->poll(count, entries);
}
int req_notify_cq(ibv_cq* queue, int solicited_only) {
  if (solicited_only != 0) return EOPNOTSUPP;
  static_cast<CompletionQueue*>(queue)->notify();
  return 0;
}

struct Domain final : ibv_pd {
  std::atomic<int> pairs{0};
};

int fail(int error) {
  errno = error;
  return error;
}

template <class Object>
Object* no(int error) {
  errno = error;
  return nullptr;
}

}  // namespace

extern "C" {

// ---- Devices

ibv_device**(ibv_get_device_list)(int* count) {
  const auto cards = Host::get().cards();
  auto** const list = static_cast<ibv_device**>(std::calloc(cards.size() + 1, sizeof(ibv_device*)));
  if (list == nullptr) return nullptr;
  for (std::size_t at = 0; at < cards.size(); ++at) list[at] = cards[at];
  if (count != nullptr) *count = static_cast<int>(cards.size());
  return list;
}

void ibv_free_device_list(ibv_device** list) { std::free(list); }
const char* ibv_get_device_name(ibv_device* device) { return device->name; }

ibv_context* ibv_open_device(ibv_device* device) {
  const char* const refused = std::getenv("EMULATED_VERBS_NO_RIGHTS");
  if (refused != nullptr && std::string_view(refused) == "1") return no<ibv_context>(EACCES);
  auto* const context = new Context();
  context->device = device;
  context->ops.post_send = post_send;
  context->ops.post_recv = post_recv;
  context->ops.poll_cq = poll_cq;
  context->ops.req_notify_cq = req_notify_cq;
  context->cmd_fd = -1;
  context->async_fd = context->events.fd();
  context->num_comp_vectors = 1;
  Host::get().add(context);
  return context;
}

int ibv_close_device(ibv_context* context) {
  Host::get().remove(static_cast<Context*>(context));
  delete static_cast<Context*>(context);
  return 0;
}

int ibv_query_device(ibv_context* context, ibv_device_attr* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  std::strncpy(attributes->fw_ver, "emulated", sizeof attributes->fw_ver - 1);
  attributes->max_mr_size = ~std::uint64_t{0};
  attributes->page_size_cap = 4096;
  attributes->max_qp = 2048;
  attributes->max_qp_wr = limits::work_requests;
  attributes->max_sge = attributes->max_sge_rd = limits::pieces;
  attributes->max_cq = 65536;
  attributes->max_cqe = limits::completion_entries;
  attributes->max_mr = 1 << 20;
  attributes->max_pd = 65536;
  attributes->max_qp_rd_atom = attributes->max_qp_init_rd_atom = limits::reads;
  attributes->max_pkeys = 1;
  attributes->phys_port_cnt = static_cast<std::uint8_t>(static_cast<Context*>(context)->card().ports);
  return 0;
}

int(ibv_query_port)(ibv_context* context, std::uint8_t number, _compat_ibv_port_attr* compat) {
  const auto& card = static_cast<Context*>(context)->card();
  if (number < 1 || number > card.ports) return fail(EINVAL);
  // The caller's structure may end behind `flags`, as it did when the function was first exported.
  ibv_port_attr attributes{};
  const bool up = card.port[number - 1U].up;
  if (!up) ++Host::get().asked_while_down;
  attributes.state = up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  attributes.phys_state = up ? 5 : 3;
  attributes.max_mtu = attributes.active_mtu = limits::mtu;
  attributes.gid_tbl_len = CardPort::gids;
  attributes.max_msg_sz = static_cast<std::uint32_t>(limits::message_bytes);
  attributes.pkey_tbl_len = 1;
  attributes.active_width = 2;
  attributes.active_speed = 32;
  attributes.link_layer = IBV_LINK_LAYER_ETHERNET;
  std::memcpy(static_cast<void*>(compat), &attributes, offsetof(ibv_port_attr, flags) + sizeof attributes.flags);
  return 0;
}

int ibv_query_gid(ibv_context* context, std::uint8_t port, int index, ibv_gid* gid) {
  const auto& card = static_cast<Context*>(context)->card();
  if (port < 1 || port > card.ports || index < 0 || index >= CardPort::gids) return errno = EINVAL, -1;
  *gid = card.gid(port, index);
  return 0;
}

int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  const auto taken = static_cast<Context*>(context)->take_event();
  if (!taken) return -1;
  *event = {};
  event->event_type = taken->type;
  switch (taken->type) {
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
      event->element.port_num = taken->port;
      break;
    case IBV_EVENT_CQ_ERR:
      event->element.cq = static_cast<ibv_cq*>(const_cast<void*>(taken->object));
      break;
    default:
      event->element.qp = static_cast<ibv_qp*>(const_cast<void*>(taken->object));
  }
  return 0;
}

void ibv_ack_async_event(ibv_async_event* event) {
  switch (event->event_type) {
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
      return;
    case IBV_EVENT_CQ_ERR:
      return static_cast<Context*>(event->element.cq->context)->acknowledge(event->element.cq);
    default:
      return static_cast<Context*>(event->element.qp->context)->acknowledge(event->element.qp);
  }
}

// ---- Memory

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  auto* const domain = new Domain();
  domain->context = context;
  return domain;
}

int ibv_dealloc_pd(ibv_pd* domain) {
  if (static_cast<Domain*>(domain)->pairs > 0 || Host::get().memory.used(domain)) return fail(EBUSY);
  delete static_cast<Domain*>(domain);
  return 0;
}

ibv_mr*(ibv_reg_mr)(ibv_pd* domain, void* data, std::size_t bytes, int access) {
  return Host::get().memory.add(domain, data, bytes, reinterpret_cast<std::uintptr_t>(data),
                                static_cast<unsigned>(access));
}

ibv_mr* ibv_reg_mr_iova2(ibv_pd* domain, void* data, std::size_t bytes, std::uint64_t start, unsigned access) {
  return Host::get().memory.add(domain, data, bytes, start, access);
}

ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* domain, std::uint64_t offset, std::size_t bytes, std::uint64_t start, int fd,
                          int access) {
  if (offset % 4096 != start % 4096) return no<ibv_mr>(EINVAL);
  return Host::get().memory.add_dma_buf(domain, fd, bytes, start, static_cast<unsigned>(access));
}

int ibv_dereg_mr(ibv_mr* region) {
  Host::get().memory.remove(static_cast<Region*>(region));
  return 0;
}

// ---- Completions

ibv_comp_channel* ibv_create_comp_channel(ibv_context* context) {
  auto* const channel = new CompletionChannel();
  channel->context = context;
  channel->fd = channel->events.fd();
  return channel;
}

int ibv_destroy_comp_channel(ibv_comp_channel* channel) {
  if (static_cast<CompletionChannel*>(channel)->queues > 0) return fail(EBUSY);
  delete static_cast<CompletionChannel*>(channel);
  return 0;
}

ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* cq_context, ibv_comp_channel* channel, int vector) {
  if (entries < 1 || entries > limits::completion_entries || vector != 0) return no<ibv_cq>(EINVAL);
  auto* const queue = new CompletionQueue();
  queue->context = context;
  queue->channel = channel;
  queue->cq_context = cq_context;
  queue->cqe = entries;
  if (channel != nullptr) ++static_cast<CompletionChannel*>(channel)->queues;
  return queue;
}

int ibv_destroy_cq(ibv_cq* cq) {
  auto* const queue = static_cast<CompletionQueue*>(cq);
  if (queue->pairs > 0) return fail(EBUSY);
  static_cast<Context*>(queue->context)->forget(cq);
  if (queue->channel != nullptr) {
    auto* const channel = static_cast<CompletionChannel*>(queue->channel);
    channel->events.remove([&](const CompletionQueue* event) { return event == queue; });
    queue->wait_for_acknowledgements();
    --channel->queues;
  }
  delete queue;
  return 0;
}

int ibv_get_cq_event(ibv_comp_channel* channel, ibv_cq** cq, void** cq_context) {
  const auto queue = static_cast<CompletionChannel*>(channel)->events.take();
  if (!queue) return -1;
  (*queue)->delivered();
  *cq = *queue;
  *cq_context = (*queue)->cq_context;
  return 0;
}

void ibv_ack_cq_events(ibv_cq* cq, unsigned count) { static_cast<CompletionQueue*>(cq)->acknowledge(count); }

// ---- Queue pairs

ibv_qp* ibv_create_qp(ibv_pd* domain, ibv_qp_init_attr* attributes) {
  if (const int error = QueuePair::check(*attributes); error != 0) return no<ibv_qp>(error);
  const auto pair = std::make_shared<QueuePair>(domain, *attributes);
  if (!Host::get().add(pair)) return no<ibv_qp>(ENOMEM);
  ++static_cast<Domain*>(domain)->pairs;
  ++static_cast<CompletionQueue*>(attributes->send_cq)->pairs;
  ++static_cast<CompletionQueue*>(attributes->recv_cq)->pairs;
  return pair.get();
}

int ibv_modify_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask) {
  return fail(static_cast<QueuePair*>(pair)->modify(*attributes, mask));
}

int ibv_query_qp(ibv_qp* pair, ibv_qp_attr* attributes, int mask, ibv_qp_init_attr* initial) {
  (void)mask;
  static_cast<QueuePair*>(pair)->query(*attributes, *initial);
  return 0;
}

int ibv_destroy_qp(ibv_qp* qp) {
  const auto pair = Host::get().find(qp->qp_num);  // keeps it until the end of the function
  if (pair.get() != qp) return fail(EINVAL);       // a parent process made it
  Host::get().remove(*pair);
  pair->close();
  static_cast<Context*>(pair->context)->forget(qp);
  --static_cast<Domain*>(pair->pd)->pairs;
  --static_cast<CompletionQueue*>(pair->send_cq)->pairs;
  --static_cast<CompletionQueue*>(pair->recv_cq)->pairs;
  return 0;
}

// ---- Others

const char* ibv_wc_status_str(ibv_wc_status status) {
  static const char* const texts[] = {"success",
                                      "local length error",
                                      "local QP operation error",
                                      "local EE context operation error",
                                      "local protection error",
                                      "Work Request Flushed Error",
                                      "memory management operation error",
                                      "bad response error",
                                      "local access error",
                                      "remote invalid request error",
                                      "remote access error",
                                      "remote operation error",
                                      "transport retry counter exceeded",
                                      "RNR retry counter exceeded"};
  return static_cast<std::size_t>(status) < std::size(texts) ? texts[status] : "unknown";
}

int ibv_fork_init() { return 0; }

// ---- Controls (control.h)

int emulated_verbs_set_port(const char* device, int port, int up) {
  return Host::get().set_port(device, port, up != 0) ? 0 : ENODEV;
}
int emulated_verbs_revoke(std::uint32_t key) { return Host::get().memory.revoke(key) ? 0 : ENOENT; }
int emulated_verbs_fail_queue_pair(std::uint32_t number) {
  const auto pair = Host::get().find(number);
  if (pair == nullptr) return ENOENT;
  pair->fail(IBV_EVENT_QP_FATAL);
  return 0;
}
std::size_t emulated_verbs_fail_queue_pairs(std::size_t most) { return Host::get().fail_queue_pairs(most); }
void emulated_verbs_limit_memory(std::uint64_t bytes) { Host::get().memory.limit(bytes); }
void emulated_verbs_stall(int on) { Host::get().stall(on != 0); }
std::size_t emulated_verbs_stalled() { return Host::get().held_up; }
std::size_t emulated_verbs_asked_while_down() { return Host::get().asked_while_down; }
std::uint64_t emulated_verbs_registered_bytes() { return Host::get().memory.bytes(); }
std::size_t emulated_verbs_queue_pairs() { return Host::get().queue_pairs(); }
std::size_t emulated_verbs_queue_pairs_made() { return Host::get().queue_pairs_made(); }

}  // extern "C"
