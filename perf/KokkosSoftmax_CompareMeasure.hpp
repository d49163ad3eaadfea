// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#ifndef KOKKOSSOFTMAX_COMPAREMEASURE_HPP
#define KOKKOSSOFTMAX_COMPAREMEASURE_HPP

// How a case is timed, on any backend: the clock, CUDA graphs, and the yardsticks measured beside it.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <KokkosSoftmax.hpp>
#include <Kokkos_Core.hpp>

#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
#include <immintrin.h>
#endif

#include "KokkosSoftmax_Compare.hpp"

namespace compare {

template <class Exec>
inline constexpr bool is_host_backend =
    Kokkos::SpaceAccessibility<Kokkos::HostSpace, typename Exec::memory_space>::accessible;

// Something to time. One invocation stands for `calls` calls (more than one when they sit in a graph).
struct Action {
  std::string name;
  std::function<void()> invoke;
  int calls = 1;
};

// ------------------------------------------------------------------------------------------------------------
// The instance that the work runs on, and what differs between backends.

template <class Exec>
class Runner {
 public:
  explicit Runner(bool /*graph*/) {}
  const Exec& exec() const { return exec_; }
  static constexpr bool has_graphs = false;
  Action in_graph(const Action& action) { return action; }
  Action copy(void* to, const void* from, std::size_t bytes) const {
    Kokkos::View<char*, typename Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>> target(
        static_cast<char*>(to), bytes);
    Kokkos::View<const char*, typename Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>> source(
        static_cast<const char*>(from), bytes);
    return {"deep_copy", [exec = exec_, target, source] { Kokkos::deep_copy(exec, target, source); }};
  }
  static std::int64_t free_bytes() {
    return is_host_backend<Exec> ? host_available_bytes() : std::int64_t(4) << 30;
  }
  static std::string device() { return is_host_backend<Exec> ? host_processor() : Exec::name(); }

 private:
  Exec exec_{};
};

#if defined(KOKKOS_ENABLE_CUDA)
inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

template <>
class Runner<Kokkos::Cuda> {
 public:
  // The default instance's stream cannot be captured, so graphs get a stream of their own.
  explicit Runner(bool graph)
      : stream_(graph ? new_stream() : nullptr),
        exec_(graph ? Kokkos::Cuda(stream_.get()) : Kokkos::Cuda()) {}
  const Kokkos::Cuda& exec() const { return exec_; }
  static constexpr bool has_graphs = true;

  Action in_graph(const Action& action) {
    constexpr int calls = 20;
    cudaStream_t stream = exec_.cuda_stream();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    exec_.fence();
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    try {
      for (int i = 0; i < calls; ++i) action.invoke();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
    check(cudaGraphDestroy(graph), "cudaGraphDestroy");
    std::shared_ptr<CUgraphExec_st> owned(executable, [](cudaGraphExec_t g) { cudaGraphExecDestroy(g); });
    // What the action owns, operands among it, the graph has only pointers to.
    return {action.name,
            [owned, stream, kept = action.invoke] {
              check(cudaGraphLaunch(owned.get(), stream), "cudaGraphLaunch");
            },
            calls};
  }

  Action copy(void* to, const void* from, std::size_t bytes) const {
    return {"cudaMemcpyAsync", [=, stream = exec_.cuda_stream()] {
              check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
            }};
  }

  static std::int64_t free_bytes() {
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return static_cast<std::int64_t>(free);
  }
  static std::string device() {
    cudaDeviceProp properties;
    int id = 0;
    check(cudaGetDevice(&id), "cudaGetDevice");
    check(cudaGetDeviceProperties(&properties, id), "cudaGetDeviceProperties");
    return properties.name;
  }

 private:
  using Stream = std::shared_ptr<CUstream_st>;
  static Stream new_stream() {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    return Stream(stream, [](cudaStream_t s) { cudaStreamDestroy(s); });
  }
  Stream stream_;  // before exec_, which uses it
  Kokkos::Cuda exec_;
};
#endif

// ------------------------------------------------------------------------------------------------------------
// Yardsticks of a host: each thread of the backend copies or reads a contiguous part, in blocks.

struct HostCopyBlocks {
  char* to;
  const char* from;
  std::int64_t bytes, block;
  bool streaming;

  void operator()(std::int64_t i) const {
    const std::int64_t begin = i * block;
    const std::int64_t length = std::min(block, bytes - begin);
    // A block is below the length from which the C library's memcpy streams by itself.
    if (streaming) {
      stream(to + begin, from + begin, length);
    } else {
      std::memcpy(to + begin, from + begin, static_cast<std::size_t>(length));
    }
  }

#if defined(__SSE2__) && !defined(__CUDA_ARCH__)
#if defined(__AVX512F__)
  using Vector = __m512i;
  static void move(Vector* target, const Vector* source) {
    _mm512_stream_si512(target, _mm512_loadu_si512(source));
  }
#elif defined(__AVX__)
  using Vector = __m256i;
  static void move(Vector* target, const Vector* source) {
    _mm256_stream_si256(target, _mm256_loadu_si256(source));
  }
#else
  using Vector = __m128i;
  static void move(Vector* target, const Vector* source) {
    _mm_stream_si128(target, _mm_loadu_si128(source));
  }
#endif
  static constexpr bool can_stream = true;
  static void stream(char* target, const char* source, std::int64_t length) {
    constexpr std::int64_t width = sizeof(Vector);
    const std::int64_t head = std::min(
        length,
        (width - static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(target) % width)) % width);
    std::memcpy(target, source, static_cast<std::size_t>(head));
    std::int64_t i = head;
    for (; i + width <= length; i += width) {
      move(reinterpret_cast<Vector*>(target + i), reinterpret_cast<const Vector*>(source + i));
    }
    std::memcpy(target + i, source + i, static_cast<std::size_t>(length - i));
    _mm_sfence();
  }
#else
  static constexpr bool can_stream = false;
  static void stream(char* target, const char* source, std::int64_t length) {
    std::memcpy(target, source, static_cast<std::size_t>(length));
  }
#endif
};

struct HostReadBlocks {
  const std::uint64_t* from;
  std::int64_t words, block;
  bool streams;  // four places of the block at once, which some memory systems like better than one

  void operator()(std::int64_t i, std::uint64_t& sum) const {
    const std::uint64_t* begin = from + i * block;
    const std::int64_t length = std::min(block, words - i * block), quarter = streams ? length / 4 : 0;
    std::uint64_t part = 0;
    for (std::int64_t j = 0; j < quarter; ++j) {
      part += begin[j] + begin[j + quarter] + begin[j + 2 * quarter] + begin[j + 3 * quarter];
    }
    for (std::int64_t j = 4 * quarter; j < length; ++j) part += begin[j];
    sum += part;
  }
};

// Blocks of at most 64 KiB, whole cache lines, several for each thread where the bytes allow.
template <class Exec>
std::int64_t host_block(const Exec& exec, std::int64_t bytes) {
  const std::int64_t share = bytes / (std::int64_t(4) * exec.concurrency());
  return std::clamp<std::int64_t>(share / 64 * 64, 4096, 65536);
}

// Yardstick of a device: one team reads one tile, tiles in order.
template <class Exec>
struct DeviceReadTiles {
  struct alignas(16) Words {
    std::uint64_t a, b;
  };
  static constexpr int team_size = 512, unroll = 8;
  const Words* from;
  std::int64_t words;
  Kokkos::View<std::uint64_t*, typename Exec::memory_space> partial;

  KOKKOS_FUNCTION void operator()(const typename Kokkos::TeamPolicy<Exec>::member_type& team) const {
    constexpr std::int64_t tile = team_size * unroll;
    const std::int64_t first = team.league_rank() * tile + team.team_rank();
    std::uint64_t sum = 0;
    if ((team.league_rank() + 1) * tile <= words) {
      Words w[unroll];
      for (int u = 0; u < unroll; ++u) w[u] = from[first + u * team_size];
      for (int u = 0; u < unroll; ++u) sum += w[u].a + w[u].b;
    } else {
      for (std::int64_t i = first; i < words; i += team_size) sum += from[i].a + from[i].b;
    }
    team.team_reduce(Kokkos::Sum<std::uint64_t>(sum));
    Kokkos::single(Kokkos::PerTeam(team), [&] { partial(team.league_rank()) = sum; });
  }
};

// What a copy of `bytes` bytes takes, in each way that this backend knows.
template <class Exec>
std::vector<Action> copy_yardsticks(const Runner<Exec>& runner, void* to, const void* from,
                                    std::int64_t bytes) {
  std::vector<Action> actions;
  if constexpr (is_host_backend<Exec>) {
    const Exec exec = runner.exec();
    const std::int64_t block = host_block(exec, bytes);
    for (const bool streaming : {false, true}) {
      if (streaming && !HostCopyBlocks::can_stream) continue;
      const HostCopyBlocks body{static_cast<char*>(to), static_cast<const char*>(from), bytes, block,
                                streaming};
      const Kokkos::RangePolicy<Exec, Kokkos::Schedule<Kokkos::Static>, Kokkos::IndexType<std::int64_t>>
          policy(exec, 0, (bytes + block - 1) / block);
      actions.push_back({streaming ? "parallel copy, streaming stores" : "parallel copy, ordinary stores",
                         [=] { Kokkos::parallel_for("compare::copy", policy, body); }});
    }
  } else {
    actions.push_back(runner.copy(to, from, static_cast<std::size_t>(bytes)));
  }
  return actions;
}

// What only reading `bytes` bytes takes.
template <class Exec>
std::vector<Action> read_yardsticks(const Runner<Exec>& runner, const void* from, std::int64_t bytes) {
  const Exec exec = runner.exec();
  if constexpr (is_host_backend<Exec>) {
    const std::int64_t words = bytes / 8, block = host_block(exec, bytes) / 8;
    std::vector<Action> actions;
    for (const bool streams : {false, true}) {
      const HostReadBlocks body{static_cast<const std::uint64_t*>(from), words, block, streams};
      const Kokkos::RangePolicy<Exec, Kokkos::Schedule<Kokkos::Static>, Kokkos::IndexType<std::int64_t>>
          policy(exec, 0, (words + block - 1) / block);
      actions.push_back({streams ? "parallel sum, four streams" : "parallel sum, one stream", [=] {
                           std::uint64_t sum = 0;
                           Kokkos::parallel_reduce("compare::sum", policy, body, sum);
                           volatile std::uint64_t sink = sum;
                           (void)sink;
                         }});
    }
    return actions;
  } else {
    using Tiles = DeviceReadTiles<Exec>;
    const std::int64_t words = bytes / 16, tile = Tiles::team_size * Tiles::unroll;
    const int tiles = static_cast<int>((words + tile - 1) / tile);
    const Tiles body{
        static_cast<const typename Tiles::Words*>(from), words,
        Kokkos::View<std::uint64_t*, typename Exec::memory_space>("compare::partial sums", tiles)};
    return {{"sum of tiles", [=] {
               const auto policy =
                   Kokkos::Experimental::require(Kokkos::TeamPolicy<Exec>(exec, tiles, Tiles::team_size),
                                                 Kokkos::Experimental::WorkItemProperty::HintLightWeight);
               Kokkos::parallel_for("compare::sum", policy, body);
             }}};
  }
}

// ------------------------------------------------------------------------------------------------------------
// The clock.

inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : 0.5 * (values[n / 2 - 1] + values[n / 2]);
}

template <class Exec>
double seconds(const Exec& exec, const Action& action, int invocations) {
  exec.fence("compare::before");
  const double begin = now();
  for (int i = 0; i < invocations; ++i) action.invoke();
  exec.fence("compare::after");
  return now() - begin;
}

// Times all actions in turn, round after round, so that a change of the machine's speed meets all of them.
template <class Exec>
std::vector<Timing> time_in_rounds(const Exec& exec, const std::vector<Action>& actions,
                                   const Options& options) {
  // On a device a round is long beside the launch and the fence; on a host, beside the clock.
  const double shortest_round = is_host_backend<Exec> ? 2e-3 : 10e-3;
  std::vector<int> invocations;
  for (const Action& action : actions) {
    seconds(exec, action, 1);
    double once = seconds(exec, action, 1);
    int count = 1;
    while (once * count < shortest_round && count < 100000) {
      // Few calls at once overrate a call, so grow in steps.
      count = static_cast<int>(
          std::min(100000.0, std::max(count * 2.0, std::min(count * 10.0, shortest_round / once))));
      once = seconds(exec, action, count) / count;
    }
    invocations.push_back(count);
  }
  std::vector<std::vector<double>> times(actions.size());
  const double begin = now();
  const int least = 3, most = options.repetitions > 0 ? options.repetitions : 100000;
  for (int round = 0; round < most; ++round) {
    if (options.repetitions == 0 && round >= least && now() - begin > options.time_budget) break;
    for (std::size_t a = 0; a < actions.size(); ++a) {
      times[a].push_back(seconds(exec, actions[a], invocations[a]) / invocations[a] / actions[a].calls);
    }
  }
  std::vector<Timing> timings;
  for (std::size_t a = 0; a < actions.size(); ++a) {
    timings.push_back({median(times[a]), *std::min_element(times[a].begin(), times[a].end()),
                       static_cast<int>(times[a].size()), invocations[a] * actions[a].calls});
  }
  return timings;
}

// Measures; why that was not possible is the result's failure.
template <class Measure>
void with_failure_in(Result& result, const Measure& measure) {
  try {
    measure();
  } catch (const std::invalid_argument& error) {
    result.failure = error.what();
    result.refused = !result.what.implementation.empty();
  } catch (const std::exception& error) {
    result.failure = error.what();
  }
}

// ------------------------------------------------------------------------------------------------------------
// Data. Functors rather than lambdas, for nvcc.

// A part of one sequence of random numbers, even in (middle - range, middle + range). A bool says whether its
// number is above 0.
struct Random {
  double range;
  double middle = 0;
  std::int64_t first = 0;  // in the sequence
};

template <class T, class Exec>
struct FillRandom {
  T* data;
  Random random;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    std::uint64_t h = static_cast<std::uint64_t>(random.first + i) + 0x9e3779b97f4a7c15u;
    h = (h ^ (h >> 32)) * 0xd6e8feb86659fd93u;
    h = (h ^ (h >> 32)) * 0xd6e8feb86659fd93u;
    h ^= h >> 32;
    // The half keeps it from 0 and from the ends.
    const double unit = (static_cast<double>(h >> 12) + 0.5) * 0x1p-52;
    const double value = random.middle + (2 * unit - 1) * random.range;
    if constexpr (std::is_same_v<T, double>) {
      data[i] = value;
    } else if constexpr (std::is_same_v<T, bool>) {
      data[i] = value > 0;
    } else {
      data[i] = static_cast<T>(static_cast<float>(value));
    }
  }
};

template <class T, class Exec>
struct FillNaN {
  T* data;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    data[i] = static_cast<T>(Kokkos::Experimental::quiet_NaN<float>::value);
  }
};

template <class T>
KOKKOS_FUNCTION double widened(const T& value) {
  if constexpr (std::is_same_v<T, double>) {
    return value;
  } else {
    return static_cast<double>(static_cast<float>(value));
  }
}

template <class T, class Exec>
struct CountNaN {
  const T* data;
  KOKKOS_FUNCTION void operator()(std::int64_t i, std::int64_t& count) const {
    const double value = widened(data[i]);
    if (value != value) ++count;
  }
};

// Copies chosen rows, widened to double, into one contiguous block.
template <class T, class Exec>
struct GatherRows {
  const T* data;
  std::int64_t row_stride, column_stride, columns;
  Kokkos::View<const std::int64_t*, typename Exec::memory_space> rows;
  Kokkos::View<double*, typename Exec::memory_space> gathered;
  KOKKOS_FUNCTION void operator()(std::int64_t i) const {
    gathered(i) = widened(data[rows(i / columns) * row_stride + i % columns * column_stride]);
  }
};

template <class Exec, class Functor>
void for_each_index(const Exec& exec, const char* label, std::int64_t count, const Functor& functor) {
  Kokkos::parallel_for(label, Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(exec, 0, count),
                       functor);
}

// A contiguous block of memory for a view. Written in parallel first, so that its pages lie near the threads.
template <class T, class Exec>
using Block = Kokkos::View<T*, typename Exec::memory_space>;

template <class T, class Exec>
Block<T, Exec> random_block(const Exec& exec, std::int64_t count, const Random& random) {
  Block<T, Exec> block(Kokkos::view_alloc(exec, "compare::logits", Kokkos::WithoutInitializing),
                       static_cast<std::size_t>(count));
  for_each_index(exec, "compare::fill", count, FillRandom<T, Exec>{block.data(), random});
  return block;
}

template <class T, class Exec>
void poison(const Exec& exec, const Block<T, Exec>& block) {
  for_each_index(exec, "compare::poison", static_cast<std::int64_t>(block.size()),
                 FillNaN<T, Exec>{block.data()});
}

template <class T, class Exec>
std::int64_t count_nan(const Exec& exec, const Block<T, Exec>& block) {
  std::int64_t count = 0;
  Kokkos::parallel_reduce("compare::count",
                          Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>(
                              exec, 0, static_cast<std::int64_t>(block.size())),
                          CountNaN<T, Exec>{block.data()}, count);
  return count;
}

template <class T, class Exec>
std::vector<double> gather(const Exec& exec, const Block<T, Exec>& block,
                           const std::vector<std::int64_t>& rows, std::int64_t row_stride,
                           std::int64_t columns, std::int64_t column_stride) {
  using Memory = typename Exec::memory_space;
  Kokkos::View<std::int64_t*, Memory> on_device("compare::rows", rows.size());
  Kokkos::View<double*, Memory> gathered("compare::gathered",
                                         rows.size() * static_cast<std::size_t>(columns));
  Kokkos::deep_copy(on_device,
                    Kokkos::View<const std::int64_t*, Kokkos::HostSpace>(rows.data(), rows.size()));
  for_each_index(exec, "compare::gather", static_cast<std::int64_t>(gathered.size()),
                 GatherRows<T, Exec>{block.data(), row_stride, column_stride, columns, on_device, gathered});
  exec.fence("compare::gathered");
  std::vector<double> values(gathered.size());
  Kokkos::deep_copy(Kokkos::View<double*, Kokkos::HostSpace>(values.data(), values.size()), gathered);
  return values;
}

// The first, the middle and the last row, and more, spread evenly at random, until `elements` are covered.
inline std::vector<std::int64_t> rows_to_check(std::int64_t rows, std::int64_t columns,
                                               std::int64_t elements) {
  std::vector<std::int64_t> chosen{0, rows / 2, rows - 1};
  const std::int64_t wanted = std::min(rows, (elements + columns - 1) / columns);
  std::uint64_t h = 0x9e3779b97f4a7c15u;
  for (std::int64_t i = 0; i < wanted; ++i) {
    h = h * 6364136223846793005u + 1442695040888963407u;
    // One in each of `wanted` equal parts.
    const std::int64_t begin = i * (rows / wanted) + std::min(i, rows % wanted);
    const std::int64_t length = rows / wanted + (i < rows % wanted ? 1 : 0);
    chosen.push_back(begin + static_cast<std::int64_t>((h >> 33) % static_cast<std::uint64_t>(length)));
  }
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  return chosen;
}

}  // namespace compare

#endif
