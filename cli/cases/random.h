// SPDX-License-Identifier: MIT
//
// Inputs of one case, a function of the run's seed and the case's name: a case
// sees the same numbers whatever else runs.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>

#include <string>

namespace cli {

class Random {
 public:
  Random(uint64_t seed, const std::string& name)
      : seed_(mix(seed, name)),
        generator_(at::detail::createCPUGenerator(seed_)) {}

  at::Tensor normal(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    return at::randn(sizes, generator_, at::kFloat).to(dtype);
  }
  at::Tensor uniform(at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    return at::rand(sizes, generator_, at::kFloat).to(dtype);
  }
  /// bool; true with probability p.
  at::Tensor chance(at::IntArrayRef sizes, double p) {
    return at::empty(sizes, at::kBool).bernoulli_(p, generator_);
  }
  /// For what draws from torch's own generator, dropout for instance.
  uint64_t seed() const { return seed_; }

 private:
  // FNV-1a: the same on every machine, which std::hash does not promise.
  static uint64_t mix(uint64_t seed, const std::string& name) {
    uint64_t hash = 0xcbf29ce484222325 ^ seed;
    for (unsigned char c : name) hash = (hash ^ c) * 0x100000001b3;
    return hash;
  }

  uint64_t seed_;
  at::Generator generator_;
};

/// Keeps the state of torch's own generator as it is over its lifetime: making
/// a module draws parameters, which must not shift the dropout that follows.
class KeepGenerator {
 public:
  KeepGenerator() : state_(generator().get_state()) {}
  ~KeepGenerator() { generator().set_state(state_); }
  KeepGenerator(const KeepGenerator&) = delete;
  KeepGenerator& operator=(const KeepGenerator&) = delete;

 private:
  static at::Generator generator() {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Tensor state_;
};

}  // namespace cli
