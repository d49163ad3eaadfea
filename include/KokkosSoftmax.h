/* SPDX-FileCopyrightText: The KokkosSoftmax authors
 * SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception */

/** \file
 * KokkosSoftmax from C (C11), and from every language that calls C: softmax, log_softmax, logsumexp and the
 * fused heads over plain descriptors of memory. A library of its own, `kokkossoftmax_c`; its users know
 * nothing of Kokkos. What the results mean is what it means in C++ (KokkosSoftmax_Softmax.hpp,
 * KokkosSoftmax_Linear.hpp, README): the same kernels run, and the results have the same bits. (Except that
 * on CUDA a chain of several masks of one kind, and nothing else, rounds long rows of 16 bits otherwise.)
 *
 * \section errors Errors
 * Every call that can fail returns a kokkossoftmax_status. A status other than KOKKOSSOFTMAX_OK leaves a
 * sentence in kokkossoftmax_last_error() of the calling thread, naming the call, the argument and its
 * extents. Bad input is found before anything is launched, with the outputs untouched. Nothing is thrown or
 * aborted across this boundary. (An error that a CUDA kernel raises later than the call that launched it, or
 * a processor that lacks what the library was built for, ends the program.)
 *
 * \section lifetimes Lifetimes
 * Descriptors (the structs below, and the extents and strides that they point to) are read during the call
 * and not kept. What `data` points to must live until the work is done: on the host that is the return of
 * the call; on CUDA, when the stream is past it.
 *
 * \section asynchrony Asynchrony
 * Calls on the host have ended when they return. Calls on CUDA are put on the caller's stream and return;
 * they do not wait, allocate nothing and can be captured in a CUDA graph once warm, that is after
 * kokkossoftmax_reserve() (or the same call) with these operands on this host thread outside of a capture.
 *
 * \section threads Threads
 * Every call may be made from any host thread, several at a time, except that kokkossoftmax_finalize() must
 * not run beside another call. What is said of errors and of the last implementation belongs to the thread.
 *
 * \section growth Growth
 * Every struct begins with its size, set by the caller to sizeof (the KOKKOSSOFTMAX_..._INIT initialisers
 * do): a later library reads a shorter struct of an earlier header as if what was added were zero. A size
 * that no version had is an error. Zero is the default of every member, unless said otherwise.
 */

#ifndef KOKKOSSOFTMAX_H
#define KOKKOSSOFTMAX_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define KOKKOSSOFTMAX_API
#else
#define KOKKOSSOFTMAX_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/** What a call says. */
typedef enum kokkossoftmax_status {
  KOKKOSSOFTMAX_OK = 0,
  /** An argument is wrong: null, of extents that do not fit, out of range, not reachable, overlapping. */
  KOKKOSSOFTMAX_INVALID_ARGUMENT = 1,
  /** The argument is sensible, and this library (or this build of it) does not do it. */
  KOKKOSSOFTMAX_UNSUPPORTED = 2,
  /** Memory of the host or the device did not suffice. */
  KOKKOSSOFTMAX_OUT_OF_MEMORY = 3,
  /** Kokkos could not be initialised, or a handle outlived it. */
  KOKKOSSOFTMAX_NOT_INITIALIZED = 4,
  /** Kokkos was finalised, by kokkossoftmax_finalize() or by the program; it cannot be initialised again. */
  KOKKOSSOFTMAX_FINALIZED = 5,
  /** Anything else, the message says what. */
  KOKKOSSOFTMAX_INTERNAL = 6
} kokkossoftmax_status;

/** Scalar types. */
enum {
  KOKKOSSOFTMAX_FLOAT = 1,    /**< IEEE binary32 */
  KOKKOSSOFTMAX_DOUBLE = 2,   /**< IEEE binary64 */
  KOKKOSSOFTMAX_HALF = 3,     /**< IEEE binary16 */
  KOKKOSSOFTMAX_BFLOAT16 = 4, /**< bfloat16 */
  KOKKOSSOFTMAX_BOOL = 5      /**< one byte, zero or one; for masks alone */
};

/** Where memory lies. */
enum {
  KOKKOSSOFTMAX_HOST = 1, /**< memory of the host */
  KOKKOSSOFTMAX_CUDA = 2  /**< memory that a CUDA device reaches: device, managed, or pinned host memory */
};

/** What runs a call. */
enum {
  KOKKOSSOFTMAX_BACKEND_OF_ARRAYS = 0, /**< by the memory of the output */
  KOKKOSSOFTMAX_BACKEND_HOST = 1,      /**< Kokkos' host backend: OpenMP, Threads or Serial */
  KOKKOSSOFTMAX_BACKEND_CUDA = 2
};

/** How a head multiplies float operands; see Precision in KokkosSoftmax_Linear.hpp. */
enum {
  KOKKOSSOFTMAX_PRECISION_IEEE = 0, /**< no less accurate than IEEE single precision */
  KOKKOSSOFTMAX_PRECISION_TF32 = 1  /**< operands rounded to TF32 where the GPU has it */
};

#define KOKKOSSOFTMAX_MAX_RANK 8
/** How many transforms a call takes. */
#define KOKKOSSOFTMAX_MAX_TRANSFORMS 8

/** An array of the caller's. */
typedef struct kokkossoftmax_array {
  size_t struct_size; /**< sizeof(kokkossoftmax_array) */
  /** The element whose indices are all zero. Inputs are not written. May be null where an extent is 0. */
  void* data;
  int32_t scalar; /**< KOKKOSSOFTMAX_FLOAT, ... */
  int32_t memory; /**< KOKKOSSOFTMAX_HOST or KOKKOSSOFTMAX_CUDA */
  int32_t rank;   /**< 0 to 8; rank 0 is one element */
  int32_t reserved;
  const int64_t* extents; /**< `rank` values, each at least 0; ignored (may be null) for rank 0 */
  /** `rank` values, in elements; below 0 where a dimension lies backwards, before `data`. Null: C order
   * without gaps, the last dimension fastest. */
  const int64_t* strides;
} kokkossoftmax_array;

#define KOKKOSSOFTMAX_ARRAY_INIT \
  { sizeof(kokkossoftmax_array), NULL, 0, 0, 0, 0, NULL, NULL }

/** Where, and in which order with other work, a call runs. A null pointer in place of one of these means
 * KOKKOSSOFTMAX_EXECUTION_INIT. */
typedef struct kokkossoftmax_execution {
  size_t struct_size; /**< sizeof(kokkossoftmax_execution) */
  int32_t backend;    /**< KOKKOSSOFTMAX_BACKEND_... */
  /** CUDA: the device's ordinal; negative: the one that Kokkos uses (before Kokkos is initialised: the
   * current one). Kokkos uses one device in a process; another is KOKKOSSOFTMAX_UNSUPPORTED. */
  int32_t device;
  /** CUDA: the caller's cudaStream_t, of that device; null: CUDA's default stream. Ignored on the host. The
   * library keeps an instance for each stream that it has seen, see kokkossoftmax_forget_stream(). */
  void* stream;
} kokkossoftmax_execution;

#define KOKKOSSOFTMAX_EXECUTION_INIT \
  { sizeof(kokkossoftmax_execution), 0, -1, NULL }

/** What a transform does with a logit; `operands` are the members of kokkossoftmax_transform. An operand
 * "for each logit" has x's rank and extents, or 1 where it is broadcast, or rank 1 with a value for each
 * column (each place along the axis), or one value for all. Operands other than masks are of any scalar type
 * but BOOL. */
enum {
  /** value * number */
  KOKKOSSOFTMAX_SCALE = 1,
  /** value / operands[0]; one value a row: rank 1 with a value for each row, or x's extents without the axis.
   * With KOKKOSSOFTMAX_CHECKED a value that is not positive is an error, at the cost of waiting. */
  KOKKOSSOFTMAX_TEMPERATURE = 2,
  /** operands[0], of BOOL, for each logit: true keeps, the rest counts as -inf, whatever else is done to it
   */
  KOKKOSSOFTMAX_MASK = 3,
  /** keeps column <= query + offset, the query being the index along the dimension before the axis */
  KOKKOSSOFTMAX_CAUSAL = 4,
  /** value + operands[0], for each logit */
  KOKKOSSOFTMAX_BIAS = 5,
  /** value * Phi(value), through erf */
  KOKKOSSOFTMAX_GELU_ERF = 6,
  /** the approximation of the same through tanh */
  KOKKOSSOFTMAX_GELU_TANH = 7,
  /** max(value, 0) */
  KOKKOSSOFTMAX_RELU = 8,
  /** (value - mean) / sqrt(variance + number) * gamma + beta; operands: mean, variance, gamma, beta, each of
   * one value a column; number: eps, at least 0 */
  KOKKOSSOFTMAX_BATCH_NORM = 9,
  /** The same with mean and (biased) variance of the batch, which has at least two rows; heads alone, once in
   * a chain. operands: gamma, beta, running_mean, running_variance, each of one value a column; number: eps.
   * The last two may both be null; else they are written: running = (1 - momentum) running + momentum
   * statistic, the variance unbiased. */
  KOKKOSSOFTMAX_BATCH_NORM_TRAINING = 10,
  /** value * operands[0], for each logit; read where the call runs, so it may be in a device's memory */
  KOKKOSSOFTMAX_SCALE_BY = 11
};

/** A flag of KOKKOSSOFTMAX_TEMPERATURE. */
#define KOKKOSSOFTMAX_CHECKED 1

/** One step of a chain of transforms; the steps are applied in their order, in float (double where x or the
 * output is double). Members that the kind does not name are zero. */
typedef struct kokkossoftmax_transform {
  size_t struct_size; /**< sizeof(kokkossoftmax_transform); the same for all elements of an array of these */
  int32_t kind;       /**< KOKKOSSOFTMAX_SCALE, ... */
  int32_t flags;      /**< KOKKOSSOFTMAX_CHECKED or 0 */
  double number;      /**< factor of SCALE; eps of BATCH_NORM and BATCH_NORM_TRAINING */
  double momentum;    /**< BATCH_NORM_TRAINING: from 0 to 1 */
  int64_t offset;     /**< CAUSAL */
  const kokkossoftmax_array* operands[4];
} kokkossoftmax_transform;

#define KOKKOSSOFTMAX_TRANSFORM_INIT                      \
  {                                                       \
    sizeof(kokkossoftmax_transform), 0, 0, 0.0, 0.0, 0, { \
      NULL, NULL, NULL, NULL                              \
    }                                                     \
  }

/** How Kokkos is to be initialised. */
typedef struct kokkossoftmax_options {
  size_t struct_size;  /**< sizeof(kokkossoftmax_options) */
  int32_t device;      /**< the CUDA device; negative: the current one */
  int32_t num_threads; /**< threads of the host backend; 0: Kokkos' default (OMP_NUM_THREADS) */
} kokkossoftmax_options;

#define KOKKOSSOFTMAX_OPTIONS_INIT \
  { sizeof(kokkossoftmax_options), -1, 0 }

/** Weights in the form in which heads take them; made by kokkossoftmax_pack(). */
typedef struct kokkossoftmax_packed kokkossoftmax_packed;

/* ---- The library
 * ---------------------------------------------------------------------------------------------- */

/** major * 10000 + minor * 100 + patch of the library that runs. */
KOKKOSSOFTMAX_API int kokkossoftmax_version(void);

/** The same in words, "0.1.0". */
KOKKOSSOFTMAX_API const char* kokkossoftmax_version_string(void);

/** Initialises Kokkos, or takes it as it is when the program has done so (`options` are ignored then). Not
 * needed: the first call that needs Kokkos does it, with the default options and the device of its execution.
 * A program that itself initialises Kokkos does so before its first call here, or finds Kokkos initialised.
 * \param options  null: the defaults
 * \return KOKKOSSOFTMAX_OK; also when it was called before. KOKKOSSOFTMAX_FINALIZED after Kokkos was
 *         finalised: it cannot be initialised again in the same process. */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_initialize(const kokkossoftmax_options* options);

/** Waits for all work, frees everything that the library holds (packed weights too: their handles may only be
 * freed afterwards), and finalises Kokkos if this library initialised it. Where the program initialised
 * Kokkos, that stays usable, and calls here go on to work until the program finalises it; the same memory is
 * freed then. Need not be called.
 * \return KOKKOSSOFTMAX_OK; also when there is nothing to do. */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_finalize(void);

/** 1 while Kokkos is initialised (by whomever), else 0. */
KOKKOSSOFTMAX_API int kokkossoftmax_is_initialized(void);

/** 1 if this build has the backend (KOKKOSSOFTMAX_BACKEND_HOST or _CUDA), else 0; no matter whether the
 * machine has a device. */
KOKKOSSOFTMAX_API int kokkossoftmax_has_backend(int32_t backend);

/** 1 if this build has the heads (kokkossoftmax_linear_... and kokkossoftmax_pack), else 0: they return
 * KOKKOSSOFTMAX_UNSUPPORTED then. */
KOKKOSSOFTMAX_API int kokkossoftmax_has_linear(void);

/** What went wrong in the last call of this thread that did not return KOKKOSSOFTMAX_OK; empty before one.
 * Valid until the next such call of the thread. */
KOKKOSSOFTMAX_API const char* kokkossoftmax_last_error(void);

/** The name of a status, "KOKKOSSOFTMAX_OK". */
KOKKOSSOFTMAX_API const char* kokkossoftmax_status_name(kokkossoftmax_status status);

/** The name of the implementation that ran last on this thread; empty before the first. Valid for ever. */
KOKKOSSOFTMAX_API const char* kokkossoftmax_last_implementation(void);

/* ---- Executions
 * -------------------------------------------------------------------------------------------------- */

/** Waits until all work put on the execution (CUDA: on its stream) is done. Errors as for
 * kokkossoftmax_softmax(). Not in a capture. */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_synchronize(const kokkossoftmax_execution* execution);

/** To be called before the caller destroys a CUDA stream on which calls were made: waits for the stream and
 * lets go of what was kept for it (some megabytes; scratch memory is kept for the next stream). A stream that
 * is destroyed without this costs that memory until the program ends and is otherwise harmless; a new stream
 * that CUDA gives the same handle is treated as the old one, which is right.
 * \return KOKKOSSOFTMAX_OK; also for a stream that was never seen. */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_forget_stream(const kokkossoftmax_execution* execution);

/* ---- softmax
 * ------------------------------------------------------------------------------------------------------- */

/** y = softmax of the transformed x along an axis.
 * \param execution        null: by the memory of y
 * \param x                logits, rank 1 to 8; FLOAT, DOUBLE, HALF or BFLOAT16
 * \param y                output, of x's extents, any strides; elements between strides stay untouched. May
 * be x itself (same pointer, strides and scalar size); no other overlap with an operand. Of x's scalar type,
 * or FLOAT where x is HALF or BFLOAT16 \param axis             negative counts from the end: -1 is the last
 * \param transforms       `transform_count` steps; may be null for 0
 * \param transform_count  0 to KOKKOSSOFTMAX_MAX_TRANSFORMS
 * \return KOKKOSSOFTMAX_INVALID_ARGUMENT  null pointers, wrong sizes of structs, unknown kinds, extents that
 * do not fit, an axis out of range, memory that the execution cannot reach, overlap, a stream of another
 * device, a temperature that was to be checked and is not positive; KOKKOSSOFTMAX_UNSUPPORTED       another
 * pair of scalar types, a backend that the library was not built with, another device than Kokkos', batch
 * statistics outside of a head, a stream first seen in a capture before kokkossoftmax_reserve() was called on
 * this thread. */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_softmax(const kokkossoftmax_execution* execution,
                                                             const kokkossoftmax_array* x,
                                                             const kokkossoftmax_array* y, int32_t axis,
                                                             const kokkossoftmax_transform* transforms,
                                                             size_t transform_count);

/** y = log_softmax of the transformed x along an axis; everything else as kokkossoftmax_softmax(). */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_log_softmax(const kokkossoftmax_execution* execution,
                                                                 const kokkossoftmax_array* x,
                                                                 const kokkossoftmax_array* y, int32_t axis,
                                                                 const kokkossoftmax_transform* transforms,
                                                                 size_t transform_count);

/** lse = log of the sum of the exponentials of the transformed x along an axis. `lse` has x's extents without
 * the axis (rank 0 for x of rank 1), and does not overlap x; everything else as kokkossoftmax_softmax(). */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_logsumexp(const kokkossoftmax_execution* execution,
                                                               const kokkossoftmax_array* x,
                                                               const kokkossoftmax_array* lse, int32_t axis,
                                                               const kokkossoftmax_transform* transforms,
                                                               size_t transform_count);

/** Makes whatever the three calls above need the first time with these operands, or with smaller ones, on
 * this execution and host thread: the instance of the stream, scratch memory, the first launch of kernels.
 * Afterwards such a call allocates nothing and can be captured. On CUDA it also makes what a capture on a
 * stream that was never seen needs (torch.cuda.graph makes such). A captured call keeps the memory that it
 * took for the life of its graph: reserve again before the next capture. Arguments and errors as for the
 * call; `y` has x's rank, or one less for kokkossoftmax_logsumexp(). May wait for the stream. */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_reserve(const kokkossoftmax_execution* execution,
                                                             const kokkossoftmax_array* x,
                                                             const kokkossoftmax_array* y, int32_t axis,
                                                             const kokkossoftmax_transform* transforms,
                                                             size_t transform_count);

/* ---- Heads
 * -----------------------------------------------------------------------------------------------------------
 */

/** y = softmax of each row of the transformed x w^T.
 * \param execution   null: by the memory of y
 * \param x           M x K
 * \param w           N x K, any strides (a transposed matrix is one with its strides exchanged)
 * \param y           M x N, apart from x and w
 *                    The scalars (x, w, y) are (FLOAT, FLOAT, FLOAT), (DOUBLE, DOUBLE, DOUBLE), (HALF, HALF,
 *                    HALF or FLOAT), (BFLOAT16, BFLOAT16, BFLOAT16 or FLOAT)
 * \param transforms  as for kokkossoftmax_softmax(), and BATCH_NORM_TRAINING
 * \param precision   KOKKOSSOFTMAX_PRECISION_IEEE or _TF32
 * \return as kokkossoftmax_softmax() */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_linear_softmax(
    const kokkossoftmax_execution* execution, const kokkossoftmax_array* x, const kokkossoftmax_array* w,
    const kokkossoftmax_array* y, const kokkossoftmax_transform* transforms, size_t transform_count,
    int32_t precision);

/** y = log_softmax of each row of the transformed x w^T; everything else as kokkossoftmax_linear_softmax().
 */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_linear_log_softmax(
    const kokkossoftmax_execution* execution, const kokkossoftmax_array* x, const kokkossoftmax_array* w,
    const kokkossoftmax_array* y, const kokkossoftmax_transform* transforms, size_t transform_count,
    int32_t precision);

/** kokkossoftmax_reserve() for the two calls above. */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_reserve_linear(
    const kokkossoftmax_execution* execution, const kokkossoftmax_array* x, const kokkossoftmax_array* w,
    const kokkossoftmax_array* y, const kokkossoftmax_transform* transforms, size_t transform_count,
    int32_t precision);

/** Brings the weights w (N x K) into the form in which heads take them, once for many calls. Allocates and
 * waits, so not in a capture; w is not looked at afterwards. The handle may be used on every execution of the
 * same backend (null execution: by the memory of w), by several threads, and is to be freed with
 * kokkossoftmax_packed_free().
 * \param packed  where the handle is written; null is written on an error */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_pack(const kokkossoftmax_execution* execution,
                                                          const kokkossoftmax_array* w,
                                                          kokkossoftmax_packed** packed);

/** Frees a handle; null is allowed. On CUDA the work that uses it must be done: this call waits for it. May
 * be called after kokkossoftmax_finalize(). */
KOKKOSSOFTMAX_API void kokkossoftmax_packed_free(kokkossoftmax_packed* packed);

/** kokkossoftmax_linear_softmax() with weights from kokkossoftmax_pack(), whose scalar x has. */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_linear_softmax_packed(
    const kokkossoftmax_execution* execution, const kokkossoftmax_array* x, const kokkossoftmax_packed* w,
    const kokkossoftmax_array* y, const kokkossoftmax_transform* transforms, size_t transform_count,
    int32_t precision);

/** kokkossoftmax_linear_log_softmax() with weights from kokkossoftmax_pack(). */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_linear_log_softmax_packed(
    const kokkossoftmax_execution* execution, const kokkossoftmax_array* x, const kokkossoftmax_packed* w,
    const kokkossoftmax_array* y, const kokkossoftmax_transform* transforms, size_t transform_count,
    int32_t precision);

/** kokkossoftmax_reserve_linear() with weights from kokkossoftmax_pack(). */
KOKKOSSOFTMAX_API kokkossoftmax_status kokkossoftmax_reserve_linear_packed(
    const kokkossoftmax_execution* execution, const kokkossoftmax_array* x, const kokkossoftmax_packed* w,
    const kokkossoftmax_array* y, const kokkossoftmax_transform* transforms, size_t transform_count,
    int32_t precision);

#ifdef __cplusplus
}
#endif

#endif
