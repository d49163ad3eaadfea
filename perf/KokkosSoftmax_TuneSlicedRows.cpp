// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The measurements behind include/impl/cuda/KokkosSoftmax_CudaTuning.hpp: grid_pipelined_rows with slices of
// several sizes, rows held in the ring as far as it goes, up to 0.7 of it, or read twice; and behind
// include/impl/cuda/KokkosSoftmax_GridPipelinedShape.hpp: what paces a block's reads, of many rows (1 GiB)
// and of few (64 MiB). As fractions of cudaMemcpy of the same bytes in the same run, both call after call.
//
//   kokkossoftmax_tune_sliced_rows [slices|paces|few]
#include <KokkosSoftmax.hpp>

#include <algorithm>
#include <cstdio>
#include <string_view>
#include <type_traits>
#include <vector>

namespace {

namespace ks = KokkosSoftmax;
using ks::index_type;

template <class T>
struct Fill {
  T* data;
  KOKKOS_FUNCTION void operator()(index_type i) const {
    unsigned z = static_cast<unsigned>(i) * 2654435761u;
    z ^= z >> 16;
    z *= 0x85ebca6bu;
    z ^= z >> 13;
    data[i] = T(static_cast<float>(z & 0xffffffu) * 0x1p-21f - 4.0f);
  }
};

/// Of a call among others.
template <class Run>
float median_ms(cudaStream_t stream, const Run& run) {
  constexpr int calls = 4;
  using ks::impl::check_cuda;
  cudaEvent_t start{}, stop{};
  check_cuda(cudaEventCreate(&start), "cudaEventCreate");
  check_cuda(cudaEventCreate(&stop), "cudaEventCreate");
  run();
  run();
  std::vector<float> times(7);
  for (float& ms : times) {
    check_cuda(cudaEventRecord(start, stream), "cudaEventRecord");
    for (int call = 0; call < calls; ++call) run();
    check_cuda(cudaEventRecord(stop, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(stop), "cudaEventSynchronize");
    check_cuda(cudaEventElapsedTime(&ms, start, stop), "cudaEventElapsedTime");
    ms /= calls;
  }
  check_cuda(cudaEventDestroy(start), "cudaEventDestroy");
  check_cuda(cudaEventDestroy(stop), "cudaEventDestroy");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

constexpr index_type many_bytes = index_type(1) << 30, few_bytes = many_bytes / 16;  // of x

template <class T>
using Memory = Kokkos::View<T*, Kokkos::CudaSpace>;

/// x and y, and what a copy of as many bytes as both have takes.
template <class In, class Out>
struct Operands {
  using Problem = ks::impl::RowsProblem<In, Out, ks::impl::BoundIdentity>;
  Kokkos::Cuda exec;
  index_type total_bytes;
  index_type total = total_bytes / static_cast<index_type>(sizeof(In));
  Memory<In> x = Memory<In>(Kokkos::view_alloc("x", Kokkos::WithoutInitializing), total);
  Memory<Out> y = Memory<Out>(Kokkos::view_alloc("y", Kokkos::WithoutInitializing), total);
  double copy_gb_per_s = 0;

  explicit Operands(index_type total_bytes_ = many_bytes) : total_bytes(total_bytes_) {
    Kokkos::parallel_for("fill",
                         Kokkos::RangePolicy<Kokkos::Cuda, Kokkos::IndexType<index_type>>(exec, 0, total),
                         Fill<In>{x.data()});
    const float copy = median_ms(exec.cuda_stream(), [&] {
      ks::impl::check_cuda(
          cudaMemcpyAsync(y.data(), x.data(), total_bytes, cudaMemcpyDeviceToDevice, exec.cuda_stream()),
          "cudaMemcpyAsync");
    });
    copy_gb_per_s = 2e-6 * static_cast<double>(total_bytes) / copy;
    const char *const in = ks::scalar_name<In>(), *const out = ks::scalar_name<Out>();
    std::printf("%s%s%s, fraction of a copy at %.0f GB/s\n%10s %10s", in,
                std::is_same_v<In, Out> ? "" : " to ", std::is_same_v<In, Out> ? "" : out, copy_gb_per_s,
                "rows", "columns");
  }

  Problem problem(index_type columns) const {
    const index_type rows = total / columns;
    UnmanagedRows<const In> from(x.data(), rows, columns);
    UnmanagedRows<Out> to(y.data(), rows, columns);
    ks::impl::LogitShape shape;
    shape.rank = 2;
    shape.axis = 1;
    shape.extent[0] = shape.rows = rows;
    shape.extent[1] = shape.columns = columns;
    const ks::impl::Block from_block = ks::impl::block_of(from), to_block = ks::impl::block_of(to);
    return {x.data(),
            y.data(),
            ks::impl::Operation::softmax,
            false,
            ks::impl::RowGeometry::of(shape, from_block, to_block),
            {}};
  }

  /// Prints what a call with such a plan and choice reaches.
  void measure(const Problem& problem, const ks::impl::ReductionPlan& plan,
               const ks::impl::GridPipelinedChoice& choice) const {
    const float ms = median_ms(exec.cuda_stream(),
                               [&] { ks::impl::GridPipelinedRows::run_with(exec, problem, plan, choice); });
    const auto moved = static_cast<double>(problem.geometry.rows * problem.geometry.columns *
                                           static_cast<index_type>(sizeof(In) + sizeof(Out)));
    std::printf("  %9.3f", moved * 1e-6 / ms / copy_gb_per_s);
  }

 private:
  template <class T>
  using UnmanagedRows =
      Kokkos::View<T**, Kokkos::LayoutRight, Kokkos::CudaSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
};

template <class Problem>
void begin_line(const Problem& problem) {
  std::printf("%10lld %10lld", static_cast<long long>(problem.geometry.rows),
              static_cast<long long>(problem.geometry.columns));
}
void end_line() {
  std::printf("\n");
  std::fflush(stdout);
}

template <class T>
void sweep_slices() {
  using ks::impl::ReductionPlan;
  const Operands<T, T> operands;
  using Problem = typename Operands<T, T>::Problem;
  constexpr int slice_bytes[] = {20480, 24576, 32640, 32768, ReductionPlan::largest_slice_bytes};
  constexpr double parts_held[] = {1, 0.7, 0, -1};  // below 0: as the kernel likes, parked where that can be
  for (const int bytes : slice_bytes) {
    for (const double part : parts_held) std::printf("  %5d/%.1f", bytes, part);
  }
  end_line();
  std::vector<index_type> lengths;
  for (index_type bytes = 32768; bytes < 8000000; bytes *= 2) lengths.push_back(bytes);
  for (const index_type mega : {8, 9, 10, 11, 12, 14, 16, 20, 24, 32, 48, 64, 80})
    lengths.push_back(mega * 1024 * 1024);
  for (const index_type row_bytes : lengths) {
    const index_type columns = row_bytes / static_cast<index_type>(sizeof(T));
    const Problem problem = operands.problem(columns);
    begin_line(problem);
    for (const int bytes : slice_bytes) {
      for (const double part : parts_held) {
        ReductionPlan plan = ks::impl::plan_of(problem);
        const bool is_long = plan.reads_twice;
        plan.slice_columns = bytes / static_cast<int>(sizeof(T));
        plan.slices = (columns + plan.slice_columns - 1) / plan.slice_columns;
        plan.runs = ReductionPlan::runs_of(plan.slices, row_bytes, ks::impl::parks_slices<Problem>,
                                           static_cast<index_type>(sizeof(T)));
        plan.reads_twice = is_long || (part >= 0 && part < 1);
        if ((plan.reads_twice && plan.slices == 1) || (part < 0 && !is_long)) {
          std::printf("  %9s", "");
          continue;
        }
        operands.measure(problem, plan, {.part_held = part});
      }
    }
    end_line();
  }
}

/// Of so many bytes of x, what GridPipelinedShape says of is_paced, copied_bytes_of_whole_rows,
/// most_copies_of_held_rows, leaves_a_slot, collector_paces and draws_early_anywhere, and
/// blocks_resident_together().
template <class In, class Out>
void sweep_paces(index_type total_bytes) {
  struct Named {
    const char* name;
    ks::impl::GridPipelinedChoice choice;
  };
  const Named choices[] = {{"as it is", {}},
                           {"2 copies", {.most_copies = 2}},
                           {"3 copies", {.most_copies = 3}},
                           {"4 copies", {.most_copies = 4}},
                           {"5 slots", {.slots = 5}},
                           {"6 slots", {.slots = 6}},
                           {"7 slots", {.slots = 7}},
                           {"whole", {.whole_rows = true}},
                           {"dealt", {.whole_rows = false}},
                           {"early", {.draws_early = true}},
                           {"late", {.draws_early = false}},
                           {"quick", {.collects_slice_each = true}},
                           {"slow", {.collects_slice_each = false}},
                           {"together", {.all_resident = true}}};
  const Operands<In, Out> operands(total_bytes);
  for (const Named& named : choices) std::printf("  %9s", named.name);
  end_line();
  for (const index_type columns :
       {16385,  17408,  18432,  20001,  20480,  24576,  24577,  28672,   32768,   33001,
        40001,  49152,  50257,  53248,  57345,  65536,  65537,  73728,   98304,   98305,
        131072, 131073, 151643, 196608, 262144, 300001, 524288, 1000003, 1900001, 4194303}) {
    const auto problem = operands.problem(columns);
    constexpr index_type fewest_rows = 32;  // of fewer another kernel has all slices at once
    if (problem.geometry.rows < fewest_rows) break;
    begin_line(problem);
    for (const Named& named : choices) operands.measure(problem, ks::impl::plan_of(problem), named.choice);
    end_line();
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard kokkos(argc, argv);
  const std::string_view what = argc > 1 ? argv[1] : "";
  if (argc > 2 || (!what.empty() && what != "slices" && what != "paces" && what != "few")) {
    std::fprintf(stderr, "usage: %s [slices|paces|few]\n", argv[0]);
    return 2;
  }
  if (what.empty() || what == "slices") {
    sweep_slices<float>();
    sweep_slices<ks::half_t>();
    sweep_slices<ks::bhalf_t>();
    sweep_slices<double>();
  }
  for (const index_type bytes : {many_bytes, few_bytes}) {
    if (!what.empty() && what != (bytes == many_bytes ? "paces" : "few")) continue;
    sweep_paces<float, float>(bytes);
    sweep_paces<ks::bhalf_t, ks::bhalf_t>(bytes);
    sweep_paces<ks::half_t, ks::half_t>(bytes);
    sweep_paces<ks::bhalf_t, float>(bytes);
  }
}
