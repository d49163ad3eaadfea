// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// What the CUDA kernels for rows whose columns are not contiguous have in common (another axis than the last
/// one of LayoutRight, the last one of LayoutLeft). Neighbouring rows go to neighbouring lanes. A tile is so
/// many rows and columns as a block has at a time; a thread has some columns of it, one behind the other, of
/// a row, or, of 16 bits, of two neighbours, which come as a pair, or of several of these.
///
/// A row's maximum is exact, and its sum of exponentials formed of a few columns each, which their indices
/// decide, in fixed point (ShareSum; double: in the order of columns): how many lanes and threads there are
/// moves no bits. What a transform makes of logits is summed in the same way whatever it is, so that a chain
/// that is known at run time gives the bits of one that is known before. (Rows of 16 bits that stay packed
/// are summed in other ways; for their chains the C interface has kernels of its own.)

#ifndef KOKKOSSOFTMAX_ROWTILES_HPP
#define KOKKOSSOFTMAX_ROWTILES_HPP

#include <impl/cuda/KokkosSoftmax_PackedTiles.hpp>

namespace KokkosSoftmax::impl {

/// Columns of a tile; longer rows are cut in slices of so many. (Of 32 lanes. Twice as many by half the
/// columns are copied faster, but twice the slices have twice the rows to exchange results of: 4096 columns
/// on one H200, fraction of a copy, so and then: float 0.77 and 0.70, bfloat16 0.67 and 0.54.)
template <class Problem>
inline constexpr int columns_of_tile = sizeof(typename Problem::Acc) == 8 ? 128 : 256;

template <class Problem>
index_type slices_of_tiles(const Problem& problem) {
  return ceil_div(problem.geometry.columns, columns_of_tile<Problem>);
}

/// None of the rows, of so many columns at most: what `reserve` hands to kernels so that they are loaded, for
/// a capture could not do that.
template <class Problem>
Problem no_rows_of(const Problem& problem, index_type most_columns) {
  Problem no_rows = problem;
  no_rows.geometry.rows = 0;
  no_rows.geometry.columns = std::min(problem.geometry.columns, most_columns);
  return no_rows;
}

/// What decides how logits are summed and outputs formed: types, and whether there is a transform, or a
/// product of what stays packed.
template <class Problem>
using ReducedAs =
    RowsProblem<typename Problem::In, typename Problem::Out,
                std::conditional_t<
                    makes_logits<Problem>, BoundScale,
                    std::conditional_t<multiplies_packed<Problem>, BoundTemperature<float>, BoundIdentity>>>;
template <class Problem>
using ResultOfTileRow = SlicedRowResult<ReducedAs<Problem>, false>;

/// The same of a row that a tile has whole. Its exponentials, uncorrected, have in common what they would be
/// corrected by, which cancels out of a softmax that is made of them.
template <class Problem>
struct ResultOfWholeRow : ResultOfTileRow<Problem> {
  using Base = ResultOfTileRow<Problem>;
  using Acc = typename Problem::Acc;
  using Part = PartOfSlice<ReducedAs<Problem>>;

  ResultOfWholeRow() = default;
  /// `max` is at least -largest.
  __device__ ResultOfWholeRow(Operation operation, Acc max, const ShareSum<Acc>& sum) {
    if constexpr (std::is_same_v<Acc, float>) {
      const float finite = finite_maximum(max), uncorrected = sum.sum.rounded();
      if (operation == Operation::softmax && Base::keeps_exponentials) {
        set(operation, finite, sum_or_special(max, uncorrected));
      } else {
        const float total = sum_or_special(max, uncorrected * Part::correction_below(max));
        if (operation == Operation::softmax && Base::sum_in_exponent) {
          this->max = finite;
          this->factor = 0;
          this->log_sum = total == 0                  ? 0.0f
                          : total < infinity_v<float> ? lg2_approx_ftz(total)
                                                      : nan_v<float>;
          this->operation = operation;
        } else {
          set(operation, finite, total);
        }
      }
    } else {
      Base::operator=(Base(operation, Part::share(max, sum)));
    }
  }
  __device__ Acc factor_of_share(Acc max) const {
    if constexpr (std::is_same_v<Acc, float>) return this->factor;
    return Base::factor_of_share(max);
  }

 private:
  __device__ void set(Operation operation, float max, float sum) {
    RowResult<float>::operator=(RowResult<float>(operation, MaxSum<float>{max, sum}));
  }
};

/// Whether a thread takes rows of 16 bits in pairs.
template <class Problem>
inline constexpr bool takes_pairs = stays_packed<Problem>;

/// Whether it takes two one after the other.
template <class Problem>
inline constexpr bool transforms_pairs = makes_logits<Problem> && sizeof(typename Problem::In) == 2;

/// Whether two rows at a time are neighbours that lie on a boundary of pairs in x and y.
template <class Problem>
bool rows_come_in_pairs(const Problem& problem) {
  if constexpr (sizeof(typename Problem::In) == 2) {
    const RowGeometry& g = problem.geometry;
    if (g.rank == 0 || g.x_stride[g.rank - 1] != 1 || g.extent[g.rank - 1] % 2 != 0) return false;
    const auto lies_so = [&](const auto* data, index_type column_stride, const index_type* strides) {
      bool all = reinterpret_cast<std::uintptr_t>(data) % (2 * sizeof(*data)) == 0 && column_stride % 2 == 0;
      for (int d = 0; d + 1 < g.rank; ++d) all = all && strides[d] % 2 == 0;
      return all;
    };
    return lies_so(problem.x, g.x_column_stride, g.x_stride) &&
           (problem.operation == Operation::logsumexp ||
            (g.y_stride[g.rank - 1] == 1 && lies_so(problem.y, g.y_column_stride, g.y_stride)));
  } else {
    return false;
  }
}

/// Whether columns of x, and of y if it has any, begin on boundaries of so many bytes, if their first rows
/// are those of memory.
template <class Problem>
bool columns_begin_at(const Problem& problem, index_type bytes) {
  const auto begin = [&](const auto* data, index_type column_stride) {
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 &&
           column_stride * static_cast<index_type>(sizeof(*data)) % bytes == 0;
  };
  return begin(problem.x, problem.geometry.x_column_stride) &&
         (problem.operation == Operation::logsumexp || begin(problem.y, problem.geometry.y_column_stride));
}

/// Memory that is written in part of a sector is written slowly. Rows that one has of a column of y.
inline constexpr int bytes_of_sector = 32;
template <class Problem>
inline constexpr int rows_of_sector = bytes_of_sector / static_cast<int>(sizeof(typename Problem::Out));

/// Whether outputs take the place of logits.
template <class Problem>
bool is_in_place(const Problem& problem) {
  return static_cast<const void*>(problem.x) == static_cast<const void*>(problem.y);
}

/// How many rows before the first one lie on a boundary of 256 bytes in every column of y: where pieces of
/// columns begin that are written fastest (see SidesOfTileBlock). 0 where they do not lie so; nor are rows of
/// several dimensions looked at.
/// (One H200, fraction of a copy of 1 GiB that begins 128 bytes behind a boundary, as Kokkos' own memory
/// does, tiles from the first row on and so: float 64 columns 0.88 and 0.94, 256 0.85 and 0.93, 1024 in wide
/// boxes 0.80 and 0.85; bfloat16 256 0.86 and 0.885.)
template <class Problem>
int rows_before_boundary(const Problem& problem) {
  constexpr index_type boundary = 256, size = sizeof(typename Problem::Out);
  const RowGeometry& g = problem.geometry;
  if (problem.operation == Operation::logsumexp || g.rank != 1 || g.y_stride[0] != 1 ||
      g.y_column_stride * size % boundary != 0)
    return 0;
  return static_cast<int>(reinterpret_cast<std::uintptr_t>(problem.y) % boundary / size);
}

/// Reads two rows of 16 bits that lie side by side, of which one may not be there, in the first `count` of so
/// many columns at a distance, wherever these begin; -inf for what is not there.
template <int columns, class In>
__device__ __forceinline__ void load_pairs_anywhere(const In* x, index_type distance, int count, bool first,
                                                    bool second, unsigned (&pair)[columns]) {
  constexpr unsigned nothing = PackedPair<In>::minus_infinities;
#pragma unroll
  for (unsigned& p : pair) p = nothing;
  for_pairs_anywhere<columns>(
      reinterpret_cast<const unsigned short*>(x), distance, count, first && second,
      [&](int k, const unsigned short* at) { pair[k] = *reinterpret_cast<const unsigned*>(at); },
      [&](int k, const unsigned short* at) {
        unsigned low = nothing, high = nothing;
        if (first) low = at[0];
        if (second) high = at[1];
        pair[k] = __byte_perm(low, high, 0x5410);
      });
}

/// Where a thread's part of a tile lies.
template <int columns, int rows>
struct PlaceInTile {
  index_type first_row, first_column;
  int count;  ///< of columns

  __device__ PlaceInTile(const RowGeometry& g, index_type first_row_, index_type first_column_)
      : first_row(first_row_), first_column(first_column_), count(0) {
    if (exists(g)) {
      const index_type left = g.columns - first_column;
      count = left >= columns ? columns : max(static_cast<int>(left), 0);
    }
  }
  __device__ bool exists(const RowGeometry& g) const { return first_row < g.rows; }
  __device__ RowGeometry::Row row(const RowGeometry& g) const { return g.row(exists(g) ? first_row : 0); }
};

/// A thread's columns of a row, so far apart, to a transform that transforms_held_logits; past the end the
/// last one's operands, where -inf stays what it is.
template <int distance>
struct ColumnsOfThread {
  static constexpr bool vectors_are_whole = false;
  index_type origin;
  int count;
  __device__ static constexpr bool skips(int) { return false; }
  __device__ int offset(int v) const { return min(v, count - 1) * distance; }
  __device__ int offset(int v, int) const { return offset(v); }
  __device__ ColumnsOfThread anew() const { return {origin, not_known(count)}; }
};

/// Transforms logits of columns from `first` on, so far apart, of which the row has `count`, one at least.
template <int distance, int columns, class Acc, class RowStage>
__device__ __forceinline__ void transform_columns(const RowStage& stage, index_type first, int count,
                                                  Acc (&logit)[columns]) {
  const auto transform_at = [&](const auto& offset) {
#pragma unroll
    for (int k = 0; k < columns; ++k) logit[k] = transformed<Acc>(stage, logit[k], first + offset(k));
  };
  const ColumnsOfThread<distance> all{first, count};
  if constexpr (transforms_held_logits<RowStage>) {
    stage.template transform_held<1>(logit, all);
  } else if (takes_any_column<RowStage> || count == columns) {
    transform_at([](int k) { return k * distance; });
  } else {
    // (No branch parts the loads.)
    transform_at([&](int k) { return all.offset(k); });
  }
}

/// What a thread has of a tile.
template <int columns, int rows, class Problem>
struct PartOfTile {
  using Part = PartOfSlice<ReducedAs<Problem>>;
  using Result = ResultOfTileRow<Problem>;
  using Place = PlaceInTile<columns, rows>;
  using In = typename Problem::In;
  using Out = typename Problem::Out;
  using Acc = typename Problem::Acc;
  static constexpr bool pairs = rows == 2;
  static_assert(!pairs || stays_packed<Problem>);
  /// As it comes from memory, and as it stays until it is written.
  using Raw = std::conditional_t<pairs, unsigned, std::conditional_t<sizeof(In) == 2, unsigned short, In>>;
  using Held = std::conditional_t<pairs, unsigned, Acc>;

  Held held[columns];
  /// Of rows that stay packed, with a transform.
  using Scale = RowScale<typename Problem::Transform, multiplies_packed<Problem>>;
  using Dropped = std::conditional_t<stays_packed<Problem>,
                                     DroppedOfRows<typename Problem::Transform, rows, columns>, NoneDropped>;
  Scale scale[rows];
  Dropped dropped;

  /// -inf, in place of columns that are not there.
  __device__ static Raw nothing() {
    if constexpr (sizeof(In) == 2) {
      return static_cast<Raw>(PackedPair<In>::minus_infinities);
    } else {
      return -infinity_v<In>;
    }
  }
  __device__ static Held nothing_held() {
    if constexpr (pairs) {
      return nothing();
    } else {
      return -infinity_v<Acc>;
    }
  }
  __device__ static const Raw* first_of_x(const Problem& problem, const Place& place) {
    return reinterpret_cast<const Raw*>(problem.x + place.row(problem.geometry).x_offset +
                                        place.first_column * problem.geometry.x_column_stride);
  }
  /// From column to column, in bytes.
  __device__ static index_type x_distance(const Problem& problem) {
    return problem.geometry.x_column_stride * static_cast<index_type>(sizeof(In));
  }

  /// Nothing is waited for.
  __device__ static void load(const Problem& problem, const Place& place, Raw (&raw)[columns]) {
    const char* at = reinterpret_cast<const char*>(first_of_x(problem, place));
    const index_type distance = x_distance(problem);
#pragma unroll
    for (int k = 0; k < columns; ++k) raw[k] = nothing();
    for_columns<columns>(place.count, [&](int k) {
      raw[k] = *reinterpret_cast<const Raw*>(at);
      at += distance;
    });
  }
  /// at(k) gives the bits of a column, where it is there.
  template <class At>
  __device__ void take_from(const At& at, int count) {
    Raw raw[columns];
    if (count == columns) {
#pragma unroll
      for (int k = 0; k < columns; ++k) raw[k] = at(k);
    } else {
#pragma unroll
      for (int k = 0; k < columns; ++k) raw[k] = k < count ? at(k) : nothing();
    }
    take(raw);
  }
  /// Both at once, where nothing else is to be done meanwhile.
  __device__ void read(const Problem& problem, const Place& place) {
    Raw raw[columns];
    load(problem, place, raw);
    take(raw);
  }
  /// The same of two rows side by side wherever they lie.
  __device__ void read_anywhere(const Problem& problem, const Place& place) requires(pairs) {
    const RowGeometry& g = problem.geometry;
    load_pairs_anywhere<columns>(problem.x + place.row(g).x_offset + place.first_column * g.x_column_stride,
                                 g.x_column_stride, place.count, true, place.first_row + 1 < g.rows, held);
  }
  __device__ void take(const Raw (&raw)[columns]) {
#pragma unroll
    for (int k = 0; k < columns; ++k) {
      if constexpr (pairs) {
        held[k] = raw[k];
      } else {
        held[k] = load_as<Acc>(bits_as<In>(raw[k]));
      }
    }
  }

  /// The numbers of rows to a transform; of a row that is not there, the other one's.
  struct Numbers {
    index_type of[rows];

    __device__ Numbers(index_type only) requires(rows == 1) : of{only} {}
    __device__ Numbers(const RowGeometry& g, const Place& place) : of{place.row(g).index} {
      if constexpr (pairs) of[1] = place.first_row + 1 < g.rows ? g.row(place.first_row + 1).index : of[0];
    }
    /// Of rows of one dimension.
    __device__ Numbers(const RowGeometry& g, index_type first, index_type last) : of{g.row(first).index} {
      of[rows - 1] = g.row(last).index;
    }
  };

  /// Not of one row and many columns: their logits leave no registers for it.
  static constexpr bool loads_operands = Dropped::any && (pairs || columns <= 16);
  /// For transform(), before the logits are read: what their registers are for afterwards.
  __device__ void load_operands(const Problem& problem, const Place& place) {
    if constexpr (loads_operands) {
      if (place.count != 0)
        load_operands<1>(problem, Numbers(problem.geometry, place), place.first_column, place.count);
    }
  }
  template <int distance>
  __device__ void load_operands(const Problem& problem, const Numbers& number, index_type first_column,
                                int count) {
    if constexpr (loads_operands) {
      with_rows(problem, number,
                [&](const auto& row) { dropped.template load<distance>(row, first_column, count); });
    }
  }

  /// Makes logits, one row's, what the softmax is of; of rows that stay packed, drops what is to be dropped,
  /// and finds what the others are multiplied by. True if what is held is not what it was.
  /// `loaded`: by load_operands().
  template <bool loaded = loads_operands>
  __device__ bool transform(const Problem& problem, const Place& place) {
    find_factor(problem);
    if constexpr (has_transform_v<Problem>) {
      if (place.count != 0)
        return transform<1, loaded>(problem, Numbers(problem.geometry, place), place.first_column,
                                    place.count);
    }
    return false;
  }
  /// The same of columns so far apart, one at least.
  template <int distance, bool loaded = loads_operands>
  __device__ bool transform(const Problem& problem, const Numbers& number, index_type first_column,
                            int count) {
    if constexpr (makes_logits<Problem>) {
      static_assert(rows == 1);
      const auto stage = prepared_stage<Acc>(problem.transform.at_row(number.of[0]), first_column);
      transform_columns<distance>(stage, first_column, count, held);
      return true;
    } else if constexpr (has_transform_v<Problem>) {
      find_factor(problem);
      with_rows(problem, number, [&](const auto& row) {
        if constexpr (Dropped::any)
          dropped.template drop<distance, In, loaded>(row, first_column, count, held);
        scale_by(row);
      });
      return turn() || Dropped::any;
    } else {
      return false;
    }
  }
  /// The parts of that. Drops what is to be dropped:
  __device__ void drop(const Problem& problem, const Place& place) {
    if constexpr (Dropped::any) {
      if (place.count == 0) return;
      with_rows(problem, Numbers(problem.geometry, place), [&](const auto& row) {
        dropped.template drop<1, In, false>(row, place.first_column, place.count, held);
      });
    }
  }
  /// The factor of all rows. (Behind a branch that asks whether rows are there each would have its own.)
  __device__ void find_factor([[maybe_unused]] const Problem& problem) {
    if constexpr (multiplies_packed<Problem> && !Scale::reads_number) {
#pragma unroll
      for (Scale& of_row : scale) of_row = Scale(problem.transform.at_row(0));
    }
  }
  /// Finds what rows are multiplied by:
  __device__ void find_scale(const Problem& problem, const Place& place) {
    find_factor(problem);
    if constexpr (Scale::reads_number)
      with_rows(problem, Numbers(problem.geometry, place), [&](const auto& row) { scale_by(row); });
  }
  /// Of rows that ask for it, turns what is held. True if it does.
  __device__ bool turn() {
    if constexpr (multiplies_packed<Problem>) {
      bool turns = false;
#pragma unroll
      for (const auto& of_row : scale) turns = turns || of_row.turns_values();
      if (!turns) return false;
#pragma unroll
      for (int k = 0; k < columns; ++k) {
        if constexpr (pairs) {
          held[k] = rounded_pair<In>(scale[0].turned(value(k, 0)), scale[1].turned(value(k, 1)));
        } else {
          held[k] = scale[0].turned(held[k]);
        }
      }
      return true;
    }
    return false;
  }

  __device__ Acc value(int k, int row) const {
    if constexpr (pairs) {
      return row == 0 ? PackedPair<In>::low(held[k]) : PackedPair<In>::high(held[k]);
    } else {
      return held[k];
    }
  }

  /// The maximum of the columns, of each row.
  __device__ Held top() const {
    return largest<columns>([&](int k) { return held[k]; });
  }
  /// Of so many. (Doubles in four chains: a comparison of them takes long.)
  template <int count, class Get>
  __device__ __forceinline__ static Held largest(const Get& get) {
    constexpr int chains = sizeof(Acc) == 8 && count >= 4 ? 4 : 1;
    Held top[chains];
#pragma unroll
    for (int k = 0; k < count; ++k) top[k % chains] = k < chains ? get(k) : larger(top[k % chains], get(k));
#pragma unroll
    for (int i = 1; i < chains; ++i) top[0] = larger(top[0], top[i]);
    return top[0];
  }
  __device__ static Held larger(Held a, Held b) {
    if constexpr (pairs) {
      return PackedPair<In>::maximum_or_nan(a, b);
    } else {
      return maximum_or_nan(a, b);
    }
  }
  /// Of logits, from those of what is held; at least -largest.
  __device__ void maxima(Held top, Acc (&max)[rows]) const {
    if constexpr (pairs) {
      max[0] = PackedPair<In>::low(top);
      max[1] = PackedPair<In>::high(top);
    } else {
      max[0] = top;
    }
#pragma unroll
    for (int v = 0; v < rows; ++v) {
      if constexpr (multiplies_packed<Problem>) max[v] = scale[v].of_maximum(max[v]);
      max[v] = maximum_or_nan(max[v], -largest_v<Acc>);
    }
  }

  /// Of a row's exponentials below its maximum in the tile, which are left in the registers where the
  /// outputs of a softmax are made of them.
  __device__ ShareSum<Acc> sum(Acc max, int row, [[maybe_unused]] bool softmax) {
    [[maybe_unused]] const auto exponential = Part::exponential_below(max);
    if constexpr (multiplies_packed<Problem>) {
      const Scale& of_row = scale[row];
      // (Not by ExponentialOfCoarseQuotient: whoever adds these sums up does not know its correction.)
      if (of_row.is_coarse(max))
        return sum_by([&](Acc value) { return exponential(of_row.coarse(value)); }, row, softmax);
      return sum_by([&](Acc value) { return exponential.uncorrected(of_row(value)); }, row, softmax);
    } else if constexpr (Part::unpacked) {
      // (Whether the maximum is subtracted first is asked once: instructions are what 16 bits wait for.)
      if (!exponential.subtracts_first()) return sum_by(exponential, row, softmax);
      return sum_by([&](Acc value) { return exponential.uncorrected(value); }, row, softmax);
    } else if constexpr (Part::packed || sizeof(Acc) == 8) {
      return sum_by(exponential, row, softmax);
    } else {
      return sum_by([&](Acc value) { return exponential.uncorrected(value); }, row, softmax);
    }
  }

  /// What is put into y: of pairs of rows with 16 bits both.
  static constexpr bool puts_pairs = pairs && is_16_bit_v<Out>;
  using Put = std::conditional_t<puts_pairs, unsigned, Out>;

  /// put(k, row, output) for the first `count` columns, of rows whose maxima in the tile these were.
  template <class ResultOfRow, class PutOutput>
  __device__ void for_outputs(Operation operation, const Acc (&max)[rows], const ResultOfRow (&result)[rows],
                              int count, const PutOutput& put) {
    if constexpr (puts_pairs) {
      // Both rows at once where they can: one after the other takes three instructions more for a pair.
      ExponentialOfProduct first, second;
      if (takes_two_instructions(0, result[0], first) && takes_two_instructions(1, result[1], second)) {
        for_columns<columns>(
            count, [&](int k) { put(k, 0, rounded_pair<Out>(first(value(k, 0)), second(value(k, 1)))); });
        return;
      }
    }
#pragma unroll
    for (int v = 0; v < rows; ++v) {
      if constexpr (Result::keeps_exponentials) {
        if (operation == Operation::softmax) {
          const Acc factor = result[v].factor_of_share(finite_maximum(max[v]));
          outputs_of_row(v, count, put, [factor](Acc exponential) { return exponential * factor; });
          continue;
        }
      }
      with_output(v, result[v], [&](const auto& output) { outputs_of_row(v, count, put, output); });
    }
  }
  /// Whether two instructions make an output of what is held of a row.
  template <class ResultOfRow>
  __device__ bool takes_two_instructions(int row, const ResultOfRow& result,
                                         ExponentialOfProduct& output) const requires(puts_pairs) {
    if constexpr (multiplies_packed<Problem>) {
      return scale[row].is_coarse(result.max) && result.takes_two_instructions(scale[row], output);
    } else {
      return result.takes_two_instructions(output);
    }
  }
  /// Calls use with the function from what is held of a row to an output.
  template <class ResultOfRow, class Use>
  __device__ void with_output(int row, const ResultOfRow& result, const Use& use) const {
    if constexpr (multiplies_packed<Problem>) {
      const auto& of_row = scale[row];
      if (of_row.is_coarse(result.max)) {
        result.with_output_of_quotients(of_row, use);
      } else {
        result.with_output_of(of_row, use);
      }
    } else {
      result.with_output(use);
    }
  }

  /// The same to y.
  template <class ResultOfRow>
  __device__ void write(const Problem& problem, const Place& place, const Acc (&max)[rows],
                        const ResultOfRow (&result)[rows]) {
    const RowGeometry& g = problem.geometry;
    char* const y =
        reinterpret_cast<char*>(problem.y + place.row(g).y_offset + place.first_column * g.y_column_stride);
    const index_type distance = g.y_column_stride * static_cast<index_type>(sizeof(Out));
    char* at = y;
    for_outputs(problem.operation, max, result, place.count, [&](int k, int row, const Put& output) {
      if (k == 0) at = y;
      reinterpret_cast<Put*>(at)[row] = output;
      at += distance;
    });
  }

 private:
  /// use(objects of the rows).
  template <class Use>
  __device__ static void with_rows(const Problem& problem, const Numbers& number, const Use& use) {
    using Row = decltype(problem.transform.at_row(0));
    if constexpr (pairs) {
      const Row row[rows] = {problem.transform.at_row(number.of[0]), problem.transform.at_row(number.of[1])};
      use(row);
    } else {
      const Row row[rows] = {problem.transform.at_row(number.of[0])};
      use(row);
    }
  }
  template <class Row>
  __device__ void scale_by([[maybe_unused]] const Row (&row)[rows]) {
    if constexpr (Scale::reads_number) {
#pragma unroll
      for (int v = 0; v < rows; ++v) scale[v] = Scale(row[v]);
    }
  }
  template <class SomeExponential>
  __device__ ShareSum<Acc> sum_by(const SomeExponential& exponential, int row,
                                  [[maybe_unused]] bool softmax) {
    auto sum = ShareSum<Acc>::none();
    // (Of fewer the same bits: exponentials of columns that are not there are 0.)
    constexpr int most = is_16_bit_v<Out> ? 8 : 4, few = columns < most ? columns : most;
    static_assert(columns % few == 0);
#pragma unroll
    for (int k = 0; k < columns; k += few) {
      Acc e[few];
#pragma unroll
      for (int j = 0; j < few; ++j) e[j] = value(k + j, row);
      if constexpr (sizeof(Acc) == 8) {
        exponential.replace(e);
      } else {
#pragma unroll
        for (Acc& of_value : e) of_value = exponential(of_value);
      }
      if constexpr (Result::keeps_exponentials) {
        // (Where there is a transform, whoever stores them rounds them.)
        if (softmax) {
#pragma unroll
          for (int j = 0; j < few; ++j) held[k + j] = e[j];
        }
      }
#pragma unroll
      for (int distance = 1; distance < few; distance *= 2) {
#pragma unroll
        for (int j = 0; j < few; j += 2 * distance) e[j] += e[j + distance];
      }
      sum.join(ShareSum<Acc>::of(e[0]));
    }
    return sum;
  }

  template <class PutOutput, class Output>
  __device__ void outputs_of_row(int row, int count, const PutOutput& put, const Output& output) {
    if constexpr (puts_pairs) {
      // The first of two waits for the second in its place.
      if (row == 0) {
#pragma unroll
        for (int k = 0; k < columns; ++k)
          held[k] = __byte_perm(held[k], rounded_pair<Out>(output(value(k, 0)), Acc(0)), 0x3254);
      } else {
        for_columns<columns>(count, [&](int k) {
          put(k, 0, __byte_perm(held[k], rounded_pair<Out>(output(value(k, 1)), Acc(0)), 0x5410));
        });
      }
    } else {
      for_columns<columns>(count, [&](int k) { put(k, row, store_as<Out>(output(value(k, row)))); });
    }
  }
};

/// Maxima and sums of exponentials of rows in shared memory, to which threads add in whatever order.
struct TalliesOfRows {
  int* tops;  ///< in_integer_order
  unsigned *high, *low;

  static constexpr int bytes(int rows) { return rows * static_cast<int>(sizeof(int) + 2 * sizeof(unsigned)); }
  __device__ TalliesOfRows(void* memory, int rows)
      : tops(static_cast<int*>(memory)), high(reinterpret_cast<unsigned*>(tops + rows)), low(high + rows) {}
  __device__ void clear(int row) const {
    tops[row] = in_integer_order(-largest_v<float>);
    high[row] = low[row] = 0;
  }
  __device__ void raise_top(int row, float top) const { atomicMax(&tops[row], in_integer_order(top)); }
  __device__ float top(int row) const { return from_integer_order(tops[row]); }
  __device__ void add(int row, const ShareSum<float>& sum) const {
    atomicAdd(&high[row], sum.sum.high);
    atomicAdd(&low[row], sum.sum.low);
  }
  __device__ ShareSum<float> sum(int row) const { return {{high[row], low[row]}}; }
};

/// So many slices of a row at a time, whichever kernel does it.
inline constexpr unsigned slices_joined_at_once = 8;

/// What the threads of a block tell each other of the rows of a tile: a maximum and a sum of each row from
/// each of the slots that share its columns.
template <int rows_of_lane, class Problem>
struct SharedTile {
  using Acc = typename Problem::Acc;
  using Held = typename PartOfTile<8, rows_of_lane, Problem>::Held;
  ShareSum<Acc>* sums;
  Acc* maxima;  ///< of all slots
  Held* tops;

  KOKKOS_FORCEINLINE_FUNCTION static constexpr int bytes(int lanes, int slots) {
    return lanes *
           (rows_of_lane * (slots * static_cast<int>(sizeof(ShareSum<Acc>)) + static_cast<int>(sizeof(Acc))) +
            slots * static_cast<int>(sizeof(Held)));
  }
  __device__ SharedTile(void* memory, int lanes, int slots)
      : sums(static_cast<ShareSum<Acc>*>(memory)),
        maxima(reinterpret_cast<Acc*>(sums + lanes * rows_of_lane * slots)),
        tops(reinterpret_cast<Held*>(maxima + lanes * rows_of_lane)) {}

  /// Reduces what the threads have of the rows, if they have any; `max` becomes their maxima in the tile.
  /// with_row(row, maximum, sum) by one thread for each row. barrier() is one of all threads.
  template <int columns, class Barrier, class WithRow>
  __device__ void reduce(PartOfTile<columns, rows_of_lane, Problem>& mine, bool softmax, int lane, int lanes,
                         int slot, int slots, Acc (&max)[rows_of_lane], const Barrier& barrier,
                         const WithRow& with_row, bool has_columns = true) const {
    using Mine = PartOfTile<columns, rows_of_lane, Problem>;
    const int first = lane * rows_of_lane, rows = lanes * rows_of_lane;
    Held top = has_columns ? mine.top() : Mine::nothing_held();
    tops[slot * lanes + lane] = top;
    barrier();
#pragma unroll 8
    for (int t = 0; t < slots; ++t) top = Mine::larger(top, tops[t * lanes + lane]);
    mine.maxima(top, max);
#pragma unroll
    for (int v = 0; v < rows_of_lane; ++v) {
      if (slot == 0) maxima[first + v] = max[v];
      sums[slot * rows + first + v] = has_columns ? mine.sum(max[v], v, softmax) : ShareSum<Acc>::none();
    }
    barrier();
    for (int row = slot * lanes + lane; row < rows; row += slots * lanes) {
      ShareSum<Acc> sum = sums[row];
#pragma unroll 8
      for (int t = 1; t < slots; ++t) sum.join(sums[t * rows + row]);
      with_row(row, maxima[row], sum);
    }
  }
};

template <int columns, int rows, class Problem, class Result>
__device__ void write_logsumexp(const Problem& problem, const PlaceInTile<columns, rows>& place,
                                const Result (&result)[rows]) {
  if (!place.exists(problem.geometry)) return;
#pragma unroll
  for (int v = 0; v < rows; ++v)
    problem.y[problem.geometry.row(place.first_row + v).y_offset] =
        store_as<typename Problem::Out>(result[v].logsumexp());
}

}  // namespace KokkosSoftmax::impl

#endif
