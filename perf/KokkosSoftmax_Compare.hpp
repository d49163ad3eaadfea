// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#ifndef KOKKOSSOFTMAX_COMPARE_HPP
#define KOKKOSSOFTMAX_COMPARE_HPP

// What the parts of the comparison program tell each other. This header knows neither Kokkos nor the
// library, so that the flags, the reference and the report compile in a second.

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <utility>
#include <vector>

namespace compare {

// A shape as it was asked for.
struct ShapeRequest {
  enum class Rows {
    given,  // ROWSxCOLUMNS
    total,  // COLUMNS: as many rows as make the input --total bytes
    fit     // fitxCOLUMNS: up to 4096 rows, as many as the memory share of the backend holds
  };
  Rows kind = Rows::given;
  std::int64_t rows = 0;     // extent 0 of the view
  std::int64_t inner = 0;    // the summed dimension, for operations that multiply matrices
  std::int64_t columns = 0;  // extent 1 of the view
};

struct Options {
  std::vector<std::string> operations{"softmax"};
  std::vector<std::string> transforms{"none"};
  std::vector<ShapeRequest> shapes;  // empty: the default work
  std::vector<std::string> scalars{"float"};
  std::vector<std::string> backends;  // empty: every backend of the build
  std::vector<std::string> implementations{""};
  int axis = 1;
  std::vector<std::string> layouts{"right"};
  std::int64_t total_bytes = 0;  // 0: 256 MiB on a host, 1 GiB on a device
  double range = 3.0;
  int repetitions = 0;  // 0: until the time budget is spent
  double time_budget = 1.5;
  std::int64_t check_elements = std::int64_t(1) << 20;
  bool graph = false;
  bool quiet = false;
  bool list = false;
  bool markdown = false;
  std::string markdown_file;
  std::string json_file;
};

// One measurement to make.
struct Case {
  std::string operation;
  std::string transform = "none";
  std::string backend;
  std::string scalar_in, scalar_out;
  std::int64_t rows = 0, inner = 0, columns = 0;  // the view's extents
  int axis = 1;
  std::string layout = "right";  // of the views; for three matrices one of each may stand, X:W:Y
  std::string implementation;    // empty: the library chooses
  int group = 0;                 // cases of one group differ in backend and implementation alone

  // The operation, with a transform if there is one.
  std::string call() const { return transform == "none" ? operation : operation + " " + transform; }
};

struct Timing {
  double median = 0, minimum = 0;  // seconds a call
  int rounds = 0, calls = 0;       // calls: in each round
};

// What the hardware does with the same bytes, measured between the calls of the operation.
struct Yardstick {
  std::string name;
  Timing time;
  double bytes = 0;
};

struct Accuracy {
  double error = 0;    // largest; relative for softmax, scaled for the logarithms
  double allowed = 0;  // largest error as a part of what the contract allows at that element; above 1 fails
  std::int64_t checked = 0;
  std::int64_t unwritten = 0;  // NaN left in the whole output
};

struct Result {
  Case what;
  std::string implementation;  // which ran
  std::string failure;         // not empty: it did not run; why
  bool refused = false;        // a forced implementation declined: no failure of the comparison
  Timing time;
  double bytes = 0;
  std::vector<Yardstick> yardsticks;
  Accuracy accuracy;
  double speedup = 0;  // over the slowest backend of its group, by bytes a second

  bool ran() const { return failure.empty(); }
  bool correct() const { return ran() && accuracy.allowed <= 1 && accuracy.unwritten == 0; }
  double bandwidth() const { return time.median > 0 ? bytes / time.median : 0; }
  // The fastest yardstick counts.
  const Yardstick* yardstick() const;
  double fraction() const;
};

// An operation as built for one backend and one pair of scalars.
struct Kernel {
  std::string backend;
  std::string scalar_in, scalar_out;
  std::size_t size_in = 0, size_out = 0;
  std::function<Result(const Case&, const Options&)> run;
  std::string transform = "none";
};

struct Operation {
  std::string name;
  std::string description;
  int extents = 2;  // numbers in its shape; 3: ROWSxINNERxCOLUMNS
  std::vector<Kernel> kernels;
  std::function<std::vector<std::string>(const std::string& backend)> implementations;
};

struct Backend {
  std::string name;
  bool on_host = true;
  int concurrency = 0;
  std::string device;  // the processor's name
  std::function<std::int64_t()> free_bytes;
};

// Everything that the build can run. An operation to come is one more element of this list.
std::vector<Operation> all_operations();
std::vector<Operation> softmax_operations();
std::vector<Operation> linear_operations();  // where the build has the heads
// Kernels with a transform, each with its operation. Files that bring some along add them before main.
std::vector<std::pair<std::string, Kernel>>& transform_kernels();
std::vector<Backend> all_backends();

// Flags. Throws UsageError.
struct UsageError {
  std::string what;
};
// False: --help was given and answered.
bool parse_options(int argc, char** argv, Options& options);
extern const char* const usage_line;

// The default shapes, for --help and main.
std::vector<ShapeRequest> default_shapes();

// A transform of the logits as its name tells it: steps in their order between underscores, with "row" at the
// end where a mask or a bias is one row for all rows.
struct Transform {
  explicit Transform(const std::string& name);
  std::vector<std::string> steps;  // scale, temperature, mask, causal, bias, gelu
  bool one_row = false;

  bool has(const std::string& step) const;
  // Of a mask and a bias, for each element.
  std::size_t operand_bytes(std::size_t size_in) const;
  // How many of rows x columns logits a causal mask drops, at the ends of rows.
  double dropped_at_ends(std::int64_t rows, std::int64_t columns) const;
};
inline constexpr double transform_factor = 0.125;

// What the steps take, for one row.
struct TransformOperands {
  const double* mask = nullptr;  // 0: dropped
  const double* bias = nullptr;
  double temperature = 1;
  std::int64_t query = 0;
};
// Makes of a row x its logits as transformed in the accumulator's type, and of `error` what the library's own
// arithmetic may add to or take from each where a step is not one rounded operation.
void transform_row(const Transform& transform, const TransformOperands& operands,
                   const std::string& scalar_in, const std::string& scalar_out, double* x,
                   std::int64_t columns, std::vector<double>& error);

// The reference, in plain double precision.
enum class Quantity { softmax, log_softmax, logsumexp };

struct ScalarFormat {
  int digits;        // of the significand, the hidden one counted
  int min_exponent;  // of the smallest normal, as a power of two
};
ScalarFormat scalar_format(const std::string& name);

// One row x of `columns` logits, each with its `error`, against its result y (one value for logsumexp);
// widens `accuracy`.
void check_row(Quantity quantity, const double* x, const std::vector<double>& error, std::int64_t columns,
               const double* y, const std::string& scalar_in, const std::string& scalar_out,
               Accuracy& accuracy);

// The report.
struct RunInfo {
  std::string library, kokkos, date, processor;
  std::vector<Backend> backends;
  std::vector<std::string> notes;
};
void set_speedups(std::vector<Result>& results);
std::string duration(double seconds);
void print_table(std::ostream& out, const RunInfo& info, const std::vector<Result>& results);
void print_markdown(std::ostream& out, const RunInfo& info, const std::vector<Result>& results);
void print_json(std::ostream& out, const RunInfo& info, const Options& options,
                const std::vector<Result>& results);

// Bytes that a program may still take on this host: what the kernel calls available, or less where the
// control group allows less.
std::int64_t host_available_bytes();
std::string host_processor();

}  // namespace compare

#endif
