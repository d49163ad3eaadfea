// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Work in steps that threads share: every share of every step once, and no step before the one before it is
// done, whatever threads there are and whenever they come.
#include <gtest/gtest.h>

#include <impl/host/KokkosSoftmax_SharedSteps.hpp>

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

namespace {

using KokkosSoftmax::impl::SharedSteps;

// What each share of three steps finds, and how often it was begun.
struct Record {
  int shares;
  std::vector<std::atomic<int>> begun = std::vector<std::atomic<int>>(static_cast<std::size_t>(3 * shares));
  std::atomic<int> ended[3] = {};
  std::atomic<int> too_early = 0;

  explicit Record(int n) : shares(n) {}
  // Not of atomic type, so that a sanitizer for threads sees whether steps are in order.
  std::vector<int> left = std::vector<int>(static_cast<std::size_t>(3 * shares), 0);

  int& left_by(int step, int share) { return left[static_cast<std::size_t>(step * shares + share)]; }
  auto step(int i, int microseconds = 0) {
    return [this, i, microseconds](int share) {
      ++begun[static_cast<std::size_t>(i * shares + share)];
      if (i > 0 && ended[i - 1] < shares) ++too_early;
      // Of the step before: all that other shares left, too.
      if (i > 0) {
        for (int s = 0; s < shares; ++s) {
          if (left_by(i - 1, s) != i * 1000 + s) ++too_early;
        }
      }
      if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
      left_by(i, share) = (i + 1) * 1000 + share;
      ++ended[i];
    };
  }
  void expect_all_once() const {
    for (std::size_t s = 0; s < begun.size(); ++s) EXPECT_EQ(begun[s], 1) << "step and share " << s;
    EXPECT_EQ(too_early, 0);
  }
};

TEST(SharedSteps, TasksMayRunOneAfterTheOther) {
  for (const int shares : {1, 2, 3, 63, 64, 65, 130, 1024}) {
    for (const bool backwards : {false, true}) {
      Record record(shares);
      SharedSteps<3> steps(shares);
      for (int t = 0; t < shares; ++t)
        steps.run(backwards ? shares - 1 - t : t, record.step(0), record.step(1), record.step(2));
      record.expect_all_once();
    }
  }
}

TEST(SharedSteps, OneTaskDoesAllWhenNoOtherComes) {
  for (const int task : {0, 1, 99}) {
    Record record(100);
    SharedSteps<3> steps(100);
    steps.run(task, record.step(0), record.step(1), record.step(2));
    record.expect_all_once();
  }
}

TEST(SharedSteps, ATaskHasItsOwnShareWhenAllComeInTime) {
  constexpr int shares = 4;
  SharedSteps<2> steps(shares);
  std::atomic<int> here = 0;
  std::vector<int> owner(shares, -1);
  std::vector<std::thread> threads;
  for (int task = 0; task < shares; ++task) {
    threads.emplace_back([&, task] {
      steps.run(
          task,
          [&](int share) {
            // All have begun before one is through.
            ++here;
            while (here < shares) std::this_thread::yield();
            owner[static_cast<std::size_t>(share)] = task;
          },
          [](int) {});
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(owner, (std::vector<int>{0, 1, 2, 3}));
}

TEST(SharedSteps, ThreadsThatComeLateOrStandStill) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const int shares = round % 10 == 0 ? 70 : 2 + round % 7;
    Record record(shares);
    SharedSteps<3> steps(shares);
    const int slow_step = static_cast<int>(random() % 4), late = static_cast<int>(random() % 8);
    std::vector<std::thread> threads;
    for (int task = 0; task < shares; ++task) {
      threads.emplace_back([&, task] {
        if (task == late) std::this_thread::sleep_for(std::chrono::microseconds(200));
        steps.run(task, record.step(0, slow_step == 0 ? 100 : 0), record.step(1, slow_step == 1 ? 100 : 0),
                  record.step(2, slow_step == 2 ? 100 : 0));
      });
    }
    for (auto& thread : threads) thread.join();
    record.expect_all_once();
  }
}

}  // namespace
