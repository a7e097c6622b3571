/// The messages of one-sided memory: calls of three functions, whose payload is one of these records.
/// docs/protocol.md, "Regions and versions", is normative.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "base/record.h"
#include "channels/cma/process.h"
#include "rpc/regions/gpu_memory.h"
#include "rpc/regions/versions.h"

namespace tensorferry::regions {

/// Never answered while the visitor is there (rpc/regions/visits.h).
inline constexpr std::string_view attend_function = "tf:attend";
inline constexpr std::string_view region_function = "tf:region";
inline constexpr std::string_view version_function = "tf:version";

/// Returns whether the bytes of a peer's buffer can be read: a message's sender says on which device each lands.
inline bool on_host(const Buffer& buffer) { return buffer.device == Device(); }

inline constexpr std::size_t longest_name = 256;
/// The most runs of one message, and the most bytes that they may have together.
inline constexpr std::size_t most_runs = std::size_t{1} << 22;
inline constexpr std::uint64_t most_served_bytes = std::uint64_t{64} << 20;

/// Where a process is, as far as another must know to read its memory.
struct ProcessPlace {
  std::string boot_id;
  std::uint64_t pid_namespace = 0;
  std::uint64_t user_namespace = 0;
  cma::Identity process;
  static constexpr std::tuple fields{at_most(&ProcessPlace::boot_id, 64), &ProcessPlace::pid_namespace,
                                     &ProcessPlace::user_namespace, &ProcessPlace::process};
};

/// Begins a visit: the call ends when the visit does. Or, if `leaves`, ends it.
struct Attend {
  std::uint64_t visit = 0;  // a number of the visitor's, never used again
  bool leaves = false;
  static constexpr std::tuple fields{&Attend::visit, &Attend::leaves};
};

/// Asks for a grant. The reply is a RegionGrant; if `map`, with the control page and perhaps the region's memory as
/// shared buffers.
struct OpenRegion {
  static constexpr std::uint8_t tag = 1;
  std::uint64_t visit = 0;
  std::uint64_t incarnation = 0;  // of the owner that made the handle; 0: any
  std::uint64_t id = 0;           // 0: by `name`
  std::string name;
  bool map = false;
  ProcessPlace place;  // of the asking process
  std::uint64_t proof =
      0;  // the owner writes it into a word of its own: so the asking process knows whose memory it reads
  static constexpr std::tuple fields{
      &OpenRegion::visit, &OpenRegion::incarnation, &OpenRegion::id,   at_most(&OpenRegion::name, longest_name),
      &OpenRegion::map,   &OpenRegion::place,       &OpenRegion::proof};
};
/// How the bytes of a granted region are reached. `by_card` stands in no grant: the peer asks for keys (AskKeys).
enum class Reach : std::uint8_t { served = 0, in_place = 1, mapped = 2, last = mapped, by_card = 3 };
struct RegionGrant {
  std::uint64_t id = 0;
  std::uint64_t bytes = 0;
  bool read = false;
  bool write = false;
  Reach reach = Reach::served;
  bool page = false;          // the first shared buffer is the control page
  std::uint32_t slot = 0;     // of the generation word in it
  std::uint64_t offset = 0;   // mapped: of the region in the other shared buffer
  cma::Identity process{};    // in_place: whose memory to read, and where
  std::uint64_t address = 0;  // of the region
  std::uint64_t word_address = 0;
  std::uint64_t proof_address = 0;
  bool on_gpu = false;  // `place` says where; mapped: by its handle, not by a shared buffer
  GpuPlace place;
  std::string shape;  // what the owner told of the region, opaque here
  static constexpr std::tuple fields{
      &RegionGrant::id,      &RegionGrant::bytes,        &RegionGrant::read,
      &RegionGrant::write,   &RegionGrant::reach,        &RegionGrant::page,
      &RegionGrant::slot,    &RegionGrant::offset,       &RegionGrant::process,
      &RegionGrant::address, &RegionGrant::word_address, &RegionGrant::proof_address,
      &RegionGrant::on_gpu,  &RegionGrant::place,        at_most(&RegionGrant::shape, 4096)};
};
/// Gives a grant back.
struct CloseRegion {
  static constexpr std::uint8_t tag = 2;
  std::uint64_t visit = 0;
  std::uint64_t id = 0;
  static constexpr std::tuple fields{&CloseRegion::visit, &CloseRegion::id};
};
/// Reads runs of equal size. The reply has one buffer with all of them.
struct ReadRuns {
  static constexpr std::uint8_t tag = 3;
  std::uint64_t visit = 0;
  std::uint64_t id = 0;
  std::uint64_t run_bytes = 0;
  std::vector<std::uint64_t> offsets;
  static constexpr std::tuple fields{&ReadRuns::visit, &ReadRuns::id, &ReadRuns::run_bytes,
                                     at_most(&ReadRuns::offsets, most_runs)};
};
/// Writes runs of equal size from the one buffer of the message.
struct WriteRuns {
  static constexpr std::uint8_t tag = 4;
  std::uint64_t visit = 0;
  std::uint64_t id = 0;
  std::uint64_t run_bytes = 0;
  std::vector<std::uint64_t> offsets;
  static constexpr std::tuple fields{&WriteRuns::visit, &WriteRuns::id, &WriteRuns::run_bytes,
                                     at_most(&WriteRuns::offsets, most_runs)};
};
/// Tells the owner that what was written before is there.
struct NotifyOwner {
  static constexpr std::uint8_t tag = 5;
  std::uint64_t visit = 0;
  std::uint64_t id = 0;
  std::uint64_t notification = 0;
  static constexpr std::tuple fields{&NotifyOwner::visit, &NotifyOwner::id, &NotifyOwner::notification};
};
/// Asks by which keys network cards reach a granted region. The reply is a RegionKeys.
struct AskKeys {
  static constexpr std::uint8_t tag = 6;
  std::uint64_t visit = 0;
  std::uint64_t id = 0;
  std::uint8_t gpu = 0;  // of the peer's: cards reach a region on a GPU if they connect the two GPUs
  static constexpr std::tuple fields{&AskKeys::visit, &AskKeys::id, &AskKeys::gpu};
};
/// What OneSided::expose() has returned at the owner.
struct RegionKeys {
  Bytes region;  // empty: no card reaches it, or not yet
  Bytes page;    // of the visit's words
  static constexpr std::tuple fields{at_most(&RegionKeys::region, 4096), at_most(&RegionKeys::page, 4096)};
};
using RegionMessage = std::variant<OpenRegion, CloseRegion, ReadRuns, WriteRuns, NotifyOwner, AskKeys>;

/// Asks for a publication. The reply is a Subscribed.
struct SubscribeTo {
  static constexpr std::uint8_t tag = 1;
  std::uint64_t visit = 0;
  std::string name;
  std::string host;     // the subscriber's boot id
  bool relays = false;  // it keeps a copy, and serves it to other subscribers of its host
  static constexpr std::tuple fields{&SubscribeTo::visit, at_most(&SubscribeTo::name, longest_name),
                                     at_most(&SubscribeTo::host, 64), &SubscribeTo::relays};
};
struct Subscribed {
  ImageLayout layout;
  std::string host;         // the publisher's boot id
  std::string relay;        // an agent of the subscriber's host that serves the publication; "": there is none
  std::uint64_t epoch = 0;  // of the publication: versions of two epochs have nothing in common
  static constexpr std::tuple fields{&Subscribed::layout, at_most(&Subscribed::host, 64),
                                     at_most(&Subscribed::relay, 4096), &Subscribed::epoch};
};
/// Asks for a lease of the newest version above `newer_than`, and waits for it. The reply is an Acquired; if `map`,
/// with the image as a shared buffer. If `on_gpu`, the bytes that are on a GPU need not be in it.
struct AcquireVersion {
  static constexpr std::uint8_t tag = 2;
  std::uint64_t visit = 0;
  std::string name;
  std::uint64_t newer_than = 0;
  bool map = false;
  bool wait = false;                 // false: NotFound at once if there is none
  std::vector<std::uint64_t> holds;  // the subscriber's leases: its others up to `seen` end, whose grants were lost
  std::uint64_t seen = 0;
  std::uint64_t epoch = 0;  // of the publication that the subscriber knows
  bool on_gpu = false;      // the subscriber would map the region of what is on a GPU
  static constexpr std::tuple fields{&AcquireVersion::visit,      at_most(&AcquireVersion::name, longest_name),
                                     &AcquireVersion::newer_than, &AcquireVersion::map,
                                     &AcquireVersion::wait,       at_most(&AcquireVersion::holds, 4096),
                                     &AcquireVersion::seen,       &AcquireVersion::epoch,
                                     &AcquireVersion::on_gpu};
};
struct Acquired {
  std::uint64_t version = 0;
  std::uint64_t lease = 0;
  std::uint64_t checksum = 0;
  std::uint64_t region = 0;  // of the publisher, with the bytes that are on a GPU; 0: the image has all bytes
  static constexpr std::tuple fields{&Acquired::version, &Acquired::lease, &Acquired::checksum, &Acquired::region};
};
/// Ends a lease.
struct ReleaseVersion {
  static constexpr std::uint8_t tag = 3;
  std::uint64_t visit = 0;
  std::string name;
  std::uint64_t lease = 0;
  static constexpr std::tuple fields{&ReleaseVersion::visit, at_most(&ReleaseVersion::name, longest_name),
                                     &ReleaseVersion::lease};
};
/// Asks what differs between a leased version and an older one. The reply is a Changes.
struct AskChanges {
  static constexpr std::uint8_t tag = 4;
  std::uint64_t visit = 0;
  std::string name;
  std::uint64_t lease = 0;
  std::uint64_t base = 0;  // 0: none
  static constexpr std::tuple fields{&AskChanges::visit, at_most(&AskChanges::name, longest_name), &AskChanges::lease,
                                     &AskChanges::base};
};
struct Changes {
  bool known = false;  // false: everything may differ
  std::vector<ByteRange> ranges;
  static constexpr std::tuple fields{&Changes::known, &Changes::ranges};
};
/// Asks for bytes of a leased version. The reply has one buffer with all of them.
struct FetchRanges {
  static constexpr std::uint8_t tag = 5;
  std::uint64_t visit = 0;
  std::string name;
  std::uint64_t lease = 0;
  std::vector<ByteRange> ranges;
  static constexpr std::tuple fields{&FetchRanges::visit, at_most(&FetchRanges::name, longest_name),
                                     &FetchRanges::lease, at_most(&FetchRanges::ranges, most_runs)};
};
using VersionMessage = std::variant<SubscribeTo, AcquireVersion, ReleaseVersion, AskChanges, FetchRanges>;

}  // namespace tensorferry::regions
