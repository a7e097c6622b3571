/// The operations of a group on tensors, for any kind of tensor. Tensors may be strided: an input with gaps is copied
/// first, and an output with gaps gets its elements when the operation ends.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "rpc/collectives/arguments.h"
#include "rpc/collectives/raw_group.h"

namespace tensorferry::collectives {

/// Starts the operations of a RawGroup. Thread-safe as that is. A tensor that the group cannot take is an
/// InvalidArgument here, at this rank alone: Access refuses it, the reduction does not know its dtype, or the operation
/// needs another size.
///
/// Access is a copyable class with these functions for a kind of tensor, whose copies share memory:
///
///     using Tensor = ...;
///     Status check(const Tensor&);                    // Ok, or why a group cannot take it; asked before all others
///     DType dtype(const Tensor&);
///     std::size_t elements(const Tensor&);
///     bool is_dense(const Tensor&);                   // in row-major order without gaps, where the group takes it
///     Tensor dense(const Tensor&);                    // the tensor itself, or a dense copy
///     Tensor empty_like(const Tensor&);               // a dense tensor of the same shape
///     void copy(const Tensor& to, const Tensor& from);
///     std::span<std::byte> bytes(const Tensor&);      // of a dense tensor
///     bool is_same(const Tensor&, const Tensor&);     // the same elements
///     StartOptions arrange(StartOptions);             // adds what the tensors' memory needs: arrived, device, finish
///     bool is_direct();                               // devices do the operation among themselves
template <class Access>
class TensorOperations {
 public:
  using Tensor = typename Access::Tensor;
  using Tensors = std::vector<Tensor>;
  using Started = Result<std::shared_ptr<GroupWork>>;

  explicit TensorOperations(std::shared_ptr<RawGroup> group, Access access = {})
      : group_(std::move(group)), access_(std::move(access)) {}
  [[nodiscard]] RawGroup& raw() const noexcept { return *group_; }
  [[nodiscard]] const Access& access() const noexcept { return access_; }

  Started broadcast(const Tensor& tensor, std::size_t root, StartOptions options = {}) const {
    if (auto status = first_error({access_.check(tensor), check_rank(*group_, root)}); !status.ok()) return status;
    if (auto status = check_algorithm(Operation::broadcast, options); !status.ok()) return status;
    Staged staged(access_);
    const auto bytes = group_->rank() == root ? staged.both(tensor) : staged.output(tensor);
    return group_->broadcast(bytes, access_.dtype(tensor), root, Staged::with(std::move(options), std::move(staged)));
  }

  Started all_reduce(const Tensor& input, const Tensor& output, ReduceOp op, StartOptions options = {}) const {
    if (auto status = first_error({access_.check(input), access_.check(output)}); !status.ok()) return status;
    if (auto status = check_reduced(given(input), given(output), op); !status.ok()) return status;
    if (auto status = check_algorithm(Operation::all_reduce, options, combines_in_turn(input, op)); !status.ok())
      return status;
    Staged staged(access_);
    const bool in_place = access_.is_same(input, output);
    const auto out = in_place ? staged.both(output) : staged.output(output);
    const auto in = in_place ? std::span<const std::byte>(out) : staged.input(input);
    return group_->all_reduce(in, out, access_.dtype(input), std::move(op),
                              Staged::with(std::move(options), std::move(staged)));
  }

  /// Reduces all tensors, which have one dtype, as if they were one.
  Started all_reduce_coalesced(const Tensors& tensors, ReduceOp op, StartOptions options = {}) const {
    if (tensors.empty()) return Status(Code::invalid_argument, "there is no tensor to reduce");
    if (auto status = check_each(tensors); !status.ok()) return status;
    if (auto status = check_coalesced(given(tensors), op); !status.ok()) return status;
    if (tensors.size() == 1) return all_reduce(tensors[0], tensors[0], std::move(op), std::move(options));
    if (auto status = check_algorithm(Operation::all_reduce, options, combines_in_turn(tensors[0], op)); !status.ok())
      return status;
    const auto dtype = access_.dtype(tensors[0]);
    std::size_t size = 0;
    for (const auto& tensor : tensors) size += access_.elements(tensor) * size_of(dtype);
    const std::shared_ptr<std::byte[]> memory(new std::byte[std::max<std::size_t>(size, 1)]);  // uninitialised
    auto* to = memory.get();
    for (const auto& tensor : tensors) {
      const auto dense = access_.dense(tensor);
      to = std::copy_n(access_.bytes(dense).data(), access_.bytes(dense).size(), to);
    }
    options.keep = std::make_shared<std::pair<std::shared_ptr<std::byte[]>, Owner>>(memory, std::move(options.keep));
    options.finish = [memory, tensors, access = access_, then = std::move(options.finish)] {
      const auto* from = memory.get();
      for (const auto& tensor : tensors) {
        const auto dense = access.is_dense(tensor) ? tensor : access.empty_like(tensor);
        const auto bytes = access.bytes(dense);
        std::copy_n(from, bytes.size(), bytes.data());
        from += bytes.size();
        if (!access.is_dense(tensor)) access.copy(tensor, dense);
      }
      if (then) then();
    };
    const std::span joined(memory.get(), size);
    return group_->all_reduce(joined, joined, dtype, std::move(op), std::move(options));
  }

  /// `output` is used at `root` alone.
  Started reduce(const Tensor& input, const Tensor& output, ReduceOp op, std::size_t root,
                 StartOptions options = {}) const {
    if (auto status = first_error({access_.check(input), check_rank(*group_, root)}); !status.ok()) return status;
    const bool takes = group_->rank() == root;
    if (auto status = takes ? access_.check(output) : Status(); !status.ok()) return status;
    if (auto status = check_reduced(given(input), given(takes ? output : input), op); !status.ok()) return status;
    if (auto status = check_algorithm(Operation::reduce, options, combines_in_turn(input, op)); !status.ok())
      return status;
    Staged staged(access_);
    const auto out = takes ? staged.output(output) : std::span<std::byte>();
    const auto in = staged.input(input);
    return group_->reduce(in, out, access_.dtype(input), std::move(op), root,
                          Staged::with(std::move(options), std::move(staged)));
  }

  /// `outputs` has a tensor for each rank. Their sizes may differ if each rank gives as much as the others expect.
  Started all_gather(const Tensor& input, const Tensors& outputs, StartOptions options = {}) const {
    if (auto status = first_error({access_.check(input), check_each(outputs)}); !status.ok()) return status;
    if (auto status = check_gathered(*group_, given(input), given(outputs)); !status.ok()) return status;
    Staged staged(access_);
    auto out = staged.outputs(outputs);
    const auto in = staged.input(input);
    const bool even = std::all_of(out.begin(), out.end(), [&](const auto& each) { return each.size() == in.size(); });
    if (auto status = check_algorithm(Operation::all_gather, options, true, even); !status.ok()) {
      return status;
    }
    return group_->all_gather(in, std::move(out), access_.dtype(input), even,
                              Staged::with(std::move(options), std::move(staged)));
  }

  /// `outputs` is used at `root` alone. Their sizes may differ, except on a device.
  Started gather(const Tensor& input, const Tensors& outputs, std::size_t root, StartOptions options = {}) const {
    if (auto status = first_error({access_.check(input), check_rank(*group_, root)}); !status.ok()) return status;
    Staged staged(access_);
    std::vector<std::span<std::byte>> out;
    if (group_->rank() == root) {
      if (auto status = check_each(outputs); !status.ok()) return status;
      if (auto status = check_gathered(*group_, given(input), given(outputs)); !status.ok()) return status;
      out = staged.outputs(outputs);
    }
    const auto in = staged.input(input);
    return group_->gather(in, std::move(out), access_.dtype(input), root,
                          Staged::with(std::move(options), std::move(staged)));
  }

  /// `inputs` is used at `root` alone. Their sizes may differ, except on a device.
  Started scatter(const Tensors& inputs, const Tensor& output, std::size_t root, StartOptions options = {}) const {
    if (auto status = first_error({access_.check(output), check_rank(*group_, root)}); !status.ok()) return status;
    Staged staged(access_);
    std::vector<std::span<const std::byte>> in;
    if (group_->rank() == root) {
      if (auto status = check_each(inputs); !status.ok()) return status;
      if (auto status = check_scattered(*group_, given(inputs), given(output)); !status.ok()) return status;
      in = staged.inputs(inputs);
    }
    const auto out = staged.output(output);
    return group_->scatter(std::move(in), out, access_.dtype(output), root,
                           Staged::with(std::move(options), std::move(staged)));
  }

  Started reduce_scatter(const Tensors& inputs, const Tensor& output, ReduceOp op, StartOptions options = {}) const {
    if (auto status = first_error({access_.check(output), check_each(inputs)}); !status.ok()) return status;
    if (auto status = check_scattered(*group_, given(inputs), given(output)); !status.ok()) return status;
    if (auto status = check_reduction(op, access_.dtype(output)); !status.ok()) return status;
    Staged staged(access_);
    auto in = staged.inputs(inputs);
    const auto out = staged.output(output);
    const bool even = std::all_of(in.begin(), in.end(), [&](const auto& each) { return each.size() == out.size(); });
    if (auto status = check_algorithm(Operation::reduce_scatter, options, combines_in_turn(output, op), even);
        !status.ok())
      return status;
    return group_->reduce_scatter(std::move(in), out, access_.dtype(output), std::move(op),
                                  Staged::with(std::move(options), std::move(staged)));
  }

  /// `even`: all tensors of all ranks have one size, which is then checked.
  Started all_to_all(const Tensors& inputs, const Tensors& outputs, bool even, StartOptions options = {}) const {
    if (auto status = first_error({check_each(inputs), check_each(outputs)}); !status.ok()) return status;
    if (auto status = check_exchanged(*group_, given(inputs), given(outputs)); !status.ok()) return status;
    Staged staged(access_);
    auto in = staged.inputs(inputs);
    auto out = staged.outputs(outputs);
    return group_->all_to_all(std::move(in), std::move(out), access_.dtype(inputs[0]), even,
                              Staged::with(std::move(options), std::move(staged)));
  }

  Started send(const Tensor& tensor, std::size_t to, std::uint64_t tag, StartOptions options = {}) const {
    if (auto status = first_error({access_.check(tensor), check_rank(*group_, to)}); !status.ok()) return status;
    Staged staged(access_);
    const auto bytes = staged.input(tensor);
    return group_->send(bytes, access_.dtype(tensor), to, tag, Staged::with(std::move(options), std::move(staged)));
  }

  /// `from` may be Mailbox::any_rank.
  Started receive(const Tensor& tensor, std::size_t from, std::uint64_t tag, StartOptions options = {}) const {
    const auto known = from == Mailbox::any_rank ? Status() : check_rank(*group_, from);
    if (auto status = first_error({access_.check(tensor), known}); !status.ok()) return status;
    Staged staged(access_);
    const auto bytes = staged.output(tensor);
    return group_->receive(bytes, access_.dtype(tensor), from, tag,
                           Staged::with(std::move(options), std::move(staged)));
  }

 protected:
  [[nodiscard]] Given given(const Tensor& tensor) const { return {access_.dtype(tensor), access_.elements(tensor)}; }
  [[nodiscard]] std::vector<Given> given(const Tensors& tensors) const {
    std::vector<Given> out;
    for (const auto& tensor : tensors) out.push_back(given(tensor));
    return out;
  }
  [[nodiscard]] Status check_each(const Tensors& tensors) const {
    for (const auto& tensor : tensors) {
      if (auto status = access_.check(tensor); !status.ok()) return status;
    }
    return {};
  }

 private:
  /// Returns why the algorithm that the call asks for does not fit it.
  [[nodiscard]] Status check_algorithm(Operation operation, const StartOptions& options, bool in_turn = true,
                                       bool even = true) const {
    Asked asked;
    asked.operation = operation;
    asked.in_turn = in_turn;
    asked.even = even;
    asked.gpu = access_.is_direct();
    return group_->find_algorithm(options.algorithm, asked).status();
  }
  [[nodiscard]] bool combines_in_turn(const Tensor& reduced, const ReduceOp& op) const {
    return reduces_in_turn(op, access_.dtype(reduced));
  }

  /// The tensors of one operation, and their dense copies.
  class Staged final {
   public:
    explicit Staged(Access access) : access_(std::move(access)) {}
    ~Staged() {
      Access::release(std::move(kept_));
      for (auto& [tensor, dense] : copies_) Access::release({std::move(tensor), std::move(dense)});
    }
    Staged(Staged&&) noexcept = default;
    Staged(const Staged&) = delete;
    Staged& operator=(const Staged&) = delete;
    std::span<const std::byte> input(const Tensor& tensor) { return keep(access_.dense(tensor)); }
    std::span<std::byte> output(const Tensor& tensor) {
      if (access_.is_dense(tensor)) return keep(tensor);
      auto dense = access_.empty_like(tensor);
      copies_.emplace_back(tensor, dense);
      return keep(std::move(dense));
    }
    /// The same for a tensor that is both.
    std::span<std::byte> both(const Tensor& tensor) {
      const auto out = output(tensor);
      if (!copies_.empty() && access_.is_same(copies_.back().first, tensor))
        access_.copy(copies_.back().second, tensor);
      return out;
    }
    std::vector<std::span<const std::byte>> inputs(const Tensors& tensors) {
      std::vector<std::span<const std::byte>> out;
      for (const auto& tensor : tensors) out.push_back(input(tensor));
      return out;
    }
    std::vector<std::span<std::byte>> outputs(const Tensors& tensors) {
      std::vector<std::span<std::byte>> out;
      for (const auto& tensor : tensors) out.push_back(output(tensor));
      return out;
    }
    /// Keeps the tensors, and adds the copies to host memory and back to their outputs.
    static StartOptions with(StartOptions options, Staged staged) {
      const auto kept = std::make_shared<Staged>(std::move(staged));
      options = kept->access_.arrange(std::move(options));
      if (!kept->copies_.empty()) {
        options.finish = [kept, then = std::move(options.finish)] {
          for (const auto& [to, from] : kept->copies_) kept->access_.copy(to, from);
          if (then) then();
        };
      }
      options.keep = std::make_shared<std::pair<std::shared_ptr<Staged>, Owner>>(kept, std::move(options.keep));
      return options;
    }

   private:
    std::span<std::byte> keep(Tensor tensor) {
      kept_.push_back(std::move(tensor));
      return access_.bytes(kept_.back());
    }
    Access access_;
    Tensors kept_;
    std::vector<std::pair<Tensor, Tensor>> copies_;
  };

  const std::shared_ptr<RawGroup> group_;
  const Access access_;
};

}  // namespace tensorferry::collectives
