#include "channels/rdma/queue_pair.h"

#include <arpa/inet.h>

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
constexpr std::uint32_t most_inline = 220;  // cards that take more put it into larger work requests
constexpr int most_receives = 128;          // writes of 4 KB fill an inbox of 512 KB

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
  if (options_.write_bytes > 0)
    receives_ =
        static_cast<std::uint16_t>(std::clamp(std::min(limits.max_qp_wr, limits.max_cqe - 1), 1, most_receives));
  const auto make_queue = [&](int places, ibv_cq*& queue) {
    queue = verbs.create_cq(card_->context(), places, this, card_->events(), 0);
    if (queue != nullptr) return Status();
    return status_of(errno, formatted("making a completion queue of {} places on {}", places, card_->name()));
  };
  if (auto made = make_queue(depth + 1, completions_); !made.ok()) return made;
  if (auto made = make_queue(std::max<int>(receives_, 1) + 1, arrivals_); !made.ok()) return made;

  ibv_qp_init_attr wanted{};
  wanted.qp_context = this;
  wanted.send_cq = completions_;
  wanted.recv_cq = arrivals_;
  wanted.cap.max_send_wr = static_cast<std::uint32_t>(depth);
  wanted.cap.max_recv_wr = std::max<std::uint32_t>(receives_, 1);
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_recv_sge = 1;
  wanted.qp_type = IBV_QPT_RC;
  wanted.sq_sig_all = 1;
  wanted.cap.max_inline_data = receives_ > 0 ? most_inline : 0;
  const auto capacity = wanted.cap;
  pair_ = verbs.create_qp(card_->domain(), &wanted);
  if (pair_ == nullptr && receives_ > 0) {  // the card may know no inline bytes
    wanted.cap = capacity;
    wanted.cap.max_inline_data = 0;
    pair_ = verbs.create_qp(card_->domain(), &wanted);
  }
  if (pair_ == nullptr)
    return status_of(errno, formatted("making a queue pair of {} work requests on {}", depth, card_->name()));

  inline_bytes_ = wanted.cap.max_inline_data;

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
  attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ;
  if (receives_ > 0) attributes.qp_access_flags |= IBV_ACCESS_REMOTE_WRITE;
  auto status =
      modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "be initialised");
  if (!status.ok()) return status;
  announced(completions_);
  announced(arrivals_);
  return {};
}

Status QueuePair::receive_into(std::shared_ptr<Inbox> inbox) {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  if (receives_ == 0) return {Code::channel_unavailable, "this process lets no peer write"};
  inbox_ = std::move(inbox);
  has_inbox_.store(inbox_.get(), std::memory_order_release);
  for (int i = 0; i < receives_; ++i) {
    if (!post_receive()) return no_work_taken();
  }
  return {};
}

std::shared_ptr<Inbox> QueuePair::inbox() const {
  const std::lock_guard lock(mutex_);
  return inbox_;
}

Status QueuePair::modify(ibv_qp_attr& attributes, int mask, const char* to) {
  const int error = card_->verbs().modify_qp(pair_, &attributes, mask);
  return status_of(error, formatted("letting a queue pair on {} port {} {}", card_->name(), port_.number, to));
}

Status QueuePair::connect(const QueuePairAddress& theirs) {
  const std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  // The card gives a receive request back when the queue pair fails, also if a read of the peer's was the cause, and
  // nothing else says so: not every card has an event for that. No write of the peer's takes this one.
  if (inbox_ == nullptr && !post_receive()) return no_work_taken();
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
  most_reads_ = attributes.max_rd_atomic;
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

std::optional<std::uint64_t> QueuePair::write(const Write& write, Completion done) {
  Status why;
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok() || free_.empty() || !waiting_.empty() || reads_ >= most_reads_) return std::nullopt;
    const auto number = written_ + 1;
    auto place = place_of(write.from, write.bytes, write.local_key);
    auto request = request_of(IBV_WR_RDMA_WRITE_WITH_IMM, place, write.to, write.remote_key);
    request.imm_data = htonl(static_cast<std::uint32_t>(number));
    if (write.bytes <= inline_bytes_) request.send_flags |= IBV_SEND_INLINE;
    if (number % write.wakes_every == 0) request.send_flags |= IBV_SEND_SOLICITED;
    if (post(request, done)) {
      ++outstanding_;
      return written_ = number;
    }
    why = no_work_taken();
  }
  fail(why);
  return std::nullopt;
}

Status QueuePair::failure_of(std::string_view what, ibv_wc_status status) const {
  if (status == IBV_WC_WR_FLUSH_ERR) {
    return {Code::channel_unavailable, formatted("the queue pair on {} port {} failed", card_->name(), port_.number)};
  }
  return {Code::channel_unavailable, formatted("{} by {} port {} failed: {}", what, card_->name(), port_.number,
                                               card_->verbs().wc_status_str(status))};
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
  if (!post(request, done)) return false;
  ++reads_;
  return true;
}

bool QueuePair::post(ibv_send_wr& request, Completion& done) {
  const auto number = free_.back();
  request.wr_id = number;
  ibv_send_wr* refused = nullptr;
  if (const int error = ibv_post_send(pair_, &request, &refused); error != 0) {
    errno = error;
    return false;
  }
  free_.pop_back();
  with_card_[number] = {std::move(done), request.opcode == IBV_WR_RDMA_READ};
  return true;
}

/// Posts a receive request for one write; it needs no memory of its own. Call under the lock.
bool QueuePair::post_receive() {
  ibv_recv_wr request{};
  ibv_recv_wr* refused = nullptr;
  const int error = ibv_post_recv(pair_, &request, &refused);
  errno = error;
  return error == 0;
}

void QueuePair::take(std::uint64_t number, std::uint64_t offset, Inbox::Taker taker) {
  const auto inbox = this->inbox();
  if (inbox == nullptr) return taker(Status(Code::channel_unavailable, "the queue pair has no inbox"), nullptr);
  (void)poll_arrivals();
  inbox->take(number, offset, std::move(taker));
  if (!inbox->awaited()) return;
  {
    const std::lock_guard lock(mutex_);
    notify_of_arrivals();
  }
  (void)poll_arrivals();  // what came before the card was asked to announce it
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
  if (const auto inbox = first ? this->inbox() : nullptr) inbox->fail(why.ok() ? ended() : why);
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

bool QueuePair::awaits() const noexcept {
  const auto* const inbox = has_inbox_.load(std::memory_order_acquire);
  return reads_.load(std::memory_order_relaxed) > 0 || (inbox != nullptr && inbox->awaited());
}

bool QueuePair::poll() {
  const bool requests = poll_requests();
  return poll_arrivals() || requests;
}

bool QueuePair::poll_requests() {
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
        const bool known =
            each.wr_id < with_card_.size() && (with_card_[each.wr_id].done || with_card_[each.wr_id].list != nullptr);
        const bool reads = known && with_card_[each.wr_id].reads;
        if (each.status != IBV_WC_SUCCESS && failure.ok() && (failure_.ok() || each.status != IBV_WC_WR_FLUSH_ERR)) {
          failure = failure_of(reads ? "a read" : "a write", each.status);
        }
        if (!known) continue;
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

bool QueuePair::poll_arrivals() {
  bool any = false;
  std::array<ibv_wc, 16> done{};
  for (;;) {
    Status failure;
    std::shared_ptr<Inbox> inbox;
    std::uint64_t arrived = 0;
    int count = 0;
    {
      const std::lock_guard lock(mutex_);
      if (arrivals_ == nullptr) return any;
      count = ibv_poll_cq(arrivals_, static_cast<int>(done.size()), done.data());
      for (int i = 0; i < count && failure.ok() && failure_.ok(); ++i) {
        const auto& each = done[static_cast<std::size_t>(i)];
        if (each.status != IBV_WC_SUCCESS) {
          failure = failure_of("a write of the peer's", each.status);
        } else if (inbox_ == nullptr || each.opcode != IBV_WC_RECV_RDMA_WITH_IMM ||
                   ntohl(each.imm_data) != static_cast<std::uint32_t>(arrived_ + 1)) {
          failure = Status(
              Code::channel_unavailable,
              formatted("the peer sent to {} port {} what this process did not expect", card_->name(), port_.number));
        } else {
          ++arrived_;
          if (!post_receive()) failure = no_work_taken();
        }
      }
      if (count < 0 && failure_.ok()) failure = queue_failed();
      arrived = arrived_;
      if (count > 0) inbox = inbox_;
    }
    if (inbox != nullptr) inbox->arrived(arrived);
    if (!failure.ok()) fail(failure);
    if (count <= 0) return any;
    any = true;
  }
}

void QueuePair::announced(const ibv_cq* queue) noexcept {
  const std::lock_guard lock(mutex_);
  if (pair_ == nullptr) return;
  if (queue == completions_) (void)ibv_req_notify_cq(completions_, 0);
  if (queue == arrivals_) notify_of_arrivals();
}

/// Call under the lock, so that a request for every arrival is not followed by one for those alone that the peer wants
/// announced: some cards remember the last one.
void QueuePair::notify_of_arrivals() noexcept {
  if (arrivals_ != nullptr) (void)ibv_req_notify_cq(arrivals_, inbox_ != nullptr && inbox_->awaited() ? 0 : 1);
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
    for (auto* queue : {std::exchange(completions_, nullptr), std::exchange(arrivals_, nullptr)}) {
      if (queue != nullptr) (void)card_->verbs().destroy_cq(queue);
    }
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
  if (const auto inbox = this->inbox()) inbox->fail(why);
  for (auto& done : dropped) complete(std::move(done), why);
}

}  // namespace tensorferry::rdma
