// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// PTX instructions of Hopper, each under its own name: barriers in shared memory, the tensor copy engine and
/// the asynchronous tensor core products. The manual: "Parallel Thread Execution ISA", the section in each
/// comment. Those of wgmma and setmaxnreg exist for compute capability 9.0a alone.

#ifndef KOKKOSSOFTMAX_HOPPERPTX_HPP
#define KOKKOSSOFTMAX_HOPPERPTX_HPP

#include <impl/cuda/KokkosSoftmax_Ptx.hpp>

#include <cstdint>

#include <cuda.h>

namespace KokkosSoftmax::impl {

// ---------------------------------------------------------------------------------------------------------------------
// "Parallel Synchronization and Communication Instructions: mbarrier".

/// mbarrier.init.shared::cta.b64
__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// mbarrier.arrive.shared::cta.b64
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// mbarrier.arrive.expect_tx.shared::cta.b64: arrives, and makes the phase wait for so many bytes.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint32_t barrier, std::uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

/// mbarrier.try_wait.parity.shared::cta.b64, until the phase of that parity is over.
__device__ __forceinline__ void mbarrier_wait_parity(std::uint32_t barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
  while (!done) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// "Data Movement and Conversion Instructions: Tensor copy".

/// cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes: a box of a tensor in global
/// memory to shared memory; what lies outside of the tensor arrives as zeros.
__device__ __forceinline__ void cp_async_bulk_tensor_3d(std::uint32_t to, const CUtensorMap* map, int c0,
                                                        int c1, int c2, std::uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
      : "memory");
}

/// The same with .multicast::cluster: to the same place of the blocks of a cluster whose bits are set, each
/// of which counts the bytes at the same place.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_multicast(std::uint32_t to, const CUtensorMap* map,
                                                                  int c0, int c1, int c2,
                                                                  std::uint32_t barrier,
                                                                  std::uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(blocks)
      : "memory");
}

/// cp.async.bulk.tensor.4d, likewise.
__device__ __forceinline__ void cp_async_bulk_tensor_4d(std::uint32_t to, const CUtensorMap* map, int c0,
                                                        int c1, int c2, int c3, std::uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
      "%5}], [%6];" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier)
      : "memory");
#endif
}

/// cp.async.bulk.tensor.4d.global.shared::cta.bulk_group: a box from shared memory to a tensor in global
/// memory, in a bulk group of its own; what lies outside of the tensor is left out.
__device__ __forceinline__ void cp_async_bulk_tensor_4d_store(const CUtensorMap* map, int c0, int c1, int c2,
                                                              int c3, std::uint32_t from) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];" ::"l"(map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(from)
      : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/// %cluster_ctarank, %cluster_nctarank ("Special Registers"): which block of its cluster this is, and of how
/// many.
__device__ __forceinline__ unsigned cluster_ctarank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}
__device__ __forceinline__ unsigned cluster_nctarank() {
  unsigned blocks = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
#endif
  return blocks;
}
/// barrier.cluster.arrive, barrier.cluster.wait: all threads of a cluster; what was written before the one is
/// seen after the other.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#else
  __trap();
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/// mapa.shared::cluster, st.shared::cluster.v2: 16 bytes to where another block's shared memory has what is
/// here in this one's.
__device__ __forceinline__ void st_shared_cluster_b128(Word16* here, unsigned rank, const Word16& word) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "st.shared::cluster.v2.b64 [there], {%2, %3}; }" ::"r"(shared_address(here)),
      "r"(rank), "l"(word.low), "l"(word.high)
      : "memory");
#endif
}

/// mapa.shared::cluster, st.async.shared::cluster.mbarrier::complete_tx::bytes: likewise 16 bytes, or 4,
/// which that block's barrier, in the place of this one's `counter`, counts.
__device__ __forceinline__ void st_async_b128(Word16* here, unsigned rank, const Word16& word,
                                              Mbarrier* counter) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there, counter; mapa.shared::cluster.u32 there, %0, %2; "
      "mapa.shared::cluster.u32 counter, %1, %2; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [there], {%3, %4}, [counter]; }" ::"r"(
          shared_address(here)),
      "r"(shared_address(counter)), "r"(rank), "l"(word.low), "l"(word.high)
      : "memory");
#endif
}
__device__ __forceinline__ void st_async_b32(unsigned* here, unsigned rank, unsigned word,
                                             Mbarrier* counter) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .b32 there, counter; mapa.shared::cluster.u32 there, %0, %2; "
      "mapa.shared::cluster.u32 counter, %1, %2; "
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [counter]; }" ::"r"(
          shared_address(here)),
      "r"(shared_address(counter)), "r"(rank), "r"(word)
      : "memory");
#endif
}

/// mapa.shared::cluster, mbarrier.arrive.shared::cluster: at what another block of the cluster has in the
/// place of this one's barrier. (Releases nothing to it: that would wait for all that was written.)
__device__ __forceinline__ void mbarrier_arrive_cluster(std::uint32_t barrier, unsigned rank) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

/// prefetch.tensormap ("prefetch, prefetchu")
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------------
// "Parallel Synchronization and Communication Instructions: griddepcontrol": the launch after this one may
// begin, and what the launch before this one wrote is there.

__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void griddepcontrol_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---------------------------------------------------------------------------------------------------------------------
// "Miscellaneous Instructions: setmaxnreg". By all warps of a warpgroup.

template <int registers>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// ---------------------------------------------------------------------------------------------------------------------
// "Asynchronous Warpgroup Level Matrix Instructions". By all warps of a warpgroup.

/// wgmma.fence.sync.aligned: registers of accumulators may be touched by the next product.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

/// wgmma.commit_group.sync.aligned
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// wgmma.wait_group.sync.aligned: until at most so many of the youngest groups are under way.
template <int pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/// Keeps the compiler from reading accumulators before the wait that stands before this.
template <int count>
__device__ __forceinline__ void accumulators_are_complete(float (&d)[count]) {
#pragma unroll
  for (int i = 0; i < count; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// "Matrix Descriptor Format": an operand whose rows of 64 binary16 lie 128 bytes apart in shared memory,
/// swizzled in groups of eight, the groups one after the other; the tile begins at a multiple of 1024 bytes.
/// 16 columns further is `+ matrix_descriptor_step`.
__device__ __forceinline__ std::uint64_t matrix_descriptor(std::uint32_t address) {
  constexpr std::uint64_t swizzle_128_bytes = std::uint64_t(1) << 62,
                          group_stride = std::uint64_t(1024 >> 4) << 32,
                          leading_unused = std::uint64_t(1) << 16;
  return swizzle_128_bytes | group_stride | leading_unused | ((address & 0x3ffffu) >> 4);
}
inline constexpr std::uint64_t matrix_descriptor_step = 32 >> 4;

// The registers of 8 to 128 accumulators, and their names in a product.
#define KOKKOSSOFTMAX_D8(i)                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define KOKKOSSOFTMAX_D16(i) KOKKOSSOFTMAX_D8(i), KOKKOSSOFTMAX_D8(i + 8)
#define KOKKOSSOFTMAX_D32(i) KOKKOSSOFTMAX_D16(i), KOKKOSSOFTMAX_D16(i + 16)
#define KOKKOSSOFTMAX_D64(i) KOKKOSSOFTMAX_D32(i), KOKKOSSOFTMAX_D32(i + 32)
#define KOKKOSSOFTMAX_D128(i) KOKKOSSOFTMAX_D64(i), KOKKOSSOFTMAX_D64(i + 64)
#define KOKKOSSOFTMAX_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define KOKKOSSOFTMAX_NAMES_16 KOKKOSSOFTMAX_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define KOKKOSSOFTMAX_NAMES_32 \
  KOKKOSSOFTMAX_NAMES_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KOKKOSSOFTMAX_NAMES_64                                                       \
  KOKKOSSOFTMAX_NAMES_32                                                             \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KOKKOSSOFTMAX_NAMES_128                                                           \
  KOKKOSSOFTMAX_NAMES_64                                                                  \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80" \
  ", %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97" \
  ", %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"    \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125"  \
  ", %126, %127"

// wgmma.mma_async.sync.aligned.m64nNk16.f32.f16.f16, N being twice the accumulators: d = a b^T, added to d
// where `accumulate`. `a_at` to `accumulate_at`: the numbers of the operands that follow them.
#define KOKKOSSOFTMAX_WGMMA(columns, count, a_at, b_at, accumulate_at)                            \
  asm volatile(                                                                                   \
      "{\n"                                                                                       \
      ".reg .pred accumulate;\n"                                                                  \
      "setp.ne.b32 accumulate, %" accumulate_at                                                   \
      ", 0;\n"                                                                                    \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.f16.f16 {" KOKKOSSOFTMAX_NAMES_##count \
      "}, %" a_at ", %" b_at                                                                      \
      ", accumulate, 1, 1, 0, 0;\n"                                                               \
      "}\n"                                                                                       \
      : KOKKOSSOFTMAX_D##count(0)                                                                 \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

__device__ __forceinline__ void wgmma_f16(float (&d)[8], std::uint64_t a, std::uint64_t b, bool accumulate) {
  KOKKOSSOFTMAX_WGMMA("16", 8, "8", "9", "10");
}
__device__ __forceinline__ void wgmma_f16(float (&d)[16], std::uint64_t a, std::uint64_t b, bool accumulate) {
  KOKKOSSOFTMAX_WGMMA("32", 16, "16", "17", "18");
}
__device__ __forceinline__ void wgmma_f16(float (&d)[32], std::uint64_t a, std::uint64_t b, bool accumulate) {
  KOKKOSSOFTMAX_WGMMA("64", 32, "32", "33", "34");
}
__device__ __forceinline__ void wgmma_f16(float (&d)[64], std::uint64_t a, std::uint64_t b, bool accumulate) {
  KOKKOSSOFTMAX_WGMMA("128", 64, "64", "65", "66");
}
__device__ __forceinline__ void wgmma_f16(float (&d)[128], std::uint64_t a, std::uint64_t b,
                                          bool accumulate) {
  KOKKOSSOFTMAX_WGMMA("256", 128, "128", "129", "130");
}

#undef KOKKOSSOFTMAX_D8
#undef KOKKOSSOFTMAX_NAMES_8
#undef KOKKOSSOFTMAX_D16
#undef KOKKOSSOFTMAX_NAMES_16
#undef KOKKOSSOFTMAX_D32
#undef KOKKOSSOFTMAX_NAMES_32
#undef KOKKOSSOFTMAX_D64
#undef KOKKOSSOFTMAX_NAMES_64
#undef KOKKOSSOFTMAX_D128
#undef KOKKOSSOFTMAX_NAMES_128
#undef KOKKOSSOFTMAX_WGMMA

}  // namespace KokkosSoftmax::impl

#endif
