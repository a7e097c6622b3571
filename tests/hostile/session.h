/// One link of the hostile peer with the agent: its connections, its ring, and the frames that it sends.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tests/hostile/channels.h"
#include "tests/hostile/connection.h"
#include "tests/hostile/memory.h"
#include "tests/hostile/random.h"
#include "tests/hostile/values.h"
#include "tests/hostile/wire.h"

namespace hostile {

struct Target {
  std::string unix_address, tcp_address, key;
};

/// What one run has done.
struct Score {
  std::uint64_t links = 0, frames = 0, broken = 0, replies = 0, calls_back = 0, in_rings = 0;
};

/// Used by one thread.
class Session {
 public:
  Session(const Target& target, Random& random, Meddler& meddler, Score& score, std::string name);

  /// Dials the agent and greets it. Returns false if that fails.
  bool begin();
  /// Sends up to `frames` frames, then waits until the agent has read them. Returns false if the link has ended.
  bool attack(std::uint64_t frames);

 private:
  struct Next {
    Frame frame;
    std::string bytes;  // instead of the frame, if it is broken
    std::vector<Descriptor> descriptors;
    std::vector<Channels::Sent> buffers;
    std::shared_ptr<SharedPages> pages;
  };
  // grammar.cpp
  Next next();
  Next generated_request();
  Next odd_frame();
  void add_buffers(Frame& frame, std::vector<Channels::Sent>& sent, std::uint64_t count, bool may_trail);
  void add_extensions(Frame& frame);
  std::string payload_for(std::string_view function, const std::vector<Channels::Sent>& buffers);
  void break_it(Next& frame);
  Next answer_to(std::uint64_t call);

  // session.cpp
  std::optional<Connection> dialled(std::uint8_t purpose);
  bool send(Next next);
  bool send_control(Control control);
  void drain(Connection& from, std::chrono::milliseconds for_a_pong);
  void take(Connection::Incoming frame);
  void offer_ring();
  bool push_into_ring(const std::string& frame);

  const Target& target_;
  Random& random_;
  Meddler& meddler_;
  Score& score_;
  Facts facts_;
  Channels channels_{random_, meddler_};
  struct Streams {
    std::optional<Connection> calls, bulk;
    std::uint64_t number = 0;  // of the connection for calls
    bool bulk_is_stuck = false, reads_nothing = false, got_pong = false;
    bool may_be_out_of_step = false;  // the agent may wait for the rest of a broken frame
  };
  Streams streams_;
  struct Ring {
    std::shared_ptr<SharedPages> pages, bell, agents_bell;
    std::uint64_t head = 0;
    std::uint32_t slot = 0;
    bool accepted = false;
  };
  Ring ring_;
  std::vector<std::string> channel_names_;  // the agent's
  std::vector<std::uint64_t> called_;       // calls of the agent's that wait for an answer
  std::uint64_t calls_ = 0;
};

}  // namespace hostile
