#include "rpc/cpp/reading.h"

#include <algorithm>
#include <utility>

#include "rpc/cpp/failures.h"
#include "tensorferry/errors.h"

namespace tensorferry::detail {
namespace {

constexpr std::size_t budget_a_byte = 4;
constexpr std::size_t least_budget = 100'000;
constexpr std::size_t bytes_a_step = 64;
constexpr std::size_t shown_values = 8;

/// Searches the next value of `in` for the value numbered `number`, and stops at its beginning. Returns its tag;
/// Tag::invalid if it is not inside. Takes one from `budget` for each value passed.
Tag find_in(Decoder& in, std::uint32_t number, std::size_t& budget) {
  const auto tag = in.next();
  if (tag == Tag::invalid || budget == 0) return Tag::invalid;
  --budget;
  if (in.number() == number) return tag;
  const auto values = in.inside(tag);
  if (!values) return Tag::invalid;
  for (auto left = *values; left != 0; --left) {
    const auto found = find_in(in, number, budget);
    if (found != Tag::invalid || in.failed() || budget == 0) return found;
  }
  in.leave();
  return Tag::invalid;
}

std::string describe_inside(Decoder& in, Tag tag, std::string name, std::size_t depth) {
  auto left = in.inside(tag).value_or(0);
  const bool shown = tag == Tag::tuple && depth == 0;
  for (std::size_t i = 0; left != 0 && !in.failed(); --left, ++i) {
    if (!shown || i >= shown_values) {
      in.skip();
      if (shown && i == shown_values) name += ", ...";
      continue;
    }
    name += (i == 0 ? "[" : ", ") + describe_value(in, depth + 1);
    if (left == 1) name += "]";
  }
  in.leave();
  return name;
}

std::string name_of_record(const Decoder& in) {
  const auto name = in.record_name();
  return name.empty() ? "record" : std::string(name.substr(name.rfind(':') + 1));
}

}  // namespace

std::string describe_value(Decoder& in, std::size_t depth) {
  switch (const auto tag = in.next()) {
    case Tag::none:
      return "None";
    case Tag::true_:
    case Tag::false_:
      return "bool";
    case Tag::integer:
    case Tag::big_integer:
      return "int";
    case Tag::real:
      return "float";
    case Tag::complex:
      return "complex";
    case Tag::text:
      return "str";
    case Tag::bytes:
      return "bytes";
    case Tag::bytearray:
      return "bytearray";
    case Tag::tuple:
      return describe_inside(in, tag, "tuple", depth);
    case Tag::list:
      return describe_inside(in, tag, "list", depth);
    case Tag::dict:
      return describe_inside(in, tag, "dict", depth);
    case Tag::set:
    case Tag::frozenset:
      return describe_inside(in, tag, "set", depth);
    case Tag::tensor:
      return std::string(name_of(in.tensor().dtype)) + " tensor";
    case Tag::sparse:
      return describe_inside(in, tag, "sparse tensor", depth);
    case Tag::array:
      return "numpy array of " + in.array().dtype;
    case Tag::pickled:
      return describe_inside(in, tag, "an object that only Python can read (a pickle)", depth);
    case Tag::reference:
      return "reference";
    case Tag::record:
      return describe_inside(in, tag, name_of_record(in), depth);
    case Tag::again:
      return "the same again";
    case Tag::invalid:
      return "?";
    default:
      return "a constant of torch's";
  }
}

std::string describe_arguments(const Received& message) {
  Decoder in(message.payload, message.buffers);
  const auto head = read_request(in);
  if (head.packed) return "(objects that only Python can read: a pickle)";
  std::string out = "(";
  const auto add = [&](std::string_view name) {
    out += out.size() == 1 ? "" : ", ";
    if (!name.empty()) out.append(name).append("=");
    out += describe_value(in);
  };
  for (std::size_t i = 0; i < head.positional && !in.failed(); ++i) {
    if (i < 2 * shown_values) {
      add({});
    } else {
      in.skip();
    }
  }
  if (head.positional > 2 * shown_values) out += ", ...";
  if (in.failed()) return out + ")";
  for (auto left = read_keywords(in); left != 0 && !in.failed(); --left) add(in.raw_text().substr(0, 256));
  return out + ")";
}

Reading::Reading(const Received& message, AgentCore* core)
    : message_(message),
      core_(core),
      main_(message.payload, message.buffers),
      budget_(least_budget + budget_a_byte * message.payload.size()) {}

RequestHead Reading::request() {
  is_request_ = true;
  head_ = read_request(main_);
  if (main_.failed()) broken();
  return head_;
}

ReplyKind Reading::reply() {
  const auto kind = read_reply(main_);
  if (main_.failed()) broken();
  return kind;
}

const std::vector<std::string_view>& Reading::keywords() {
  if (std::exchange(keywords_read_, true)) return keywords_;
  drop_finished();
  for (auto left = read_keywords(main_); left != 0 && !main_.failed(); --left) {
    keywords_.push_back(main_.raw_text());
    main_.skip();
  }
  if (main_.failed()) broken();
  return keywords_;
}

void Reading::go_to_keyword(std::size_t index) {
  drop_finished();
  auto in = at_beginning();
  for (auto left = head_.positional; left != 0; --left) in->skip();
  read_keywords(*in);
  for (; index != 0; --index) {
    in->raw_text();
    in->skip();
  }
  in->raw_text();
  again_.push_back({std::move(in)});
}

void Reading::finish() {
  if (is_request_) keywords();
  if (!main_.finish().ok()) broken();
}

std::unique_ptr<Decoder> Reading::at_beginning() const {
  auto in = std::make_unique<Decoder>(message_.payload, message_.buffers);
  if (is_request_) {
    read_request(*in);
  } else {
    read_reply(*in);
  }
  return in;
}

void Reading::drop_finished() {
  while (!again_.empty() && again_.back().delivered && again_.back().open == 0) again_.pop_back();
}

Tag Reading::peek() {
  if (peeked_) return tag_;
  drop_finished();
  tag_ = current().next();
  if (tag_ == Tag::again) {
    if (!again_.empty()) again_.back().delivered = true;
    tag_ = seek(current().referred());
  }
  if (tag_ == Tag::invalid) broken();
  if (!again_.empty()) {
    again_.back().delivered = true;
    if (current().inside(tag_)) ++again_.back().open;
    charge(0);
  }
  peeked_ = true;
  return tag_;
}

Tag Reading::seek(std::uint32_t number) {
  if (again_.size() >= max_depth) throw InvalidArgument("a value that holds itself cannot be read here");
  auto in = at_beginning();
  auto left = is_request_ ? head_.positional : 1;
  auto found = Tag::invalid;
  for (; left != 0 && found == Tag::invalid && !in->failed(); --left) found = find_in(*in, number, budget_);
  if (found == Tag::invalid && is_request_ && !in->failed()) {
    for (auto keywords = read_keywords(*in); keywords != 0 && found == Tag::invalid && !in->failed(); --keywords) {
      in->raw_text();
      found = find_in(*in, number, budget_);
    }
  }
  if (found == Tag::invalid) throw InvalidArgument("the message holds the same objects too many times");
  again_.push_back({std::move(in)});
  return found;
}

void Reading::charge(std::size_t bytes) {
  const auto steps = again_.empty() ? 0 : 1 + bytes / bytes_a_step;
  if (steps > budget_) throw InvalidArgument("the message holds the same objects too many times");
  budget_ -= steps;
}

void Reading::leave() {
  drop_finished();
  current().leave();
  if (!again_.empty() && again_.back().open != 0) --again_.back().open;
}

void Reading::broken() { throw_status(current().failed() ? current().status() : main_.status()); }

void Reading::mismatch(const std::string& expected) {
  if (wanted_ == nullptr) throw Mismatch();
  const auto in = at_beginning();
  const auto came = describe_value(*in);
  const auto wanted = wanted_();
  throw InvalidArgument("\"" + std::string(function_) + "\" on \"" + std::string(peer_) + "\" returned " + came +
                        ", not " + wanted + (expected == wanted ? "" : " (in it: not " + expected + ")"));
}

}  // namespace tensorferry::detail
