// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The C interface on CUDA: one execution space instance for each stream of the caller's, because making one
// allocates and waits, and for captures on streams that were never seen one of ours that joins the capture.

#include "KokkosSoftmax_CBackend.hpp"

#include <impl/KokkosSoftmax_SoftmaxCandidates.hpp>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace KokkosSoftmax::c {
namespace {

using impl::check_cuda;
using Exec = Kokkos::Cuda;

/// The thread's device is what it was when the call is over.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = device != before_;
  }
  ~CurrentDevice() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

bool is_capturing(const std::string& function, cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    impl::bad_argument(function, std::string("the stream cannot be used: ") + cudaGetErrorString(error));
  }
  return status != cudaStreamCaptureStatusNone;
}

/// The device of a stream, found without touching it.
int device_of(const std::string& function, cudaStream_t stream) {
  CUcontext context{};
  CUdevice device{};
  if (cuStreamGetCtx(stream, &context) != CUDA_SUCCESS || cuCtxPushCurrent(context) != CUDA_SUCCESS) {
    impl::bad_argument(function, "the stream is none that CUDA knows");
  }
  const CUresult got = cuCtxGetDevice(&device);
  (void)cuCtxPopCurrent(nullptr);
  if (got != CUDA_SUCCESS) impl::bad_argument(function, "the stream is none that CUDA knows");
  return device;
}

/// An instance on a stream of our own. A stream that is being captured and was never seen before lends it its
/// capture: the two are tied together by events, so nothing is made and nothing waits.
struct Side {
  cudaStream_t stream{};
  cudaEvent_t fork{}, join{};
  std::unique_ptr<Exec> exec;

  Side() {
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    check_cuda(cudaEventCreateWithFlags(&join, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    exec = std::make_unique<Exec>(stream);
  }
  void destroy() {
    exec->fence("KokkosSoftmax: before an instance goes away");
    exec.reset();
    (void)cudaEventDestroy(fork);
    (void)cudaEventDestroy(join);
    (void)cudaStreamDestroy(stream);
  }
};

class CudaBackend : public Backend {
 public:
  void check_machine(Kokkos::InitializationSettings& settings, int device) const override {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess || count == 0) {
      (void)cudaGetLastError();
      throw Failure(
          KOKKOSSOFTMAX_NOT_INITIALIZED,
          std::string("KokkosSoftmax::initialize: this library was built with CUDA, and Kokkos needs a "
                      "CUDA device then, for calls on the host too: ") +
              (error != cudaSuccess ? cudaGetErrorString(error) : "there is none"));
    }
    if (device >= count) {
      impl::bad_argument("initialize", "there is no CUDA device " + std::to_string(device) + " among " +
                                           std::to_string(count));
    }
    if (device < 0) check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    settings.set_device_id(device);
  }

  const char* refuse_as_host_memory(const void* pointer) const override {
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
      (void)cudaGetLastError();
      return nullptr;
    }
    return attributes.type == cudaMemoryTypeDevice ? "it is a CUDA device's" : nullptr;
  }

  void rows(const Place& place, const RowsCall& call) override {
    with_exec(call.function(), place, call.reserve, [&](const Exec& exec) { rows_of_scalars(exec, call); });
  }
  void head(const Place& place, const HeadCall& call) override {
    with_exec(call.function(), place, call.reserve, [&](const Exec& exec) { head_of_scalars(exec, call); });
  }
  std::shared_ptr<void> pack(const Place& place, const Array& w) override {
    std::shared_ptr<void> packed;
    if (is_capturing("pack", stream_of(place)))
      unsupported("pack", "the stream is being captured, and this call allocates and waits");
    with_exec("pack", place, false, [&](const Exec& exec) { packed = pack_of_scalar(exec, w); });
    return packed;
  }

  void synchronize(const Place& place) override {
    const CurrentDevice current(checked_device("synchronize", place));
    check_cuda(cudaStreamSynchronize(stream_of(place)), "cudaStreamSynchronize");
  }

  void forget(const Place& place) override {
    const CurrentDevice current(checked_device("forget_stream", place));
    std::unique_ptr<Exec> exec;
    {
      const std::lock_guard lock(mutex_);
      const auto found = instances_.find(key_of(place));
      if (found == instances_.end()) return;
      exec = std::move(found->second);
      instances_.erase(found);
      ++generation_;
    }
    exec->fence("KokkosSoftmax::forget_stream: before its instance goes away");
  }

  void release() override {
    const std::lock_guard lock(mutex_);
    released_ = true;
    ++generation_;
    // The caller may have destroyed the stream of an instance, and to end one waits for its stream: they are
    // left as they are.
    for (auto& [key, exec] : instances_) (void)exec.release();
    instances_.clear();
    for (const auto& side : sides_) side->destroy();
    sides_.clear();
    free_sides_.clear();
  }

 private:
  /// CUDA's stream of each thread has one handle.
  using Key = std::pair<void*, std::thread::id>;

  static cudaStream_t stream_of(const Place& place) { return static_cast<cudaStream_t>(place.stream); }
  static Key key_of(const Place& place) {
    return {place.stream,
            stream_of(place) == cudaStreamPerThread ? std::this_thread::get_id() : std::thread::id()};
  }

  static int checked_device(const std::string& function, const Place& place) {
    static const int device = Exec().cuda_device();
    if (place.device >= 0 && place.device != device) {
      unsupported(function, "the execution is on CUDA device " + std::to_string(place.device) +
                                ", and Kokkos in this process uses device " + std::to_string(device));
    }
    return device;
  }

  template <class Use>
  void with_exec(const std::string& function, const Place& place, bool reserve, const Use& use) {
    const int device = checked_device(function, place);
    const CurrentDevice current(device);
    if (const Exec* exec = known(place)) {
      use(*exec);
    } else if (is_capturing(function, stream_of(place))) {
      check_stream(function, place, device);
      return in_capture(function, place, use);
    } else {
      check_stream(function, place, device);
      use(made(place));
    }
    if (reserve && !is_capturing(function, stream_of(place))) use(*side_of_thread().exec);
  }

  static void check_stream(const std::string& function, const Place& place, int device) {
    const int of_stream = device_of(function, stream_of(place));
    if (of_stream != device) {
      impl::bad_argument(function, "the stream is of CUDA device " + std::to_string(of_stream) +
                                       ", and Kokkos in this process uses device " + std::to_string(device));
    }
  }

  // ---- Instances of the caller's streams ------------------------------------------------------------------

  const Exec* known(const Place& place) {
    struct Last {
      Key key;
      std::uint64_t generation = 0;
      const Exec* exec = nullptr;
    };
    thread_local Last last;
    const Key key = key_of(place);
    const std::uint64_t generation = generation_.load(std::memory_order_acquire);
    if (last.exec && last.key == key && last.generation == generation) return last.exec;
    const std::lock_guard lock(mutex_);
    const auto found = instances_.find(key);
    if (found == instances_.end()) return nullptr;
    last = {key, generation_.load(), found->second.get()};
    return last.exec;
  }

  const Exec& made(const Place& place) {
    const std::lock_guard lock(mutex_);
    auto& exec = instances_[key_of(place)];
    if (!exec) exec = std::make_unique<Exec>(stream_of(place));
    return *exec;
  }

  // ---- Captures on streams that were never seen
  // ---------------------------------------------------------------

  /// A thread's own, because scratch belongs to a thread; the next thread takes it over.
  struct SideOfThread {
    Side* side = nullptr;
    ~SideOfThread() {
      if (side) static_cast<CudaBackend*>(cuda_backend())->give_back(side);
    }
  };
  static SideOfThread& side_slot() {
    thread_local SideOfThread slot;
    return slot;
  }

  void give_back(Side* side) {
    const std::lock_guard lock(mutex_);
    if (!released_) free_sides_.push_back(side);
  }

  Side& side_of_thread() {
    SideOfThread& slot = side_slot();
    if (slot.side) return *slot.side;
    const std::lock_guard lock(mutex_);
    if (free_sides_.empty()) {
      sides_.push_back(std::make_unique<Side>());
      slot.side = sides_.back().get();
    } else {
      slot.side = free_sides_.back();
      free_sides_.pop_back();
    }
    return *slot.side;
  }

  template <class Use>
  void in_capture(const std::string& function, const Place& place, const Use& use) {
    const Side* side = side_slot().side;
    if (!side) {
      unsupported(
          function,
          "the stream is first seen while it is being captured; call KokkosSoftmax::reserve with these "
          "operands on this thread, on any stream, before the capture");
    }
    check_cuda(cudaEventRecord(side->fork, stream_of(place)), "cudaEventRecord");
    const cudaError_t joined = cudaStreamWaitEvent(side->stream, side->fork, 0);
    if (joined != cudaSuccess) {
      (void)cudaGetLastError();
      unsupported(function,
                  std::string("two captures at a time by one thread, on streams first seen in them: ") +
                      cudaGetErrorString(joined));
    }
    // Whatever happens, what was taken into the capture is given back to its stream.
    struct Join {
      const Side& side;
      cudaStream_t stream;
      ~Join() {
        (void)cudaEventRecord(side.join, side.stream);
        (void)cudaStreamWaitEvent(stream, side.join, 0);
      }
    };
    const Join join{*side, stream_of(place)};
    use(*side->exec);
  }

  std::mutex mutex_;
  std::map<Key, std::unique_ptr<Exec>> instances_;
  std::atomic<std::uint64_t> generation_{1};
  std::vector<std::unique_ptr<Side>> sides_;
  std::vector<Side*> free_sides_;
  bool released_ = false;
};

}  // namespace

Backend* cuda_backend() {
  static auto* backend = new CudaBackend;
  return backend;
}

}  // namespace KokkosSoftmax::c
