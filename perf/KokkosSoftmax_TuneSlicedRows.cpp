// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The measurements behind include/impl/cuda/KokkosSoftmax_CudaTuning.hpp: grid_pipelined_rows with slices of
// several sizes, rows held in the ring as far as it goes, up to 0.7 of it, or read twice, as a fraction of
// cudaMemcpy of the same bytes in the same run; 1 GiB in and 1 GiB out.
//
//   kokkossoftmax_tune_sliced_rows
#include <KokkosSoftmax.hpp>

#include <algorithm>
#include <cstdio>
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

template <class Run>
float median_ms(cudaStream_t stream, const Run& run) {
  using ks::impl::check_cuda;
  cudaEvent_t start{}, stop{};
  check_cuda(cudaEventCreate(&start), "cudaEventCreate");
  check_cuda(cudaEventCreate(&stop), "cudaEventCreate");
  run();
  run();
  std::vector<float> times(9);
  for (float& ms : times) {
    check_cuda(cudaEventRecord(start, stream), "cudaEventRecord");
    run();
    check_cuda(cudaEventRecord(stop, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(stop), "cudaEventSynchronize");
    check_cuda(cudaEventElapsedTime(&ms, start, stop), "cudaEventElapsedTime");
  }
  check_cuda(cudaEventDestroy(start), "cudaEventDestroy");
  check_cuda(cudaEventDestroy(stop), "cudaEventDestroy");
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

template <class T>
void sweep() {
  using ks::impl::Block, ks::impl::GridPipelinedRows, ks::impl::LogitShape, ks::impl::ReductionPlan,
      ks::impl::RowGeometry;
  using Problem = ks::impl::RowsProblem<T, T, ks::impl::BoundIdentity>;
  const Kokkos::Cuda exec;
  const index_type total = (index_type(1) << 30) / static_cast<index_type>(sizeof(T));
  const Kokkos::View<T*, Kokkos::CudaSpace> x(Kokkos::view_alloc("x", Kokkos::WithoutInitializing), total),
      y(Kokkos::view_alloc("y", Kokkos::WithoutInitializing), total);
  Kokkos::parallel_for("fill",
                       Kokkos::RangePolicy<Kokkos::Cuda, Kokkos::IndexType<index_type>>(exec, 0, total),
                       Fill<T>{x.data()});
  const float copy = median_ms(exec.cuda_stream(), [&] {
    ks::impl::check_cuda(
        cudaMemcpyAsync(y.data(), x.data(), total * sizeof(T), cudaMemcpyDeviceToDevice, exec.cuda_stream()),
        "cudaMemcpyAsync");
  });
  std::printf("%s, fraction of a copy at %.0f GB/s\n%10s %10s", ks::scalar_name<T>(),
              2e-6 * static_cast<double>(total * sizeof(T)) / copy, "rows", "columns");
  constexpr int slice_bytes[] = {20480, 24576, 32640, 32768, ReductionPlan::largest_slice_bytes};
  constexpr double parts_held[] = {1, 0.7, 0, -1};  // below 0: as the kernel likes, parked where that can be
  for (const int bytes : slice_bytes) {
    for (const double part : parts_held) std::printf("  %5d/%.1f", bytes, part);
  }
  std::printf("\n");
  std::vector<index_type> lengths;
  for (index_type bytes = 32768; bytes < 8000000; bytes *= 2) lengths.push_back(bytes);
  for (const index_type mega : {8, 9, 10, 11, 12, 14, 16, 20, 24, 32, 48, 64, 80})
    lengths.push_back(mega * 1024 * 1024);
  for (const index_type row_bytes : lengths) {
    const index_type columns = row_bytes / static_cast<index_type>(sizeof(T)), rows = total / columns;
    const Kokkos::View<T**, Kokkos::LayoutRight, Kokkos::CudaSpace, Kokkos::MemoryTraits<Kokkos::Unmanaged>>
        from(x.data(), rows, columns), to(y.data(), rows, columns);
    LogitShape shape;
    shape.rank = 2;
    shape.axis = 1;
    shape.extent[0] = shape.rows = rows;
    shape.extent[1] = shape.columns = columns;
    const Block from_block = ks::impl::block_of(from), to_block = ks::impl::block_of(to);
    const Problem problem{
        x.data(), y.data(), ks::impl::Operation::softmax, false, RowGeometry::of(shape, from_block, to_block),
        {}};
    std::printf("%10lld %10lld", static_cast<long long>(rows), static_cast<long long>(columns));
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
        const float ms = median_ms(exec.cuda_stream(), [&] {
          GridPipelinedRows::run_with(exec, problem, plan, ks::impl::GridPipelinedShape::most_slots, part);
        });
        std::printf("  %9.3f", copy / ms);
      }
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard kokkos(argc, argv);
  sweep<float>();
  sweep<ks::half_t>();
  sweep<ks::bhalf_t>();
  sweep<double>();
}
