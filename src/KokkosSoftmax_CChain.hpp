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
  union {
    double factor;
    impl::BoundCausal causal;
    AnyLogitOperand operand;  ///< mask, bias, scale, temperature
    AnyBatchNorm batch_norm;
    AnyNormalizer normalizer;
  };
  BoundStep() : kind(0), scalar(0), operand{} {}
};

struct BoundAnyChain {
  std::int32_t count = 0;
  std::uint32_t kinds = 0;  ///< a bit for each kind that is in it
  bool rows_alike = true;
  index_type first_row = 0;  ///< of a panel of rows
  BoundStep step[max_steps];

  KOKKOS_FORCEINLINE_FUNCTION bool has_rows_alike() const { return rows_alike; }
  KOKKOS_FORCEINLINE_FUNCTION bool drops_ends(index_type) const {
    return kinds & std::uint32_t(1) << KOKKOSSOFTMAX_CAUSAL;
  }

  struct Row {
    static constexpr bool takes_distant_columns = true;  ///< see apply_to_columns
    const BoundAnyChain* chain;
    index_type
        at[max_steps];  ///< of a step's operand, the row's offset; of causal, the last column that is kept

    KOKKOS_FORCEINLINE_FUNCTION index_type end_of_kept(index_type columns) const {
      index_type end = columns;
      for (std::int32_t s = 0; s < chain->count; ++s) {
        if (chain->step[s].kind == KOKKOSSOFTMAX_CAUSAL)
          end = Kokkos::min(end, impl::BoundCausal::Row{at[s]}.end_of_kept(columns));
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
      Acc values[1] = {value};
      bool keeps[1] = {kept};
      apply_to_neighbours(values, keeps, column);
      value = values[0];
      kept = keeps[0];
    }

    template <int width, class Acc>
    KOKKOS_FORCEINLINE_FUNCTION void apply_to_neighbours(Acc (&value)[width], bool (&kept)[width],
                                                         index_type first) const {
      constexpr int lanes = width < 8 ? width : 8;
      for (int begin = 0; begin < width; begin += lanes)
        apply_to_lanes<lanes, lanes>(value + begin, kept + begin, first + begin, 0);
    }

    /// The same of as many neighbours as `together` every `distance` columns.
    template <int together, int width, class Acc>
    KOKKOS_FORCEINLINE_FUNCTION void apply_to_columns(Acc (&value)[width], bool (&kept)[width],
                                                      index_type first, int distance) const {
      static_assert(width <= 8);
      apply_to_lanes<together, width>(value, kept, first, distance);
    }

    /// Logits of some columns, which a device's function takes and gives back in registers.
    template <class Acc, int width>
    struct Lanes {
      Acc value[width];
      std::uint32_t kept;  ///< a bit for each

      KOKKOS_FORCEINLINE_FUNCTION bool keeps(int i) const { return kept >> i & 1; }
      KOKKOS_FORCEINLINE_FUNCTION void keep_if(int i, bool condition) {
        kept &= ~(static_cast<std::uint32_t>(!condition) << i);
      }
    };

    /// A function that is called: inlined wherever a kernel has a logit it would be most of the library, and
    /// of the time to compile it.
    template <int together, class Acc, int width>
    KOKKOS_FUNCTION __attribute__((noinline)) Lanes<Acc, width> transformed(Lanes<Acc, width> l,
                                                                            index_type first,
                                                                            int distance) const {
      Acc(&value)[width] = l.value;
      const auto column = [&](int i) { return first + column_of_lane<together>(i, distance); };
      for (std::int32_t s = 0; s < chain->count; ++s) {
        const BoundStep& step = chain->step[s];
        switch (step.kind) {
          case KOKKOSSOFTMAX_SCALE: {
            const impl::ScaleFunction scale{step.factor};
            for (int i = 0; i < width; ++i) value[i] = scale(value[i], 0, 0);
            break;
          }
          case KOKKOSSOFTMAX_TEMPERATURE: {
            const impl::SharedDivisor<Acc> divisor(load_any<Acc>(step.operand.data, step.scalar, at[s]));
            for (int i = 0; i < width; ++i) value[i] = divisor.quotient(value[i]);
            break;
          }
          case KOKKOSSOFTMAX_MASK: {
            const auto mask = mask_of(step, at[s]);
            for (int i = 0; i < width; ++i) l.keep_if(i, mask.keeps(column(i)));
            break;
          }
          case KOKKOSSOFTMAX_CAUSAL:
            for (int i = 0; i < width; ++i) l.keep_if(i, column(i) <= at[s]);
            break;
          case KOKKOSSOFTMAX_BIAS:
            with_scalar(
                step.operand.data, step.scalar,
                CombineLanes<impl::Plus, together, width, Acc>{
                    value, at[s] + first * step.operand.column_stride, step.operand.column_stride, distance});
            break;
          case KOKKOSSOFTMAX_SCALE_BY:
            with_scalar(
                step.operand.data, step.scalar,
                CombineLanes<impl::Times, together, width, Acc>{
                    value, at[s] + first * step.operand.column_stride, step.operand.column_stride, distance});
            break;
          case KOKKOSSOFTMAX_GELU_ERF:
            for (int i = 0; i < width; ++i) value[i] = impl::GeluErfFunction{}(value[i], 0, 0);
            break;
          case KOKKOSSOFTMAX_GELU_TANH:
            for (int i = 0; i < width; ++i) value[i] = impl::GeluTanhFunction{}(value[i], 0, 0);
            break;
          case KOKKOSSOFTMAX_RELU:
            for (int i = 0; i < width; ++i) value[i] = impl::ReluFunction{}(value[i], 0, 0);
            break;
          case KOKKOSSOFTMAX_BATCH_NORM: {
            const AnyBatchNorm& b = step.batch_norm;
            for (int i = 0; i < width; ++i) {
              const index_type c = column(i);
              value[i] = impl::batch_normalized<Acc>(value[i], b.mean.template at<Acc>(c),
                                                     b.variance.template at<Acc>(c), static_cast<Acc>(b.eps),
                                                     b.gamma.template at<Acc>(c), b.beta.template at<Acc>(c));
            }
            break;
          }
          case normalizer_step: {
            const auto normalizer = step.normalizer.template row<Acc>();
            for (int i = 0; i < width; ++i) value[i] = normalizer(value[i], column(i));
            break;
          }
        }
      }
      return l;
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
    /// From the first one's.
    template <int together>
    KOKKOS_FORCEINLINE_FUNCTION static int column_of_lane(int lane, int distance) {
      return lane / together * distance + lane % together;
    }

    template <int together, int width, class Acc>
    KOKKOS_FORCEINLINE_FUNCTION void apply_to_lanes(Acc* value, bool* kept, index_type first,
                                                    int distance) const {
      Lanes<Acc, width> l;
      l.kept = 0;
      for (int i = 0; i < width; ++i) {
        l.value[i] = value[i];
        l.kept |= static_cast<std::uint32_t>(kept[i]) << i;
      }
      l = transformed<together>(l, first, distance);
      for (int i = 0; i < width; ++i) {
        value[i] = l.value[i];
        kept[i] = l.keeps(i);
      }
    }

    template <class Combine, int together, int width, class Acc>
    struct CombineLanes {
      Acc* value;
      index_type at, stride;
      int distance;
      template <class T>
      KOKKOS_FORCEINLINE_FUNCTION void operator()(const T* data) const {
        const auto column = [&](int i) { return column_of_lane<together>(i, distance); };
        if (stride == 1) {
          for (int i = 0; i < width; ++i)
            value[i] = Combine::of(value[i], impl::load_as<Acc>(data[at + column(i)]));
        } else {
          for (int i = 0; i < width; ++i)
            value[i] = Combine::of(value[i], impl::load_as<Acc>(data[at + column(i) * stride]));
        }
      }
    };

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

  KOKKOS_FUNCTION __attribute__((noinline)) Row at_row(index_type row) const {
    Row result;
    result.chain = this;
    row += first_row;
    for (std::int32_t s = 0; s < count; ++s) {
      const BoundStep& one = step[s];
      switch (one.kind) {
        case KOKKOSSOFTMAX_TEMPERATURE:
        case KOKKOSSOFTMAX_MASK:
        case KOKKOSSOFTMAX_BIAS:
        case KOKKOSSOFTMAX_SCALE_BY:
          result.at[s] = one.operand.row_offset(row);
          break;
        case KOKKOSSOFTMAX_CAUSAL:
          result.at[s] = one.causal.at_row(row).last;
          break;
        default:
          result.at[s] = 0;
      }
    }
    return result;
  }

  void add(std::int32_t kind, const BoundStep& what) {
    step[count] = what;
    step[count++].kind = kind;
    kinds |= std::uint32_t(1) << kind;
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
