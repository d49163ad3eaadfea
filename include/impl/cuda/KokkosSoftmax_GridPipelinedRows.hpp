// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The CUDA kernel for long rows, at the speed of a copy (compute capability 9.0): blocks stay resident, one
/// on each multiprocessor; slices of rows are handed out in the order of memory by a ticket, so that a slower
/// multiprocessor takes fewer. In a block
///   a producer    takes a ticket when a slot of the ring in shared memory is free, and starts its bulk copy;
///   publishers    (8 warps) reduce a slice to (max, sum), one word in global memory;
///   a collector   (1 warp, or 2 that take turns) waits for the words of a slot's row and joins them;
///   finishers     (8 warps) write exp(x - max) / sum from the slot, which is free then.
/// None of them waits for a later one, so the way through L2 and the reduction of one slice are hidden behind
/// the copies and stores of others. (Warps that do all of it in turn reach 0.8 of a copy: they wait for
/// copies while results are there, or for results while copies are.)
///
/// Why it cannot hang. Publishers wait for nothing but copies: whatever slice was handed out gets published.
/// A row lacks slices that nobody took only while no slot is free, and tickets are handed out in order, so of
/// all rows that some block waits for, the oldest could lack one only if it filled all slots of the grid
/// itself: ruled out, since a row has at most as many slices as the grid has slots; a longer one is read
/// twice and holds no slot while it waits. All blocks are resident (the launch is cooperative).

#ifndef KOKKOSSOFTMAX_GRIDPIPELINEDROWS_HPP
#define KOKKOSSOFTMAX_GRIDPIPELINEDROWS_HPP

#include <impl/cuda/KokkosSoftmax_SlicedRows.hpp>

#include <string_view>

namespace KokkosSoftmax::impl {

struct GridPipelinedShape {
  static constexpr int most_slots = 12;
  static constexpr int warps_of_group = ReductionPlan::shares;
  static constexpr int most_collectors = 2;
  /// Slots, or their ends, are dealt to so many parties in turn; each then sees every phase of its slots'
  /// barriers.
  static constexpr int parties = 2;
  /// Two collectors hide the way through L2 better, but those ahead of their time poll in vain. (One and two
  /// on one H200, 1 GiB, 32768 columns: float 0.93 and 0.90 of a copy, bfloat16 0.86 and 0.90.)
  template <class In>
  static constexpr int collectors = sizeof(In) == 2 ? 2 : 1;
  static constexpr int threads = (2 * warps_of_group + 1 + most_collectors) * 32;
  static constexpr int slot_alignment = 128;

  index_type slices;    ///< of a row
  double rows_a_slice;  ///< 1 / slices
  int slice_columns;
  int slots;
  int slot_bytes;
  bool rereads;

  /// Tickets of a launch.
  KOKKOS_FORCEINLINE_FUNCTION index_type tickets(index_type rows) const {
    return rereads ? (rows + 1) * 2 * slices : rows * slices;
  }
  /// index / slices and the rest: a division of 64 bits would take the producer's one thread longer than all
  /// else that it does.
  __device__ void divide(index_type index, index_type& quotient, index_type& rest) const {
    quotient = __double2ll_rz(static_cast<double>(index) * rows_a_slice);
    rest = index - quotient * slices;
    if (rest < 0) {
      --quotient;
      rest += slices;
    } else if (rest >= slices) {
      ++quotient;
      rest -= slices;
    }
  }
};

enum class SliceUse : int {
  hold,     ///< publish, and finish from the same slot
  publish,  ///< and let the slot go
  finish,   ///< what another ticket published
  end,      ///< no more slices
};

/// What the producer says of a slot.
template <class Problem>
struct SliceInSlot {
  typename Problem::Out* y;  ///< first element of the slice (logsumexp: the row's output)
  index_type row;            ///< of the logits, for the transform
  index_type position;       ///< of the row among the rows
  index_type first_column;
  int columns;
  int shift;  ///< bytes of the slot before the slice
  SliceUse use;
  bool last_of_row;
};

/// Writes the outputs of a slice: neighbouring lanes write neighbouring vectors of 16 bytes where x and y
/// allow it, scalars elsewhere. Which lane writes what moves no bits.
template <class Problem>
struct SliceWriter {
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  using Result = SlicedRowResult<Problem>;
  using Registers = SliceRegisters<Problem>;
  static constexpr int larger_scalar = sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out);
  static constexpr int width = 16 / larger_scalar;  ///< elements of a vector
  static constexpr int steps =
      ReductionPlan::largest_slice_bytes / static_cast<int>(sizeof(In)) / width / ReductionPlan::threads;
  struct alignas(width * sizeof(In)) InVector {
    In e[width];
  };
  struct alignas(width * sizeof(Out)) OutVector {
    Out e[width];
  };

  const SliceInSlot<Problem>& slice;
  const char* slot;
  int warp, lane;
  const Result& row;

  /// From the exponentials in the slot, or from the logits where these are not kept. `release` is called once
  /// this warp has read its part of the slot.
  template <class Release>
  __device__ void scale_exponentials(const PartialSoftmax<Acc>* of_share, const Release& release) const {
    // A lane's vectors lie at the same place of each round of the shares, in one share or across two.
    const int first = head() + (warp * 32 + lane) * width;
    Acc factor[width];
#pragma unroll
    for (int j = 0; j < width; ++j) {
      if (j == 0 || j == width - 1)
        factor[j] = row.factor_of_share(of_share[Registers::share_of(first + j)].max);
    }
#pragma unroll
    for (int j = 1; j < width - 1; ++j)
      factor[j] =
          Registers::share_of(first + j) == Registers::share_of(first) ? factor[0] : factor[width - 1];
    write([&](int, int j, In held) { return static_cast<Acc>(held) * factor[j]; },
          [&](int column, In held) {
            return static_cast<Acc>(held) * row.factor_of_share(of_share[Registers::share_of(column)].max);
          },
          release);
  }

  template <class TransformRow, class Release>
  __device__ void from_inputs(const TransformRow& transform, const Release& release) const {
    const index_type first_column = slice.first_column;  // the slot may have a new slice before the last use
    row.with_output([&](const auto& output_of) {
      const auto output = [&](int column, In held) {
        return output_of(transformed<Acc>(transform, load_as<Acc>(held), first_column + column));
      };
      write([&](int column, int, In held) { return output(column, held); }, output, release);
    });
  }

  /// From transformed logits in the slot.
  template <class Release>
  __device__ void from_logits(const Release& release) const {
    from_inputs(BoundIdentity::Row{}, release);
  }

 private:
  __device__ int x_phase() const {
    return slice.shift / static_cast<int>(sizeof(In)) % width;
  }
  __device__ int head() const {
    return min((width - x_phase()) % width, slice.columns);
  }

  template <class InVectorOutput, class ScalarOutput, class Release>
  __device__ void write(const InVectorOutput& vector_output, const ScalarOutput& scalar_output,
                        const Release& release) const {
    const In* x = reinterpret_cast<const In*>(slot + slice.shift);
    Out* y = slice.y;
    const int thread = warp * 32 + lane;
    const int y_phase = static_cast<int>(reinterpret_cast<std::uintptr_t>(y) / sizeof(Out) % width);
    if (x_phase() == y_phase) {
      const int first = head();
      const int vectors = (slice.columns - first) / width;
      const int tail = slice.columns - first - vectors * width;
      InVector held[steps];
      const InVector* from = reinterpret_cast<const InVector*>(x + first);
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const int at = i * ReductionPlan::threads + thread;
        if (at < vectors) held[i] = from[at];
      }
      // The ends, fewer than a vector each: lanes of the first warp write the one, of the second the other.
      const int end = warp == 0 ? lane : first + vectors * width + lane;
      const bool has_end = (warp == 0 && lane < first) || (warp == 1 && lane < tail);
      Acc at_end = 0;
      if (has_end) at_end = scalar_output(end, x[end]);
      release();
      if (has_end) y[end] = store_as<Out>(at_end);
      OutVector* to = reinterpret_cast<OutVector*>(y + first);
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const int at = i * ReductionPlan::threads + thread;
        if (at < vectors) {
          Acc value[width];
#pragma unroll
          for (int j = 0; j < width; ++j) value[j] = vector_output(first + at * width + j, j, held[i].e[j]);
          OutVector out;
          round_vector(value, out);
          store_streaming(to + at, out);
        }
      }
    } else {
      for (int c = thread; c < slice.columns; c += ReductionPlan::threads)
        y[c] = store_as<Out>(scalar_output(c, x[c]));
      release();
    }
  }

  __device__ static void round_vector(const Acc (&value)[width], OutVector& out) {
    if constexpr (is_16_bit_v<Out> && std::is_same_v<Acc, float> && width % 2 == 0) {
      unsigned words[width / 2];
#pragma unroll
      for (int i = 0; i < width; i += 2) words[i / 2] = rounded_pair<Out>(value[i], value[i + 1]);
      memcpy(&out, words, sizeof(out));
    } else {
#pragma unroll
      for (int i = 0; i < width; ++i) out.e[i] = store_as<Out>(value[i]);
    }
  }

  // Evict-first: it is not read again.
  __device__ static void store_streaming(OutVector* to, const OutVector& v) {
    if constexpr (sizeof(OutVector) == 16) {
      __stcs(reinterpret_cast<uint4*>(to), bits_as<uint4>(v));
    } else if constexpr (sizeof(OutVector) == 8) {
      __stcs(reinterpret_cast<uint2*>(to), bits_as<uint2>(v));
    } else {
      __stcs(reinterpret_cast<unsigned*>(to), bits_as<unsigned>(v));
    }
  }
};

/// The ring: a slot's barriers, and what is known of the slice in it.
template <class Problem>
struct GridPipelinedRing {
  using Acc = typename Problem::Acc;
  static constexpr int most_slots = GridPipelinedShape::most_slots;

  // Each has one phase a turn of the ring.
  Mbarrier full[most_slots];     ///< the slice has arrived
  Mbarrier reduced[most_slots];  ///< the publishers are done with it
  Mbarrier ready[most_slots];    ///< the row's result is there, or none is needed
  Mbarrier empty[most_slots];    ///< all are done with it
  SliceInSlot<Problem> slice[most_slots];
  PartialSoftmax<Acc> of_warp[most_slots][GridPipelinedShape::warps_of_group];
  SlicedRowResult<Problem> of_row[most_slots];
  std::uint32_t epoch;
};

/// A position in the ring, and the parity of its turn.
struct RingCursor {
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ void advance(int slots, int by = 1) {
    slot += by;
    if (slot >= slots) {
      slot -= slots;
      parity ^= 1;
    }
  }
};

template <class Problem>
struct GridPipelinedBlock {
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  static constexpr bool has_transform = !std::is_same_v<typename Problem::Transform, BoundIdentity>;
  /// The exponentials go back to the slot where they fit, or the transformed logits for log_softmax, so that
  /// a transform and its operands are used once.
  static constexpr bool writes_back = SlicedRowResult<Problem>::keeps_exponentials;
  static constexpr int warps_of_group = GridPipelinedShape::warps_of_group;

  const Problem& problem;
  const GridPipelinedShape& shape;
  const CudaWorkspace& workspace;
  GridPipelinedRing<Problem>& ring;
  char* slots;
  int lane;

  __device__ bool writes_rows() const { return problem.operation != Operation::logsumexp; }
  __device__ std::uint32_t tag() const { return CudaWorkspace::tag_of(ring.epoch); }
  __device__ char* slot(int s) const { return slots + s * shape.slot_bytes; }
  __device__ PartialWords<Acc>* words_of(index_type position) const {
    return workspace.partials<Acc>() + position * shape.slices;
  }

  /// One thread.
  __device__ void produce() const {
    const index_type tickets = shape.tickets(problem.geometry.rows);
    RingCursor at{0, 1};
    for (;;) {
      mbarrier_wait_parity(&ring.empty[at.slot], at.parity);
      const auto ticket = static_cast<index_type>(atomicAdd(&workspace.header->next_ticket, 1ull));
      fence_proxy_async_shared();  // what was written to the slot comes before the next copy
      if (ticket >= tickets) {
        // Every block draws one such ticket; who draws the last one leaves all ready for the next launch.
        if (ticket == tickets + gridDim.x - 1) {
          workspace.header->next_ticket = 0;
          workspace.header->epoch_and_arrivals =
              static_cast<unsigned long long>(CudaWorkspace::epoch_after(ring.epoch)) << 32;
        }
        for (int end = 0; end < GridPipelinedShape::parties; ++end) {
          if (end > 0) mbarrier_wait_parity(&ring.empty[at.slot], at.parity);
          ring.slice[at.slot].use = SliceUse::end;
          mbarrier_arrive(&ring.full[at.slot]);
          at.advance(shape.slots);
        }
        return;
      }
      index_type position, slice;
      SliceUse use = writes_rows() ? SliceUse::hold : SliceUse::publish;
      if (!shape.rereads) {
        shape.divide(ticket, position, slice);
      } else {
        // Rows in phases: a slice of one to publish and one of the row before to finish in turn, the last
        // slices first, since they are the ones still in L2.
        const bool publishes = ticket % 2 == 0;
        shape.divide(ticket / 2, position, slice);
        use = SliceUse::publish;
        if (!publishes) {
          use = SliceUse::finish;
          --position;
          slice = shape.slices - 1 - slice;
        }
        if (position < 0 || position >= problem.geometry.rows) continue;
      }
      fill(at.slot, position, slice, use);
      at.advance(shape.slots);
    }
  }

  __device__ void fill(int s, index_type position, index_type slice, SliceUse use) const {
    const RowGeometry& g = problem.geometry;
    const RowGeometry::Row where = g.row(position);
    SliceInSlot<Problem>& in = ring.slice[s];
    const index_type first = slice * shape.slice_columns;
    const index_type columns = min(static_cast<index_type>(shape.slice_columns), g.columns - first);
    const In* x = problem.x + where.x_offset + first;
    in.y = problem.y + where.y_offset + (writes_rows() ? first : 0);
    in.row = where.index;
    in.position = position;
    in.first_column = first;
    in.columns = static_cast<int>(columns);
    in.use = use;
    in.last_of_row = slice == shape.slices - 1;
    // From the boundary of 16 bytes before the slice to the one after it. Both stay on the pages of the row,
    // but what follows the last row may not be memory of anyone: there the copy ends at the boundary before,
    // and ordinary loads bring the rest.
    const auto begin = reinterpret_cast<std::uintptr_t>(x);
    const auto end = reinterpret_cast<std::uintptr_t>(x + columns);
    const std::uintptr_t copy_begin = begin / 16 * 16;
    const bool ends_memory = position == g.rows - 1 && in.last_of_row;
    const std::uintptr_t copy_end = ends_memory ? end / 16 * 16 : (end + 15) / 16 * 16;
    in.shift = static_cast<int>(begin - copy_begin);
    char* to = slot(s);
    if (copy_end < end) {
      for (const In* p = reinterpret_cast<const In*>(max(copy_end, begin)); p < x + columns; ++p)
        *reinterpret_cast<In*>(to + (reinterpret_cast<std::uintptr_t>(p) - copy_begin)) = *p;
    }
    const auto bytes = static_cast<std::uint32_t>(copy_end > copy_begin ? copy_end - copy_begin : 0);
    mbarrier_arrive_expect_tx(&ring.full[s], bytes);
    if (bytes) cp_async_bulk(to, reinterpret_cast<const void*>(copy_begin), bytes, &ring.full[s]);
  }

  /// One of the collectors.
  __device__ void collect(int collector) const {
    index_type have = -1;
    SlicedRowResult<Problem> result{};
    RingCursor at{collector, 0};
    for (;; at.advance(shape.slots, GridPipelinedShape::collectors<In>)) {
      mbarrier_wait_parity(&ring.full[at.slot], at.parity);
      const SliceInSlot<Problem>& in = ring.slice[at.slot];
      const SliceUse use = in.use;
      if (use == SliceUse::end) {
        if (lane == 0) mbarrier_arrive(&ring.ready[at.slot]);
        return;
      }
      const index_type position = in.position;
      Out* const y = in.y;
      const bool last = in.last_of_row;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&ring.empty[at.slot]);
      const bool collects = shape.slices > 1 && (use != SliceUse::publish || (last && !writes_rows()));
      if (!collects) {
        // (A row of one slice has its result from a publisher.)
        if (lane == 0 && use == SliceUse::publish) mbarrier_arrive(&ring.ready[at.slot]);
        continue;
      }
      if (position != have) {
        result = {problem.operation, collect_slices(words_of(position), shape.slices, tag(), lane)};
        have = position;
      }
      if (lane == 0) {
        ring.of_row[at.slot] = result;
        if (!writes_rows()) *y = store_as<Out>(result.logsumexp());
        mbarrier_arrive(&ring.ready[at.slot]);
      }
    }
  }

  /// A warp of a group of publishers.
  __device__ void publish(int group, int groups, int warp) const {
    int joins = 0;
    int ends = GridPipelinedShape::parties / groups;
    RingCursor at{group, 0};
    for (;; at.advance(shape.slots, groups)) {
      mbarrier_wait_parity(&ring.full[at.slot], at.parity);
      const SliceUse use = ring.slice[at.slot].use;
      if (use == SliceUse::end) {
        if (lane == 0) mbarrier_arrive(&ring.reduced[at.slot]);
        if (--ends == 0) return;
        continue;
      }
      if (use == SliceUse::finish) {
        if (lane == 0) mbarrier_arrive(&ring.reduced[at.slot]);
      } else {
        publish_slice(at, warp, warp == joins);
        joins = (joins + 1) % warps_of_group;
      }
      release(at);
    }
  }

  /// All lanes of a warp are done with a slot.
  __device__ void release(const RingCursor& at) const {
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&ring.empty[at.slot]);
  }

  /// Reduces a slice; one of the warps, in turns, joins what all found.
  __device__ void publish_slice(const RingCursor& at, int warp, bool joins) const {
    const SliceInSlot<Problem>& in = ring.slice[at.slot];
    char* const data = slot(at.slot) + in.shift;
    PartialSoftmax<Acc> found;
    const bool keeps_exponentials = in.use == SliceUse::hold && problem.operation == Operation::softmax;
    const bool keeps_logits = has_transform && in.use == SliceUse::hold && !keeps_exponentials;
    with_quarters<In>(in.columns, [&](auto quarters) {
      SliceRegisters<Problem, decltype(quarters)::value> mine;
      mine.load(reinterpret_cast<const In*>(data), in.columns, warp, lane, problem.transform.at_row(in.row),
                in.first_column);
      found = mine.reduce([&]([[maybe_unused]] int i, [[maybe_unused]] Acc value, [[maybe_unused]] Acc e) {
        if constexpr (writes_back) {
          const int c = mine.column(i, warp, lane);
          if ((keeps_exponentials || keeps_logits) && (mine.is_whole(i / mine.unit) || c < in.columns))
            reinterpret_cast<Acc*>(data)[c] = keeps_exponentials ? e : value;
        }
      });
    });
    if (lane == 0) ring.of_warp[at.slot][warp] = found;
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&ring.reduced[at.slot]);
    if (!joins) return;
    mbarrier_wait_parity(&ring.reduced[at.slot], at.parity);
    const PartialSoftmax<Acc> of_slice =
        join_lanes<warps_of_group>(ring.of_warp[at.slot][lane % warps_of_group]);
    if (lane != 0) return;
    if (shape.slices > 1) {
      PartialWords<Acc>::publish(words_of(in.position) + in.first_column / shape.slice_columns, of_slice,
                                 tag());
      return;
    }
    const SlicedRowResult<Problem> result(problem.operation, of_slice);
    if (writes_rows()) {
      ring.of_row[at.slot] = result;
      mbarrier_arrive(&ring.ready[at.slot]);
    } else {
      *in.y = store_as<Out>(result.logsumexp());
    }
  }

  /// A warp of the finishers.
  __device__ void finish(int warp) const {
    RingCursor at;
    for (;; at.advance(shape.slots)) {
      mbarrier_wait_parity(&ring.ready[at.slot], at.parity);
      mbarrier_wait_parity(&ring.full[at.slot], at.parity);  // passed, but what the copy wrote is visible now
      const SliceUse use = ring.slice[at.slot].use;
      if (use == SliceUse::end) return;
      if (use == SliceUse::publish) {
        release(at);
      } else {
        finish_slice(at, warp);
      }
    }
  }

  __device__ void finish_slice(const RingCursor& at, int warp) const {
    const SliceInSlot<Problem>& in = ring.slice[at.slot];
    const SlicedRowResult<Problem> result = ring.of_row[at.slot];
    const SliceWriter<Problem> writer{in, slot(at.slot), warp, lane, result};
    const auto done = [&] { release(at); };
    if constexpr (writes_back) {
      if (in.use == SliceUse::hold) {
        mbarrier_wait_parity(&ring.reduced[at.slot], at.parity);
        if (problem.operation == Operation::softmax) {
          writer.scale_exponentials(ring.of_warp[at.slot], done);
        } else {
          writer.from_logits(done);
        }
        return;
      }
    }
    writer.from_inputs(problem.transform.at_row(in.row), done);
  }
};

template <class Problem>
__global__ void __launch_bounds__(GridPipelinedShape::threads, 1)
    grid_pipelined_rows_kernel(const __grid_constant__ Problem problem,
                               const __grid_constant__ GridPipelinedShape shape,
                               const __grid_constant__ CudaWorkspace workspace) {
  extern __shared__ __align__(128) char grid_pipelined_slots[];
  __shared__ GridPipelinedRing<Problem> ring;
  constexpr int warps_of_group = GridPipelinedShape::warps_of_group;
  if (threadIdx.x == 0) {
    const bool finishes = problem.operation != Operation::logsumexp;
    for (int i = 0; i < shape.slots; ++i) {
      mbarrier_init(&ring.full[i], 1);
      mbarrier_init(&ring.empty[i], (finishes ? 2 : 1) * warps_of_group + 1);
      mbarrier_init(&ring.reduced[i], warps_of_group);
      mbarrier_init(&ring.ready[i], 1);
    }
    fence_mbarrier_init();
    ring.epoch = static_cast<std::uint32_t>(workspace.header->epoch_and_arrivals >> 32);
  }
  __syncthreads();
  workspace.clear_before_first_epoch(ring.epoch);
  const int warp = threadIdx.x / 32;
  const GridPipelinedBlock<Problem> block{
      problem, shape, workspace, ring, grid_pipelined_slots, static_cast<int>(threadIdx.x % 32)};
  const bool finishes = block.writes_rows();
  if (warp < warps_of_group) {
    block.publish(0, finishes ? 1 : 2, warp);
  } else if (warp < 2 * warps_of_group) {
    if (finishes) {
      block.finish(warp - warps_of_group);
    } else {
      block.publish(1, 2, warp - warps_of_group);
    }
  } else if (warp == 2 * warps_of_group) {
    if (block.lane == 0) block.produce();
  } else if (warp <= 2 * warps_of_group + GridPipelinedShape::collectors<typename Problem::In>) {
    block.collect(warp - 2 * warps_of_group - 1);
  }
}

struct GridPipelinedRows {
  static constexpr const char* name = "grid_pipelined_rows";

  template <class Exec, class Problem>
  static constexpr bool supports = sliced_rows_support<Exec, Problem>;

  template <class Exec, class Problem>
  static std::string_view refuse(const Exec& exec, const Problem& problem) {
    const std::string_view layout = refuse_sliced_rows(problem);
    if (!layout.empty()) return layout;
    const char* refusal = limits(exec, &grid_pipelined_rows_kernel<Problem>).refusal;
    return refusal ? std::string_view(refusal) : std::string_view();
  }

  template <class Exec, class Problem>
  static void run(const Exec& exec, const Problem& problem) {
    run_with(exec, problem, ReductionPlan::of<typename Problem::In>(problem.geometry.columns));
  }

  /// With parameters of the caller's choice: for the program that finds the tuning.
  template <class Problem>
  static void run_with(const Kokkos::Cuda& exec, const Problem& problem, const ReductionPlan& plan,
                       int slots = GridPipelinedShape::most_slots) {
    using In = typename Problem::In;
    const auto kernel = &grid_pipelined_rows_kernel<Problem>;
    const CooperativeLimits& device = limits(exec, kernel);
    GridPipelinedShape shape{};
    shape.slices = plan.slices;
    shape.rows_a_slice = 1.0 / static_cast<double>(plan.slices);
    shape.slice_columns = plan.slice_columns;
    constexpr int alignment = GridPipelinedShape::slot_alignment;
    // A slice that starts off a boundary takes up to 16 bytes more.
    shape.slot_bytes =
        (plan.slice_columns * static_cast<int>(sizeof(In)) + 16 + alignment - 1) / alignment * alignment;
    constexpr int parties = GridPipelinedShape::parties;
    shape.slots = std::min({slots, device.shared_bytes / shape.slot_bytes, GridPipelinedShape::most_slots}) /
                  parties * parties;
    shape.rereads =
        problem.operation != Operation::logsumexp &&
        (plan.reads_twice || plan.slices > static_cast<index_type>(device.multiprocessors) * shape.slots);
    launch_labelled(exec, kernel_label(problem.operation, name), [&] {
      launch_cooperatively(exec, kernel, device.multiprocessors, GridPipelinedShape::threads,
                           static_cast<std::size_t>(shape.slots) * shape.slot_bytes, problem, shape,
                           CudaWorkspace::get<typename Problem::Acc>(exec, words(problem, plan)));
    });
  }

  template <class Exec, class Problem>
  static void reserve(const Exec& exec, const Problem& problem) {
    CudaWorkspace::reserve<typename Problem::Acc>(
        exec, words(problem, ReductionPlan::of<typename Problem::In>(problem.geometry.columns)));
  }

 private:
  template <class Problem>
  static index_type words(const Problem& problem, const ReductionPlan& plan) {
    return plan.slices > 1 ? problem.geometry.rows * plan.slices : 0;
  }

  template <class Kernel>
  static const CooperativeLimits& limits(const Kokkos::Cuda& exec, Kernel kernel) {
    return cooperative_limits(kernel, exec.cuda_device(), GridPipelinedShape::threads, true);
  }
};

}  // namespace KokkosSoftmax::impl

#endif
