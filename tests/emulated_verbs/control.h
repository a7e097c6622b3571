/// What a test tells the emulated cards to do. Finds the functions in the library that TENSORFERRY_LIBIBVERBS names.
///
/// Each process is a host of its own: taking a port down here does not take down the peer's.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <type_traits>

namespace tensorferry::emulated_verbs {

struct Controls {
  /// Takes a port of this process down (0) or up (1). Queue pairs notice by retries that run out; the context gets
  /// IBV_EVENT_PORT_ERR or IBV_EVENT_PORT_ACTIVE. Returns 0, or ENODEV.
  int (*set_port)(const char* device, int port, int up);
  /// Makes the registration with this lkey or rkey invalid, as if the card had lost it. Returns 0, or ENOENT.
  int (*revoke)(std::uint32_t key);
  /// Moves a queue pair of this process to the state ERR, with IBV_EVENT_QP_FATAL. Returns 0, or ENOENT.
  int (*fail_queue_pair)(std::uint32_t number);
  /// Does so with `most` queue pairs of this process that have not failed, or with all if there are fewer. Returns with
  /// how many.
  std::size_t (*fail_queue_pairs)(std::size_t most);
  /// Registrations of more bytes than this in all fail with ENOMEM.
  void (*limit_memory)(std::uint64_t bytes);
  /// While on, transfers of this process stop after their first 64 KiB, on both sides.
  void (*stall)(int on);
  /// Returns how many transfers of this process stall() holds now.
  std::size_t (*stalled)();
  /// Returns how often this process has asked for the state of a port that was down.
  std::size_t (*asked_while_down)();
  /// Returns how many bytes are registered now.
  std::uint64_t (*registered_bytes)();
  /// Returns how many queue pairs exist now.
  std::size_t (*queue_pairs)();
  /// Returns how many queue pairs this process has made so far.
  std::size_t (*queue_pairs_made)();
};

/// Returns the functions; all are null if the emulated cards are not the library that is loaded.
inline Controls controls() {
  Controls found{};
  const char* const path = std::getenv("TENSORFERRY_LIBIBVERBS");
  void* const library = path == nullptr ? nullptr : ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return found;
  const auto load = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
  };
  load(found.set_port, "emulated_verbs_set_port");
  load(found.revoke, "emulated_verbs_revoke");
  load(found.fail_queue_pair, "emulated_verbs_fail_queue_pair");
  load(found.fail_queue_pairs, "emulated_verbs_fail_queue_pairs");
  load(found.limit_memory, "emulated_verbs_limit_memory");
  load(found.stall, "emulated_verbs_stall");
  load(found.stalled, "emulated_verbs_stalled");
  load(found.asked_while_down, "emulated_verbs_asked_while_down");
  load(found.registered_bytes, "emulated_verbs_registered_bytes");
  load(found.queue_pairs, "emulated_verbs_queue_pairs");
  load(found.queue_pairs_made, "emulated_verbs_queue_pairs_made");
  return found;
}

}  // namespace tensorferry::emulated_verbs
