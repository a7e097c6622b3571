/// The `cuda_gdr` channel: the receiver's network card reads a buffer out of the sender's GPU memory into the
/// receiver's GPU memory (GPUDirect RDMA).
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "channels/channel.h"
#include "channels/rdma/options.h"

namespace tensorferry {

namespace rdma {
class SharedCards;
}  // namespace rdma

namespace cuda_gdr {
struct CudaGdrOptions {
  std::optional<rdma::Options> rdma = std::nullopt;  // nullopt: those of the environment; unused with shared cards
  std::string sysfs = "/sys";                        // where the places of GPUs on the PCI bus are found; for tests
};
}  // namespace cuda_gdr

/// Carries GPU memory to GPU memory of any process that a card reaches. The driver and the queue pairs are those of
/// `ibv`: the pairs of devices of a link, and `ibv`, use one connection (rdma::SharedConnection).
///
/// Probe: each end reads a word of the peer's GPU memory into its own, by a card. So it fails, with the reason, if the
/// memory cannot be registered, or if the cards do not reach the GPUs.
///
/// Memory: a card registers an allocation as a whole, as a dma-buf or by nvidia-peermem (register_gpu_memory), and
/// keeps that until the allocation ends (Allocations). The first buffer of an allocation is refused in passing, and
/// another channel carries it, while the allocation is registered in the background. If the whole may not be
/// registered, or if the allocator reports no frees, each buffer is registered for the time of its transfer. Otherwise
/// the channel refuses the buffer and says why.
///
/// Cards: the sender offers the ports that are nearest to its GPU by PCI path, and the receiver takes those of them
/// that are nearest to its own.
///
/// Order: the ticket of a buffer whose stream is busy says so, and a control message follows when the stream has come
/// so far. The receiver reads when that has come and the memory's stream is idle. It flushes what the card has written
/// (cuda_gdr::Flush), then runs `landed`. No stream and no thread waits.
///
/// Failure: if a read fails, the buffer comes as the link's bulk data, from host memory to host memory, and is copied
/// to the GPU. The pair is not usable then until the queue pairs are connected again.
///
/// Release: as in `ibv`. `released` runs when the receiver has acknowledged, or on withdraw or close. A forked child
/// cannot use the driver or its channels.
class CudaGdrDriver final : public Driver {
 public:
  /// `cards`: those that the agent's drivers share; null: the driver has its own.
  explicit CudaGdrDriver(cuda_gdr::CudaGdrOptions options = {}, std::shared_ptr<rdma::SharedCards> cards = nullptr);
  ~CudaGdrDriver() override;

  [[nodiscard]] std::string_view name() const override { return "cuda_gdr"; }
  std::variant<Bytes, Refusal> descriptor(Device device) override;
  std::optional<Refusal> reaches(ByteView mine, ByteView theirs) override;
  std::unique_ptr<Channel> open(Wire& wire, DevicePair pair) override;

  /// What all channels of the driver share; see the source file.
  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace tensorferry
