// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the portable floors have to know of the CUDA runtime: whether a pointer can be reached, and graph
/// captures. And what is asked of a device once, and launches that begin while the kernel before them ends.

#ifndef KOKKOSSOFTMAX_CUDARUNTIME_HPP
#define KOKKOSSOFTMAX_CUDARUNTIME_HPP

#include <impl/KokkosSoftmax_Check.hpp>
#include <impl/KokkosSoftmax_Scratch.hpp>

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

namespace KokkosSoftmax::impl {

inline void check_cuda(cudaError_t error, const char* call) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("KokkosSoftmax: ") + call + ": " + cudaGetErrorString(error));
  }
}

template <>
struct Reach<Kokkos::Cuda> {
  static const char* refuse(const Kokkos::Cuda& exec, const void* pointer) {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
      (void)cudaGetLastError();  // unknown to CUDA in every way: leave the judgement to the launch
      return nullptr;
    }
    const int device = exec.cuda_device();
    if (attributes.type == cudaMemoryTypeUnregistered) {
      int pageable = 0;
      check_cuda(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, device),
                 "cudaDeviceGetAttribute");
      return pageable ? nullptr : "it is ordinary host memory";
    }
    if (attributes.type == cudaMemoryTypeDevice && attributes.device != device) {
      int peer = 0;
      check_cuda(cudaDeviceCanAccessPeer(&peer, device, attributes.device), "cudaDeviceCanAccessPeer");
      return peer ? nullptr : "it is on another CUDA device";
    }
    return nullptr;
  }
};

template <>
struct Capture<Kokkos::Cuda> {
  static constexpr bool possible = true;

  static std::uint64_t id(const Kokkos::Cuda& exec) { return info(exec).id; }

  static void keep_with_graph(const Kokkos::Cuda& exec, std::shared_ptr<void> memory) {
    const Info capture = info(exec);
    auto owner = std::make_unique<std::shared_ptr<void>>(std::move(memory));
    cudaUserObject_t object{};
    check_cuda(
        cudaUserObjectCreate(
            &object, owner.get(),
            [](void* p) {
              const std::unique_ptr<std::shared_ptr<void>> mine(static_cast<std::shared_ptr<void>*>(p));
              RetiredMemory::add(std::move(*mine));
            },
            1, cudaUserObjectNoDestructorSync),
        "cudaUserObjectCreate");
    owner.release();
    check_cuda(cudaGraphRetainUserObject(capture.graph, object, 1, cudaGraphUserObjectMove),
               "cudaGraphRetainUserObject");
  }

 private:
  struct Info {
    std::uint64_t id = 0;
    cudaGraph_t graph{};
  };

  static Info info(const Kokkos::Cuda& exec) {
    cudaStreamCaptureStatus status{};
    unsigned long long id = 0;
    Info result;
#if CUDART_VERSION >= 13000
    check_cuda(
        cudaStreamGetCaptureInfo(exec.cuda_stream(), &status, &id, &result.graph, nullptr, nullptr, nullptr),
        "cudaStreamGetCaptureInfo");
#else
    check_cuda(cudaStreamGetCaptureInfo_v2(exec.cuda_stream(), &status, &id, &result.graph),
               "cudaStreamGetCaptureInfo");
#endif
    if (status == cudaStreamCaptureStatusActive) result.id = id;
    return result;
  }
};

/// What ask() says of a kernel, or another function, and a device, asked for once.
template <class Kernel, class Ask>
const auto& asked_once(Kernel kernel, int device, const Ask& ask) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, decltype(ask())> known;
  const std::pair<const void*, int> key{reinterpret_cast<const void*>(kernel), device};
  const std::lock_guard lock(mutex);
  const auto found = known.find(key);
  if (found != known.end()) return found->second;
  return known.emplace(key, ask()).first->second;
}

/// Whether memory gives each multiprocessor 16 bytes a cycle or more, for which it has to have a lot under
/// way. (H200: 18.7; an H100 has 12.8.)
inline bool has_fast_memory(int device) {
  constexpr double fewest_bytes_a_cycle = 16;
  return asked_once(&has_fast_memory, device, [&] {
    const auto attribute = [&](cudaDeviceAttr which) {
      int value = 0;
      check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
      return static_cast<double>(value);
    };
    // (Two transfers a clock; both clocks in kHz.)
    return 2 * attribute(cudaDevAttrMemoryClockRate) * attribute(cudaDevAttrGlobalMemoryBusWidth) / 8 >=
           fewest_bytes_a_cycle * attribute(cudaDevAttrClockRate) * attribute(cudaDevAttrMultiProcessorCount);
  });
}

/// Whether a kernel was compiled for an architecture that has griddepcontrol.wait.
template <class Kernel>
bool has_grid_dependency_wait(Kernel* kernel) {
  cudaFuncAttributes attributes{};
  check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
             "cudaFuncGetAttributes");
  return attributes.ptxVersion >= 90;
}

/// Launches a kernel in clusters of so many blocks, or none of one. One that begins with
/// grid_dependency_wait() may be `early`: its blocks are then on their way to the multiprocessors while the
/// kernel before it in the stream ends (programmatic dependent launch).
template <class... Arguments>
void launch_clusters(const Kokkos::Cuda& exec, void (*kernel)(Arguments...), bool early,
                     unsigned blocks_of_cluster, unsigned blocks, dim3 threads, std::size_t shared_bytes,
                     const std::type_identity_t<Arguments>&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (blocks_of_cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {blocks_of_cluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = exec.cuda_stream();
  config.attrs = attributes;
  config.numAttrs = count;
  void* addresses[] = {const_cast<Arguments*>(&arguments)...};
  check_cuda(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), addresses),
             "cudaLaunchKernelExC");
}
template <class... Arguments>
void launch_kernel(const Kokkos::Cuda& exec, void (*kernel)(Arguments...), bool early, unsigned blocks,
                   dim3 threads, std::size_t shared_bytes,
                   const std::type_identity_t<Arguments>&... arguments) {
  launch_clusters(exec, kernel, early, 1, blocks, threads, shared_bytes, arguments...);
}

}  // namespace KokkosSoftmax::impl

#endif
