// SPDX-License-Identifier: MIT
//
// What the processes of a group say to each other: the few operations of c10d
// that attention needs, with errors that name who is missing.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace multihead::distributed {

class Group {
 public:
  /// A registered process group, for calls of `function`, with whose name
  /// errors begin. Throws c10::Error for an unknown group.
  Group(const char* function, std::string_view name);

  const char* function() const { return function_; }
  int rank() const { return rank_; }
  int size() const { return size_; }

  /// The words of every process, which all give as many, in order of rank.
  std::vector<std::vector<int64_t>> all_gather(
      const std::vector<int64_t>& words) const;

  /// Those of every process, which all have the same shape.
  std::vector<at::Tensor> all_gather(const at::Tensor& x) const;

  /// Gives the tensors parts[r] to process r, all in one exchange. Returns what
  /// each process gives to this one: dense, of sizes[r], of the dtypes of
  /// parts, which are the same for every process.
  std::vector<std::vector<at::Tensor>> all_to_all(
      const std::vector<std::vector<at::Tensor>>& parts,
      const std::vector<std::vector<std::vector<int64_t>>>& sizes) const;

 private:
  friend class Shift;
  const char* function_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int rank_, size_;
};

/// A tensor on its way to the next process of the ring, and one from the
/// process before. Both are dense; what is received has a size of its own.
class Shift {
 public:
  Shift(const Group& group, const at::Tensor& sent, at::Tensor received,
        int step);
  /// What was received, when it is there.
  at::Tensor wait();

 private:
  const char* function_;
  int from_, to_;
  at::Tensor received_;
  c10::intrusive_ptr<c10d::Work> sending_, receiving_;
};

}  // namespace multihead::distributed
