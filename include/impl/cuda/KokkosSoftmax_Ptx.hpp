// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// PTX instructions, each under its own name. The manual: "Parallel Thread Execution ISA", the section in
/// each comment. What needs compute capability 9.0 traps below it; hosts refuse such kernels there.

#ifndef KOKKOSSOFTMAX_PTX_HPP
#define KOKKOSSOFTMAX_PTX_HPP

#include <cstdint>

namespace KokkosSoftmax::impl {

/// ex2.approx.ftz.f32 ("Floating Point Instructions: ex2"): 2^x to 2^-22 relative, subnormal results 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// lg2.approx.ftz.f32 ("Floating Point Instructions: lg2"): log2(x) to 2^-22, between 0.5 and 2 absolute.
__device__ __forceinline__ float lg2_approx_ftz(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// rcp.approx.ftz.f32 ("Floating Point Instructions: rcp"): 1/x to a unit in the last place.
__device__ __forceinline__ float rcp_approx_ftz(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// max.NaN.f32 ("Floating Point Instructions: max"): NaN where one of the two is NaN.
__device__ __forceinline__ float max_nan(float a, float b) {
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}

/// redux.sync.max.s32 ("Parallel Synchronization and Communication Instructions: redux.sync"): of a whole
/// warp. Before compute capability 8.0 by shuffles.
__device__ __forceinline__ int redux_max(int value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xffffffffu, value);
#else
  for (int mask = 1; mask < 32; mask *= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
#endif
}

/// redux.sync.add.u32, likewise.
__device__ __forceinline__ unsigned redux_add(unsigned value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_add_sync(0xffffffffu, value);
#else
  for (int mask = 1; mask < 32; mask *= 2) value += __shfl_xor_sync(0xffffffffu, value, mask);
  return value;
#endif
}

/// The address that instructions on .shared operands take ("State Spaces: Shared State Space").
__device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// Sixteen bytes that are read and written at once.
struct alignas(16) Word16 {
  std::uint64_t low, high;
};

/// st.relaxed.gpu.global.b128 ("Data Movement and Conversion Instructions: st"; a scalar of 128 bits is
/// single-copy atomic, see "Memory Consistency Model: Scalar Data-types").
__device__ __forceinline__ void st_relaxed_gpu_b128(Word16* to, const Word16& word) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.gpu.global.b128 [%0], word; }" ::"l"(
                   __cvta_generic_to_global(to)),
               "l"(word.low), "l"(word.high)
               : "memory");
#else
  __trap();
#endif
}

/// ld.relaxed.gpu.global.b128 (ibidem: ld).
__device__ __forceinline__ Word16 ld_relaxed_gpu_b128(const Word16* from) {
  Word16 word{};
#if __CUDA_ARCH__ >= 900
  asm volatile("{ .reg .b128 word; ld.relaxed.gpu.global.b128 word, [%2]; mov.b128 {%0, %1}, word; }"
               : "=l"(word.low), "=l"(word.high)
               : "l"(__cvta_generic_to_global(from))
               : "memory");
#else
  __trap();
#endif
  return word;
}

/// cp.async.cg.shared.global ("Data Movement and Conversion Instructions: cp.async") of 16 bytes, to a
/// shared_address. Before compute capability 8.0 an ordinary copy.
__device__ __forceinline__ void cp_async_16(std::uint32_t to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
               : "memory");
#elif defined(__CUDA_ARCH__)
  *static_cast<Word16*>(__cvta_shared_to_generic(to)) = *static_cast<const Word16*>(from);
#endif
}

/// cp.async.ca.shared.global (ibidem), likewise, by way of L1.
__device__ __forceinline__ void cp_async_16_by_l1(std::uint32_t to, const void* from) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(__cvta_generic_to_global(from))
               : "memory");
#elif defined(__CUDA_ARCH__)
  cp_async_16(to, from);
#endif
}

/// The same of 4 or 8 bytes.
template <int bytes>
__device__ __forceinline__ void cp_async_by_l1(std::uint32_t to, const void* from) {
  static_assert(bytes == 4 || bytes == 8);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "n"(bytes)
               : "memory");
#elif defined(__CUDA_ARCH__)
  using Bytes = std::conditional_t<bytes == 4, std::uint32_t, std::uint64_t>;
  *static_cast<Bytes*>(__cvta_shared_to_generic(to)) = *static_cast<const Bytes*>(from);
#endif
}

/// prefetch.global.L2 ("Data Movement and Conversion Instructions: prefetch, prefetchu")
__device__ __forceinline__ void prefetch_l2(const void* from) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(from)) : "memory");
}

/// prmt.b32 ("Data Movement and Conversion Instructions: prmt"), whose selectors may ask for a byte's first
/// bit eight times, which __byte_perm's do not.
__device__ __forceinline__ unsigned prmt(unsigned a, unsigned b, unsigned selectors) {
  unsigned result = 0;
#if defined(__CUDA_ARCH__)
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selectors));
#endif
  return result;
}

/// cp.async.wait_all: until the thread's are there.
__device__ __forceinline__ void cp_async_wait_all() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

/// cp.async.commit_group: those of the thread since the last one.
__device__ __forceinline__ void cp_async_commit_group() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// cp.async.wait_group: until all of the thread's groups but the last `but` are there.
template <int but>
__device__ __forceinline__ void cp_async_wait_group() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(but) : "memory");
#endif
}

/// ld.volatile.global ("Data Movement and Conversion Instructions: ld") for what it brings to L2.
template <class T>
__device__ __forceinline__ void ld_volatile_unused(const T* at) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 2) {
    asm volatile(
        "{ .reg .b16 unused; ld.volatile.global.b16 unused, [%0]; }" ::"l"(__cvta_generic_to_global(at)));
  } else if constexpr (sizeof(T) == 4) {
    asm volatile(
        "{ .reg .b32 unused; ld.volatile.global.b32 unused, [%0]; }" ::"l"(__cvta_generic_to_global(at)));
  } else {
    asm volatile(
        "{ .reg .b64 unused; ld.volatile.global.b64 unused, [%0]; }" ::"l"(__cvta_generic_to_global(at)));
  }
#endif
}

/// An mbarrier object in shared memory ("Parallel Synchronization and Communication Instructions: mbarrier").
using Mbarrier = std::uint64_t;

/// mbarrier.init; made visible to the copy engine by fence_mbarrier_init.
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, std::uint32_t arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
#else
  __trap();
#endif
}

/// fence.mbarrier_init ("membar, fence").
__device__ __forceinline__ void fence_mbarrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

/// mbarrier.arrive: releases what the thread wrote before.
__device__ __forceinline__ void mbarrier_arrive(Mbarrier* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#else
  __trap();
#endif
}

/// mbarrier.arrive.expect_tx: arrives, and the phase also waits for `bytes` more of bulk copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(Mbarrier* barrier, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
#else
  __trap();
#endif
}

/// mbarrier.try_wait.parity until the phase of that parity has completed: acquires what was released there.
/// With a time to be suspended for: without one it was seen to return at once, and a sixth of all
/// instructions of grid_pipelined_rows were those of warps that asked again.
__device__ __forceinline__ void mbarrier_wait_parity(Mbarrier* barrier, std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  constexpr std::uint32_t suspended_ns = 10'000'000;
  std::uint32_t done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity), "r"(suspended_ns)
        : "memory");
  } while (!done);
#else
  __trap();
#endif
}

/// mbarrier.test_wait.parity: whether the phase of that parity has completed; where it has, like waiting.
__device__ __forceinline__ bool mbarrier_test_parity(Mbarrier* barrier, std::uint32_t parity) {
  std::uint32_t done = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#else
  __trap();
#endif
  return done;
}

/// createpolicy.fractional ("Data Movement and Conversion Instructions: createpolicy"): of what lies in L2,
/// this is to be evicted first, or last.
__device__ __forceinline__ std::uint64_t createpolicy_evict_first() {
  std::uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}
__device__ __forceinline__ std::uint64_t createpolicy_evict_last() {
  std::uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

/// cp.async.bulk from global to shared memory ("Data Movement and Conversion Instructions: cp.async.bulk"):
/// both addresses and the size are multiples of 16; reports its bytes to the barrier. May be given a policy.
template <class... Policy>
__device__ __forceinline__ void cp_async_bulk(void* to, const void* from, std::uint32_t bytes,
                                              Mbarrier* barrier, Policy... policy) {
#if __CUDA_ARCH__ >= 900
  if constexpr (sizeof...(policy) == 0) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
  } else {
    const std::uint64_t hint = (std::uint64_t(0) | ... | policy);
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier)), "l"(hint)
        : "memory");
  }
#else
  __trap();
#endif
}

/// cp.async.bulk.prefetch.L2 ("Data Movement and Conversion Instructions: cp.async.bulk.prefetch"): the
/// address and the size are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_prefetch_l2(const void* from, std::uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
#else
  __trap();
#endif
}

/// cp.async.bulk from shared to global memory (ibidem), alone in a bulk group of its own.
template <class... Policy>
__device__ __forceinline__ void cp_async_bulk_store(void* to, const void* from, std::uint32_t bytes,
                                                    Policy... policy) {
#if __CUDA_ARCH__ >= 900
  if constexpr (sizeof...(policy) == 0) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
        "r"(shared_address(from)), "r"(bytes)
        : "memory");
  } else {
    const std::uint64_t hint = (std::uint64_t(0) | ... | policy);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(
                     __cvta_generic_to_global(to)),
                 "r"(shared_address(from)), "r"(bytes), "l"(hint)
                 : "memory");
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
  __trap();
#endif
}

/// cp.async.bulk.wait_group.read: until all of the thread's bulk groups but the last `but` have been read.
template <int but>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(but) : "memory");
#endif
}

/// cp.async.bulk.wait_group: until all of the thread's bulk groups are complete.
__device__ __forceinline__ void cp_async_bulk_wait_group() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}

/// fence.proxy.async ("membar, fence: proxy"): ordinary accesses to shared memory before it come before bulk
/// copies after it.
__device__ __forceinline__ void fence_proxy_async_shared() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// %clock ("Special Registers: %clock"): cycles, modulo 2^32.
__device__ __forceinline__ unsigned clock_cycles() {
  unsigned now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
}

/// barrier.cta.sync ("Parallel Synchronization and Communication Instructions: barrier") of `threads`
/// threads, whole warps; 0 is the one of __syncthreads().
__device__ __forceinline__ void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/// barrier.cta.red.and.pred (ibidem): whether it holds for all of them.
__device__ __forceinline__ bool barrier_all(int barrier, int threads, bool holds) {
  std::uint32_t all = 0;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.and.pred q, %1, %2, p; "
      "selp.u32 %0, 1, 0, q; }"
      : "=r"(all)
      : "r"(barrier), "r"(threads), "r"(static_cast<std::uint32_t>(holds))
      : "memory");
  return all != 0;
}

/// griddepcontrol.wait ("Parallel Synchronization and Communication Instructions: griddepcontrol"): until the
/// kernels that this one was launched behind have ended and what they wrote can be read.
__device__ __forceinline__ void grid_dependency_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// griddepcontrol.launch_dependents (ibidem): once all blocks have come here, or have ended, the kernel
/// behind this one may begin; it sees what this one wrote behind its own grid_dependency_wait().
__device__ __forceinline__ void grid_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace KokkosSoftmax::impl

#endif
