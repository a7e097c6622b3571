#include "rpc/regions/versions.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/text.h"
#include "channels/region.h"
#include "rpc/regions/gpu_memory.h"

namespace tensorferry::regions {
namespace {

constexpr std::size_t most_steps = 256;
constexpr std::uint64_t piece_alignment = 64;
// Images from this size on are written past the caches: readers find nothing of them there.
constexpr std::uint64_t streams_from = std::uint64_t{32} << 20;

std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) noexcept {
  constexpr std::uint64_t prime = 0x9e3779b97f4a7c15;
  return std::rotl((hash ^ word) * prime, 29);
}

bool has_all(const NewBytes& given, const ImageLayout& layout) {
  for (std::size_t i = 0; i < given.pieces.size(); ++i) {
    if (given.pieces[i] == nullptr && layout.pieces[i].bytes != 0) return false;
  }
  return true;
}

}  // namespace

bool ImageLayout::valid() const {
  if (!std::has_single_bit(block) || block < (4U << 10) || block > (64U << 10) || bytes > (std::uint64_t{1} << 48)) {
    return false;
  }
  if (gpu_from > bytes || (on_gpu() && (gpu_from % block != 0 || bytes % block != 0))) return false;
  return std::ranges::all_of(pieces, [&](const auto& piece) {
    if (piece.bytes > bytes || piece.offset > bytes - piece.bytes) return false;
    return piece.offset >= gpu_from || piece.bytes <= gpu_from - piece.offset;
  });
}

void lay_out(ImageLayout& layout, std::size_t on_gpu) {
  const auto rounded = [](std::uint64_t at, std::uint64_t to) { return (at + to - 1) / to * to; };
  const auto block = std::max<std::uint64_t>(layout.block, 1);  // valid() comes later
  const auto on_host = layout.pieces.size() - std::min(on_gpu, layout.pieces.size());
  std::uint64_t at = 0;
  for (std::size_t i = 0; i < layout.pieces.size(); ++i) {
    auto& piece = layout.pieces[i];
    if (i == on_host) layout.gpu_from = at = rounded(at, block);
    piece.offset = at;
    at += rounded(piece.bytes, piece_alignment);
  }
  layout.bytes = on_gpu == 0 ? at : rounded(at, block);
  if (on_gpu == 0) layout.gpu_from = layout.bytes;
}

void mark(BlockMarks& marks, const ImageLayout& layout, const ByteRange& range) {
  if (range.bytes == 0) return;
  const auto first = marks.begin() + static_cast<std::ptrdiff_t>(range.offset / layout.block);
  const auto last = marks.begin() + static_cast<std::ptrdiff_t>((range.offset + range.bytes - 1) / layout.block);
  std::fill(first, last + 1, 1);
}

std::uint64_t hash_of(ByteView bytes) noexcept {
  std::array<std::uint64_t, 4> lanes{1, 2, 3, 4};
  std::array<std::uint64_t, 4> words{};
  const auto* at = bytes.data();
  auto left = bytes.size();
  for (; left >= sizeof words; left -= sizeof words, at += sizeof words) {
    std::memcpy(words.data(), at, sizeof words);
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) lanes[lane] = mixed(lanes[lane], words[lane]);
  }
  words = {};
  if (left != 0) std::memcpy(words.data(), at, left);
  auto hash = mixed(left, bytes.size());
  for (std::size_t lane = 0; lane < lanes.size(); ++lane) hash = mixed(hash, mixed(lanes[lane], words[lane]));
  return hash;
}

std::vector<std::uint64_t> block_hashes(ByteView image, std::uint32_t block) {
  std::vector<std::uint64_t> out;
  out.reserve(image.size() / block + 1);
  for (std::size_t at = 0; at < image.size(); at += block) {
    out.push_back(hash_of(image.subspan(at, std::min<std::size_t>(block, image.size() - at))));
  }
  return out;
}

std::uint64_t checksum_of(const std::vector<std::uint64_t>& hashes) noexcept {
  std::uint64_t sum = hashes.size();
  for (const auto hash : hashes) sum = mixed(sum, hash);
  return sum;
}

VersionStore::VersionStore(ImageLayout layout, Options options) : layout_(std::move(layout)), options_(options) {}

VersionLease VersionStore::current() const {
  const std::lock_guard lock(mutex_);
  return current_;
}

std::size_t VersionStore::images() const {
  const std::lock_guard lock(mutex_);
  return images_.size();
}

void VersionStore::abandon(const VersionLease& lease) {
  std::shared_ptr<VersionImage> ended;  // dropped without the lock
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(images_, lease, [](const auto& each) { return VersionLease(each); });
  if (found == images_.end()) return;
  (*found)->abandoned = true;
  if (*found != current_) {
    ended = std::move(*found);
    images_.erase(found);
  }
  freed_.notify_all();
}

void VersionStore::lease_ended() {
  { const std::lock_guard lock(mutex_); }  // what the lease's holder has read comes before the next write
  freed_.notify_all();
}

void VersionStore::close() {
  std::vector<std::shared_ptr<VersionImage>> images;  // dropped without the lock
  std::shared_ptr<VersionImage> current;
  const std::lock_guard lock(mutex_);
  closed_ = true;
  images.swap(images_);
  current.swap(current_);
  freed_.notify_all();
}

std::uint64_t VersionStore::last_version() const {
  const std::lock_guard lock(mutex_);
  return last_version_;
}

Result<std::shared_ptr<VersionImage>> VersionStore::free_image(std::optional<Clock::time_point> until,
                                                               const std::function<std::string()>& holders,
                                                               const std::function<bool()>& interrupted,
                                                               const GpuWriter* gpu) {
  constexpr Milliseconds look_every{10};
  std::unique_lock lock(mutex_);
  for (;;) {
    std::shared_ptr<VersionImage>* best = nullptr;
    for (auto& image : images_) {
      if (image == current_ || image->abandoned || image.use_count() != 1) continue;
      if (best == nullptr || image->version > (*best)->version) best = &image;
    }
    if (best != nullptr) {
      std::atomic_thread_fence(std::memory_order_acquire);  // after the last reads of the lease that ended elsewhere
      return *best;
    }
    if (images_.size() < options_.kept) break;
    const auto now = Clock().now();
    if (until && now >= *until) {
      lock.unlock();
      return Status(
          Code::resource_exhausted,
          formatted("all {} images of the publication are read{}: raise kept=, or let readers drop old versions",
                    options_.kept, holders ? ", by " + holders() : ""));
    }
    freed_.wait_until(lock, std::min(now + look_every, until.value_or(Clock::time_point::max())));
    if (!interrupted) continue;
    lock.unlock();
    if (interrupted()) return Status(Code::cancelled, "the wait for a free image was interrupted");
    lock.lock();
  }
  lock.unlock();
  auto memory = Regions::of_this_process().make(std::max<std::uint64_t>(layout_.bytes, 1));
  if (!memory.ok()) return memory.status();
  auto image = std::make_shared<VersionImage>();
  image->memory = *std::move(memory);
  if (gpu != nullptr) {
    auto made = gpu->make(layout_.bytes - layout_.gpu_from);
    if (!made.ok()) return made.status();
    image->gpu = std::move(made->memory);
    image->region = made->region;
  }
  if (layout_.checksums) image->hashes.resize(layout_.blocks());
  lock.lock();
  images_.push_back(image);
  return image;
}

std::optional<VersionStore::Marks> VersionStore::marks_between(std::uint64_t version, std::uint64_t base) const {
  Marks out(layout_.blocks());
  if (base == version) return out;
  auto wanted = version;
  for (auto step = steps_.rbegin(); step != steps_.rend() && base != 0; ++step) {
    if (step->version > wanted) continue;
    if (step->version != wanted) return std::nullopt;
    for (std::size_t i = 0; i < out.size(); ++i) out[i] |= step->marks[i];
    wanted = step->previous;
    if (wanted == base) return out;
  }
  return std::nullopt;
}

std::optional<std::vector<ByteRange>> VersionStore::changes(std::uint64_t version, std::uint64_t base) const {
  std::optional<Marks> marks;
  {
    const std::lock_guard lock(mutex_);
    marks = marks_between(version, base);
  }
  if (!marks) return std::nullopt;
  for (const auto& piece : layout_.pieces) {
    if (piece.bytes == 0) continue;
    const auto begin = marks->begin() + static_cast<std::ptrdiff_t>(piece.offset / layout_.block);
    const auto end = marks->begin() + static_cast<std::ptrdiff_t>((piece.offset + piece.bytes - 1) / layout_.block + 1);
    if (std::count(begin, end, 1) * 2 > end - begin) std::fill(begin, end, 1);
  }
  std::vector<ByteRange> out;
  for (std::size_t i = 0; i < marks->size(); ++i) {
    if ((*marks)[i] == 0) continue;
    const auto at = std::uint64_t{i} * layout_.block;
    const auto bytes = std::min<std::uint64_t>(layout_.block, layout_.bytes - at);
    if (!out.empty() && out.back().offset + out.back().bytes == at) {
      out.back().bytes += bytes;
    } else {
      out.push_back({at, bytes});
    }
  }
  return out;
}

VersionStore::Marks VersionStore::begin_writing(VersionImage& image, std::uint64_t current) {
  const std::lock_guard lock(mutex_);
  auto known = image.version == 0 ? std::nullopt : marks_between(current, image.version);
  image.version = 0;
  return known ? *std::move(known) : Marks(layout_.blocks(), 1);
}

void VersionStore::publish(std::shared_ptr<VersionImage> image, std::uint64_t version, std::uint64_t previous,
                           Marks marks) {
  std::shared_ptr<VersionImage> ended;  // dropped without the lock
  const std::lock_guard lock(mutex_);
  image->version = version;
  if (closed_) {
    std::erase(images_, image);
    return;
  }
  last_version_ = version;
  steps_.push_back({version, previous, std::move(marks)});
  if (steps_.size() > most_steps) steps_.pop_front();
  if (current_ && current_->abandoned) std::erase(images_, current_);
  ended = std::exchange(current_, std::move(image));
}

Status VersionStore::write_gpu(const VersionImage& image, const VersionLease& base, const GpuWriter& gpu,
                               Marks& changed) const {
  const auto first = static_cast<std::size_t>(layout_.gpu_from / layout_.block);
  const auto marks = gpu.write(image.gpu, base ? &base->gpu : nullptr);
  if (!marks.ok()) return marks.status();
  if (marks->size() != changed.size() - first) return {Code::internal, "the marks of other blocks than the image has"};
  std::ranges::copy(*marks, changed.begin() + static_cast<std::ptrdiff_t>(first));
  return {};
}

Status VersionStore::land(const VersionLease& lease) const {
  if (lease->gpu.data == nullptr) return {};
  const std::lock_guard turn(lease->landing);
  if (lease->landed == lease->version) return {};
  const auto first = static_cast<std::size_t>(layout_.gpu_from / layout_.block);
  std::optional<Marks> stale;
  {
    const std::lock_guard lock(mutex_);
    stale = marks_between(lease->version, lease->landed);
  }
  if (!stale) stale.emplace(layout_.blocks(), 1);
  std::vector<HostCopy> copies;
  for (auto block = first; block < stale->size(); ++block) {
    if ((*stale)[block] == 0) continue;
    const auto at = std::uint64_t{block} * layout_.block;
    if (block > first && (*stale)[block - 1] != 0) {
      copies.back().bytes += layout_.block;
    } else {
      copies.push_back({at - layout_.gpu_from, lease->memory.data + at, layout_.block});
    }
  }
  lease->landed = 0;  // until all is there
  if (auto copied = copy_to_host(lease->gpu, copies); !copied.ok()) return copied;
  lease->landed = lease->version;
  return {};
}

Result<std::uint64_t> VersionStore::update(const NewBytes& given, std::optional<Clock::time_point> until,
                                           const std::function<std::string()>& holders,
                                           const std::function<bool()>& interrupted, const GpuWriter* gpu) {
  if (layout_.on_gpu() != (gpu != nullptr)) return Status(Code::internal, "tensors on another device than at first");
  const auto base = current();
  const auto* const look = base ? given.look : nullptr;
  if (look != nullptr && look->size() != layout_.blocks()) return Status(Code::internal, "marks of other blocks");
  if (!base && !has_all(given, layout_)) return Status(Code::internal, "a tensor is missing");
  auto found = free_image(until, holders, interrupted, gpu);
  if (!found.ok()) return found.status();
  auto image = *std::move(found);
  const auto previous = base ? base->version : 0;
  const auto stale = begin_writing(*image, previous);
  Marks changed(layout_.blocks());
  const auto how = layout_.gpu_from >= streams_from ? best_streaming() : Streaming::none;
  const auto copy_block = [&](std::size_t at, std::size_t bytes) {
    const auto place = at / layout_.block;
    if (look != nullptr && (*look)[place] == 0) {
      if (stale[place] == 0) return;
      copy_streaming(image->memory.data + at, base->memory.data + at, bytes, how);
      if (layout_.checksums) image->hashes[place] = base->hashes[place];
      return;
    }
    auto piece = std::ranges::upper_bound(layout_.pieces, at, {}, &ImagePiece::offset) - 1;
    // Compares and copies the parts of the pieces that lie in this block; first to see whether it has changed.
    const auto each_part = [&](const auto& part) {
      for (auto here = piece; here != layout_.pieces.end() && here->offset < at + bytes; ++here) {
        const auto begin = std::max<std::uint64_t>(at, here->offset);
        const auto end = std::min<std::uint64_t>(at + bytes, here->offset + here->bytes);
        if (begin >= end) continue;
        const auto* const whole = given.pieces[static_cast<std::size_t>(here - layout_.pieces.begin())];
        const auto* const from = whole != nullptr ? whole + (begin - here->offset) : base->memory.data + begin;
        if (!part(begin, from, end - begin)) return false;
      }
      return true;
    };
    const bool same = base && each_part([&](std::uint64_t to, const std::byte* from, std::size_t size) {
                        return std::memcmp(base->memory.data + to, from, size) == 0;
                      });
    changed[place] = same ? 0 : 1;
    if (same && stale[place] == 0) return;
    each_part([&](std::uint64_t to, const std::byte* from, std::size_t size) {
      copy_streaming(image->memory.data + to, from, size, how);
      return true;
    });
    if (layout_.checksums) image->hashes[place] = hash_of({image->memory.data + at, bytes});
  };
  constexpr std::size_t chunk = std::size_t{1} << 20;
  copier_.in_parts(layout_.gpu_from, chunk, [&](std::size_t begin, std::size_t size) {
    for (auto at = begin; at < begin + size; at += layout_.block) {
      copy_block(at, std::min<std::size_t>(layout_.block, begin + size - at));
    }
  });
  if (gpu != nullptr) {
    if (auto written = write_gpu(*image, base, *gpu, changed); !written.ok()) return written;
  }
  const auto version = previous + 1;
  publish(std::move(image), version, previous, std::move(changed));
  return version;
}

Status VersionStore::take_over(const Origin& origin, std::optional<Clock::time_point> until) {
  const auto base = current();
  const auto previous = base ? base->version : 0;
  const auto ranges = origin.changes(previous);
  if (!ranges.ok()) return ranges.status();
  auto found = free_image(until, {}, {});
  if (!found.ok()) return found.status();
  auto image = *std::move(found);
  const auto stale = begin_writing(*image, previous);
  Marks changed(layout_.blocks());
  for (const auto& range : *ranges) mark(changed, layout_, range);
  std::vector<Copier::Piece> missing;
  for (std::size_t block = 0; base && block < stale.size(); ++block) {
    if (stale[block] == 0 || changed[block] != 0) continue;
    const auto at = block * layout_.block;
    const auto bytes = std::min<std::size_t>(layout_.block, static_cast<std::size_t>(layout_.bytes) - at);
    missing.push_back({image->memory.data + at, base->memory.data + at, bytes});
  }
  copier_.copy(missing);
  if (auto fetched = origin.fetch(*ranges, image->memory); !fetched.ok()) return fetched;
  if (layout_.checksums) {
    image->hashes = block_hashes({image->memory.data, static_cast<std::size_t>(layout_.bytes)}, layout_.block);
    if (auto whole = origin.verify(checksum_of(image->hashes)); !whole.ok()) return whole;
  }
  publish(std::move(image), origin.version, previous, std::move(changed));
  return {};
}

}  // namespace tensorferry::regions
