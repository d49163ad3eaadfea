// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// A chain of transforms that is known at run time: one type for all chains, so that the C interface compiles
/// each kernel once. Gives the bits of the same chain written with the library's `|`.

#ifndef KOKKOSSOFTMAX_CCHAIN_HPP
#define KOKKOSSOFTMAX_CCHAIN_HPP

#include "KokkosSoftmax_CCalls.hpp"

#include <KokkosSoftmax_Softmax.hpp>
#include <impl/host/KokkosSoftmax_Simd.hpp>
#include <impl/portable/KokkosSoftmax_GemmThenRows.hpp>

namespace KokkosSoftmax::c {

/// Before a loop over what a device holds in registers, which have no index; and one over steps, each of
/// which is long.
#if defined(__CUDA_ARCH__)
#define KOKKOSSOFTMAX_UNROLLED _Pragma("unroll")
#define KOKKOSSOFTMAX_NOT_UNROLLED _Pragma("unroll 1")
#else
#define KOKKOSSOFTMAX_UNROLLED
#define KOKKOSSOFTMAX_NOT_UNROLLED
#endif

/// Kinds beside those of the C interface: a BatchNorm of a head brought to factor and shift, and a bias that
/// is in the shift of the one after it.
inline constexpr std::int32_t normalizer_step = 30, taken_over_bias_step = 31;

// ---------------------------------------------------------------------------------------------------------
// Operands of a scalar that is known at run time.

/// Calls `use` with the operand's type. (What is for a host's vectors is a host's function, and called there
/// alone.)
#if defined(__CUDACC__)
#pragma nv_exec_check_disable
#endif
template <class Use>
KOKKOS_FORCEINLINE_FUNCTION auto with_scalar(const void* data, std::int32_t scalar, const Use& use) {
  switch (scalar) {
    case KOKKOSSOFTMAX_DOUBLE:
      return use(static_cast<const double*>(data));
    case KOKKOSSOFTMAX_HALF:
      return use(static_cast<const half_t*>(data));
    case KOKKOSSOFTMAX_BFLOAT16:
      return use(static_cast<const bhalf_t*>(data));
    default:
      return use(static_cast<const float*>(data));
  }
}

template <class Acc>
struct LoadAny {
  index_type at;
  template <class T>
  KOKKOS_FORCEINLINE_FUNCTION Acc operator()(const T* data) const {
    return impl::load_as<Acc>(data[at]);
  }
};

template <class Acc>
KOKKOS_FORCEINLINE_FUNCTION Acc load_any(const void* data, std::int32_t scalar, index_type at) {
  return with_scalar(data, scalar, LoadAny<Acc>{at});
}

template <class Ops>
struct LoadAnyVector {
  index_type at, stride;
  template <class T>
  auto operator()(const T* data) const {
    return Ops::load_strided(data + at, stride);
  }
};

template <class Ops>
struct LoadAnyLanes {
  index_type at;
  const impl::OffsetsOfLanes<Ops::width>& offsets;
  template <class T>
  auto operator()(const T* data) const {
    return offsets.template load<Ops>(data + at);
  }
};

struct AnyLogitOperand {
  const void* data;
  index_type column_stride;
  impl::RowOffset row_offset;
};

struct AnyColumnOperand {
  const void* data;
  index_type stride;
  std::int32_t scalar;

  /// For what is made once a column; exact.
  KOKKOS_FORCEINLINE_FUNCTION double operator()(index_type column) const { return at<double>(column); }
  template <class Acc>
  KOKKOS_FORCEINLINE_FUNCTION Acc at(index_type column) const {
    return load_any<Acc>(data, scalar, column * stride);
  }
  template <class Ops>
  auto vector(index_type column) const {
    return with_scalar(data, scalar, LoadAnyVector<Ops>{column * stride, stride});
  }
  template <class Ops, class Offsets>
  auto vector_of_lanes(index_type column, const Offsets& offsets) const {
    return with_scalar(data, scalar, LoadAnyLanes<Ops>{offsets.first + column * stride, offsets});
  }
};

struct AnyBatchNorm {
  AnyColumnOperand mean, variance, gamma, beta;
  double eps;

  /// For a host's vectors.
  struct Row {
    const AnyBatchNorm* all;
    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask&, index_type column) const {
      value = impl::batch_normalized_vector<Ops>(value, *all, column);
    }
    template <class Ops, class Rows>
    static auto of_lanes(const Rows& rows) {
      using Columns = impl::ColumnsOfLanes<Ops, AnyColumnOperand>;
      const AnyBatchNorm& b = *rows.row(0).all;
      return impl::BatchNormOfLanes<Columns, Columns, Columns, Columns>{
          {b.mean, rows}, {b.variance, rows}, {b.gamma, rows}, {b.beta, rows}, b.eps};
    }
  };
};

// ---------------------------------------------------------------------------------------------------------
// The bound chain: plain device data.

struct AnyNormalizer {
  const void* factor;  ///< accumulators, as BoundNormalizer has them
  index_type distance;

  template <class Acc>
  KOKKOS_FORCEINLINE_FUNCTION auto row() const {
    using Normalizer = impl::BoundNormalizer<Acc>;
    return typename Normalizer::Row{Normalizer{static_cast<const Acc*>(factor), distance}};
  }
};

/// A bias that the normalizer after it has in its shift; without data: none.
struct TakenOverBias {
  AnyLogitOperand operand;
  std::int32_t scalar;
  KOKKOS_FORCEINLINE_FUNCTION double taken_over(index_type column) const {
    return operand.data ? load_any<double>(operand.data, scalar, column * operand.column_stride) : 0.0;
  }
};

struct BoundStep {
  std::int32_t kind;
  std::int32_t scalar;  ///< of the operand of a bias, a scale or a temperature
  std::int32_t number;  ///< among the operands whose columns lie side by side; -1: it has none
  union {
    double factor;
    impl::BoundCausal causal;
    AnyLogitOperand operand;  ///< mask, bias, scale, temperature
    AnyBatchNorm batch_norm;
    AnyNormalizer normalizer;
  };
  BoundStep() : kind(0), scalar(0), number(-1), operand{} {}
};

struct BoundAnyChain {
  std::int32_t count = 0;
  std::uint32_t kinds = 0;        ///< a bit for each kind that is in it
  std::int32_t side_by_side = 0;  ///< operands whose columns are
  bool rows_alike = true;
  index_type first_row = 0;  ///< of a panel of rows
  BoundStep step[max_steps];

  static constexpr bool shows_operands_at_run_time = true;  ///< see there
  template <class Use>
  void visit_operands(const Use& use) const {
    for (std::int32_t s = 0; s < count; ++s) {
      const auto show = [&]<class T>(const T* data) {
        use(impl::LogitOperand<T>{data, step[s].operand.row_offset, step[s].operand.column_stride});
      };
      if (step[s].number < 0) continue;
      if (step[s].kind == KOKKOSSOFTMAX_MASK) {
        show(static_cast<const bool*>(step[s].operand.data));
      } else {
        with_scalar(step[s].operand.data, step[s].scalar, show);
      }
    }
  }

  KOKKOS_FORCEINLINE_FUNCTION bool has_rows_alike() const { return rows_alike; }
  KOKKOS_FORCEINLINE_FUNCTION bool drops_ends(index_type) const {
    return kinds & std::uint32_t(1) << KOKKOSSOFTMAX_CAUSAL;
  }

  struct Row {
    static constexpr bool transforms_held_logits = true;
    const BoundAnyChain* chain;
    index_type row;  ///< in the order of the operands
    /// On the host. Of a step's operand, the row's offset; of causal, the last column that is kept. (A device
    /// finds them when a step is applied: an array with an index that is not known would be in memory.)
    index_type at[max_steps];
    /// On a device. Where operands were copied to, if they were.
    const char* copies = nullptr;
    int copied_to[2];
    index_type first_copied;
    int line_of_copies;

    KOKKOS_FORCEINLINE_FUNCTION void has_copies(const char* slot, int first, int second, index_type column,
                                                int line) {
      copies = slot;
      copied_to[0] = first;
      copied_to[1] = second;
      first_copied = column;
      line_of_copies = line;
    }
    template <class Use>
    KOKKOS_FORCEINLINE_FUNCTION void for_each_operand(const Use& use) const {
      KOKKOSSOFTMAX_NOT_UNROLLED
      for (std::int32_t s = 0; s < chain->count; ++s) {
        const BoundStep& step = chain->step[s];
        if (step.number < 0) continue;
        const int bytes = bytes_of_operand(step);
        use(step.number, static_cast<const char*>(step.operand.data) + place(s) * bytes, bytes);
      }
    }

    /// That of a step.
    KOKKOS_FORCEINLINE_FUNCTION index_type place(std::int32_t s) const {
      KOKKOS_IF_ON_HOST((return at[s];))
      KOKKOS_IF_ON_DEVICE((return chain->place_of_row(chain->step[s], row);))
    }

    KOKKOS_FORCEINLINE_FUNCTION index_type end_of_kept(index_type columns) const {
      index_type end = columns;
      if (!chain->drops_ends(columns)) return end;
      for (std::int32_t s = 0; s < chain->count; ++s) {
        if (chain->step[s].kind == KOKKOSSOFTMAX_CAUSAL)
          end = Kokkos::min(end, impl::BoundCausal::Row{place(s)}.end_of_kept(columns));
      }
      return end;
    }

    /// Whether a step has a value for each column.
    bool reads_columns() const {
      constexpr auto bit = [](std::int32_t kind) { return std::uint32_t(1) << kind; };
      constexpr std::uint32_t none = bit(KOKKOSSOFTMAX_SCALE) | bit(KOKKOSSOFTMAX_TEMPERATURE) |
                                     bit(KOKKOSSOFTMAX_CAUSAL) | bit(KOKKOSSOFTMAX_GELU_ERF) |
                                     bit(KOKKOSSOFTMAX_GELU_TANH) | bit(KOKKOSSOFTMAX_RELU);
      return (chain->kinds & ~none) != 0;
    }

    template <class Acc>
    KOKKOS_FORCEINLINE_FUNCTION void apply(Acc& value, bool& kept, index_type column) const {
      const OneLogit<Acc> logit = applied_to_one(OneLogit<Acc>{value, kept}, chain, row, column);
      value = logit.value;
      kept = logit.kept;
    }

    /// See impl::transforms_held_logits.
    template <int together, int count, class Acc, class Columns>
    KOKKOS_FORCEINLINE_FUNCTION void transform_held(Acc (&value)[count], const Columns& columns) const {
      constexpr auto minus_infinity = -impl::infinity_v<Acc>;
      const bool has_minus_infinity = has_minus_infinity_held<together>(value, columns);  // few rows have any
      std::uint32_t dropped[(count + 31) / 32] = {};
      const auto number = [](int v, int i) { return v * together + i; };
      if (has_minus_infinity) {
        for_each_held<together>(value, columns, [&](Acc& one, int v, int i) {
          dropped[number(v, i) / 32] |= static_cast<std::uint32_t>(one == minus_infinity)
                                        << number(v, i) % 32;
        });
      }
      apply_steps<together>(value, columns);
      apply_masks<together, count>(columns, [&](int i, bool keeps) {
        if (!keeps) value[i] = minus_infinity;
      });
      if (has_minus_infinity) {
        for_each_held<together>(value, columns, [&](Acc& one, int v, int i) {
          if (dropped[number(v, i) / 32] >> number(v, i) % 32 & 1) one = minus_infinity;
        });
      }
    }

    template <class Ops>
    void on_vector(typename Ops::Vector& value, typename Ops::Mask& kept, index_type column) const {
      typename Ops::Vector values[1] = {value};
      typename Ops::Mask keeps[1] = {kept};
      on_vectors<Ops>(values, keeps, column);
      value = values[0];
      kept = keeps[0];
    }

    template <class Ops, int vectors>
    void on_vectors(typename Ops::Vector (&value)[vectors], typename Ops::Mask (&kept)[vectors],
                    index_type column) const {
      on_several<Ops>(value, kept, vectors, column);
    }
    template <class Ops>
    __attribute__((noinline)) void on_several(typename Ops::Vector* value, typename Ops::Mask* kept,
                                              int vectors, index_type column) const {
      for (std::int32_t s = 0; s < chain->count; ++s) {
        step_on_vectors<Ops>(chain->step[s], at[s], value, kept, vectors, column);
      }
    }

    /// See impl::takes_rows_at_once.
    static constexpr bool takes_rows_at_once = true;
    template <class Ops>
    __attribute__((noinline)) static void on_rows(const Row* row, int rows, typename Ops::Vector* value,
                                                  typename Ops::Mask* kept, int vectors, int rest) {
      const bool reads = row->reads_columns() && rest < Ops::width;
      const int whole = reads ? vectors - 1 : vectors;
      for (std::int32_t s = 0; s < row->chain->count; ++s) {
        with_object_of_row<typename Ops::Acc>(row->chain->step[s], [&](const auto& object_of) {
          for (int k = 0; k < rows; ++k) {
            const auto object = object_of(row[k].at[s]);
            const int first = k * vectors;
            for (int v = 0; v < whole; ++v)
              object.template on_vector<Ops>(value[first + v], kept[first + v], v * Ops::width);
            if (!reads) continue;
            using Object = std::remove_const_t<decltype(object)>;
            const impl::ColumnsOfRow<Object> columns{&object, whole * Ops::width, rest};
            impl::stage_of_lanes<Ops>(columns).template on_vector<Ops>(value[first + whole],
                                                                       kept[first + whole], 0);
          }
        });
      }
    }

    /// The chain for the rows of lanes, of whose objects this is one; see stage_of_lanes.
    template <class Ops, class Rows>
    class OfLanes {
     public:
      explicit OfLanes(const Rows& rows) : rows_(rows) {}
      template <class, int columns>
      __attribute__((noinline)) void on_columns(typename Ops::Vector (&value)[columns],
                                                typename Ops::Mask (&kept)[columns],
                                                index_type column) const {
        const BoundAnyChain& chain = *rows_.row(0).chain;
        for (std::int32_t s = 0; s < chain.count; ++s) step_on_columns(chain.step[s], s, value, kept, column);
      }

     private:
      template <int columns>
      void step_on_columns(const BoundStep& step, std::int32_t s, typename Ops::Vector (&value)[columns],
                           typename Ops::Mask (&kept)[columns], index_type column) const {
        const auto stage = [&](const auto& lanes) {
          for (int i = 0; i < columns; ++i) lanes.template on_vector<Ops>(value[i], kept[i], column + i);
        };
        with_object_of_row<typename Ops::Acc>(step, [&](const auto& object_of) {
          using Object = decltype(object_of(index_type()));
          using ObjectsOfLanes = impl::RowsOfLanes<Object>;
          if constexpr (std::is_same_v<decltype(impl::stage_of_lanes<Ops>(ObjectsOfLanes())), Object>) {
            stage(object_of(0));  // the same for all rows and columns
          } else if constexpr (Rows::is_one_row) {
            const Object object = object_of(rows_.object->at[s]);
            stage(impl::stage_of_lanes<Ops>(impl::ColumnsOfRow<Object>{&object, rows_.first, rows_.count}));
          } else {
            Object object[Ops::width];
            const void* objects[Ops::width];
            for (int l = 0; l < Ops::width; ++l) {
              object[l] = object_of(rows_.row(std::min(l, rows_.count - 1)).at[s]);
              objects[l] = object + l;
            }
            stage(impl::stage_of_lanes<Ops>(ObjectsOfLanes{objects, 0, rows_.column, rows_.count}));
          }
        });
      }

      Rows rows_;
    };
    template <class Ops, class Rows>
    static OfLanes<Ops, Rows> of_lanes(const Rows& rows) {
      return OfLanes<Ops, Rows>(rows);
    }

   private:
    template <class Acc>
    struct OneLogit {
      Acc value;
      bool kept;
    };
    /// A function that is called, where there are no neighbours: inlined there, too, it would be a large part
    /// of the library, and of the time to compile it.
    template <class Acc>
    KOKKOS_FUNCTION __attribute__((noinline)) static OneLogit<Acc> applied_to_one(OneLogit<Acc> logit,
                                                                                  const BoundAnyChain* chain,
                                                                                  index_type row,
                                                                                  index_type column) {
      Row of_row;
      of_row.chain = chain;
      of_row.row = row;
      KOKKOS_IF_ON_HOST((chain->find_places(of_row);))
      Acc value[1] = {logit.value};
      const impl::HeldNeighbours columns{column};
      of_row.template apply_steps<1>(value, columns);
      logit.value = value[0];
      of_row.template apply_masks<1, 1>(columns, [&](int, bool keeps) { logit.kept = logit.kept && keeps; });
      return logit;
    }

    /// Of doubles called, too: it is long.
    template <class Function>
    KOKKOS_FUNCTION __attribute__((noinline)) static double activated(double value) {
      return Function{}(value, 0, 0);
    }
    template <class Function>
    KOKKOS_FORCEINLINE_FUNCTION static float activated(float value) {
      return Function{}(value, 0, 0);
    }

    /// f(value, its vector, its place there) of all.
    template <int together, int count, class Acc, class Columns, class F>
    KOKKOS_FORCEINLINE_FUNCTION static void for_each_held(Acc (&value)[count], const Columns& columns,
                                                          const F& f) {
      KOKKOSSOFTMAX_UNROLLED
      for (int v = 0; v < count / together; ++v) {
        if (columns.skips(v)) break;
        KOKKOSSOFTMAX_UNROLLED
        for (int i = 0; i < together; ++i) f(value[v * together + i], v, i);
      }
    }

    template <int together, int count, class Acc, class Columns>
    KOKKOS_FORCEINLINE_FUNCTION static bool has_minus_infinity_held(Acc (&value)[count],
                                                                    const Columns& columns) {
      if constexpr (requires { columns.has_minus_infinity; }) {
        return columns.has_minus_infinity;
      } else {
        Acc least = value[0];
        for_each_held<together>(value, columns, [&](Acc& v, int, int) { least = Kokkos::fmin(least, v); });
        return least == -impl::infinity_v<Acc>;
      }
    }

    /// What is done to a logit with an operand.
    enum class Combine { plus, times, minus, over_deviation };
    /// An operand of a step: of a row from data + at on, its columns `stride` apart.
    struct Operand {
      Combine combine;
      std::int32_t scalar;
      const void* data;
      index_type at, stride;
      double eps;
    };
    KOKKOS_FORCEINLINE_FUNCTION static int bytes_of_operand(const BoundStep& step) {
      if (step.kind == KOKKOSSOFTMAX_MASK) return 1;
      return step.scalar == KOKKOSSOFTMAX_DOUBLE ? 8 : step.scalar == KOKKOSSOFTMAX_FLOAT ? 4 : 2;
    }
    /// The data and the place of a step's operand, where they are read.
    KOKKOS_FORCEINLINE_FUNCTION const void* data_of_operand(const BoundStep& step, std::int32_t s,
                                                            index_type& at_row) const {
      at_row = place(s);
      if (copies == nullptr || step.number < 0) return step.operand.data;
      const index_type bytes = bytes_of_operand(step);
      const char* const first = static_cast<const char*>(step.operand.data) + (at_row + first_copied) * bytes;
      at_row = 0;
      return copies + (step.number == 0 ? copied_to[0] : copied_to[1]) +
             static_cast<int>(reinterpret_cast<std::uintptr_t>(first) % line_of_copies) -
             first_copied * bytes;
    }
    /// The i-th that a step has.
    KOKKOS_FORCEINLINE_FUNCTION Operand operand_of_step(const BoundStep& step, std::int32_t s, int i) const {
      if (step.kind != KOKKOSSOFTMAX_BATCH_NORM) {
        index_type at_row;
        const void* const data = data_of_operand(step, s, at_row);
        return {step.kind == KOKKOSSOFTMAX_BIAS ? Combine::plus : Combine::times,
                step.scalar,
                data,
                at_row,
                step.operand.column_stride,
                0};
      }
      const AnyBatchNorm& b = step.batch_norm;
      const AnyColumnOperand& operand = i == 0 ? b.mean : i == 1 ? b.variance : i == 2 ? b.gamma : b.beta;
      return {i == 0   ? Combine::minus
              : i == 1 ? Combine::over_deviation
              : i == 2 ? Combine::times
                       : Combine::plus,
              operand.scalar,
              operand.data,
              0,
              operand.stride,
              b.eps};
    }

    /// use(load): load(v, to) brings the operand's values for vector v.
    template <int together, class T, class Columns, class Use>
    KOKKOS_FORCEINLINE_FUNCTION static void with_loads(const T* data, index_type at, index_type stride,
                                                       const Columns& columns, const Use& use) {
      const T* const first = data + (at + columns.origin * stride);
      const auto one_by_one = [&](const auto& one) {
        use([&]<class To>(int v, To(&to)[together]) {
          KOKKOSSOFTMAX_UNROLLED
          for (int i = 0; i < together; ++i) to[i] = impl::load_as<To>(one(columns.offset(v, i)));
        });
      };
      if constexpr (together > 1 && Columns::vectors_are_whole) {
        constexpr int bytes = impl::bytes_of_neighbours<together, T>;
        if (stride == 1 && reinterpret_cast<std::uintptr_t>(first + columns.offset(0)) % bytes == 0) {
          use([&](int v, auto& to) { impl::load_neighbours(first + columns.offset(v), to); });
          return;
        }
      } else if (stride == 1) {
        one_by_one([&](int offset) { return first[offset]; });
        return;
      }
      one_by_one([&](int offset) { return first[offset * stride]; });
    }

    template <int together, int count, class Acc, class Columns>
    KOKKOS_FORCEINLINE_FUNCTION static void combine_held(Acc (&value)[count], const Columns& columns,
                                                         const Operand& operand) {
      if (operand.combine == Combine::over_deviation) {
        // Of any scalar in one place, for there is much to do.
        over_deviation<together>(value, columns, operand);
        return;
      }
      with_scalar(operand.data, operand.scalar, [&]<class T>(const T* data) {
        with_loads<together>(data, operand.at, operand.stride, columns, [&](const auto& load) {
          const auto for_each_vector = [&](const auto& combine) {
            KOKKOSSOFTMAX_UNROLLED
            for (int v = 0; v < count / together; ++v) {
              if (columns.skips(v)) break;
              Acc of[together];
              load(v, of);
              combine([&](const auto& f) {
                KOKKOSSOFTMAX_UNROLLED
                for (int i = 0; i < together; ++i) {
                  Acc& one = value[v * together + i];
                  one = f(one, of[i]);
                }
              });
            }
          };
          // What it is, is asked once for all; of large vectors, of which there are many, for each, for the
          // loads of all of them to be there once.
          if constexpr (together <= 2) {
            with_function<Acc>(operand.combine,
                               [&](const auto& f) { for_each_vector([&](const auto& each) { each(f); }); });
          } else {
            for_each_vector([&](const auto& each) { with_function<Acc>(operand.combine, each); });
          }
        });
      });
    }
    template <class Acc, class Use>
    KOKKOS_FORCEINLINE_FUNCTION static void with_function(Combine combine, const Use& use) {
      if (combine == Combine::times) {
        use([](Acc a, Acc b) { return impl::Times::of(a, b); });
      } else if (combine == Combine::plus) {
        use([](Acc a, Acc b) { return impl::Plus::of(a, b); });
      } else {
        use([](Acc a, Acc b) { return a - b; });
      }
    }

    /// Vector after vector, each picked from the others: there are many instructions to it.
    template <int together, int count, class Acc, class Columns>
    KOKKOS_FORCEINLINE_FUNCTION static void over_deviation(Acc (&value)[count], const Columns& columns,
                                                           const Operand& variance) {
      KOKKOSSOFTMAX_NOT_UNROLLED
      for (int v = 0; v < count / together; ++v) {
        if (columns.skips(v)) break;
        Acc of[together], some[together] = {};
        with_scalar(variance.data, variance.scalar, [&]<class T>(const T* data) {
          KOKKOSSOFTMAX_UNROLLED
          for (int i = 0; i < together; ++i)
            of[i] = impl::load_as<Acc>(data[(columns.origin + columns.offset(v, i)) * variance.stride]);
        });
        KOKKOSSOFTMAX_UNROLLED
        for (int i = 0; i < count; ++i)
          some[i % together] = i / together == v ? value[i] : some[i % together];
        KOKKOSSOFTMAX_UNROLLED
        for (int i = 0; i < together; ++i) some[i] /= Kokkos::sqrt(of[i] + static_cast<Acc>(variance.eps));
        KOKKOSSOFTMAX_UNROLLED
        for (int i = 0; i < count; ++i) value[i] = i / together == v ? some[i % together] : value[i];
      }
    }

    /// All but the masks: what these drop stays so whenever they are applied. Each for all logits: a step has
    /// to be looked up.
    template <int together, int count, class Acc, class Columns>
    KOKKOS_FORCEINLINE_FUNCTION void apply_steps(Acc (&value)[count], const Columns& all_columns) const {
      const auto for_each = [&](const auto& f) { for_each_held<together>(value, all_columns, f); };
      KOKKOSSOFTMAX_NOT_UNROLLED
      for (std::int32_t s = 0; s < chain->count; ++s) {
        const BoundStep& step = chain->step[s];
        switch (step.kind) {
          case KOKKOSSOFTMAX_SCALE: {
            const impl::ScaleFunction scale{step.factor};
            for_each([&](Acc& v, int, int) { v = scale(v, 0, 0); });
            break;
          }
          case KOKKOSSOFTMAX_TEMPERATURE: {
            const impl::SharedDivisor<Acc> divisor(load_any<Acc>(step.operand.data, step.scalar, place(s)));
            for_each([&](Acc& v, int, int) { v = divisor.quotient(v); });
            break;
          }
          case KOKKOSSOFTMAX_BIAS:
          case KOKKOSSOFTMAX_SCALE_BY:
          case KOKKOSSOFTMAX_BATCH_NORM: {
            KOKKOSSOFTMAX_NOT_UNROLLED
            for (int i = 0; i < (step.kind == KOKKOSSOFTMAX_BATCH_NORM ? 4 : 1); ++i)
              combine_held<together>(value, all_columns.anew(), operand_of_step(step, s, i));
            break;
          }
          case KOKKOSSOFTMAX_GELU_ERF:
            for_each([&](Acc& v, int, int) { v = activated<impl::GeluErfFunction>(v); });
            break;
          case KOKKOSSOFTMAX_GELU_TANH:
            for_each([&](Acc& v, int, int) { v = activated<impl::GeluTanhFunction>(v); });
            break;
          case KOKKOSSOFTMAX_RELU:
            for_each([&](Acc& v, int, int) { v = impl::ReluFunction{}(v, 0, 0); });
            break;
          case normalizer_step: {
            const auto columns = all_columns.anew();
            const auto normalizer = step.normalizer.template row<Acc>();
            for_each(
                [&](Acc& v, int of, int i) { v = normalizer(v, columns.origin + columns.offset(of, i)); });
            break;
          }
        }
      }
    }

    /// drop_unless(number of a logit, whether it is kept) of all.
    template <int together, int count, class Columns, class DropUnless>
    KOKKOS_FORCEINLINE_FUNCTION void apply_masks(const Columns& all_columns,
                                                 const DropUnless& drop_unless) const {
      constexpr std::uint32_t masks = std::uint32_t(1) << KOKKOSSOFTMAX_MASK | std::uint32_t(1)
                                                                                   << KOKKOSSOFTMAX_CAUSAL;
      if ((chain->kinds & masks) == 0) return;
      KOKKOSSOFTMAX_NOT_UNROLLED
      for (std::int32_t s = 0; s < chain->count; ++s) {
        const BoundStep& step = chain->step[s];
        const auto columns = all_columns.anew();
        // keep(v, kept): for neighbours, what is kept of them.
        const auto apply = [&](const auto& keep) {
          KOKKOSSOFTMAX_UNROLLED
          for (int v = 0; v < count / together; ++v) {
            if (columns.skips(v)) break;
            bool kept[together];
            keep(v, kept);
            KOKKOSSOFTMAX_UNROLLED
            for (int i = 0; i < together; ++i) drop_unless(v * together + i, kept[i]);
          }
        };
        if (step.kind == KOKKOSSOFTMAX_MASK) {
          index_type at_row;
          const void* const data = data_of_operand(step, s, at_row);
          with_loads<together>(static_cast<const bool*>(data), at_row, step.operand.column_stride, columns,
                               apply);
        } else if (step.kind == KOKKOSSOFTMAX_CAUSAL) {
          constexpr index_type most = 0x7fffffff;
          const auto last =
              static_cast<int>(Kokkos::clamp<index_type>(place(s) - columns.origin, -most, most));
          apply([&](int v, bool(&kept)[together]) {
            KOKKOSSOFTMAX_UNROLLED
            for (int i = 0; i < together; ++i) kept[i] = columns.offset(v, i) <= last;
          });
        }
      }
    }

    KOKKOS_FORCEINLINE_FUNCTION static impl::BoundMask<bool>::Row mask_of(const BoundStep& step,
                                                                          index_type at) {
      return {{static_cast<const bool*>(step.operand.data) + at, step.operand.column_stride}};
    }

    template <class Ops>
    static void step_on_vectors(const BoundStep& step, index_type at, typename Ops::Vector* value,
                                typename Ops::Mask* kept, int vectors, index_type column) {
      with_object_of_row<typename Ops::Acc>(step, [&](const auto& object_of) {
        const auto object = object_of(at);
        for (int v = 0; v < vectors; ++v)
          object.template on_vector<Ops>(value[v], kept[v], column + v * Ops::width);
      });
    }

    /// use(object_of): of a row, by its `at` for the step, the object of the library's own stage for vectors.
    template <class Acc, class Use>
    static void with_object_of_row(const BoundStep& step, const Use& use) {
      const auto functor = [&]<class F>(const F& f) {
        use([&](index_type) { return typename impl::BoundFunctor<F>::Row{&f, 0}; });
      };
      const auto combine = [&]<class Combine>(Combine) {
        with_scalar(step.operand.data, step.scalar, [&]<class T>(const T* data) {
          use([&](index_type at) {
            return typename impl::BoundWithOperand<T, Combine>::Row{{data + at, step.operand.column_stride}};
          });
        });
      };
      switch (step.kind) {
        case KOKKOSSOFTMAX_SCALE:
          functor(impl::ScaleFunction{step.factor});
          break;
        case KOKKOSSOFTMAX_TEMPERATURE:
          with_scalar(step.operand.data, step.scalar, [&]<class T>(const T* data) {
            use([&](index_type at) { return typename impl::BoundTemperature<T>::Row{data + at}; });
          });
          break;
        case KOKKOSSOFTMAX_MASK:
          use([&](index_type at) { return mask_of(step, at); });
          break;
        case KOKKOSSOFTMAX_CAUSAL:
          use([](index_type at) { return impl::BoundCausal::Row{at}; });
          break;
        case KOKKOSSOFTMAX_BIAS:
          combine(impl::Plus());
          break;
        case KOKKOSSOFTMAX_SCALE_BY:
          combine(impl::Times());
          break;
        case KOKKOSSOFTMAX_GELU_ERF:
          functor(impl::GeluErfFunction{});
          break;
        case KOKKOSSOFTMAX_GELU_TANH:
          functor(impl::GeluTanhFunction{});
          break;
        case KOKKOSSOFTMAX_RELU:
          functor(impl::ReluFunction{});
          break;
        case KOKKOSSOFTMAX_BATCH_NORM:
          use([&](index_type) { return AnyBatchNorm::Row{&step.batch_norm}; });
          break;
        case normalizer_step:
          use([&](index_type) { return step.normalizer.template row<Acc>(); });
          break;
      }
    }
  };

  KOKKOS_FORCEINLINE_FUNCTION Row at_row(index_type row) const {
    Row result;
    result.chain = this;
    result.row = first_row + row;
    KOKKOS_IF_ON_HOST((find_places(result);))
    return result;
  }

  KOKKOS_FORCEINLINE_FUNCTION index_type place_of_row(const BoundStep& of, index_type row) const {
    switch (of.kind) {
      case KOKKOSSOFTMAX_TEMPERATURE:
      case KOKKOSSOFTMAX_MASK:
      case KOKKOSSOFTMAX_BIAS:
      case KOKKOSSOFTMAX_SCALE_BY:
        return of.operand.row_offset(row);
      case KOKKOSSOFTMAX_CAUSAL:
        return of.causal.at_row(row).last;
      default:
        return 0;
    }
  }
  void find_places(Row& row) const {
    for (std::int32_t s = 0; s < count; ++s) row.at[s] = place_of_row(step[s], row.row);
  }

  void add(std::int32_t kind, const BoundStep& what) {
    BoundStep& added = step[count++];
    added = what;
    added.kind = kind;
    kinds |= std::uint32_t(1) << kind;
    const bool has_operand =
        kind == KOKKOSSOFTMAX_MASK || kind == KOKKOSSOFTMAX_BIAS || kind == KOKKOSSOFTMAX_SCALE_BY;
    added.number = has_operand && what.operand.column_stride == 1 ? side_by_side++ : -1;
  }

  /// For a head: the BatchNorms as normalizers, which take over a bias right before them.
  template <class Prepare>
  BoundAnyChain with_prepared_batch_norms(Prepare& prepare) const {
    BoundAnyChain result = *this;
    for (std::int32_t s = 0; s < count; ++s) {
      if (step[s].kind != KOKKOSSOFTMAX_BATCH_NORM) continue;
      const auto normalizer = prepare.normalizer(step[s].batch_norm, result.take_bias_over(s));
      result.step[s].kind = normalizer_step;
      result.step[s].normalizer = {normalizer.factor, normalizer.distance};
      result.kinds = (result.kinds & ~(std::uint32_t(1) << KOKKOSSOFTMAX_BATCH_NORM)) |
                     (std::uint32_t(1) << normalizer_step);
    }
    return result;
  }

  /// For a head: before a normalizer that takes over a bias at the end.
  BoundAnyChain before_normalizer() const {
    BoundAnyChain result = *this;
    result.take_bias_over(count);
    return result;
  }
  KOKKOS_FORCEINLINE_FUNCTION double taken_over(index_type column) const {
    return count > 0 && step[count - 1].kind == taken_over_bias_step
               ? TakenOverBias{step[count - 1].operand, step[count - 1].scalar}.taken_over(column)
               : 0.0;
  }

  /// What a head does with a chain beside that: still one type, so that the kernels of the softmax serve it.
  BoundAnyChain with_rows_from(index_type row) const {
    BoundAnyChain result = *this;
    result.first_row = row;
    return result;
  }
  template <class Acc>
  BoundAnyChain followed_by(const impl::BoundNormalizer<Acc>& normalizer) const {
    BoundStep one;
    one.normalizer = {normalizer.factor, normalizer.distance};
    BoundAnyChain result = *this;
    result.add(normalizer_step, one);
    return result;
  }
  template <class Acc>
  BoundAnyChain preceded_by(const impl::BoundNormalizer<Acc>& normalizer) const {
    return BoundAnyChain{}.followed_by(normalizer).followed_by(*this);
  }
  BoundAnyChain followed_by(const BoundAnyChain& other) const {
    BoundAnyChain result = *this;
    for (std::int32_t s = 0; s < other.count; ++s) result.add(other.step[s].kind, other.step[s]);
    result.rows_alike = rows_alike && other.rows_alike;
    return result;
  }

 private:
  /// A bias right before step s, the same for all rows, becomes a step that does nothing.
  TakenOverBias take_bias_over(std::int32_t s) {
    if (s == 0 || step[s - 1].kind != KOKKOSSOFTMAX_BIAS || step[s - 1].operand.row_offset.rank > 0)
      return {};
    step[s - 1].kind = taken_over_bias_step;
    return {step[s - 1].operand, step[s - 1].scalar};
  }
};

// ---------------------------------------------------------------------------------------------------------
// As the caller gave it.

/// Checks the steps [begin, end) against a call, in their order.
template <class Exec>
BoundAnyChain bind_steps(const impl::BindContext<Exec>& context, const Steps& steps, int begin, int end);

/// The steps as a transform of the library.
struct AnyChain : impl::TransformBase {
  const Steps* steps;
  int begin, end;
  AnyChain(const Steps& steps_, int begin_, int end_) : steps(&steps_), begin(begin_), end(end_) {}
  template <class Exec>
  static constexpr bool reachable_from = true;  // said of every array, and checked, before
  template <class Exec>
  BoundAnyChain bind(const impl::BindContext<Exec>& context) const {
    return bind_steps(context, *steps, begin, end);
  }
};

// ---------------------------------------------------------------------------------------------------------
// Chains with kernels of their own: in the sources made from KokkosSoftmax_CNamedRows.cpp.in, for devices.

/// Whether it was one, and is done.
template <class Exec, class In, class Out>
bool call_named_rows(const Exec& exec, const RowsCall& call,
                     const impl::RowsProblem<In, Out, BoundAnyChain>& problem);

template <class Exec, class Problem>
bool run_named_rows(const Exec& exec, const RowsCall& call, const Problem& problem) {
  if constexpr (std::is_same_v<Exec, Kokkos::DefaultHostExecutionSpace> ||
                !std::is_same_v<typename Problem::Transform, BoundAnyChain>) {
    return false;
  } else {
    return call_named_rows(exec, call, problem);
  }
}

}  // namespace KokkosSoftmax::c

namespace KokkosSoftmax::impl {

/// How many it can hold.
template <>
inline constexpr int batch_norms_v<c::BoundAnyChain> = c::max_steps;

/// (64 rows, 2048 -> 8192 with bias and ReLU on one H200: 107 us, and 44 where the softmax does it.)
template <>
inline constexpr bool is_worth_fusing_v<c::BoundAnyChain> = false;

template <>
inline constexpr int vectors_at_once<c::BoundAnyChain::Row> = 8;

// The kernels are in the sources made from KokkosSoftmax_CRows.cpp.in, for the heads as well.
#define KOKKOSSOFTMAX_EXTERN(EXEC, IN, OUT)                                                               \
  extern template void run_rows(const EXEC&, const RowsProblem<IN, OUT, c::BoundAnyChain>&, const char*); \
  extern template void reserve_rows(const EXEC&, const RowsProblem<IN, OUT, c::BoundAnyChain>&, const char*);
#define KOKKOSSOFTMAX_EXTERN_PAIR(IN, OUT) KOKKOSSOFTMAX_FOR_EACH_BACKEND(KOKKOSSOFTMAX_EXTERN, IN, OUT)
KOKKOSSOFTMAX_FOR_EACH_SCALAR_PAIR(KOKKOSSOFTMAX_EXTERN_PAIR)
#undef KOKKOSSOFTMAX_EXTERN_PAIR
#undef KOKKOSSOFTMAX_EXTERN

}  // namespace KokkosSoftmax::impl

#endif
