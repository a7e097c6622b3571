#include "base/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <utility>

namespace tensorferry {
namespace {

constexpr std::size_t size = 3 * 4096;

SharedMemory made(std::size_t bytes = size, SharedMemory::InChild in_child = SharedMemory::InChild::unmapped) {
  auto memory = SharedMemory::create(bytes, in_child);
  EXPECT_TRUE(memory.ok()) << memory.status().text();
  return memory.ok() ? std::move(*memory) : SharedMemory();
}

FileDescriptor memfd(std::size_t bytes, int seals) {
  FileDescriptor fd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(::ftruncate(fd.get(), static_cast<off_t>(bytes)), 0);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, seals), 0);
  return fd;
}

constexpr int all_seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

Code code_of_map(FileDescriptor fd, std::size_t bytes) {
  return SharedMemory::map(std::move(fd), bytes).status().code();
}

/// Runs `work` in a forked child. Returns the child's exit status, or minus the signal that ended it.
template <class Work>
int in_child(Work work) {
  const auto child = ::fork();
  if (child == 0) ::_exit(work());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

std::size_t open_descriptors() {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

TEST(SharedMemory, BothMappingsShowTheSameBytes) {
  const auto mine = made();
  auto theirs = SharedMemory::map(std::move(*mine.share()), size);
  ASSERT_TRUE(theirs.ok()) << theirs.status().text();
  EXPECT_NE(mine.data(), theirs->data());
  EXPECT_EQ(theirs->bytes(), size);
  mine.span().back() = std::byte{7};
  EXPECT_EQ(theirs->span().back(), std::byte{7});
  theirs->span().front() = std::byte{9};
  EXPECT_EQ(mine.span().front(), std::byte{9});
}

TEST(SharedMemory, OutlivesItsMaker) {
  auto mine = made();
  std::memset(mine.data(), 0x5a, size);
  auto theirs = SharedMemory::map(std::move(*mine.share()), size);
  ASSERT_TRUE(theirs.ok());
  mine = {};
  for (const auto byte : theirs->span()) ASSERT_EQ(byte, std::byte{0x5a});
}

TEST(SharedMemory, CannotBeTruncatedOrUnsealed) {
  const auto mine = made();
  const auto fd = std::move(*mine.share());
  EXPECT_NE(::ftruncate(fd.get(), 0), 0);
  EXPECT_NE(::ftruncate(fd.get(), size * 2), 0);
  EXPECT_NE(::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

/// A peer that has the descriptor may write anything, so it may also give pages back: they read as zeros.
TEST(SharedMemory, AHoleThatAPeerPunchesReadsAsZerosAndCanBeWritten) {
  auto mine = made();
  std::memset(mine.data(), 0x5a, size);
  const auto fd = std::move(*mine.share());
  auto theirs = SharedMemory::map(std::move(*mine.share()), size);
  ASSERT_TRUE(theirs.ok());
  ASSERT_EQ(::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, size), 0);
  for (const auto byte : theirs->span()) ASSERT_EQ(byte, std::byte{0});
  std::memset(mine.data(), 0x5a, size);
  for (const auto byte : theirs->span()) ASSERT_EQ(byte, std::byte{0x5a});
}

TEST(SharedMemory, NobodyPunchesAHoleIntoFrozenMemory) {
  auto mine = std::move(*SharedMemory::create_to_freeze(size));
  std::memset(mine.data(), 0x5a, size);
  ASSERT_TRUE(mine.freeze().ok());
  const auto fd = std::move(*mine.share());
  EXPECT_NE(::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, size), 0);
  EXPECT_EQ(errno, EPERM);
  for (const auto byte : mine.span()) ASSERT_EQ(byte, std::byte{0x5a});
}

TEST(SharedMemory, RefusesAFileThatCouldShrink) {
  EXPECT_EQ(code_of_map(memfd(size, all_seals), size), Code::ok);
  for (int missing : {F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_SEAL}) {
    EXPECT_EQ(code_of_map(memfd(size, all_seals & ~missing), size), Code::protocol_error) << missing;
  }
}

TEST(SharedMemory, RefusesAnUnannouncedSize) {
  for (std::size_t announced : {std::size_t{0}, size - 1, size + 1, size * 2, ~std::size_t{0}}) {
    EXPECT_EQ(code_of_map(memfd(size, all_seals), announced), Code::protocol_error) << announced;
  }
}

TEST(SharedMemory, RefusesOtherFilesAndReadOnlyMemfds) {
  EXPECT_EQ(code_of_map(FileDescriptor(), size), Code::protocol_error);
  EXPECT_EQ(code_of_map(FileDescriptor(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC)), size), Code::protocol_error);
  EXPECT_EQ(code_of_map(FileDescriptor(::open("/dev/zero", O_RDWR | O_CLOEXEC)), size), Code::protocol_error);
  EXPECT_EQ(code_of_map(memfd(size, all_seals | F_SEAL_WRITE), size), Code::protocol_error);
}

TEST(SharedMemory, FrozenMemoryCannotBeWritten) {
  auto mine = std::move(*SharedMemory::create_to_freeze(size));
  std::memset(mine.data(), 0x5a, size);
  EXPECT_FALSE(mine.frozen());
  ASSERT_TRUE(mine.freeze().ok());
  EXPECT_TRUE(mine.frozen());
  EXPECT_EQ(mine.span().back(), std::byte{0x5a});
  const auto fd = std::move(*mine.share());
  const char byte = 1;
  EXPECT_NE(::pwrite(fd.get(), &byte, 1, 0), 1);
  EXPECT_NE(::ftruncate(fd.get(), 0), 0);
  EXPECT_EQ(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0), MAP_FAILED);
}

TEST(SharedMemory, WritesToMappedFrozenMemoryStayPrivate) {
  auto mine = std::move(*SharedMemory::create_to_freeze(size));
  std::memset(mine.data(), 0x5a, size);
  ASSERT_TRUE(mine.freeze().ok());
  auto theirs = std::move(*SharedMemory::map_handed(std::move(*mine.share()), size));
  EXPECT_TRUE(theirs.frozen());
  mine = {};
  const auto one = std::move(*theirs.copy_on_write());
  const auto other = std::move(*theirs.copy_on_write());
  one.get()[0] = std::byte{1};
  EXPECT_EQ(one.get()[1], std::byte{0x5a});
  EXPECT_EQ(other.get()[0], std::byte{0x5a});
  theirs = {};
  EXPECT_EQ(one.get()[0], std::byte{1});  // the mapping outlives the memory that it was made from
}

TEST(SharedMemory, OnlyHandedOverMemoryMayBeFrozen) {
  auto mine = std::move(*SharedMemory::create_to_freeze(size));
  ASSERT_TRUE(mine.freeze().ok());
  EXPECT_EQ(code_of_map(std::move(*mine.share()), size), Code::protocol_error);
  // Other memory that a peer may hand over: half sealed, no file at all, or sealed for sharing but not frozen.
  EXPECT_EQ(SharedMemory::map_handed(memfd(size, F_SEAL_SHRINK | F_SEAL_WRITE), size).status().code(),
            Code::protocol_error);
  EXPECT_EQ(SharedMemory::map_handed(FileDescriptor(), size).status().code(), Code::protocol_error);
  EXPECT_FALSE(SharedMemory::map_handed(memfd(size, all_seals), size)->frozen());
}

TEST(SharedMemory, ReceivedOrClosedMemoryCannotBeSharedFurther) {
  auto mine = made();
  const auto theirs = SharedMemory::map(std::move(*mine.share()), size);
  ASSERT_TRUE(theirs.ok());
  EXPECT_FALSE(theirs->share().ok());
  mine.close_descriptor();
  EXPECT_FALSE(mine.share().ok());
}

TEST(SharedMemory, LeaksNoFileDescriptor) {
  const auto before = open_descriptors();
  {
    const auto mine = made();
    const auto theirs = SharedMemory::map(std::move(*mine.share()), size);
    (void)SharedMemory::map(std::move(*mine.share()), size + 1);
    EXPECT_EQ(open_descriptors(), before + 1);
  }
  EXPECT_EQ(open_descriptors(), before);
}

TEST(SharedMemory, ZeroBytesAreRefused) { EXPECT_EQ(SharedMemory::create(0).status().code(), Code::invalid_argument); }

TEST(SharedMemory, MovesWithItsMapping) {
  auto first = made();
  auto* const at = first.data();
  SharedMemory second(std::move(first));
  EXPECT_FALSE(first);  // NOLINT(bugprone-use-after-move): the contract says that it is empty
  EXPECT_EQ(second.data(), at);
  second = made(4096);
  EXPECT_EQ(second.bytes(), 4096u);
}

TEST(SharedMemory, PopulateAllocatesPagesAndKeepsTheirContents) {
  const auto mine = made(16 * 4096);
  mine.data()[4096] = std::byte{3};
  EXPECT_TRUE(mine.populate(4096, 8 * 4096));
  struct stat file {};
  ASSERT_EQ(::fstat(mine.share()->get(), &file), 0);
  EXPECT_EQ(file.st_blocks * 512, 8 * 4096);
  EXPECT_EQ(mine.data()[4096], std::byte{3});
}

TEST(SharedMemory, AChildInheritsItOnlyIfThatIsRequested) {
  const auto dropped = made();
  const auto kept = made(size, SharedMemory::InChild::inherited);
  EXPECT_EQ(in_child([&] {
              kept.data()[0] = std::byte{4};
              return 0;
            }),
            0);
  EXPECT_EQ(kept.data()[0], std::byte{4});
  unsigned char resident = 0;
  EXPECT_EQ(in_child([&] { return ::mincore(dropped.data(), 4096, &resident) == 0 ? 1 : 0; }), 0);
}

TEST(SharedMemory, AChildsDestructorDoesNotTouchTheChildsMappings) {
  EXPECT_EQ(in_child([] {
              auto memory = made();
              return in_child([&] {
                auto* const reused =
                    ::mmap(memory.data(), size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
                memory = {};
                static_cast<char*>(reused)[0] = 1;  // faults if the destructor has unmapped it
                return 0;
              });
            }),
            0);
}

}  // namespace
}  // namespace tensorferry
