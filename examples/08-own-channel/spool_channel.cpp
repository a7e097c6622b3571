#include "spool_channel.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <map>
#include <mutex>
#include <utility>

using namespace tensorferry;

namespace {

constexpr std::uint8_t version = 1;  // of the ticket and of the control messages

/// The first byte of a control message.
enum class Kind : std::uint8_t {
  open = 1,    // + u64: a random word, the first bytes of the sender's file; + sized: the file's name in the folder
  answer = 2,  // + sized: empty if the sender of the answer has read that word there, else why it has not
};

bool write_all(int file, ByteView bytes, std::uint64_t at) {
  while (!bytes.empty()) {
    const auto written = ::pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(at));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    at += static_cast<std::uint64_t>(written);
  }
  return true;
}

bool read_all(int file, std::byte* to, std::uint64_t bytes, std::uint64_t at) {
  while (bytes > 0) {
    const auto got = ::pread(file, to, bytes, static_cast<off_t>(at));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;  // an error, or the end of the file
    to += got, at += static_cast<std::uint64_t>(got), bytes -= static_cast<std::uint64_t>(got);
  }
  return true;
}

class SpoolChannel final : public Channel {
 public:
  SpoolChannel(Wire& wire, std::string folder, std::uint64_t most_bytes)
      : wire_(wire), folder_(std::move(folder)), most_bytes_(most_bytes) {
    begin_probe();
  }
  ~SpoolChannel() override { remove_name(); }

  // The sender's side. The bytes are copied into the file here, so the source is released at once. The ticket still
  // asks for an acknowledgement: it says when their place in the file is free.
  Offer offer(const Buffer& buffer, Sharing sharing, Outgoing&, Completion released) override {
    if (sharing == Sharing::shared) return Refusal{"spool copies bytes and cannot share them"};
    if (buffer.device.type != DeviceType::cpu) return Refusal{"spool carries CPU memory"};
    if (buffer.bytes != 0 && buffer.data == nullptr) return Refusal{"the buffer has a size but no address"};
    const auto place = reserve_place(buffer.bytes);
    if (!place) return Refusal{std::string(place.status().what()), /*passing=*/true};
    if (!write_all(mine_.get(), ByteView(buffer.data, buffer.bytes), *place)) {
      free_place(*place);
      return Refusal{"cannot write to a file in " + folder_};
    }
    complete(std::move(released), {});
    Ticket ticket{.bytes = buffer.bytes, .opaque = {}};
    Writer(ticket.opaque).put(*place);
    ticket.acknowledge = buffer.bytes != 0;
    return ticket;
  }
  void acknowledged(const Ticket& ticket) override { free_place(Reader(ticket.opaque).get<std::uint64_t>()); }
  void withdraw(const Ticket& ticket) override { free_place(Reader(ticket.opaque).get<std::uint64_t>()); }

  // The receiver's side.
  void pull(const Ticket& ticket, Sink& sink, Completion landed, Completion consumed) override {
    const auto status = receive(ticket, sink);
    complete(std::move(landed), status);
    complete(std::move(consumed), status);  // pread has returned: nothing reads the place any more
  }
  void discard(const Ticket&) override {}  // holds nothing; the agent sends the acknowledgement

  // A message that does not parse is ignored: then the probe does not end, and the pair carries nothing.
  void control(ByteView message, Descriptors) override {
    Reader in(message);
    const Kind kind{in.get<std::uint8_t>()};
    const auto word = kind == Kind::open ? in.get<std::uint64_t>() : 0;
    const std::string text(in.text());
    if (in.failed() || !in.empty()) return;
    if (kind == Kind::open) {
      Bytes answer;
      Writer out(answer);
      out.put(Kind::answer);
      out.sized(open_theirs(text, word));
      wire_.control(std::move(answer), {});
    } else if (kind == Kind::answer && remove_name()) {
      wire_.ready(text.empty() ? Status() : Status(Code::channel_unavailable, std::string(wire_.peer()) + ": " + text));
    }
  }

  /// Completes nothing, because the channel keeps no completion: offer() and pull() run theirs before they return.
  void close(Status status) noexcept override {
    const std::lock_guard lock(mutex_);
    if (ended_.ok()) ended_ = std::move(status);
  }

 private:
  /// Makes this end's file and asks the other end to read the word in it.
  void begin_probe() {
    std::string path = folder_ + "/spool-XXXXXX";
    mine_ = FileDescriptor(::mkostemp(path.data(), O_CLOEXEC));
    Bytes word(word_bytes);
    if (!mine_) return wire_.ready({Code::channel_unavailable, "cannot make a file in " + folder_});
    path_ = path;
    if (::getrandom(word.data(), word.size(), 0) != static_cast<ssize_t>(word.size()) ||
        !write_all(mine_.get(), word, 0)) {
      return wire_.ready({Code::channel_unavailable, "cannot write to a file in " + folder_});
    }
    Bytes message;
    Writer out(message);
    out.put(Kind::open);
    out.raw(word);
    out.sized(path_.substr(folder_.size() + 1));
    wire_.control(std::move(message), {});
  }

  /// Opens the file that the peer names and returns "", or why this end cannot read it. The name is the peer's: it must
  /// not lead out of the folder, nor to a device or a pipe, on which a read could wait.
  std::string open_theirs(const std::string& name, std::uint64_t word) {
    if (name.find('/') != std::string::npos) return "the name of the file has a slash";
    FileDescriptor file(::open((folder_ + "/" + name).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!file) return "there is no such file in its folder";
    struct stat status {};
    std::uint64_t found = 0;
    if (::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return "that is no regular file";
    if (!read_all(file.get(), reinterpret_cast<std::byte*>(&found), sizeof found, 0) || found != word)
      return "the file of that name is another one";
    const std::lock_guard lock(mutex_);
    if (theirs_) return "a file is open already";  // pull() may be reading it, so it stays
    theirs_ = std::move(file);
    return {};
  }

  Status receive(const Ticket& ticket, Sink& sink) {
    int file = -1;
    {
      const std::lock_guard lock(mutex_);
      if (!ended_.ok()) return ended_;
      file = theirs_.get();
    }
    // Everything here is the peer's: a ticket that names bytes outside the file is refused before memory is reserved.
    Reader in(ticket.opaque);
    const auto at = in.get<std::uint64_t>();
    struct stat status {};
    if (in.failed() || !in.empty() || file < 0 || ::fstat(file, &status) != 0 ||
        at > static_cast<std::uint64_t>(status.st_size) ||
        ticket.bytes > static_cast<std::uint64_t>(status.st_size) - at) {
      return {Code::protocol_error, formatted("{} sent a ticket that spool cannot read", wire_.peer())};
    }
    const auto memory = sink.reserve(ticket.bytes);
    if (!memory) return {Code::resource_exhausted, formatted("no memory for {} bytes", ticket.bytes)};
    if (!read_all(file, memory->data, ticket.bytes, at))
      return {Code::connection_lost, formatted("cannot read the file of {}", wire_.peer())};
    return {};
  }

  /// Returns a place for `bytes` bytes in this end's file. Places follow one another, and begin anew when all are free.
  Result<std::uint64_t> reserve_place(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (!ended_.ok()) return ended_;
    if (bytes == 0) return std::uint64_t{0};  // an empty buffer needs no place, and may not lie beyond the file's end
    if (bytes > most_bytes_ - used_) return Status(Code::resource_exhausted, "the file holds as much as it may");
    if (places_.empty()) next_ = word_bytes;
    const auto at = next_;
    next_ += bytes;
    used_ += bytes;
    places_.emplace(at, bytes);
    return at;
  }

  void free_place(std::uint64_t at) {
    const std::lock_guard lock(mutex_);
    const auto place = places_.find(at);
    if (place == places_.end()) return;
    used_ -= place->second;
    // Gives the blocks back, under the lock, before the place can be used again. A file system that cannot punch holes
    // keeps them until the channel ends.
    (void)::fallocate(mine_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(at),
                      static_cast<off_t>(place->second));
    places_.erase(place);
  }

  /// Returns false if the file has no name, because it has lost it already or could not be made.
  bool remove_name() {
    const std::lock_guard lock(mutex_);
    return !path_.empty() && ::unlink(std::exchange(path_, {}).c_str()) == 0;
  }

  static constexpr std::uint64_t word_bytes = sizeof(std::uint64_t);  // the places begin behind the word

  Wire& wire_;
  const std::string folder_;
  const std::uint64_t most_bytes_;
  FileDescriptor mine_;                            // this end writes, the other end reads; set by the constructor
  std::mutex mutex_;                               // guards the members below
  FileDescriptor theirs_;                          // the other way round
  std::string path_;                               // of this end's file, until it has no name any more
  std::map<std::uint64_t, std::uint64_t> places_;  // of open tickets: offset, bytes
  std::uint64_t next_ = word_bytes;
  std::uint64_t used_ = 0;
  Status ended_;  // not ok: the link has ended
};

}  // namespace

std::variant<Bytes, Refusal> SpoolDriver::descriptor(Device device) {
  if (device.type != DeviceType::cpu) return Refusal{"spool carries CPU memory"};
  return Bytes{std::byte{version}};
}

std::optional<Refusal> SpoolDriver::reaches(ByteView mine, ByteView theirs) {
  if (text_of(mine) == text_of(theirs)) return std::nullopt;
  return Refusal{"the peer has another version of spool"};
}

std::unique_ptr<Channel> SpoolDriver::open(Wire& wire, DevicePair) {
  return std::make_unique<SpoolChannel>(wire, folder_, most_bytes_);
}
