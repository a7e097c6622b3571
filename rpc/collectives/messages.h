/// The messages between the members of a group: calls of one function, whose payload is one of these records.
/// docs/protocol.md, "Groups", is normative.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/record.h"
#include "channels/cma/process.h"
#include "rpc/collectives/board.h"

namespace tensorferry::collectives {

/// The function under which an agent receives the messages of its groups.
inline constexpr std::string_view group_function = "tf:group";
inline constexpr std::size_t most_ranks = 4096;

/// What the members of a group must know to share memory with one another.
struct HostIdentity {
  std::string boot_id;
  std::uint32_t uid = 0;
  std::uint64_t pid_namespace = 0;
  std::uint64_t user_namespace = 0;
  cma::Identity process;
  std::uint64_t probe_address = 0;  // of a word in the process's memory
  std::uint64_t probe_word = 0;     // its value
  static constexpr std::tuple fields{at_most(&HostIdentity::boot_id, 64),
                                     &HostIdentity::uid,
                                     &HostIdentity::pid_namespace,
                                     &HostIdentity::user_namespace,
                                     &HostIdentity::process,
                                     &HostIdentity::probe_address,
                                     &HostIdentity::probe_word};
};
struct MemberRecord {
  std::string name;
  std::uint64_t incarnation = 0;
  HostIdentity host;
  static constexpr std::tuple fields{at_most(&MemberRecord::name, 4096), &MemberRecord::incarnation,
                                     &MemberRecord::host};
};

/// To rank 0: a member wants to form the group. The reply is a Formed.
struct JoinGroup {
  static constexpr std::uint8_t tag = 1;
  std::string label;
  std::vector<std::string> names;
  std::uint32_t rank = 0;
  MemberRecord member;
  static constexpr std::tuple fields{at_most(&JoinGroup::label, 4096), at_most(&JoinGroup::names, most_ranks),
                                     varint(&JoinGroup::rank), &JoinGroup::member};
};
struct Formed {
  std::uint64_t group = 0;
  std::vector<MemberRecord> members;
  static constexpr std::tuple fields{&Formed::group, at_most(&Formed::members, most_ranks)};
};
/// To rank 0: asks for the board. The reply has one shared buffer.
struct GetBoard {
  static constexpr std::uint8_t tag = 2;
  std::uint64_t group = 0;
  static constexpr std::tuple fields{&GetBoard::group};
};
/// To every other member, so that a session stands between each two. The reply is empty.
struct Greet {
  static constexpr std::uint8_t tag = 3;
  std::uint64_t group = 0;
  static constexpr std::tuple fields{&Greet::group};
};
/// To rank 0: the member is ready, and says what it can use. The reply is a Decision, when all members are ready.
struct ReadyForGroup {
  static constexpr std::uint8_t tag = 4;
  std::uint64_t group = 0;
  std::uint32_t rank = 0;
  std::string no_board;   // why it has not mapped the board; "": it has
  std::string no_memory;  // why it cannot read the memory of every other member
  static constexpr std::tuple fields{&ReadyForGroup::group, varint(&ReadyForGroup::rank),
                                     at_most(&ReadyForGroup::no_board, 4096), at_most(&ReadyForGroup::no_memory, 4096)};
};
struct Decision {
  std::string no_board;
  std::string no_memory;
  std::string crossings;  // measured at rank 0, for parse_crossings(); "": those of the table
  static constexpr std::tuple fields{at_most(&Decision::no_board, 8192), at_most(&Decision::no_memory, 8192),
                                     at_most(&Decision::crossings, 8192)};
};

/// Data of a step, or of a send: in the message's buffer if it is small. The receiver fetches more.
struct Posted {
  static constexpr std::uint8_t tag = 5;
  std::uint64_t group = 0;
  std::uint32_t from = 0;
  bool by_tag = false;         // a send, whose `number` is its tag; else a step
  std::uint64_t number = 0;    // of the step, or the tag
  std::uint64_t sequence = 0;  // of the send among those of its tag to this receiver, from 0
  Fingerprint fingerprint;
  std::uint64_t bytes = 0;
  static constexpr std::tuple fields{&Posted::group,        varint(&Posted::from),     &Posted::by_tag,
                                     &Posted::number,       varint(&Posted::sequence), &Posted::fingerprint,
                                     varint(&Posted::bytes)};
};
/// Asks a rank for the data of a step, which it may post later, or of a send that it has announced. The reply has one
/// buffer.
struct FetchData {
  static constexpr std::uint8_t tag = 6;
  std::uint64_t group = 0;
  bool by_tag = false;
  std::uint64_t number = 0;
  std::uint64_t sequence = 0;
  static constexpr std::tuple fields{&FetchData::group, &FetchData::by_tag, &FetchData::number,
                                     varint(&FetchData::sequence)};
};
/// The group has failed at a member and is of no more use; or the member has left it.
struct GroupFailed {
  static constexpr std::uint8_t tag = 7;
  std::uint64_t group = 0;
  std::uint8_t code = 0;
  std::string text;
  std::uint64_t after = 0;  // of a member that has left: 1 more than the operations that it has ended; else 0
  static constexpr std::tuple fields{&GroupFailed::group, &GroupFailed::code, at_most(&GroupFailed::text, 8192),
                                     varint(&GroupFailed::after)};
};
/// Hands over a region of the sender, as the message's shared buffer. Announcements name it by `region` from then on.
struct MapRegion {
  static constexpr std::uint8_t tag = 8;
  std::uint64_t group = 0;
  std::uint32_t from = 0;
  std::uint64_t region = 0;
  static constexpr std::tuple fields{&MapRegion::group, varint(&MapRegion::from), &MapRegion::region};
};
/// The sender's region has ended.
struct UnmapRegion {
  static constexpr std::uint8_t tag = 9;
  std::uint64_t group = 0;
  std::uint32_t from = 0;
  std::uint64_t region = 0;
  static constexpr std::tuple fields{&UnmapRegion::group, varint(&UnmapRegion::from), &UnmapRegion::region};
};

/// To itself: runs the operations of a group that wait, on a thread of the pool.
struct RunOperations {
  static constexpr std::uint8_t tag = 10;
  std::uint64_t group = 0;
  static constexpr std::tuple fields{&RunOperations::group};
};

/// Asks how far a member is, when an operation is late. The reply is a Progress.
struct GetProgress {
  static constexpr std::uint8_t tag = 11;
  std::uint64_t group = 0;
  static constexpr std::tuple fields{&GetProgress::group};
};
struct Progress {
  std::uint64_t step = 0;  // the last one that the member has begun
  static constexpr std::tuple fields{&Progress::step};
};

/// To the sender of announced data: no receiver takes it, because its dtype or size is another than expected.
struct RefuseData {
  static constexpr std::uint8_t tag = 12;
  std::uint64_t group = 0;
  std::uint64_t number = 0;  // the tag of the send
  std::uint64_t sequence = 0;
  std::string text;  // why
  static constexpr std::tuple fields{&RefuseData::group, &RefuseData::number, varint(&RefuseData::sequence),
                                     at_most(&RefuseData::text, 8192)};
};

/// To the sender of a send's data, which this rank has fetched: the fetch has ended.
struct TakenData {
  static constexpr std::uint8_t tag = 13;
  std::uint64_t group = 0;
  std::uint64_t number = 0;  // the tag of the send
  std::uint64_t sequence = 0;
  static constexpr std::tuple fields{&TakenData::group, &TakenData::number, varint(&TakenData::sequence)};
};

using GroupMessage = std::variant<JoinGroup, GetBoard, Greet, ReadyForGroup, Posted, FetchData, GroupFailed, MapRegion,
                                  UnmapRegion, RunOperations, GetProgress, RefuseData, TakenData>;

/// What a rank tells all others at the beginning of a step without a board: its call, and its bytes if they are few.
struct Told {
  /// More bytes come as messages of their own.
  static constexpr std::size_t most_bytes = std::size_t{32} << 10;
  Fingerprint fingerprint;
  bool posted = false;  // the bytes come as messages of their own
  std::vector<std::uint64_t>
      sizes;       // how many bytes each rank takes; one entry: all take the same bytes; none: nothing
  ByteView bytes;  // unless they are posted: those for each rank, in order
  static constexpr std::tuple fields{&Told::fingerprint, &Told::posted, at_most(&Told::sizes, most_ranks),
                                     at_most(&Told::bytes, most_bytes)};
};
/// What some ranks have told, each a Told: the sender, and those that follow it.
struct TellAll {
  std::vector<ByteView> told;
  static constexpr std::tuple fields{at_most(&TellAll::told, most_ranks)};
};

}  // namespace tensorferry::collectives
