/// A queue pair with all that it needs, for tests that call verbs themselves.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "channels/rdma/cards.h"

namespace tensorferry::rdma {

/// What a peer needs to know of an end.
struct EndAddress {
  std::uint32_t number = 0;
  std::uint32_t psn = 0;
  Gid gid{};
  std::uint16_t lid = 0;
};

struct EndSettings {
  int entries = 64;
  std::uint32_t send_depth = 16;
  std::uint32_t receive_depth = 16;
  unsigned rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
  std::uint8_t rnr_retry = 7;
  std::uint8_t retries = 3;
  std::uint8_t timeout = 16;  // 0.27 s: where the processor is emulated, an answer may take 0.1 s
};

/// Memory that is registered until the end of the scope.
class Registered {
 public:
  Registered(const Verbs& verbs, ibv_pd* domain, std::size_t bytes, unsigned rights)
      : verbs_(verbs), bytes_(bytes), region_(register_memory(verbs, domain, bytes_.data(), bytes, rights)) {
    if (region_ == nullptr) throw std::runtime_error(std::string("registration failed: ") + std::strerror(errno));
  }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;
  ~Registered() { deregister(); }

  void deregister() {
    if (region_ != nullptr) verbs_.dereg_mr(region_);
    region_ = nullptr;
  }
  void fill(int seed) {
    for (std::size_t at = 0; at < bytes_.size(); ++at) bytes_[at] = static_cast<std::byte>(seed + at * 7 + at / 256);
  }
  [[nodiscard]] std::vector<std::byte>& bytes() { return bytes_; }
  [[nodiscard]] std::uint64_t address(std::size_t offset = 0) const {
    return reinterpret_cast<std::uintptr_t>(bytes_.data()) + offset;
  }
  [[nodiscard]] std::uint32_t lkey() const { return region_->lkey; }
  [[nodiscard]] std::uint32_t rkey() const { return region_->rkey; }
  [[nodiscard]] ibv_sge piece(std::size_t offset, std::size_t bytes) const {
    return {address(offset), static_cast<std::uint32_t>(bytes), lkey()};
  }

 private:
  const Verbs& verbs_;
  std::vector<std::byte> bytes_;
  ibv_mr* region_;
};

/// The usable ports. Throws if there is none.
inline std::vector<CardPort> ports() {
  auto found = usable_ports(Options());
  if (const auto* const refusal = std::get_if<Refusal>(&found)) throw std::runtime_error(refusal->reason);
  return std::get<0>(std::move(found));
}

class End {
 public:
  using Settings = EndSettings;
  static constexpr unsigned all_rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;

  explicit End(const Settings& settings = {}, const CardPort& port = ports().front())
      : settings_(settings), port_(port) {
    int count = 0;
    ibv_device** const devices = verbs_.get_device_list(&count);
    for (int at = 0; at < count; ++at) {
      if (port_.device == verbs_.get_device_name(devices[at])) context_ = verbs_.open_device(devices[at]);
    }
    verbs_.free_device_list(devices);
    if (context_ == nullptr) throw std::runtime_error("the device does not open");
    domain_ = verbs_.alloc_pd(context_);
    channel_ = verbs_.create_comp_channel(context_);
    queue_ = verbs_.create_cq(context_, settings.entries, this, channel_, 0);
    ibv_qp_init_attr attributes{};
    attributes.send_cq = attributes.recv_cq = queue_;
    attributes.cap = {settings.send_depth, settings.receive_depth, 4, 4, 64};
    attributes.qp_type = IBV_QPT_RC;
    pair_ = verbs_.create_qp(domain_, &attributes);
    if (pair_ == nullptr) throw std::runtime_error("no queue pair");
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;
  ~End() {
    if (pair_ != nullptr) verbs_.destroy_qp(pair_);
    verbs_.destroy_cq(queue_);
    verbs_.destroy_comp_channel(channel_);
    verbs_.dealloc_pd(domain_);
    verbs_.close_device(context_);
  }

  [[nodiscard]] const Verbs& verbs() const { return verbs_; }
  [[nodiscard]] ibv_pd* domain() const { return domain_; }
  [[nodiscard]] ibv_qp* pair() const { return pair_; }
  [[nodiscard]] ibv_cq* queue() const { return queue_; }
  [[nodiscard]] ibv_comp_channel* channel() const { return channel_; }
  [[nodiscard]] ibv_context* context() const { return context_; }
  [[nodiscard]] const CardPort& port() const { return port_; }
  [[nodiscard]] EndAddress address() const {
    return {pair_->qp_num, 1000 + pair_->qp_num % 1000, port_.gid, port_.lid};
  }

  int to_init() {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.port_num = port_.number;
    attributes.qp_access_flags = settings_.rights;
    return verbs_.modify_qp(pair_, &attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  }
  int to_receive(const EndAddress& peer) {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_RTR;
    attributes.path_mtu = port_.mtu;
    attributes.dest_qp_num = peer.number;
    attributes.rq_psn = peer.psn;
    attributes.max_dest_rd_atomic = 4;
    attributes.min_rnr_timer = 12;
    attributes.ah_attr.is_global = 1;
    attributes.ah_attr.port_num = port_.number;
    attributes.ah_attr.dlid = peer.lid;
    attributes.ah_attr.grh.hop_limit = 64;
    attributes.ah_attr.grh.sgid_index = port_.gid_index;
    std::memcpy(attributes.ah_attr.grh.dgid.raw, peer.gid.data(), peer.gid.size());
    return verbs_.modify_qp(pair_, &attributes,
                            IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                                IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  }
  int to_send() {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_RTS;
    attributes.sq_psn = address().psn;
    attributes.timeout = settings_.timeout;
    attributes.retry_cnt = settings_.retries;
    attributes.rnr_retry = settings_.rnr_retry;
    attributes.max_rd_atomic = 4;
    return verbs_.modify_qp(
        pair_, &attributes,
        IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC);
  }
  int to(ibv_qp_state state) {
    ibv_qp_attr attributes{};
    attributes.qp_state = state;
    return verbs_.modify_qp(pair_, &attributes, IBV_QP_STATE);
  }
  void connect(const EndAddress& peer) {
    if (to_init() != 0 || to_receive(peer) != 0 || to_send() != 0) {
      throw std::runtime_error(std::string("the queue pair does not connect: ") + std::strerror(errno));
    }
  }
  [[nodiscard]] ibv_qp_state state() const {
    ibv_qp_attr attributes{};
    ibv_qp_init_attr initial{};
    verbs_.query_qp(pair_, &attributes, IBV_QP_STATE, &initial);
    return attributes.qp_state;
  }
  void destroy_pair() {
    verbs_.destroy_qp(pair_);
    pair_ = nullptr;
  }

  /// Posts one request with at most one piece.
  int post(ibv_wr_opcode opcode, std::uint64_t id, ibv_sge piece, std::uint64_t address = 0, std::uint32_t key = 0,
           unsigned flags = IBV_SEND_SIGNALED, std::uint32_t immediate = 0) {
    ibv_send_wr work{}, *bad = nullptr;
    work.wr_id = id;
    work.sg_list = &piece;
    work.num_sge = piece.length == 0 ? 0 : 1;
    work.opcode = opcode;
    work.send_flags = flags;
    work.imm_data = immediate;
    work.wr.rdma.remote_addr = address;
    work.wr.rdma.rkey = key;
    return ibv_post_send(pair_, &work, &bad);
  }
  int post_receive(std::uint64_t id, ibv_sge piece) {
    ibv_recv_wr work{}, *bad = nullptr;
    work.wr_id = id;
    work.sg_list = &piece;
    work.num_sge = piece.length == 0 ? 0 : 1;
    return ibv_post_recv(pair_, &work, &bad);
  }
  /// Polls one entry. Throws if none comes within `seconds`.
  ibv_wc wait(int seconds = 60) {
    ibv_wc entry{};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
    for (;;) {
      const int count = ibv_poll_cq(queue_, 1, &entry);
      if (count == 1) return entry;
      if (count < 0) throw std::runtime_error("the completion queue is broken");
      if (std::chrono::steady_clock::now() > end) throw std::runtime_error("no completion came");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

 private:
  const Verbs& verbs_ = *rdma::verbs();
  Settings settings_;
  CardPort port_;
  ibv_context* context_ = nullptr;
  ibv_pd* domain_ = nullptr;
  ibv_comp_channel* channel_ = nullptr;
  ibv_cq* queue_ = nullptr;
  ibv_qp* pair_ = nullptr;
};

}  // namespace tensorferry::rdma
