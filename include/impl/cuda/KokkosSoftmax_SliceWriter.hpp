// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// How the finishers of grid_pipelined_rows turn a slice of a row into its outputs.

#ifndef KOKKOSSOFTMAX_SLICEWRITER_HPP
#define KOKKOSSOFTMAX_SLICEWRITER_HPP

#include <impl/cuda/KokkosSoftmax_GridPipelinedShape.hpp>

namespace KokkosSoftmax::impl {

/// Where a finisher's warp leaves outputs that are larger than the inputs, from where bulk copies take them.
struct StagedOutputs {
  char* place;  ///< a line more than so many vectors a lane, at a boundary of lines
  int vectors;
  bool leave_l2_first;
};

/// Turns a slice in its slot into its outputs. Which lane does what moves no bits. Outputs as large as the
/// inputs stay in the slot, larger ones are staged piece by piece; but the few before the first boundary of y
/// and behind the last go to y, and so do all that are smaller.
template <class Problem>
struct SliceWriter {
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  using Result = SlicedRowResult<Problem>;
  using Part = PartOfSlice<Problem>;
  static constexpr bool through_slot = sizeof(In) == sizeof(Out);
  static constexpr bool stages = has_larger_outputs<Problem>;
  static constexpr int threads = GridPipelinedShape::finishing_threads;
  /// From a vector of a lane to its next one: a warp's lie together where they are staged.
  static constexpr int stride = stages ? 32 : threads;
  static constexpr int larger_scalar = sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out);
  static constexpr int width = GridPipelinedShape::copy_alignment / larger_scalar;  ///< elements of a vector
  static constexpr int unit = Part::unit;
  /// (In words: the compiler gives each half or bfloat16 a register.)
  struct alignas(width * sizeof(In)) InVector {
    unsigned word[width * sizeof(In) / 4];
    template <class Pair>
    __device__ Acc element(int i) const {
      if constexpr (sizeof(In) == 2) {
        return i % 2 ? Pair::high(word[i / 2]) : Pair::low(word[i / 2]);
      } else {
        In e[width];
        memcpy(e, word, sizeof(e));
        return load_as<Acc>(e[i]);
      }
    }
  };
  struct alignas(width * sizeof(Out)) OutVector {
    Out e[width];
  };

  /// What a pair of 16 bits in the slot holds.
  using Logits = PackedPair<In>;
  using Exponentials =
      std::conditional_t<Result::keeps_packed_exponentials, PackedExponentials<In>, PackedPair<In>>;

  const SliceInSlot<Problem>& slice;
  char* slot;
  int warp, lane;
  const Result& row;
  StagedOutputs staged;

  /// From the exponentials in the slot. `release` is called once this warp is done with the slot.
  template <class Release>
  __device__ void scale_exponentials(const PartialSoftmax<Acc>* of_share, const Release& release) const {
    from_kept<Exponentials>(
        [&](int column) { return row.factor_of_share(of_share[Part::share_of(column)].max); },
        [](Acc held, Acc factor) { return held * factor; }, release);
  }
  /// From the differences from their share's maximum there.
  template <class Release>
  __device__ void add_to_differences(const PartialSoftmax<Acc>* of_share, const Release& release) const {
    from_kept<Logits>([&](int column) { return row.offset_of_share(of_share[Part::share_of(column)].max); },
                      [](Acc held, Acc offset) { return held + offset; }, release);
  }

  template <class TransformRow, class Release>
  __device__ void from_inputs(const TransformRow& transform, const Release& release) const {
    if constexpr (divides_coarsely<Problem>) {
      using Transform = typename Problem::Transform;
      const auto& temperature = temperature_of_row<Transform>(transform);
      if (quotients_are_coarse(temperature, row.max)) {
        const auto with_output = [&](const auto& use) { row.with_output_of_quotients(temperature, use); };
        if constexpr (may_be_coarse<Out, TransformRow>) {
          from_values(BoundIdentity::Row{}, with_output, release);
        } else {
          from_values(mask_of_row<Transform>(transform), with_output, release);
        }
        return;
      }
    }
    from_values(
        transform, [this](const auto& use) { row.with_output(use); }, release);
  }
  /// `with_output` calls what it is given with the function from a transformed value to its output.
  template <class TransformRow, class WithOutput, class Release>
  __device__ void from_values(const TransformRow& transform, const WithOutput& with_output,
                              const Release& release) const {
    const index_type first_column = slice.first_column;  // the slot may have a new slice before the last use
    if constexpr (transforms_held_logits<TransformRow>) {
      // Once for all operations: it is long.
      const auto output = [&](int column, Acc held) {
        Acc value = transformed<Acc>(transform, held, first_column + column);
        with_output([&](const auto& output_of) { value = output_of(value); });
        return value;
      };
      write<Logits>(
          [&]<int count>(int column, Acc(&value)[count]) {
            transform.template transform_held<width>(value,
                                                     HeldNeighbours{first_column + column, stride * width});
            with_output([&](const auto& output_of) {
#pragma unroll
              for (Acc& v : value) v = output_of(v);
            });
          },
          output, [&](int) { return output; }, release);
    } else {
      with_output([&](const auto& output_of) {
        const auto output = [&](int column, Acc held) {
          return output_of(transformed<Acc>(transform, held, first_column + column));
        };
        const auto write_with = [&](const auto& transform_vector) {
          write<Logits>(
              [&](int column, Acc(&value)[width]) {
                transform_vector(value, first_column + column);
#pragma unroll
                for (int j = 0; j < width; ++j) value[j] = output_of(value[j]);
              },
              output, [&](int) { return output; }, release);
        };
        if (stage_takes_neighbours<width>(transform, first_column + head())) {
          write_with([&](Acc(&value)[width], index_type first) {
            transform_neighbours<width>(transform, value, first);
          });
        } else {
          write_with([&](Acc(&value)[width], index_type first) {
#pragma unroll
            for (int j = 0; j < width; ++j) value[j] = transformed<Acc>(transform, value[j], first + j);
          });
        }
      });
    }
  }

  /// What a lane keeps of a slice, as it is in the slot.
  struct Parked {
    InVector vector[GridPipelinedShape::parked_vectors];
    Acc end;
  };
  __device__ __forceinline__ void park(Parked& parked) const {
    const int first = head();
    const int vectors = (slice.columns - first) / width;
    const InVector* const from = reinterpret_cast<const InVector*>(x() + first) + thread();
#pragma unroll
    for (int i = 0; i < GridPipelinedShape::parked_vectors; ++i) {
      if (thread() + i * threads < vectors) parked.vector[i] = from[i * threads];
    }
    parked.end = end_of<Logits>(first, first + vectors * width, [](int, Acc held) { return held; }).value;
  }

  /// Writes a parked slice of x and y that lie alike, each thread a vector in so many cycles.
  __device__ __forceinline__ void from_parked(const Parked& parked, int store_cycles) const {
    unsigned next_store = clock_cycles();
    const int first = head();
    const int vectors = (slice.columns - first) / width;
    const End end = end_at(first, first + vectors * width);
    OutVector* const to = reinterpret_cast<OutVector*>(slice.y + first) + thread();
    const int left = vectors - thread();
    row.with_output([&](const auto& output_of) {
      if (end.exists) slice.y[end.column] = store_as<Out>(output_of(parked.end));
#pragma unroll
      for (int i = 0; i < GridPipelinedShape::parked_vectors; ++i) {
        Acc value[width];
#pragma unroll
        for (int j = 0; j < width; ++j) value[j] = output_of(parked.vector[i].template element<Logits>(j));
        if (i * threads < left) store_streaming(to + i * threads, rounded<OutVector>(value));
        next_store += static_cast<unsigned>(store_cycles);
        wait_until_cycle(next_store);
      }
    });
  }

  /// Of logits that are all dropped, whatever is in the slot.
  template <class Release>
  __device__ void of_dropped(const Release& release) const {
    Acc output = 0;
    row.with_output([&](const auto& output_of) { output = output_of(-infinity_v<Acc>); });
    if constexpr (stages) {
      write_staged<Logits>(
          [&](int, Acc(&value)[SliceWriter::width]) {
#pragma unroll
            for (Acc& v : value) v = output;
          },
          [&](int, Acc) { return output; }, release);
      return;
    }
    constexpr int width = GridPipelinedShape::copy_alignment / static_cast<int>(sizeof(Out));
    struct alignas(GridPipelinedShape::copy_alignment) Vector {
      Out e[width];
    } vector;
#pragma unroll
    for (Out& e : vector.e) e = store_as<Out>(output);
    // As a bulk copy takes them; the others go to y.
    const int first =
        through_slot ? min(slice.bytes_before_boundary() / static_cast<int>(sizeof(Out)), slice.columns) : 0;
    const int vectors = through_slot ? (slice.columns - first) / width : 0;
    auto* const to = reinterpret_cast<Vector*>(slot + slice.bytes_before_outputs() +
                                               first * static_cast<int>(sizeof(Out)));
    for (int i = thread(); i < vectors; i += threads) to[i] = vector;
    for (int c = thread(); c < slice.columns - vectors * width; c += threads)
      slice.y[c < first ? c : c + vectors * width] = vector.e[0];
    release();
  }

  /// From transformed logits in the slot.
  template <class Release>
  __device__ void from_logits(const Release& release) const {
    from_values(
        BoundIdentity::Row{}, [this](const auto& use) { row.with_output(use); }, release);
  }

 private:
  /// `number_of`(column) is the number that an output is made with, by `combine`, all over the column's
  /// share.
  template <class Pair, class NumberOf, class Combine, class Release>
  __device__ void from_kept(const NumberOf& number_of, const Combine& combine, const Release& release) const {
    // A lane's vectors lie at the same place of each round of the shares, in one share or across two.
    const int first = head() + thread() * width;
    const int of_first_share =
        static_cast<int>(Part::columns_together - static_cast<unsigned>(first) % Part::columns_together);
    const Acc of_first = number_of(first);
    Acc of_last = of_first;
    if (of_first_share < width) of_last = number_of(first + width - 1);
    Acc number[width];
#pragma unroll
    for (int j = 0; j < width; ++j) number[j] = j < of_first_share ? of_first : of_last;
    write<Pair>(
        [&](int, Acc(&value)[width]) {
#pragma unroll
          for (int j = 0; j < width; ++j) value[j] = combine(value[j], number[j]);
        },
        [&](int column, Acc held) { return combine(held, number_of(column)); },
        [&](int column) {
          // A unit that starts at an odd column may end in the next share.
          const Acc of_even = number_of(column), of_odd = number_of(column + unit - 1);
          return [=](int c, Acc held) { return combine(held, (c - column) % unit == 0 ? of_even : of_odd); };
        },
        release);
  }

  __device__ int thread() const {
    return warp * 32 + lane;
  }
  __device__ int x_phase() const {
    return static_cast<int>(static_cast<unsigned>(slice.shift) / sizeof(In) % width);
  }
  __device__ int y_phase() const {
    return static_cast<int>(reinterpret_cast<std::uintptr_t>(slice.y) / sizeof(Out) % width);
  }
  /// Columns before the first vector, which is one of y where outputs are staged.
  __device__ int head() const {
    return min((width - (stages ? y_phase() : x_phase())) % width, slice.columns);
  }
  __device__ In* x() const {
    return reinterpret_cast<In*>(slot + slice.shift);
  }

  template <class Pair>
  __device__ static Acc element_of(const In& held) {
    if constexpr (sizeof(In) == 2) return Pair::low(bits_as<unsigned short>(held));
    return load_as<Acc>(held);
  }

  /// The elements before `first` and those from `last` on, fewer than a vector each: lanes of the first warp
  /// have the one, of the second the other.
  struct End {
    bool exists;
    int column;
    Acc value;
  };
  __device__ End end_at(int first, int last) const {
    End end{false, warp == 0 ? lane : last + lane, 0};
    end.exists = warp == 0 ? lane < first : warp == 1 && end.column < slice.columns;
    return end;
  }
  template <class Pair, class ScalarOutput>
  __device__ End end_of(int first, int last, const ScalarOutput& scalar_output) const {
    End end = end_at(first, last);
    if (end.exists) end.value = scalar_output(end.column, element_of<Pair>(x()[end.column]));
    return end;
  }

  template <class Pair, class ScalarOutput>
  __device__ void write_ends(int first, int last, const ScalarOutput& scalar_output) const {
    const End end = end_of<Pair>(first, last, scalar_output);
    if (end.exists) slice.y[end.column] = store_as<Out>(end.value);
  }

  /// `output_of_unit(column)` gives the function for elements of the unit there and those a multiple of a
  /// round of the shares from it.
  template <class Pair, class VectorOutput, class ScalarOutput, class OutputOfUnit, class Release>
  __device__ void write(const VectorOutput& vector_output, const ScalarOutput& scalar_output,
                        const OutputOfUnit& output_of_unit, const Release& release) const {
    if constexpr (stages) {
      write_staged<Pair>(vector_output, scalar_output, release);
    } else if (x_phase() == y_phase()) {
      write_vectors<Pair>(vector_output, scalar_output, release);
    } else {
      write_units<Pair>(output_of_unit, scalar_output, release);
    }
  }

  template <class Pair, class VectorOutput, class ScalarOutput, class Release>
  __device__ void write_vectors(const VectorOutput& vector_output, const ScalarOutput& scalar_output,
                                const Release& release) const {
    const int first = head();
    const int vectors = (slice.columns - first) / width;
    write_ends<Pair>(first, first + vectors * width, scalar_output);
    OutVector* const to = through_slot ? reinterpret_cast<OutVector*>(x() + first)
                                       : reinterpret_cast<OutVector*>(slice.y + first);
    write_lane<Pair>(vector_output, first, thread(), vectors, true, to);
    release();
  }

  /// Each warp one piece of the slice after the other. Its last piece has left its place long ago.
  template <class Pair, class VectorOutput, class ScalarOutput, class Release>
  __device__ void write_staged(const VectorOutput& vector_output, const ScalarOutput& scalar_output,
                               const Release& release) const {
    const int first = head();
    const int vectors = (slice.columns - first) / width;
    write_ends<Pair>(first, first + vectors * width, scalar_output);
    OutVector* const y = reinterpret_cast<OutVector*>(slice.y + first);
    OutVector* const place = reinterpret_cast<OutVector*>(staged.place + place_in_line(y));
    const bool alike = x_phase() == y_phase();
    // Pieces of one length.
    const int rounds = (vectors + threads - 1) / threads;
    const int turns = max(1, (rounds + staged.vectors - 1) / staged.vectors);
    const int piece = (rounds + turns - 1) / turns * 32;
#pragma unroll 1
    for (int begin = warp * piece; begin < vectors; begin += piece * (threads / 32)) {
      const int last = min(begin + piece, vectors);
      if (lane == 0) cp_async_bulk_wait_group_read<0>();
      __syncwarp();
      write_lane<Pair>(vector_output, first, begin + lane, last, alike, place - begin);
      fence_proxy_async_shared();  // what was written there comes before the copy from it
      __syncwarp();
      if (lane == 0) {
        const auto bytes = static_cast<std::uint32_t>((last - begin) * GridPipelinedShape::copy_alignment);
        if (staged.leave_l2_first) {
          cp_async_bulk_store(y + begin, place, bytes, createpolicy_evict_first());
        } else {
          cp_async_bulk_store(y + begin, place, bytes);
        }
      }
    }
    release();
  }

  /// The vectors behind `first` from the lane's first, `at`, to `last`, to their places behind `to`. `alike`:
  /// whether vectors of y are vectors of x, too.
  template <class Pair, class VectorOutput>
  __device__ __forceinline__ void write_lane(const VectorOutput& vector_output, int first, int at, int last,
                                             bool alike, OutVector* to) const {
    const In* const from = x() + first;
    const auto load = [&](int of_vector) {
      InVector vector = {};
      if (!stages || alike) vector = reinterpret_cast<const InVector*>(from)[of_vector];
      if constexpr (stages) {
        if (!alike) {
          In e[width];
#pragma unroll
          for (int j = 0; j < width; ++j) e[j] = from[of_vector * width + j];
          memcpy(vector.word, e, sizeof(e));
        }
      }
      return vector;
    };
    // (What takes several vectors looks up what to do once for all of them.)
    const auto out_of = [&]<int count>(int of_vector, const InVector(&held)[count]) {
      Acc value[count * width];
#pragma unroll
      for (int j = 0; j < count * width; ++j) value[j] = held[j / width].template element<Pair>(j % width);
      vector_output(first + of_vector * width, value);
#pragma unroll
      for (int i = 0; i < count; ++i) {
        Acc of_one[width];
#pragma unroll
        for (int j = 0; j < width; ++j) of_one[j] = value[i * width + j];
        const OutVector out = rounded<OutVector>(of_one);
        if constexpr (through_slot || stages) {
          to[of_vector + i * stride] = out;
        } else {
          store_past_l1(to + of_vector + i * stride, out);
        }
      }
    };
    constexpr int at_once = Part::unit == 2 && Part::has_transform ? 2 : 4;
    constexpr int together = std::is_invocable_v<VectorOutput, int, Acc(&)[at_once * width]> ? at_once : 1;
#pragma unroll 1
    for (; at + (at_once - 1) * stride < last; at += at_once * stride) {
      InVector held[at_once / together][together];
#pragma unroll
      for (int i = 0; i < at_once; ++i) held[i / together][i % together] = load(at + i * stride);
#pragma unroll
      for (int i = 0; i < at_once; i += together) out_of(at + i * stride, held[i / together]);
    }
    InVector held[at_once - 1][1];
#pragma unroll
    for (int i = 0; i < at_once - 1; ++i) {
      if (at + i * stride < last) held[i][0] = load(at + i * stride);
    }
#pragma unroll
    for (int i = 0; i < at_once - 1; ++i) {
      if (at + i * stride < last) out_of(at + i * stride, held[i]);
    }
  }

  /// Where x and y lie differently.
  template <class Pair, class OutputOfUnit, class ScalarOutput, class Release>
  __device__ void write_units(const OutputOfUnit& output_of_unit, const ScalarOutput& scalar_output,
                              const Release& release) const {
    if constexpr (!through_slot) {
      const auto& output = output_of_unit(thread());
      const In* const from = x();
#pragma unroll 4
      for (int c = thread(); c < slice.columns; c += threads)
        slice.y[c] = store_as<Out>(output(c, element_of<Pair>(from[c])));
    } else {
      const int first = min(slice.bytes_before_boundary() / static_cast<int>(sizeof(Out)), slice.columns);
      const int units = (slice.columns - first) / width * width / unit;
      write_ends<Pair>(first, first + units * unit, scalar_output);
      if (units > 0) move_units<Pair>(first, units, output_of_unit(first + thread() * unit));
    }
    release();
  }

  /// Writes what a bulk copy can take to y to its place in the slot. Some units of a thread at once are read
  /// before any of these is written, and in the order in which none is written to the place of one that is
  /// still to be read.
  template <class Pair, class Output>
  __device__ void move_units(int first, int units, const Output& output) const {
    constexpr int steps = 8;
    struct alignas(unit * sizeof(Out)) OutUnit {
      Out e[unit];
    };
    const int place = slice.bytes_before_outputs();
    const bool moves_up = place > slice.shift;
    const In* const from = x() + first;
    OutUnit* const to = reinterpret_cast<OutUnit*>(slot + place + first * static_cast<int>(sizeof(Out)));
    const int turns = (units + steps * threads - 1) / (steps * threads);
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      const int begin = (moves_up ? turns - 1 - turn : turn) * steps * threads + thread();
      In held[steps][unit];
#pragma unroll
      for (int i = 0; i < steps; ++i) {
#pragma unroll
        for (int j = 0; j < unit; ++j) held[i][j] = from[min(begin + i * threads, units - 1) * unit + j];
      }
      barrier_sync(1, threads);
#pragma unroll
      for (int i = 0; i < steps; ++i) {
        const int at = min(begin + i * threads, units - 1);
        Acc out[unit];
#pragma unroll
        for (int j = 0; j < unit; ++j) out[j] = output(first + at * unit + j, element_of<Pair>(held[i][j]));
        if (begin + i * threads < units) to[at] = rounded<OutUnit>(out);
      }
    }
  }

  template <class OutVectorOrUnit, int count>
  __device__ static OutVectorOrUnit rounded(const Acc (&value)[count]) {
    OutVectorOrUnit out;
    if constexpr (is_16_bit_v<Out> && std::is_same_v<Acc, float> && count % 2 == 0) {
      unsigned words[count / 2];
#pragma unroll
      for (int i = 0; i < count; i += 2) words[i / 2] = rounded_pair<Out>(value[i], value[i + 1]);
      memcpy(&out, words, sizeof(out));
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) out.e[i] = store_as<Out>(value[i]);
    }
    return out;
  }
};

}  // namespace KokkosSoftmax::impl

#endif
