#include "rpc/collectives/tuning.h"

#include <charconv>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <utility>

#include "base/environment.h"
#include "base/log.h"
#include "base/text.h"
#include "rpc/collectives/choose.h"
#include "rpc/collectives/tuned_inputs.h"

namespace tensorferry::collectives {
namespace {

/// Reads JSON (RFC 8259) from front to back. Escapes of texts other than \" \\ and \/ are refused, because no text of
/// the file needs them. After an error every function returns false.
class JsonReader final {
 public:
  explicit JsonReader(std::string_view text) : rest_(text) {}
  [[nodiscard]] bool at_end() {
    skip_space();
    return rest_.empty();
  }

  bool text(std::string& out) {
    out.clear();
    if (!take('"')) return false;
    while (!rest_.empty() && rest_.front() != '"') {
      auto next = pop();
      if (static_cast<unsigned char>(next) < ' ') return fail();
      if (next == '\\') {
        next = rest_.empty() ? '\0' : pop();
        if (next != '"' && next != '\\' && next != '/') return fail();
      }
      out += next;
    }
    if (rest_.empty()) return fail();
    pop();
    return true;
  }

  bool number(std::size_t& out) {
    skip_space();
    const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), out);
    if (error != std::errc()) return fail();
    rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
    return true;
  }

  /// Calls `member` with each name; it reads the value.
  bool object(const std::function<bool(const std::string& name)>& member) {
    return sequence('{', '}', [&] {
      std::string name;
      return text(name) && take(':') && member(name);
    });
  }
  bool list(const std::function<bool()>& element) { return sequence('[', ']', element); }

  /// Reads any value.
  bool skip() {
    if (++depth_ > most_depth) return fail();
    skip_space();
    bool good = false;
    std::string ignored;
    if (peek() == '"') {
      good = text(ignored);
    } else if (peek() == '{') {
      good = object([this](const std::string&) { return skip(); });
    } else if (peek() == '[') {
      good = list([this] { return skip(); });
    } else {  // a number, true, false or null
      const auto end = rest_.find_first_not_of("+-.0123456789aefnlrstuE");
      good = end != 0 && !rest_.empty();
      rest_.remove_prefix(std::min(end, rest_.size()));
    }
    --depth_;
    return good || fail();
  }

 private:
  static constexpr int most_depth = 32;
  void skip_space() {
    const auto end = rest_.find_first_not_of(" \t\r\n");
    rest_.remove_prefix(end == std::string_view::npos ? rest_.size() : end);
  }
  [[nodiscard]] char peek() const { return rest_.empty() ? '\0' : rest_.front(); }
  char pop() {
    const auto out = rest_.front();
    rest_.remove_prefix(1);
    return out;
  }
  bool take(char wanted) {
    skip_space();
    if (peek() != wanted || rest_.empty()) return fail();
    pop();
    return true;
  }
  bool sequence(char open, char close, const std::function<bool()>& element) {
    if (!take(open)) return false;
    skip_space();
    if (peek() == close) return take(close);
    for (;;) {
      if (!element()) return fail();
      skip_space();
      if (peek() == close) return take(close);
      if (!take(',')) return false;
    }
  }
  bool fail() {
    rest_ = {};
    return false;
  }

  std::string_view rest_;
  int depth_ = 0;
};

struct Measured {
  TuningKey key;
  std::string crossings;
  std::size_t mapped_from = never_mapped;
};

/// Reads one entry of "measured".
bool read_entry(JsonReader& json, Measured& entry) {
  return json.object([&](const std::string& name) {
    if (name == "topology") return json.text(entry.key.topology);
    if (name == "device") return json.text(entry.key.device);
    if (name == "ranks") return json.number(entry.key.ranks);
    if (name == "version") return json.text(entry.key.version);
    if (name == "mapped_from") return json.number(entry.mapped_from);
    if (name != "crossings") return json.skip();
    return json.object([&](const std::string& operation) {
      std::string rows;
      if (!json.text(rows)) return false;
      entry.crossings += formatted("{}{}={}", entry.crossings.empty() ? "" : ",", operation, rows);
      return true;
    });
  });
}

/// Finds the last entry for the key; one without measurements if there is none.
Result<Measured> find_entry(std::string_view json, const TuningKey& key) {
  JsonReader reader(json);
  Measured out;
  const bool good = reader.object([&](const std::string& name) {
    if (name != "measured") return reader.skip();
    return reader.list([&] {
      Measured found;
      if (!read_entry(reader, found)) return false;
      if (found.key == key) out = std::move(found);
      return true;
    });
  });
  if (!good || !reader.at_end())
    return Status(Code::invalid_argument, "the file is not the JSON of `tensorferry tune`");
  return out;
}

/// Returns the text of the file; empty if there is none.
std::string read_tuning_file() {
  const auto path = tuning_file();
  std::ifstream file(path, std::ios::binary);
  if (path.empty() || !file) return {};
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown processor";
}

}  // namespace

TuningKey host_tuning_key(std::size_t ranks) { return {"one host", processor(), ranks, TENSORFERRY_VERSION}; }
TuningKey gpu_tuning_key(std::string_view topology, std::string device, std::size_t ranks) {
  return {std::string(topology), std::move(device), ranks, TENSORFERRY_VERSION};
}

std::string tuning_file() {
  if (const auto own = environment::tuning.value(); !own.empty()) return std::string(own);
  std::string folder(environment::value_of("XDG_CONFIG_HOME"));
  if (folder.empty() || folder.front() != '/') {
    const auto home = environment::value_of("HOME");
    if (home.empty()) return {};
    folder = std::string(home) + "/.config";
  }
  return folder + "/tensorferry/tuning.json";
}

std::string tuned_for(const TuningKey& key) {
  const auto json = read_tuning_file();
  if (json.empty()) return {};
  auto found = find_crossings(json, key);
  if (found.ok()) {
    const auto parsed = parse_crossings(*found);
    if (parsed.ok()) return *std::move(found);
    found = parsed.status();
  }
  log_warning(
      formatted("the crossings of collective operations in {} are not used: {}. Run `tensorferry tune` again, "
                "or delete the file",
                tuning_file(), found.status().what()));
  return {};
}

Result<std::string> find_crossings(std::string_view json, const TuningKey& key) {
  auto found = find_entry(json, key);
  if (!found.ok()) return found.status();
  return std::move(found->crossings);
}

Result<std::size_t> find_mapped_from(std::string_view json, const TuningKey& key) {
  const auto found = find_entry(json, key);
  if (!found.ok()) return found.status();
  return found->mapped_from;
}

std::size_t inputs_mapped_from(const TuningKey& key) {
  const auto json = read_tuning_file();
  const auto found = json.empty() ? Result<std::size_t>(never_mapped) : find_mapped_from(json, key);
  return found.ok() ? *found : never_mapped;  // tuned_for() logs what is wrong with the file
}

}  // namespace tensorferry::collectives
