// The states of an emulated queue pair and the attributes that each change needs, as the InfiniBand specification lists
// them.
#include <cerrno>

#include "tests/emulated_verbs/limits.h"
#include "tests/emulated_verbs/queue_pair.h"

namespace tensorferry::emulated_verbs {
namespace {

constexpr int to_init = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int to_receive =
    IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int to_send = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;

/// A change of state, the attributes that it needs, and those that it also takes.
struct Change {
  ibv_qp_state from;
  ibv_qp_state to;
  int needed;
  int taken;
};

constexpr Change changes[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, to_init, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, to_init},
    {IBV_QPS_INIT, IBV_QPS_RTR, to_receive, IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPS_RTR, IBV_QPS_RTS, to_send, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0, IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER},
};

bool is_ipv4(const ibv_gid& gid) { return gid.raw[10] == 0xff && gid.raw[11] == 0xff; }

}  // namespace

int QueuePair::check_states(const ibv_qp_attr& attributes, int mask) const {
  const auto to = (mask & IBV_QP_STATE) != 0 ? attributes.qp_state : state;
  const int rest = mask & ~IBV_QP_STATE;
  if (to == IBV_QPS_RESET || to == IBV_QPS_ERR) return (rest & ~IBV_QP_CUR_STATE) == 0 ? 0 : EINVAL;
  for (const auto& change : changes) {
    if (change.from != state || change.to != to) continue;
    return (rest & change.needed) == change.needed && (rest & ~(change.needed | change.taken)) == 0 ? 0 : EINVAL;
  }
  return EINVAL;
}

int QueuePair::check_values(const ibv_qp_attr& attributes, int mask) const {
  const auto& card = home().card();
  const auto has = [&](int flag) { return (mask & flag) != 0; };
  if (has(IBV_QP_CUR_STATE) && attributes.cur_qp_state != state) return EINVAL;
  if (has(IBV_QP_PORT) && (attributes.port_num < 1 || attributes.port_num > card.ports)) return EINVAL;
  if (has(IBV_QP_PKEY_INDEX) && attributes.pkey_index != 0) return EINVAL;
  if (has(IBV_QP_PATH_MTU) && (attributes.path_mtu < IBV_MTU_256 || attributes.path_mtu > limits::mtu)) return EINVAL;
  if (has(IBV_QP_TIMEOUT) && attributes.timeout > 31) return EINVAL;
  if (has(IBV_QP_RETRY_CNT) && attributes.retry_cnt > 7) return EINVAL;
  if (has(IBV_QP_RNR_RETRY) && attributes.rnr_retry > 7) return EINVAL;
  if (has(IBV_QP_MIN_RNR_TIMER) && attributes.min_rnr_timer > 31) return EINVAL;
  if (has(IBV_QP_MAX_QP_RD_ATOMIC) && attributes.max_rd_atomic > limits::reads) return EINVAL;
  if (has(IBV_QP_MAX_DEST_RD_ATOMIC) && attributes.max_dest_rd_atomic > limits::reads) return EINVAL;
  if (has(IBV_QP_DEST_QPN) && attributes.dest_qp_num >> 24 != 0) return EINVAL;
  if (!has(IBV_QP_AV)) return 0;
  const auto& path = attributes.ah_attr;
  // On RoCE every path has a global route header.
  if (path.is_global == 0 || path.port_num != attributes_.port_num || path.sl > 15) return EINVAL;
  if (path.grh.sgid_index >= CardPort::gids) return EINVAL;
  // The kernel looks for the neighbour that has the address. No host here has another than those of the cards.
  if (is_ipv4(card.gid(attributes_.port_num, path.grh.sgid_index)) != is_ipv4(path.grh.dgid)) return ENETUNREACH;
  return path.grh.dgid.raw[14] < 4 && path.grh.dgid.raw[15] <= 2 && path.grh.dgid.raw[15] >= 1 ? 0 : ETIMEDOUT;
}

void QueuePair::take_values(const ibv_qp_attr& attributes, int mask) {
  const auto take = [&](int flag, auto& mine, const auto& theirs) {
    if ((mask & flag) != 0) mine = theirs;
  };
  auto& mine = attributes_;
  take(IBV_QP_PKEY_INDEX, mine.pkey_index, attributes.pkey_index);
  take(IBV_QP_PORT, mine.port_num, attributes.port_num);
  take(IBV_QP_ACCESS_FLAGS, mine.qp_access_flags, attributes.qp_access_flags);
  take(IBV_QP_AV, mine.ah_attr, attributes.ah_attr);
  take(IBV_QP_PATH_MTU, mine.path_mtu, attributes.path_mtu);
  take(IBV_QP_DEST_QPN, mine.dest_qp_num, attributes.dest_qp_num);
  take(IBV_QP_RQ_PSN, mine.rq_psn, attributes.rq_psn);
  take(IBV_QP_SQ_PSN, mine.sq_psn, attributes.sq_psn);
  take(IBV_QP_MAX_DEST_RD_ATOMIC, mine.max_dest_rd_atomic, attributes.max_dest_rd_atomic);
  take(IBV_QP_MAX_QP_RD_ATOMIC, mine.max_rd_atomic, attributes.max_rd_atomic);
  take(IBV_QP_MIN_RNR_TIMER, mine.min_rnr_timer, attributes.min_rnr_timer);
  take(IBV_QP_TIMEOUT, mine.timeout, attributes.timeout);
  take(IBV_QP_RETRY_CNT, mine.retry_cnt, attributes.retry_cnt);
  take(IBV_QP_RNR_RETRY, mine.rnr_retry, attributes.rnr_retry);
}

int QueuePair::modify(const ibv_qp_attr& attributes, int mask) {
  const Lock lock(lock_);
  if (const int error = check_states(attributes, mask); error != 0) return error;
  if (const int error = check_values(attributes, mask); error != 0) return error;
  take_values(attributes, mask);
  if ((mask & IBV_QP_STATE) == 0) return 0;
  if (attributes.qp_state == IBV_QPS_ERR) {
    enter_error();
  } else if (attributes.qp_state == IBV_QPS_RESET) {
    enter_reset();
  } else {
    state = attributes.qp_state;
    changed_.notify_all();
  }
  return 0;
}

void QueuePair::query(ibv_qp_attr& attributes, ibv_qp_init_attr& initial) {
  const Lock lock(lock_);
  attributes = attributes_;
  attributes.qp_state = attributes.cur_qp_state = state;
  attributes.cap = initial_.cap;
  initial = initial_;
}

int QueuePair::check(const ibv_qp_init_attr& attributes) {
  const auto& wanted = attributes.cap;
  if (attributes.qp_type != IBV_QPT_RC) return EOPNOTSUPP;
  if (attributes.send_cq == nullptr || attributes.recv_cq == nullptr || attributes.srq != nullptr) return EINVAL;
  const bool fits = wanted.max_send_wr <= limits::work_requests && wanted.max_recv_wr <= limits::work_requests &&
                    wanted.max_send_sge <= limits::pieces && wanted.max_recv_sge <= limits::pieces &&
                    wanted.max_inline_data <= limits::inline_bytes;
  return fits ? 0 : EINVAL;
}

// Under the lock. All work that was posted ends with a flush error, in order; the thread sees to the requests.
void QueuePair::enter_error() {
  if (state == IBV_QPS_ERR || state == IBV_QPS_RESET) {
    state = IBV_QPS_ERR;
    return;
  }
  state = IBV_QPS_ERR;
  if (connection_ >= 0) ::shutdown(connection_, SHUT_RDWR);
  for (const auto& work : receives_) complete(work, IBV_WC_WR_FLUSH_ERR, nullptr);
  receives_.clear();
  changed_.notify_all();
}

// Under the lock. Work that was posted is forgotten, and completions that were not polled go.
void QueuePair::enter_reset() {
  state = IBV_QPS_RESET;
  ++epoch_;
  if (connection_ >= 0) ::shutdown(connection_, SHUT_RDWR);
  sends_.clear();
  receives_.clear();
  sent_.remove(this);
  received_.remove(this);
  send_places_ = std::make_shared<WorkPlaces>();
  receive_places_ = std::make_shared<WorkPlaces>();
  changed_.notify_all();
}

bool QueuePair::fail(ibv_event_type event) {
  const Lock lock(lock_);
  if (closed_ || state == IBV_QPS_ERR) return false;
  enter_error();
  home().events.push({event, static_cast<ibv_qp*>(this), 0});
  return true;
}

}  // namespace tensorferry::emulated_verbs
