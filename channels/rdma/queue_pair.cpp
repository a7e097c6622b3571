#include "channels/rdma/queue_pair.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "base/host.h"
#include "base/text.h"
#include "channels/completion.h"
#include "channels/rdma/work_requests.h"

namespace tensorferry::rdma {

namespace {

constexpr std::uint32_t packet_mask = 0xffffff;  // sequence numbers have 24 bits
constexpr std::uint8_t reads_at_once = 16;       // asked for; a card may allow fewer
constexpr std::uint8_t repeats = 6;              // then the peer counts as unreachable; rdma_rxe repeats 7 without end
constexpr std::uint8_t not_ready_repeats = 7;    // without end: the peer's card says that it is there
constexpr std::uint8_t not_ready_pause = 12;     // 0.64 ms
constexpr std::uint8_t hops = 64;
constexpr std::uint64_t receive_number = ~std::uint64_t{0};  // of the receive request, unlike that of any read or write

std::uint8_t least_of(int wanted, int allowed) { return static_cast<std::uint8_t>(std::clamp(allowed, 1, wanted)); }

Status ended() { return {Code::channel_unavailable, "the queue pair is no longer in use"}; }

}  // namespace

ibv_sge place_of(const std::byte* data, std::uint32_t bytes, std::uint32_t key) {
  return {.addr = reinterpret_cast<std::uintptr_t>(data), .length = bytes, .lkey = key};
}

ibv_send_wr request_of(ibv_wr_opcode opcode, ibv_sge& here, std::uint64_t there, std::uint32_t their_key) {
  ibv_send_wr request{};
  request.sg_list = &here;
  request.num_sge = 1;
  request.opcode = opcode;
  request.send_flags = IBV_SEND_SIGNALED;
  request.wr.rdma.remote_addr = there;
  request.wr.rdma.rkey = their_key;
  return request;
}

QueuePair::QueuePair(std::shared_ptr<OpenCard> card, const CardPort& port, const Options& options, Failed failed)
    : card_(std::move(card)), port_(port), options_(options), failed_(std::move(failed)) {}

QueuePair::~QueuePair() { destroy(); }

Result<std::shared_ptr<QueuePair>> QueuePair::make(std::shared_ptr<OpenCard> card, const CardPort& port,
                                                   const Options& options, Failed failed) {
  std::shared_ptr<QueuePair> made(new QueuePair(std::move(card), port, options, std::move(failed)));
  if (auto status = made->create(); !status.ok()) return status;
  return made;
}

Status QueuePair::create() {
  const auto& verbs = card_->verbs();
  const auto& limits = card_->limits();
  const int depth = std::clamp(options_.queue_depth, 1, std::max(1, std::min(limits.max_qp_wr, limits.max_cqe - 1)));
  completions_ = verbs.create_cq(card_->context(), depth + 1, this, card_->events(), 0);
  if (completions_ == nullptr) {
    return status_of(errno, formatted("making a completion queue of {} places on {}", depth + 1, card_->name()));
  }

  ibv_qp_init_attr wanted{};
  wanted.qp_context = this;
  wanted.send_cq = completions_;
  wanted.recv_cq = completions_;
  wanted.cap.max_send_wr = static_cast<std::uint32_t>(depth);
  wanted.cap.max_recv_wr = 1;
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_recv_sge = 1;
  wanted.qp_type = IBV_QPT_RC;
  wanted.sq_sig_all = 1;
  pair_ = verbs.create_qp(card_->domain(), &wanted);
  if (pair_ == nullptr)
    return status_of(errno, formatted("making a queue pair of {} work requests on {}", depth, card_->name()));

  with_card_.resize(static_cast<std::size_t>(depth));
  for (auto number = with_card_.size(); number-- > 0;) free_.push_back(number);
  address_.gid = port_.gid;
  address_.lid = port_.lid;
  address_.mtu = static_cast<std::uint8_t>(port_.mtu);
  address_.number = pair_->qp_num;
  address_.first_packet = static_cast<std::uint32_t>(random_word()) & packet_mask;

  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.port_num = port_.number;
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  auto status =
      modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "be initialised");
  if (!status.ok()) return status;
  announced();
  return {};
}

Status QueuePair::modify(ibv_qp_attr& attributes, int mask, const char* to) {
  const int error = card_->verbs().modify_qp(pair_, &attributes, mask);
  return status_of(error, formatted("letting a queue pair on {} port {} {}", card_->name(), port_.number, to));
}

Status QueuePair::connect(const QueuePairAddress& theirs) {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  // The card gives a receive request back when the queue pair fails, also if a read of the peer's was the cause, and
  // nothing else says so: not every card has an event for that.
  if (!post_receive()) return no_work_taken();
  const auto& limits = card_->limits();
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(std::min(theirs.mtu, address_.mtu));
  attributes.dest_qp_num = theirs.number;
  attributes.rq_psn = theirs.first_packet;
  attributes.max_dest_rd_atomic = least_of(reads_at_once, limits.max_qp_rd_atom);
  attributes.min_rnr_timer = not_ready_pause;
  auto& path = attributes.ah_attr;
  path.port_num = port_.number;
  path.sl = static_cast<std::uint8_t>(options_.service_level);
  path.dlid = theirs.lid;
  path.is_global = port_.kind != GidKind::infiniband || options_.gid_index >= 0 ? 1 : 0;
  if (path.is_global != 0) {
    static_assert(sizeof path.grh.dgid.raw == sizeof theirs.gid);
    std::memcpy(path.grh.dgid.raw, theirs.gid.data(), theirs.gid.size());
    path.grh.sgid_index = port_.gid_index;
    path.grh.hop_limit = hops;
    path.grh.traffic_class = static_cast<std::uint8_t>(options_.traffic_class);
  }
  auto status = modify(attributes,
                       IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                           IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                       "receive");
  if (!status.ok()) return status;

  attributes = {};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.timeout = static_cast<std::uint8_t>(options_.timeout);
  attributes.retry_cnt = repeats;
  attributes.rnr_retry = not_ready_repeats;
  attributes.sq_psn = address_.first_packet;
  attributes.max_rd_atomic = least_of(reads_at_once, limits.max_qp_init_rd_atom);
  return modify(
      attributes,
      IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
      "send");
}

void QueuePair::read(const Read& read, Completion done) {
  Status why;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) {
      ++outstanding_;
      if (free_.empty() || !waiting_.empty()) {
        waiting_.push_back({read, std::move(done)});
        return;
      }
      if (post(read, done)) return;
      --outstanding_;
      why = no_work_taken();
    } else {
      why = failure_;
    }
  }
  fail(why);
  complete(std::move(done), why);
}

Status QueuePair::failure_of(std::string_view what, ibv_wc_status status) const {
  if (status == IBV_WC_WR_FLUSH_ERR) {
    return {Code::channel_unavailable, formatted("the queue pair on {} port {} failed", card_->name(), port_.number)};
  }
  return {Code::channel_unavailable, formatted("{} by {} port {} failed: {}", what, card_->name(), port_.number,
                                               card_->verbs().wc_status_str(status))};
}

/// Says why the receive request has come back.
Status QueuePair::received(ibv_wc_status status) const {
  if (status != IBV_WC_SUCCESS) return failure_of("a message of the peer's", status);
  return {Code::channel_unavailable,
          formatted("the peer sent a message to {} port {}, which takes none", card_->name(), port_.number)};
}

Status QueuePair::queue_failed() const {
  return {Code::channel_unavailable, formatted("a completion queue on {} port {} failed", card_->name(), port_.number)};
}

Status QueuePair::no_work_taken() const {
  return {Code::channel_unavailable,
          formatted("the card {} took no work request: {}", card_->name(), std::strerror(errno))};
}

/// Hands a read to the card. Leaves `done` alone, and errno set, if the card does not take it. Call under the lock.
bool QueuePair::post(const Read& read, Completion& done) {
  auto place = place_of(read.to, read.bytes, read.local_key);
  auto request = request_of(IBV_WR_RDMA_READ, place, read.from, read.remote_key);
  const auto number = free_.back();
  request.wr_id = number;
  ibv_send_wr* refused = nullptr;
  if (const int error = ibv_post_send(pair_, &request, &refused); error != 0) {
    errno = error;
    return false;
  }
  free_.pop_back();
  with_card_[number] = {std::move(done), true};
  ++reads_;
  return true;
}

/// Posts a receive request without memory. Call under the lock.
bool QueuePair::post_receive() {
  ibv_recv_wr request{};
  request.wr_id = receive_number;
  ibv_recv_wr* refused = nullptr;
  const int error = ibv_post_recv(pair_, &request, &refused);
  errno = error;
  return error == 0;
}

void QueuePair::fail(const Status& why) {
  std::vector<Completion> dropped;
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = failure_.ok();
    if (first) {
      failure_ = why.ok() ? ended() : why;
      if (pair_ != nullptr) {
        ibv_qp_attr attributes{};
        attributes.qp_state = IBV_QPS_ERR;  // the card gives all work back, and answers no read of the peer
        (void)card_->verbs().modify_qp(pair_, &attributes, IBV_QP_STATE);
      }
      // After the card has been told: who sees this takes the pair for one that answers nothing.
      live_.store(false, std::memory_order_release);
      drop_waiting(dropped);
    }
  }
  run_failed(std::move(dropped), why, first);
}

void QueuePair::run_failed(std::vector<Completion> dropped, const Status& why, bool first) {
  for (auto& done : dropped) complete(std::move(done), why);
  if (!first) return;
  Failed failed;
  {
    const std::lock_guard lock(mutex_);
    failed = std::move(failed_);
  }
  if (failed) failed(why);
}

bool QueuePair::poll() {
  bool any = false;
  std::array<ibv_wc, 16> done{};
  for (;;) {
    std::vector<Ended> ended;
    Status failure;
    int count = 0;
    {
      const std::lock_guard lock(mutex_);
      if (completions_ == nullptr) return any;
      count = ibv_poll_cq(completions_, static_cast<int>(done.size()), done.data());
      for (int i = 0; i < count; ++i) {
        const auto& each = done[static_cast<std::size_t>(i)];
        if (each.wr_id == receive_number) {
          if (failure.ok() && failure_.ok()) failure = received(each.status);
          continue;
        }
        const bool reads = with_card_[each.wr_id].reads;
        if (each.status != IBV_WC_SUCCESS && failure.ok() && (failure_.ok() || each.status != IBV_WC_WR_FLUSH_ERR)) {
          failure = failure_of(reads ? "a read" : "a write", each.status);
        }
        const bool ok = each.status == IBV_WC_SUCCESS;
        if (const auto list = std::move(with_card_[each.wr_id].list)) {
          end_steps(*list, 1, ok, ended);
        } else {
          ended.push_back({std::move(with_card_[each.wr_id].done), ok});
        }
        with_card_[each.wr_id] = {};
        free_.push_back(each.wr_id);
        if (reads) --reads_;
        --outstanding_;
      }
      if (failure.ok() && failure_.ok() && !post_waiting()) failure = no_work_taken();
      if (count < 0) {
        failure = queue_failed();
      }
    }
    if (!failure.ok()) fail(failure);
    for (auto& each : ended) {
      if (each.ok) {
        complete(std::move(each.done), {});
      } else {
        Status why = failure;
        if (why.ok()) {
          const std::lock_guard lock(mutex_);
          why = failure_;
        }
        complete(std::move(each.done), std::move(why));
      }
    }
    if (count <= 0) return any;
    any = true;
  }
}

void QueuePair::announced() noexcept {
  const std::lock_guard lock(mutex_);
  if (pair_ != nullptr) (void)ibv_req_notify_cq(completions_, 0);
}

void QueuePair::destroy() {
  std::vector<Completion> dropped;
  Status why;
  if (!card_->ours()) return;
  {
    const std::lock_guard lock(mutex_);
    if (failure_.ok()) failure_ = ended();
    live_.store(false, std::memory_order_release);
    why = failure_;
    if (auto* const pair = std::exchange(pair_, nullptr)) (void)card_->verbs().destroy_qp(pair);
    if (auto* const queue = std::exchange(completions_, nullptr)) (void)card_->verbs().destroy_cq(queue);
    drop_waiting(dropped);
    std::vector<Ended> ended;
    for (auto& each : with_card_) {
      if (each.done) dropped.push_back(std::move(each.done));
      if (each.list != nullptr) end_steps(*each.list, 1, false, ended);
    }
    for (auto& each : ended) dropped.push_back(std::move(each.done));
    with_card_.clear();
    free_.clear();
    outstanding_ = 0;
    reads_ = 0;
  }
  for (auto& done : dropped) complete(std::move(done), why);
}

}  // namespace tensorferry::rdma
