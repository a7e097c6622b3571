/// The memory of published versions: whole images of a set of tensors, written once, read by many.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "agent/agent.h"
#include "base/record.h"
#include "channels/copy.h"

namespace tensorferry::regions {

/// One tensor of a set: where its bytes are in an image.
struct ImagePiece {
  std::string name;
  std::string form;  // the dtype and the shape, for the layers above
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  static constexpr std::tuple fields{at_most(&ImagePiece::name, 4096), at_most(&ImagePiece::form, 4096),
                                     &ImagePiece::offset, &ImagePiece::bytes};
  bool operator==(const ImagePiece&) const = default;
};
/// What all versions of a publication have in common.
struct ImageLayout {
  std::uint64_t bytes = 0;
  std::uint32_t block = 64 << 10;  // a delta consists of blocks of so many bytes: a power of two, 4 KB to 64 KB
  bool checksums = false;
  std::vector<ImagePiece> pieces;
  std::uint64_t gpu_from = 0;  // pieces from this offset on are on a GPU of the publisher; `bytes`: none are
  static constexpr std::tuple fields{&ImageLayout::bytes, &ImageLayout::block, &ImageLayout::checksums,
                                     at_most(&ImageLayout::pieces, 1 << 20), &ImageLayout::gpu_from};
  /// Returns whether every piece lies within one part of the image, and the block size is one of those allowed. The
  /// part on a GPU consists of whole blocks.
  [[nodiscard]] bool valid() const;
  [[nodiscard]] bool on_gpu() const noexcept { return gpu_from < bytes; }
  [[nodiscard]] std::size_t blocks() const { return static_cast<std::size_t>((bytes + block - 1) / block); }
  bool operator==(const ImageLayout&) const = default;
};
/// Gives each piece its offset, and the image its size. The last `on_gpu` pieces are on a GPU. The other members are
/// kept.
void lay_out(ImageLayout& layout, std::size_t on_gpu = 0);

/// Bytes of an image.
struct ByteRange {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  static constexpr std::tuple fields{varint(&ByteRange::offset), varint(&ByteRange::bytes)};
  bool operator==(const ByteRange&) const = default;
};

/// The memory of one version. Its bytes do not change while a VersionLease of it lives.
struct VersionImage {
  std::uint64_t version = 0;          // 0: it has no version's bytes yet
  Buffer memory;                      // of a region of the process (channels/region.h), so that peers can map it
  std::vector<std::uint64_t> hashes;  // of its blocks; empty without checksums
  bool abandoned = false;             // a peer that was lost may still read it: it is never written again
  // At a publisher with tensors on a GPU. `memory` has their bytes only once VersionStore::land() has copied them.
  Buffer gpu{};              // the bytes from ImageLayout::gpu_from on
  std::uint64_t region = 0;  // by which peers map them (OwnedRegions); 0: none does
  mutable std::mutex landing{};
  mutable std::uint64_t landed = 0;  // the version whose bytes of that part `memory` has; 0: none. By `landing`
};
using VersionLease = std::shared_ptr<const VersionImage>;

/// Blocks of an image, or of its part on a GPU: 1 for each that differs.
using BlockMarks = std::vector<std::uint8_t>;

/// Memory of a GPU for one image.
struct GpuMemory {
  Buffer memory;
  std::uint64_t region = 0;
};
/// Marks the blocks that hold these bytes of an image.
void mark(BlockMarks& marks, const ImageLayout& layout, const ByteRange& range);

/// What a version on the host is made of.
struct NewBytes {
  std::span<const std::byte* const> pieces;  // one pointer for each piece; null: as in the current version
  /// The blocks that may differ from the current version. The others are as in it, and not read. nullptr: all may.
  const BlockMarks* look = nullptr;
};

/// How one update makes and writes the part of an image that is on a GPU. Called by the thread of the update, with no
/// lock of the store held.
struct GpuWriter {
  /// Returns new memory. What `write` leaves out of it is the same in all images: zeros.
  std::function<Result<GpuMemory>(std::uint64_t bytes)> make;
  /// Writes all tensors of the version into `image`, and returns the blocks that differ from `base`, the version
  /// before; null: there is none, and all do. When it returns, the bytes are there for other processes.
  std::function<Result<BlockMarks>(const Buffer& image, const Buffer* base)> write;
};

/// Returns a hash of bytes: it tells torn or damaged bytes, not an adversary's.
std::uint64_t hash_of(ByteView bytes) noexcept;
/// Returns the hashes of the blocks of an image, and the checksum of a version that has these hashes.
std::vector<std::uint64_t> block_hashes(ByteView image, std::uint32_t block);
std::uint64_t checksum_of(const std::vector<std::uint64_t>& hashes) noexcept;

/// The versions of one publication, at its publisher or at a subscriber that keeps a copy.
///
/// The model. There are at most `kept` images. The newest complete one is current. A lease of an image is a reference
/// to it; an image without a lease that is not current is free. A new version is written into a free image, and then
/// made current under the lock: so no reader can get an image whose bytes are not all there, and no image that a reader
/// has is written. A free image keeps the bytes of an older version, so only the blocks that have changed since then
/// are written.
///
/// If a peer is lost while it holds a lease, it may still live and read: the image is abandoned, and another takes its
/// place. So no lost message, time-out or kill lets a reader see bytes of two versions.
///
/// Tensors on a GPU stay there: each image has a part in memory of the GPU, which every update writes whole. The leases
/// count for both parts. Peers that map the GPU read that part there; for others, land() copies it into the image's
/// memory of the host, at most once for each version, and only blocks that differ from what that memory had.
///
/// Thread-safe, but one thread at a time makes a version.
class VersionStore final {
 public:
  struct Options {
    std::size_t kept = 3;  // images, at least 2
  };
  VersionStore(ImageLayout layout, Options options);

  [[nodiscard]] const ImageLayout& layout() const noexcept { return layout_; }
  /// Returns the newest version; null before the first.
  [[nodiscard]] VersionLease current() const;

  /// Makes version current + 1 of these bytes. Copies only blocks that differ. Pieces on a GPU are written by `gpu`,
  /// and have no pointers. Waits for a free image until `until`. ResourceExhausted: all images are leased; `holders`
  /// tells whose leases they are. Also the errors of memory and of `gpu`; then the current version is the same as
  /// before.
  Result<std::uint64_t> update(const NewBytes& bytes, std::optional<Clock::time_point> until,
                               const std::function<std::string()>& holders,
                               const std::function<bool()>& interrupted = {}, const GpuWriter* gpu = nullptr);
  /// Returns when the memory of the host has all bytes of the version. The errors of the GPU's driver.
  Status land(const VersionLease& lease) const;

  /// How a copy of another agent's versions gets one of them.
  struct Origin {
    std::uint64_t version = 0;
    /// Returns the ranges of it that differ from version `base` (0: none), as whole blocks in ascending order.
    std::function<Result<std::vector<ByteRange>>(std::uint64_t base)> changes;
    /// Writes the bytes of these ranges into an image.
    std::function<Status(const std::vector<ByteRange>& ranges, const Buffer& image)> fetch;
    /// Compares the checksum of the image with the publisher's.
    std::function<Status(std::uint64_t checksum)> verify;
  };
  /// For a copy of another agent's versions: makes a version of what `origin` brings. Only what differs from the
  /// current version is fetched; the free image gets the rest from the current one. After an error of `origin`, the
  /// current version is the same as before.
  Status take_over(const Origin& origin, std::optional<Clock::time_point> until);

  /// Returns the ranges of `version` that differ from version `base`, as whole blocks, adjacent ones joined. nullopt:
  /// the store does not know; then everything may differ. A tensor of which more than half has changed is one range.
  [[nodiscard]] std::optional<std::vector<ByteRange>> changes(std::uint64_t version, std::uint64_t base) const;
  /// Never writes the image again.
  void abandon(const VersionLease& lease);
  /// Wakes update(), because a lease may have ended.
  void lease_ended();
  /// Lets go of all images: there is no current version any more, and update() makes none. Leases keep theirs.
  void close();
  /// Returns the number of the last version that was made; 0: none was.
  [[nodiscard]] std::uint64_t last_version() const;
  [[nodiscard]] std::size_t images() const;

 private:
  using Marks = BlockMarks;
  struct Step {
    std::uint64_t version, previous;
    Marks marks;
  };
  Result<std::shared_ptr<VersionImage>> free_image(std::optional<Clock::time_point> until,
                                                   const std::function<std::string()>& holders,
                                                   const std::function<bool()>& interrupted,
                                                   const GpuWriter* gpu = nullptr);
  /// Writes the part on a GPU, and marks its blocks.
  Status write_gpu(const VersionImage& image, const VersionLease& base, const GpuWriter& gpu, Marks& changed) const;
  /// Returns the blocks that differ between the versions, under the lock.
  [[nodiscard]] std::optional<Marks> marks_between(std::uint64_t version, std::uint64_t base) const;
  /// Returns the blocks in which a free image differs from version `current`. From then on it counts as empty.
  Marks begin_writing(VersionImage& image, std::uint64_t current);
  void publish(std::shared_ptr<VersionImage> image, std::uint64_t version, std::uint64_t previous, Marks marks);

  const ImageLayout layout_;
  const Options options_;
  Copier copier_;
  mutable std::mutex mutex_;
  std::condition_variable freed_;
  std::vector<std::shared_ptr<VersionImage>> images_;
  std::shared_ptr<VersionImage> current_;
  std::deque<Step> steps_;
  std::uint64_t last_version_ = 0;
  bool closed_ = false;
};

}  // namespace tensorferry::regions
