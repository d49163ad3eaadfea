// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the blocks of a grid tell each other through L2: tickets, and partial results in words that carry
/// the epoch of their launch, so that nothing is cleared between launches and no fence is needed.

#ifndef KOKKOSSOFTMAX_CUDAWORKSPACE_HPP
#define KOKKOSSOFTMAX_CUDAWORKSPACE_HPP

#include <impl/KokkosSoftmax_Scratch.hpp>
#include <impl/cuda/KokkosSoftmax_Ptx.hpp>
#include <impl/cuda/KokkosSoftmax_RowMath.hpp>

#include <array>

#include <cooperative_groups.h>

namespace KokkosSoftmax::impl {

/// The (max, sum) of a part of a row.
template <class Acc>
struct PartialSoftmax {
  Acc max;
  ExactSum<Acc> sum;

  /// Of no element. (No member initializers: these are in shared memory too.)
  __device__ static PartialSoftmax none() { return {-largest_v<Acc>, ExactSum<Acc>::of(Acc(0))}; }

  /// The same bits whichever of the two comes first.
  __device__ void join(const PartialSoftmax& other) {
    const bool raises = other.max > max;
    PartialSoftmax small = raises ? *this : other;
    if (raises) *this = other;
    small.sum.scale(exp_between_maxima(small.max - max));
    sum.join(small.sum);
  }
  /// As other blocks are told it (see PartialWords), for kernels that do without and give the same bits.
  __device__ PartialSoftmax told() const { return {max, sum.told()}; }
  __device__ PartialSoftmax from_lane(int lane) const {
    return {__shfl_sync(0xffffffffu, max, lane), sum.from_lane(lane)};
  }
};

/// A partial result in memory. The epoch is in each word of 16 bytes, and such a word arrives as a whole.
template <class Acc>
struct PartialWords;

template <>
struct PartialWords<float> {
  Word16 word;

  __device__ static PartialWords of(const PartialSoftmax<float>& p, std::uint32_t epoch) {
    return {{bits_as<std::uint64_t>(p.sum.sum),
             static_cast<std::uint64_t>(epoch) << 32 | bits_as<std::uint32_t>(p.max)}};
  }
  __device__ static void publish(PartialWords* to, const PartialSoftmax<float>& p, std::uint32_t epoch) {
    st_relaxed_gpu_b128(&to->word, of(p, epoch).word);
  }
  __device__ static PartialWords load(const PartialWords* from) { return {ld_relaxed_gpu_b128(&from->word)}; }
  __device__ bool is_of(std::uint32_t epoch) const { return word.high >> 32 == epoch; }
  __device__ PartialSoftmax<float> value() const {
    return {bits_as<float>(static_cast<std::uint32_t>(word.high)), {bits_as<double>(word.low)}};
  }
};

template <>
struct PartialWords<double> {
  Word16 word, rest;

  __device__ static PartialWords of(const PartialSoftmax<double>& p, std::uint32_t epoch) {
    const std::uint64_t tag = static_cast<std::uint64_t>(epoch) << 32;
    return {{bits_as<std::uint64_t>(p.sum.sum), tag | bits_as<std::uint32_t>(static_cast<float>(p.sum.low))},
            {bits_as<std::uint64_t>(p.max), tag}};
  }
  __device__ static void publish(PartialWords* to, const PartialSoftmax<double>& p, std::uint32_t epoch) {
    const PartialWords words = of(p, epoch);
    st_relaxed_gpu_b128(&to->word, words.word);
    st_relaxed_gpu_b128(&to->rest, words.rest);
  }
  __device__ static PartialWords load(const PartialWords* from) {
    return {ld_relaxed_gpu_b128(&from->word), ld_relaxed_gpu_b128(&from->rest)};
  }
  __device__ bool is_of(std::uint32_t epoch) const {
    return word.high >> 32 == epoch && rest.high >> 32 == epoch;
  }
  __device__ PartialSoftmax<double> value() const {
    return {bits_as<double>(rest.low),
            {bits_as<double>(word.low), bits_as<float>(static_cast<std::uint32_t>(word.high))}};
  }
};

/// At the head of the memory; the words follow. An instance's launches use it one after the other. Zero when
/// new.
struct CudaWorkspaceHeader {
  static constexpr int most_counters = 64;
  unsigned long long next_ticket;
  unsigned long long epoch_and_arrivals;  ///< launches completed, parts of the one under way that are
  /// Where blocks draw tickets of different kinds: of each the next one.
  unsigned long long next_ticket_of[most_counters];
  unsigned long long warps_ended;  ///< see clear_as_last_of_epochs
  unsigned long long unused;       ///< words begin on a boundary of 16 bytes
};
static_assert(sizeof(CudaWorkspaceHeader) % sizeof(uint4) == 0);

struct CudaWorkspacePurpose {
  static constexpr bool starts_zeroed = true;
};

struct CudaWorkspace {
  CudaWorkspaceHeader* header;
  void* words;
  std::size_t word_bytes;

  template <class Acc>
  __device__ PartialWords<Acc>* partials() const {
    return static_cast<PartialWords<Acc>*>(words);
  }

  template <class Acc>
  static CudaWorkspace get(const Kokkos::Cuda& exec, index_type partials) {
    const auto span = Pool::get_span(exec, bytes_for<Acc>(partials));
    auto* header = static_cast<CudaWorkspaceHeader*>(span.memory);
    return {header, header + 1, span.bytes - sizeof(CudaWorkspaceHeader)};
  }
  template <class Acc>
  static void reserve(const Kokkos::Cuda& exec, index_type partials) {
    Pool::reserve(exec, bytes_for<Acc>(partials));
  }

  /// The tag of a launch's words from the number of launches before it: never 0, which new memory holds.
  /// After the largest one come those of old words again, which must not be there any more: that launch
  /// clears all.
  static constexpr std::uint32_t largest_epoch = 0xfffffffdu;
  __device__ static std::uint32_t tag_of(std::uint32_t epoch) { return epoch + 1; }
  __device__ static std::uint32_t epoch_after(std::uint32_t epoch) {
    return epoch == largest_epoch ? 0 : epoch + 1;
  }

  /// Launches completed. The load waits for nothing until it is used.
  __device__ std::uint32_t epoch() const {
    return static_cast<std::uint32_t>(header->epoch_and_arrivals >> 32);
  }
  /// Called once for each of the parts of a launch, its rows say, when all blocks of that part have read the
  /// epoch; the last one leaves all ready for the next launch.
  __device__ void end_part(std::uint32_t epoch, unsigned parts) const {
    if (parts > 1) {
      const unsigned long long before = atomicAdd(&header->epoch_and_arrivals, 1ull);
      if (static_cast<std::uint32_t>(before) != parts - 1) return;
    }
    end_launch(epoch);
  }
  __device__ void end_launch(std::uint32_t epoch) const {
    header->epoch_and_arrivals = static_cast<unsigned long long>(epoch_after(epoch)) << 32;
  }

  /// Of a kernel that is launched cooperatively, before its blocks tell each other anything: in the launch of
  /// the largest epoch all blocks clear the words together. Words of that launch stay, under a tag that only
  /// such kernels have, in such a launch.
  __device__ void clear_in_last_of_epochs(std::uint32_t epoch) const {
    if (epoch != largest_epoch) return;
    clear_words((static_cast<std::size_t>(blockIdx.y) * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x,
                static_cast<std::size_t>(gridDim.x) * gridDim.y * blockDim.x);
    cooperative_groups::this_grid().sync();
  }

  /// The same for a kernel whose blocks may be resident one after the other: its warps call it as they end,
  /// and the last of them clears the words. In the launch of the largest epoch it has a tag of its own, for
  /// words of the other kind of kernel may be there from the last time.
  __device__ void clear_as_last_of_epochs(std::uint32_t epoch) const {
    if (epoch != largest_epoch) return;
    __syncwarp();
    const unsigned lane = threadIdx.x % 32;
    unsigned long long ended = 0;
    if (lane == 0) {
      __threadfence();
      ended = atomicAdd(&header->warps_ended, 1ull) + 1;
      __threadfence();
    }
    if (__shfl_sync(0xffffffffu, ended, 0) != static_cast<unsigned long long>(gridDim.x) * (blockDim.x / 32))
      return;
    if (lane == 0) header->warps_ended = 0;
    clear_words(lane, 32);
  }
  __device__ static std::uint32_t tag_of_any_residency(std::uint32_t epoch) {
    return tag_of(epoch) + (epoch == largest_epoch ? 1 : 0);
  }

  /// Whether every workspace has so many words, so that calls of other shapes do not make it grow: fewer rows
  /// than grid_pipelined_rows has are split_rows', and that asks for more words.
  template <class Acc>
  static bool always_holds(index_type partials) {
    return bytes_for<Acc>(partials) == least_bytes;
  }

 private:
  using Pool = ScratchPool<Kokkos::Cuda::memory_space, CudaWorkspacePurpose>;

  __device__ void clear_words(std::size_t first, std::size_t stride) const {
    auto* const all = static_cast<uint4*>(words);
    for (std::size_t i = first; i < word_bytes / sizeof(uint4); i += stride) all[i] = uint4{0, 0, 0, 0};
  }

  static constexpr std::size_t least_bytes = 2 * 1024 * 1024;

  template <class Acc>
  static std::size_t bytes_for(index_type partials) {
    return std::max(
        sizeof(CudaWorkspaceHeader) + static_cast<std::size_t>(partials) * sizeof(PartialWords<Acc>),
        least_bytes);
  }
};

/// Launches a grid whose blocks wait for each other: all of them resident or none. The kernel begins with
/// grid_dependency_wait(), see launch_kernel.
template <class... Parameters, class... Arguments>
void launch_cooperatively(const Kokkos::Cuda& exec, void (*kernel)(Parameters...), dim3 blocks, dim3 threads,
                          std::size_t shared_bytes, const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeCooperative;
  attributes[0].val.cooperative = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = exec.cuda_stream();
  config.attrs = attributes;
  config.numAttrs = 2;
  check_cuda(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "cudaLaunchKernelEx");
}

/// What a cooperative launch of a kernel has to know of the device: asked for once.
struct CooperativeLimits {
  int multiprocessors = 0;
  int shared_bytes = 0;             ///< of a block, at most
  int blocks_a_multiprocessor = 0;  ///< that can be resident
  int registers = 0;                ///< of a thread: next to none of a kernel without a body
  int l2_bytes = 0;
  const char* refusal = nullptr;

  /// As much shared memory as the device gives a block.
  static constexpr int all_shared = -1;

  /// `kernel` with so much shared memory that it asks for when it is launched.
  template <class Kernel>
  static CooperativeLimits ask(Kernel kernel, int device, int threads, int shared) {
    CooperativeLimits limits;
    int major = 0, cooperative = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
               "cudaDeviceGetAttribute");
    check_cuda(cudaDeviceGetAttribute(&cooperative, cudaDevAttrCooperativeLaunch, device),
               "cudaDeviceGetAttribute");
    if (major < 9) {
      limits.refusal = "the device has a compute capability below 9.0";
      return limits;
    }
    if (!cooperative) {
      limits.refusal = "the device launches no kernels cooperatively";
      return limits;
    }
    cudaFuncAttributes attributes{};
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    if (attributes.ptxVersion < 90) {
      limits.refusal = "compiled for a compute capability below 9.0";
      return limits;
    }
    limits.registers = attributes.numRegs;
    check_cuda(cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device),
               "cudaDeviceGetAttribute");
    check_cuda(cudaDeviceGetAttribute(&limits.l2_bytes, cudaDevAttrL2CacheSize, device),
               "cudaDeviceGetAttribute");
    if (shared != 0) {
      check_cuda(
          cudaDeviceGetAttribute(&limits.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "cudaDeviceGetAttribute");
      limits.shared_bytes -= static_cast<int>(attributes.sharedSizeBytes);
      if (shared > limits.shared_bytes) {
        limits.refusal = "a block needs more shared memory than the device gives it";
        return limits;
      }
      if (shared != all_shared) limits.shared_bytes = shared;
      check_cuda(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limits.shared_bytes),
          "cudaFuncSetAttribute");
    }
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&limits.blocks_a_multiprocessor, kernel, threads,
                                                             static_cast<std::size_t>(limits.shared_bytes)),
               "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
    if (limits.blocks_a_multiprocessor == 0) limits.refusal = "a block needs more than a multiprocessor has";
    return limits;
  }
};

/// CooperativeLimits::ask, once for each kernel and device. Who launches the kernel asks with the pointer
/// that it launches: nvcc gives every translation unit a kernel of its own, and attributes are set for that
/// one alone.
template <class Kernel>
const CooperativeLimits& cooperative_limits(Kernel kernel, int device, int threads, int shared) {
  return asked_once(kernel, device, [&] { return CooperativeLimits::ask(kernel, device, threads, shared); });
}

/// Blocks of the largest cluster of a kernel that the device can have, none before compute capability 9.0.
/// Asked for likewise, and then allowed.
template <class Kernel>
int largest_cluster(Kernel kernel, int device, dim3 threads, std::size_t shared_bytes) {
  return asked_once(kernel, device, [&] {
    int major = 0, blocks = 0;
    check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
               "cudaDeviceGetAttribute");
    if (major < 9) return 0;
    // (More than eight are not what every device of that capability has.)
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "cudaFuncSetAttribute");
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1);
    config.blockDim = threads;
    config.dynamicSmemBytes = shared_bytes;
    check_cuda(cudaOccupancyMaxPotentialClusterSize(&blocks, kernel, &config),
               "cudaOccupancyMaxPotentialClusterSize");
    return blocks;
  });
}

/// How many clusters of a kernel, of each number of blocks up to `most`, the device has at once; none of
/// those that it cannot have. Asked for likewise, and then allowed.
template <int most, class Kernel>
const std::array<int, most + 1>& resident_clusters(Kernel kernel, int device, int threads, int shared_bytes) {
  return asked_once(kernel, device, [&] {
    std::array<int, most + 1> clusters{};
    int most_shared_bytes = 0;
    check_cuda(cudaDeviceGetAttribute(&most_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
               "cudaDeviceGetAttribute");
    if (shared_bytes > most_shared_bytes) return clusters;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               "cudaFuncSetAttribute");
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
               "cudaFuncSetAttribute");
    for (int blocks = 1; blocks <= most; ++blocks) {
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(static_cast<unsigned>(blocks));
      config.blockDim = dim3(static_cast<unsigned>(threads));
      config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
      config.attrs = &attribute;
      config.numAttrs = 1;
      const cudaError_t asked =
          cudaOccupancyMaxActiveClusters(&clusters[static_cast<std::size_t>(blocks)], kernel, &config);
      if (asked == cudaErrorInvalidClusterSize) {  // (of more than eight, on some devices)
        (void)cudaGetLastError();
        break;
      }
      check_cuda(asked, "cudaOccupancyMaxActiveClusters");
    }
    return clusters;
  });
}

}  // namespace KokkosSoftmax::impl

#endif
