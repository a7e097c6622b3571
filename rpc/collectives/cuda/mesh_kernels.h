/// The kernels that reduce over a hybrid cube mesh (gpu_topology.h): two quads of GPUs in which each two are joined,
/// and a link from each GPU to its partner in the other quad. A rank reads and signals its neighbours alone: the three
/// other ranks of its quad, and its partner. NVRTC compiles this file at run time (compiler.h). The emulated driver of
/// the tests compiles it with the host's compiler.
///
/// Partners relay for one another: a rank copies the inputs of its quad to its own half, where its partner reads them.
/// So every rank reduces the inputs themselves, in the order of the ranks, and the results have the bits that all other
/// algorithms give. Sums of quads would halve the bytes between the quads, but round in another order.
///
/// A launch goes like this:
///
/// - In one shot, each rank copies its input to the slot of its corner in its half, and meets its quad. It copies the
///   inputs of its quad to the other slots, and meets its partner. It then reduces its own four slots and those of its
///   partner.
/// - In two shots, each rank reduces one of eight shares. It copies its input, meets its quad, copies what the share of
///   its partner needs from the quad, and meets its partner. It reduces its share: the inputs of its quad where they
///   are, those of the other quad from its partner's slots. It meets its partner, takes its share, and meets its quad.
///   Then each rank has the results of two shares in its slot, and the others of the quad take them.
///
/// Blocks, epochs and halves are used as in flag_kernels.h, with which launches may alternate. Every launch meets each
/// neighbour at least once, which are all ranks that read this one's halves.
#pragma once

#include "rpc/collectives/cuda/flag_kernels.h"
#include "rpc/collectives/cuda/mesh_arguments.h"

namespace tensorferry::collectives::cuda {
namespace {

/// Returns the slot of a corner in this launch's half of a neighbour, or of this rank.
template <class T>
inline T* mesh_slot(const MeshArguments& a, unsigned rank, unsigned corner, unsigned epoch) {
  return slot_for<T>(a.flags, rank, corner, epoch);
}

inline bool meet_quad(const MeshArguments& a, const ThreadBlock& block, unsigned epoch) {
  return block.meet_some(a.flags, epoch, a.quad, quad_ranks);
}
inline bool meet_partner(const MeshArguments& a, const ThreadBlock& block, unsigned epoch) {
  return block.meet_some(a.flags, epoch, &a.partner, 1);
}

/// `ranks` is 8, which the compiler knows.
template <class T, class Combination>
inline void reduce_over_mesh_in_one_shot(const MeshArguments& a, unsigned ranks, const ThreadBlock& block) {
  const FlagArguments& f = a.flags;
  const unsigned epoch = f.epochs[block.index()];
  const auto own = [&](unsigned corner) { return mesh_slot<T>(a, f.rank, corner, epoch); };
  block.each([&](std::size_t thread, std::size_t threads) {
    copy_elements(own(a.corner), static_cast<const T*>(f.input), f.count, thread, threads);
  });
  if (!meet_quad(a, block, epoch + 1)) return;
  block.each([&](std::size_t thread, std::size_t threads) {
    for (unsigned i = 1; i < quad_ranks; ++i) {  // each rank begins with another one
      const unsigned corner = (a.corner + i) % quad_ranks;
      copy_elements(own(corner), static_cast<const T*>(mesh_slot<T>(a, a.quad[corner], corner, epoch)), f.count, thread,
                    threads);
    }
  });
  if (!meet_partner(a, block, epoch + 2)) return;
  if (f.output != nullptr) {
    const auto source = [&](unsigned rank) {
      return mesh_slot<T>(a, a.near[rank] ? f.rank : a.partner, a.corners[rank], epoch);
    };
    block.each([&](std::size_t thread, std::size_t threads) {
      T* const none = nullptr;
      reduce_elements<T, Combination>(f, ranks, source, 0, f.count, static_cast<T*>(f.output), none, thread, threads);
    });
  }
  block.end(f, epoch + 2);
}

/// The elements that the rank at a corner of a quad reduces for all.
template <class T>
inline ElementShare mesh_share(const MeshArguments& a, unsigned corner, unsigned side) {
  return element_share<T>(a.flags.count, 2 * corner + side, mesh_ranks);
}

/// As reduce_over_mesh_in_one_shot().
template <class T, class Combination>
inline void reduce_over_mesh_in_two_shots(const MeshArguments& a, unsigned ranks, const ThreadBlock& block) {
  const FlagArguments& f = a.flags;
  const unsigned epoch = f.epochs[block.index()];
  const T* const input = static_cast<const T*>(f.input);
  T* const output = static_cast<T*>(f.output);
  T* const slot = mesh_slot<T>(a, f.rank, a.corner, epoch);
  const auto copy_share = [&](T* to, const T* from, const ElementShare& share, std::size_t thread,
                              std::size_t threads) {
    copy_elements(to + share.begin, from + share.begin, share.end - share.begin, thread, threads);
  };
  const auto mine = mesh_share<T>(a, a.corner, a.side), of_partner = mesh_share<T>(a, a.corner, 1 - a.side);

  block.each([&](std::size_t thread, std::size_t threads) {
    for (unsigned i = 0; i < mesh_ranks; ++i) {
      copy_share(slot, input, mesh_share<T>(a, i / 2, i % 2), thread, threads);
    }
  });
  if (!meet_quad(a, block, epoch + 1)) return;

  block.each([&](std::size_t thread, std::size_t threads) {
    for (unsigned i = 1; i < quad_ranks; ++i) {
      const unsigned corner = (a.corner + i) % quad_ranks;
      copy_share(mesh_slot<T>(a, f.rank, corner, epoch), mesh_slot<T>(a, a.quad[corner], corner, epoch), of_partner,
                 thread, threads);
    }
  });
  if (!meet_partner(a, block, epoch + 2)) return;

  const auto source = [&](unsigned rank) {
    return mesh_slot<T>(a, a.near[rank] ? rank : a.partner, a.corners[rank], epoch);
  };
  block.each([&](std::size_t thread, std::size_t threads) {
    T* const copy = output == nullptr ? nullptr : output + mine.begin;
    reduce_elements<T, Combination>(f, ranks, source, mine.begin, mine.end - mine.begin, slot + mine.begin, copy,
                                    thread, threads);
  });
  if (!meet_partner(a, block, epoch + 3)) return;

  block.each([&](std::size_t thread, std::size_t threads) {
    copy_share(slot, mesh_slot<T>(a, a.partner, a.corner, epoch), of_partner, thread, threads);
    // The same thread has copied these elements.
    if (output != nullptr) copy_share(output, slot, of_partner, thread, threads);
  });
  if (!meet_quad(a, block, epoch + 4)) return;

  if (output != nullptr) {
    block.each([&](std::size_t thread, std::size_t threads) {
      for (unsigned i = 2; i < mesh_ranks; ++i) {
        const unsigned corner = (a.corner + i / 2) % quad_ranks;
        copy_share(output, mesh_slot<T>(a, a.quad[corner], corner, epoch), mesh_share<T>(a, corner, i % 2), thread,
                   threads);
      }
    });
  }
  block.end(f, epoch + 6);  // an odd number of pairs of meetings: the next launch uses the other half
}

}  // namespace
}  // namespace tensorferry::collectives::cuda
