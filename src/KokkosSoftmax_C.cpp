// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The functions of KokkosSoftmax.h: reads and checks the structs, sees to it that Kokkos is there, and turns
// exceptions into statuses.

#include "KokkosSoftmax_CBackend.hpp"

#include <impl/KokkosSoftmax_Dispatch.hpp>

#include <cstdlib>
#include <mutex>
#include <new>
#include <set>

using namespace KokkosSoftmax;
using namespace KokkosSoftmax::c;

/// The weights are gone (null) once Kokkos was finalised.
struct kokkossoftmax_packed {
  std::shared_ptr<void> weights;
  Array shape;  ///< of no data: scalar and extents
  Backend* backend;
};

namespace {

#define KOKKOSSOFTMAX_TEXT_OF(x) #x
#define KOKKOSSOFTMAX_TEXT(x) KOKKOSSOFTMAX_TEXT_OF(x)
constexpr const char* version_text = KOKKOSSOFTMAX_TEXT(KOKKOSSOFTMAX_VERSION_MAJOR) "." KOKKOSSOFTMAX_TEXT(
    KOKKOSSOFTMAX_VERSION_MINOR) "." KOKKOSSOFTMAX_TEXT(KOKKOSSOFTMAX_VERSION_PATCH);

#if defined(KOKKOSSOFTMAX_ENABLE_LINEAR)
constexpr bool has_heads = true;
#else
constexpr bool has_heads = false;
#endif

// ---- Errors ----------------------------------------------------------------------------------------------

std::string& error_text() {
  thread_local std::string text;
  return text;
}

kokkossoftmax_status report(kokkossoftmax_status status, const char* what) noexcept {
  try {
    // As the caller spells it.
    std::string text(what);
    const std::string name = "KokkosSoftmax::", c_name = "kokkossoftmax_";
    for (std::size_t at = text.find(name); at != std::string::npos; at = text.find(name, at)) {
      text.replace(at, name.size(), c_name);
    }
    error_text() = std::move(text);
  } catch (...) {
  }
  return status;
}

/// Runs the body of a function of the interface; nothing gets out of it.
template <class Body>
kokkossoftmax_status guarded(const Body& body) noexcept {
  try {
    body();
    return KOKKOSSOFTMAX_OK;
  } catch (const Failure& e) {
    return report(e.status(), e.what());
  } catch (const std::invalid_argument& e) {
    return report(KOKKOSSOFTMAX_INVALID_ARGUMENT, e.what());
  } catch (const std::bad_alloc& e) {
    return report(KOKKOSSOFTMAX_OUT_OF_MEMORY, e.what());
  } catch (const std::exception& e) {
    // Kokkos and the library say these two by text alone.
    const std::string_view text = e.what();
    if (text.find("failed to allocate") != std::string_view::npos)
      return report(KOKKOSSOFTMAX_OUT_OF_MEMORY, e.what());
    if (text.find("in a graph capture needs") != std::string_view::npos)
      return report(KOKKOSSOFTMAX_UNSUPPORTED, e.what());
    return report(KOKKOSSOFTMAX_INTERNAL, e.what());
  } catch (...) {
    return report(KOKKOSSOFTMAX_INTERNAL, "an exception that is no std::exception");
  }
}

// ---- Kokkos ----------------------------------------------------------------------------------------------

/// What outlives single calls. Never destroyed: calls may come from destructors at the end of the program.
struct Global {
  std::mutex mutex;
  bool hooked = false, is_ours = false;
  std::set<kokkossoftmax_packed*> packed;
};

Global& global() {
  static auto* g = new Global;
  return *g;
}

void release_everything() {
  Global& g = global();
  const std::lock_guard lock(g.mutex);
  for (kokkossoftmax_packed* packed : g.packed) packed->weights.reset();
  host_backend().release();
  if (Backend* cuda = cuda_backend()) cuda->release();
}

/// Initialises Kokkos unless it is.
void need_kokkos(const std::string& function, int device, int num_threads) {
  if (Kokkos::is_initialized() && global().hooked) return;
  Global& g = global();
  const std::lock_guard lock(g.mutex);
  if (Kokkos::is_finalized()) {
    throw Failure(KOKKOSSOFTMAX_FINALIZED,
                  "KokkosSoftmax::" + function +
                      ": Kokkos was finalised, and cannot be initialised again in the "
                      "same process");
  }
  if (!Kokkos::is_initialized()) {
    Kokkos::InitializationSettings settings;
    if (Backend* cuda = cuda_backend()) cuda->check_machine(settings, device);
    if (num_threads > 0) settings.set_num_threads(num_threads);
    // A library does not talk on its program's standard error, unless it was asked to.
    if (!std::getenv("KOKKOS_DISABLE_WARNINGS")) settings.set_disable_warnings(true);
    Kokkos::initialize(settings);
    g.is_ours = true;
  }
  if (!g.hooked) Kokkos::push_finalize_hook(release_everything);
  g.hooked = true;
}

// ---- Reading the structs
// -----------------------------------------------------------------------------------

/// Finds what is wrong with the structs themselves, before a backend looks at what they say.
class Reader {
 public:
  explicit Reader(const char* function) : function_(function) {}

  [[noreturn]] void fail(const std::string& what) const { impl::bad_argument(function_, what); }

  template <class Struct>
  void check_size(const char* name, const Struct* s) const {
    if (s->struct_size != sizeof(Struct)) {
      fail(std::string("struct_size of ") + name + " is " + std::to_string(s->struct_size) + "; it must be " +
           std::to_string(sizeof(Struct)) + " (sizeof)");
    }
  }

  /// The backend of the call is that of `output`, unless the execution names one.
  void read_execution(const kokkossoftmax_execution* execution, const kokkossoftmax_array* output,
                      const char* name) {
    std::int32_t which = KOKKOSSOFTMAX_BACKEND_OF_ARRAYS;
    if (execution) {
      check_size("execution", execution);
      which = execution->backend;
      place_.device = execution->device;
      place_.stream = execution->stream;
    }
    if (which == KOKKOSSOFTMAX_BACKEND_OF_ARRAYS) {
      which = KOKKOSSOFTMAX_BACKEND_HOST;
      if (!output && *name) fail(std::string(name) + " is a null pointer");
      if (output) {
        check_size(name, output);
        if (output->memory == KOKKOSSOFTMAX_CUDA) which = KOKKOSSOFTMAX_BACKEND_CUDA;
      }
    }
    if (which == KOKKOSSOFTMAX_BACKEND_HOST) {
      backend_ = &host_backend();
      memory_ = KOKKOSSOFTMAX_HOST;
    } else if (which == KOKKOSSOFTMAX_BACKEND_CUDA) {
      backend_ = cuda_backend();
      memory_ = KOKKOSSOFTMAX_CUDA;
      if (!backend_) unsupported(function_, "this library was built without CUDA");
    } else {
      fail("there is no backend " + std::to_string(which));
    }
    need_kokkos(function_, is_cuda() ? place_.device : -1, 0);
  }

  Backend& backend() const { return *backend_; }
  const Place& place() const { return place_; }
  bool is_cuda() const { return memory_ == KOKKOSSOFTMAX_CUDA; }

  Array read_array(const std::string& name, const kokkossoftmax_array* array, bool is_mask = false) const {
    if (!array) fail(name + " is a null pointer");
    check_size(name.c_str(), array);
    Array result;
    result.scalar = array->scalar;
    if (is_mask ? array->scalar != KOKKOSSOFTMAX_BOOL
                : array->scalar < KOKKOSSOFTMAX_FLOAT || array->scalar > KOKKOSSOFTMAX_BFLOAT16) {
      fail("the scalar of " + name + " is " + std::to_string(array->scalar) +
           (is_mask ? "; it must be KOKKOSSOFTMAX_BOOL"
                    : "; it must be KOKKOSSOFTMAX_FLOAT, _DOUBLE, _HALF or _BFLOAT16"));
    }
    if (array->memory != KOKKOSSOFTMAX_HOST && array->memory != KOKKOSSOFTMAX_CUDA) {
      fail("the memory of " + name + " is " + std::to_string(array->memory) +
           "; it must be KOKKOSSOFTMAX_HOST or KOKKOSSOFTMAX_CUDA");
    }
    if (array->memory != memory_) {
      fail(name + (is_cuda() ? " is in memory of the host, and the call runs on CUDA"
                             : " is in memory of a CUDA device, and the call runs on the host"));
    }
    if (array->rank < 0 || array->rank > KOKKOSSOFTMAX_MAX_RANK) {
      fail(name + " has rank " + std::to_string(array->rank) + "; it must be from 0 to " +
           std::to_string(KOKKOSSOFTMAX_MAX_RANK));
    }
    result.rank = array->rank;
    if (array->rank > 0 && !array->extents) fail("the extents of " + name + " are a null pointer");
    // What the products below must not exceed, in bytes too.
    constexpr index_type most = index_type(1) << 59;
    index_type product = 1, span = 1;
    bool empty = false;
    for (int d = array->rank - 1; d >= 0; --d) {
      const index_type e = array->extents[d];
      if (e < 0) fail("extent " + std::to_string(d) + " of " + name + " is " + std::to_string(e));
      result.extent[d] = e;
      result.stride[d] = product;
      if (e > 0 && product > most / e) fail(name + " has more elements than there is memory");
      if (e > 0) product *= e;
      empty = empty || e == 0;
    }
    if (array->strides) {
      for (int d = 0; d < array->rank; ++d) {
        const index_type e = result.extent[d], s = array->strides[d];
        result.stride[d] = s;
        if (e < 2) {
          // Leads nowhere, but its size, as that of all strides, tells which kernel a row has.
          result.stride[d] = s < 0 ? -std::max(s, -most) : s;
          continue;
        }
        const index_type farthest = (most - span) / (e - 1);
        if (s > farthest || s < -farthest) fail(name + " spans more than there is memory");
        span += (e - 1) * (s < 0 ? -s : s);
      }
    }
    result.data = array->data;
    if (!empty && !is_cuda()) {
      if (Backend* cuda = cuda_backend()) {
        if (const char* why = cuda->refuse_as_host_memory(array->data))
          fail(name + " is said to be memory of the host: " + why);
      }
    }
    return result;
  }

  Steps read_transforms(const kokkossoftmax_transform* transforms, std::size_t count) const {
    Steps steps;
    if (count == 0) return steps;
    if (!transforms) fail("transforms is a null pointer, and transform_count " + std::to_string(count));
    if (count > KOKKOSSOFTMAX_MAX_TRANSFORMS) {
      unsupported(function_, "more than " + std::to_string(KOKKOSSOFTMAX_MAX_TRANSFORMS) + " transforms");
    }
    bool normalizes_batch = false;
    for (std::size_t i = 0; i < count; ++i) {
      check_size(("transform " + std::to_string(i)).c_str(), transforms + i);
      read_transform(transforms[i], static_cast<int>(i), steps.step[i]);
      if (transforms[i].kind == KOKKOSSOFTMAX_BATCH_NORM_TRAINING) {
        if (normalizes_batch) unsupported(function_, "batch_norm_training more than once in a chain");
        normalizes_batch = true;
      }
    }
    steps.count = static_cast<int>(count);
    return steps;
  }

 private:
  void read_transform(const kokkossoftmax_transform& t, int at, Step& step) const {
    step.kind = t.kind;
    step.number = t.number;
    step.momentum = t.momentum;
    step.offset = t.offset;
    const auto read = [&](std::initializer_list<const char*> names, bool is_mask) {
      int o = 0;
      for (const char* name : names) {
        step.operand[o] = read_array(name, t.operands[o], is_mask);
        step.has_operand[o++] = true;
      }
    };
    switch (t.kind) {
      case KOKKOSSOFTMAX_SCALE:
      case KOKKOSSOFTMAX_CAUSAL:
      case KOKKOSSOFTMAX_GELU_ERF:
      case KOKKOSSOFTMAX_GELU_TANH:
      case KOKKOSSOFTMAX_RELU:
        break;
      case KOKKOSSOFTMAX_TEMPERATURE:
        read({"temperature"}, false);
        step.is_checked = (t.flags & KOKKOSSOFTMAX_CHECKED) != 0;
        break;
      case KOKKOSSOFTMAX_MASK:
        read({"mask"}, true);
        break;
      case KOKKOSSOFTMAX_BIAS:
        read({"bias"}, false);
        break;
      case KOKKOSSOFTMAX_SCALE_BY:
        read({"scale"}, false);
        break;
      case KOKKOSSOFTMAX_BATCH_NORM:
        read({"mean", "variance", "gamma", "beta"}, false);
        break;
      case KOKKOSSOFTMAX_BATCH_NORM_TRAINING:
        if (!t.operands[2] != !t.operands[3])
          fail("one of running_mean and running_variance is a null pointer, and the other is not");
        if (t.operands[2]) {
          read({"gamma", "beta", "running_mean", "running_variance"}, false);
        } else {
          read({"gamma", "beta"}, false);
        }
        break;
      default:
        fail("the kind of transform " + std::to_string(at) + " is " + std::to_string(t.kind) +
             "; there is none of that number");
    }
    const int known = t.kind == KOKKOSSOFTMAX_TEMPERATURE ? KOKKOSSOFTMAX_CHECKED : 0;
    if ((t.flags & ~known) != 0) {
      fail("the flags of transform " + std::to_string(at) + " are " + std::to_string(t.flags) +
           "; its kind knows no such flag");
    }
  }

  const char* function_;
  Backend* backend_ = nullptr;
  std::int32_t memory_ = KOKKOSSOFTMAX_HOST;
  Place place_;
};

// ---- The calls
// -----------------------------------------------------------------------------------------------

kokkossoftmax_status rows(impl::Operation operation, bool reserve, const kokkossoftmax_execution* execution,
                          const kokkossoftmax_array* x, const kokkossoftmax_array* y, int32_t axis,
                          const kokkossoftmax_transform* transforms, size_t transform_count) noexcept {
  return guarded([&] {
    RowsCall call;
    call.operation = operation;
    call.reserve = reserve;
    call.axis = axis;
    Reader reader(call.function());
    const bool drops_axis = operation == impl::Operation::logsumexp;
    const char* y_name = drops_axis ? "lse" : "y";
    reader.read_execution(execution, y, y_name);
    call.x = reader.read_array("x", x);
    call.y = reader.read_array(y_name, y);
    if (reserve && call.y.rank < call.x.rank) call.operation = impl::Operation::logsumexp;
    call.steps = reader.read_transforms(transforms, transform_count);
    reader.backend().rows(reader.place(), call);
  });
}

kokkossoftmax_status head(impl::Operation operation, bool reserve, const kokkossoftmax_execution* execution,
                          const kokkossoftmax_array* x, const kokkossoftmax_array* w,
                          const kokkossoftmax_packed* packed, bool is_packed, const kokkossoftmax_array* y,
                          const kokkossoftmax_transform* transforms, size_t transform_count,
                          int32_t precision) noexcept {
  return guarded([&] {
    HeadCall call;
    call.operation = operation;
    call.reserve = reserve;
    Reader reader(call.function());
    if (!has_heads) unsupported(call.function(), "this library was built without the heads");
    reader.read_execution(execution, y, "y");
    call.x = reader.read_array("x", x);
    if (is_packed) {
      if (!packed) reader.fail("w is a null pointer");
      if (!packed->weights) {
        throw Failure(KOKKOSSOFTMAX_FINALIZED,
                      std::string("KokkosSoftmax::") + call.function() +
                          ": the packed weights were freed when Kokkos was finalised");
      }
      if (packed->backend != &reader.backend()) reader.fail("w was packed on another backend");
      call.w = packed->shape;
      call.packed = packed->weights.get();
    } else {
      call.w = reader.read_array("w", w);
    }
    call.y = reader.read_array("y", y);
    call.steps = reader.read_transforms(transforms, transform_count);
    if (precision != KOKKOSSOFTMAX_PRECISION_IEEE && precision != KOKKOSSOFTMAX_PRECISION_TF32) {
      reader.fail("precision is " + std::to_string(precision) +
                  "; it must be KOKKOSSOFTMAX_PRECISION_IEEE or KOKKOSSOFTMAX_PRECISION_TF32");
    }
    call.tf32 = precision == KOKKOSSOFTMAX_PRECISION_TF32;
    reader.backend().head(reader.place(), call);
  });
}

}  // namespace

// ---- The interface
// -------------------------------------------------------------------------------------------

extern "C" {

int kokkossoftmax_version(void) {
  return KOKKOSSOFTMAX_VERSION;
}

const char* kokkossoftmax_version_string(void) {
  return version_text;
}

kokkossoftmax_status kokkossoftmax_initialize(const kokkossoftmax_options* options) {
  return guarded([&] {
    kokkossoftmax_options chosen = KOKKOSSOFTMAX_OPTIONS_INIT;
    if (options) {
      const Reader reader("initialize");
      reader.check_size("options", options);
      chosen = *options;
      if (chosen.num_threads < 0) {
        reader.fail("num_threads is " + std::to_string(chosen.num_threads) + "; it must not be negative");
      }
    }
    need_kokkos("initialize", chosen.device, chosen.num_threads);
  });
}

kokkossoftmax_status kokkossoftmax_finalize(void) {
  return guarded([&] {
    if (!Kokkos::is_initialized()) return;
    Kokkos::fence("KokkosSoftmax::finalize: waits for all work");
    if (global().is_ours) Kokkos::finalize();
  });
}

int kokkossoftmax_is_initialized(void) {
  return Kokkos::is_initialized() ? 1 : 0;
}

int kokkossoftmax_has_backend(int32_t backend) {
  return backend == KOKKOSSOFTMAX_BACKEND_HOST || (backend == KOKKOSSOFTMAX_BACKEND_CUDA && cuda_backend());
}

int kokkossoftmax_has_linear(void) {
  return has_heads ? 1 : 0;
}

const char* kokkossoftmax_last_error(void) {
  return error_text().c_str();
}

const char* kokkossoftmax_status_name(kokkossoftmax_status status) {
  switch (status) {
    case KOKKOSSOFTMAX_OK:
      return "KOKKOSSOFTMAX_OK";
    case KOKKOSSOFTMAX_INVALID_ARGUMENT:
      return "KOKKOSSOFTMAX_INVALID_ARGUMENT";
    case KOKKOSSOFTMAX_UNSUPPORTED:
      return "KOKKOSSOFTMAX_UNSUPPORTED";
    case KOKKOSSOFTMAX_OUT_OF_MEMORY:
      return "KOKKOSSOFTMAX_OUT_OF_MEMORY";
    case KOKKOSSOFTMAX_NOT_INITIALIZED:
      return "KOKKOSSOFTMAX_NOT_INITIALIZED";
    case KOKKOSSOFTMAX_FINALIZED:
      return "KOKKOSSOFTMAX_FINALIZED";
    case KOKKOSSOFTMAX_INTERNAL:
      return "KOKKOSSOFTMAX_INTERNAL";
  }
  return "unknown";
}

const char* kokkossoftmax_last_implementation(void) {
  return last_implementation();
}

kokkossoftmax_status kokkossoftmax_synchronize(const kokkossoftmax_execution* execution) {
  return guarded([&] {
    Reader reader("synchronize");
    reader.read_execution(execution, nullptr, "");
    reader.backend().synchronize(reader.place());
  });
}

kokkossoftmax_status kokkossoftmax_forget_stream(const kokkossoftmax_execution* execution) {
  return guarded([&] {
    if (!Kokkos::is_initialized()) return;
    Reader reader("forget_stream");
    reader.read_execution(execution, nullptr, "");
    reader.backend().forget(reader.place());
  });
}

#define KOKKOSSOFTMAX_ROWS(NAME, OPERATION, RESERVE)                                                        \
  kokkossoftmax_status kokkossoftmax_##NAME(                                                                \
      const kokkossoftmax_execution* execution, const kokkossoftmax_array* x, const kokkossoftmax_array* y, \
      int32_t axis, const kokkossoftmax_transform* transforms, size_t transform_count) {                    \
    return rows(impl::Operation::OPERATION, RESERVE, execution, x, y, axis, transforms, transform_count);   \
  }
KOKKOSSOFTMAX_ROWS(softmax, softmax, false)
KOKKOSSOFTMAX_ROWS(log_softmax, log_softmax, false)
KOKKOSSOFTMAX_ROWS(logsumexp, logsumexp, false)
KOKKOSSOFTMAX_ROWS(reserve, softmax, true)

// Each with its weights as an array and packed.
#define KOKKOSSOFTMAX_HEAD(NAME, OPERATION, RESERVE)                                                         \
  kokkossoftmax_status kokkossoftmax_##NAME(                                                                 \
      const kokkossoftmax_execution* execution, const kokkossoftmax_array* x, const kokkossoftmax_array* w,  \
      const kokkossoftmax_array* y, const kokkossoftmax_transform* transforms, size_t transform_count,       \
      int32_t precision) {                                                                                   \
    return head(impl::Operation::OPERATION, RESERVE, execution, x, w, nullptr, false, y, transforms,         \
                transform_count, precision);                                                                 \
  }                                                                                                          \
  kokkossoftmax_status kokkossoftmax_##NAME##_packed(                                                        \
      const kokkossoftmax_execution* execution, const kokkossoftmax_array* x, const kokkossoftmax_packed* w, \
      const kokkossoftmax_array* y, const kokkossoftmax_transform* transforms, size_t transform_count,       \
      int32_t precision) {                                                                                   \
    return head(impl::Operation::OPERATION, RESERVE, execution, x, nullptr, w, true, y, transforms,          \
                transform_count, precision);                                                                 \
  }
KOKKOSSOFTMAX_HEAD(linear_softmax, softmax, false)
KOKKOSSOFTMAX_HEAD(linear_log_softmax, log_softmax, false)
KOKKOSSOFTMAX_HEAD(reserve_linear, softmax, true)

kokkossoftmax_status kokkossoftmax_pack(const kokkossoftmax_execution* execution,
                                        const kokkossoftmax_array* w, kokkossoftmax_packed** packed) {
  if (packed) *packed = nullptr;
  return guarded([&] {
    Reader reader("pack");
    if (!packed) reader.fail("packed is a null pointer");
    if (!has_heads) unsupported("pack", "this library was built without the heads");
    reader.read_execution(execution, w, "w");
    const Array array = reader.read_array("w", w);
    auto handle = std::make_unique<kokkossoftmax_packed>();
    handle->weights = reader.backend().pack(reader.place(), array);
    handle->shape = array;
    handle->shape.data = nullptr;
    handle->backend = &reader.backend();
    const std::lock_guard lock(global().mutex);
    global().packed.insert(handle.get());
    *packed = handle.release();
  });
}

void kokkossoftmax_packed_free(kokkossoftmax_packed* packed) {
  if (!packed) return;
  (void)guarded([&] {
    std::unique_ptr<kokkossoftmax_packed> handle(packed);
    {
      const std::lock_guard lock(global().mutex);
      global().packed.erase(packed);
    }
    if (packed->weights && Kokkos::is_initialized()) {
      Kokkos::fence("KokkosSoftmax::packed_free: work that uses the weights");
    }
  });
}

}  // extern "C"
