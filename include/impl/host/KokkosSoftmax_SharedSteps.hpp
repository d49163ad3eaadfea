// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Work in steps that threads share, in one launch: a step begins when all of the one before is done. (A
/// launch each would cost a parallel region each, 1 to 3 us on two threads and more on many.)

#ifndef KOKKOSSOFTMAX_SHAREDSTEPS_HPP
#define KOKKOSSOFTMAX_SHAREDSTEPS_HPP

#include <Kokkos_Core.hpp>

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace KokkosSoftmax::impl {

/// A step has as many shares as there are tasks. A task works on its own share, if no other has taken it, and
/// then on what nobody has begun, so that whoever waits waits for a thread that is running: tasks may as well
/// be run one after the other, as Kokkos does within a parallel region. What a step leaves for the next one,
/// in scratch too, is to be found by the number of its share: another thread may go on with it.
template <int steps>
class SharedSteps {
 public:
  static constexpr int most_shares = 1024;

  explicit SharedSteps(int shares) : shares_(shares) {}

  /// step(share) for the shares of each step that this task comes to.
  template <class... Step>
  void run(int task, const Step&... step) {
    static_assert(sizeof...(Step) == steps);
    int i = 0;
    (run_step(i++, task, step), ...);
  }

 private:
  static constexpr int bits = 64;
  struct OfStep {
    alignas(64) std::array<std::atomic<std::uint64_t>, most_shares / bits> taken{};
    alignas(64) std::atomic<int> done{0};
  };

  template <class Step>
  void run_step(int i, int task, const Step& step) {
    OfStep& of_step = of_steps_[static_cast<std::size_t>(i)];
    for (int share = take(of_step, task); share >= 0; share = take(of_step, task)) {
      step(share);
      of_step.done.fetch_add(1, std::memory_order_release);
    }
    // After the last one the launch waits.
    if (i + 1 == steps) return;
    for (int turns = 0; of_step.done.load(std::memory_order_acquire) < shares_; ++turns) wait(turns);
  }

  /// A share that nobody has taken, this one if possible; none: -1.
  int take(OfStep& of_step, int own) const {
    const int after = take_of(of_step, own, shares_);
    return after >= 0 ? after : take_of(of_step, 0, own);
  }
  static int take_of(OfStep& of_step, int begin, int end) {
    for (int share = begin; share < end; ++share) {
      auto& word = of_step.taken[static_cast<std::size_t>(share / bits)];
      const std::uint64_t mask = std::uint64_t(1) << (share % bits);
      if ((word.load(std::memory_order_relaxed) & mask) != 0) continue;
      if ((word.fetch_or(mask, std::memory_order_relaxed) & mask) == 0) return share;
    }
    return -1;
  }

  /// Another thread is about to be through, or it waits for a core.
  static void wait(int turns) {
    constexpr int turns_awake = 2000;
    if (turns >= turns_awake) return std::this_thread::yield();
#if defined(__SSE2__)
    _mm_pause();
#endif
  }

  int shares_;
  std::array<OfStep, steps> of_steps_;
};

}  // namespace KokkosSoftmax::impl

#endif
