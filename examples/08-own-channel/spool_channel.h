/// `spool`: a channel that carries host memory through a file, between processes that can open files in one folder.
///
/// An example of a channel: small, complete, and safe against a peer that lies. It suits hosts that share a file system
/// on which a read sees the writes before it; NFS without locks is none.
#pragma once

#include <tensorferry/channel.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

/// Opens one end of `spool` for each device pair. Thread-safe.
///
/// Each end writes into a file of its own. The file loses its name as soon as the other end has opened it, so no file
/// is left behind, unless a process is killed before that.
class SpoolDriver final : public tensorferry::Driver {
 public:
  /// `folder` is the same folder of one file system at both ends; its path may differ. Other users should not be able
  /// to write there. One end's file holds at most `most_bytes` bytes of buffers at once. Beyond that the end refuses
  /// buffers, and the next channel carries them.
  explicit SpoolDriver(std::string folder, std::uint64_t most_bytes = std::uint64_t{1} << 30)
      : folder_(std::move(folder)), most_bytes_(most_bytes) {}

  [[nodiscard]] std::string_view name() const override { return "spool"; }
  std::variant<tensorferry::Bytes, tensorferry::Refusal> descriptor(tensorferry::Device device) override;
  std::optional<tensorferry::Refusal> reaches(tensorferry::ByteView mine, tensorferry::ByteView theirs) override;
  std::unique_ptr<tensorferry::Channel> open(tensorferry::Wire& wire, tensorferry::DevicePair pair) override;

 private:
  const std::string folder_;
  const std::uint64_t most_bytes_;
};
