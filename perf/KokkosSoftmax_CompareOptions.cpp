// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <getopt.h>

#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <limits>

#include "KokkosSoftmax_Compare.hpp"

namespace compare {

const char* const usage_line =
    "usage: kokkossoftmax_compare [--operation LIST] [--transform LIST] [--shape LIST] [--scalar LIST]\n"
    "       [--backend LIST] [--implementation LIST] [--axis 0|1] [--layout LIST] [--total BYTES] [--range "
    "R]\n"
    "       [--repetitions N] [--time-budget S] [--check N] [--graph] [--json FILE] [--markdown [FILE]]\n"
    "       [--quiet] [--list] [--help] [--kokkos-...]\n";

namespace {

const char* const help_text = R"(
Runs each operation of KokkosSoftmax on every enabled Kokkos backend, checks the results against a plain
double-precision reference, times them, and prints one table.

What to run
  --operation LIST       comma list of operations, or all (default: softmax)
  --transform LIST       comma list of transforms of the logits for softmax, log_softmax and logsumexp, or all
                         (default: none, which is all that kokkossoftmax_compare has). The same program with
                         the others is kokkossoftmax_compare_transforms, a target that is built on request:
                           scale          times 0.125
                           temperature    over one of 0.5 to 1.5 a row
                           causal         column <= row is kept (with --axis 1 alone)
                           mask           a boolean for each logit, three in ten dropped
                           bias           plus a number in (-1, 1) for each logit, of the input's scalar
                           gelu           GELU through erf
                           mask_row, bias_row                     one row of them for all rows
                           temperature_mask, scale_causal, scale_bias_mask_causal
                                                                  in this order
  --shape LIST           comma list of
                           ROWSxCOLUMNS   the extents of the two-dimensional view (ROWSxINNERxCOLUMNS for an
                                          operation that multiplies matrices)
                           COLUMNS        as many rows as make the input --total bytes
                           fitxCOLUMNS    up to 4096 rows, as many as fit: input and output together in a
                                          quarter of a host's available memory, or 0.8 of a device's; with a
                                          transform operands too, and as much again for the copy
                         Default, the real work: fitx393216, then a sweep of the row lengths
                         64,256,1024,4096,16384,65536,131072,1048576.
  --scalar LIST          comma list of IN or IN:OUT, or all (default: float)
  --backend LIST         comma list of backends, or all (default: all that the build has)
  --implementation LIST  comma list of implementations to force, or all: every one in turn (default: the one
                         that the library chooses). One that refuses the work is reported, and is no failure.
  --axis 0|1             the axis to normalise along (default: 1, the last). With 0, COLUMNS and fitxCOLUMNS
                         give the length of that axis.
  --layout LIST          comma list of layouts of the views: right, left (default: right). For an operation
                         that multiplies matrices also strided, where neither stride is 1, a layout for each
                         as X:W:Y, and mixtures, all 27 of these.
  --total BYTES          size of the input for a shape without ROWS; K, M, G are powers of 1024
                         (default: 256M on a host, 1G on a device)
  --range R              logits are random, even in (-R, R) (default: 3)

How to measure
  --repetitions N        rounds (default: as many as the time budget allows, but at least 3)
  --time-budget S        seconds of timing for each case (default: 1.5)
  --graph                CUDA: 20 calls captured in a graph and replayed; other backends are timed as usual
  --check N              elements to check, at least; whole rows, the first, the middle and the last among
                         them (default: 1048576)

What to write
  --json FILE            every number and the machine as JSON; - is the standard output, without the table
  --markdown [FILE]      the table in Markdown, to FILE, or in place of the table
  --quiet                no progress on stderr
  --list                 list operations, scalars, backends and implementations, and stop
  --help                 this text
  --kokkos-...           handed to Kokkos (--kokkos-num-threads=2, --kokkos-device-id=1, --kokkos-help ...)

What the columns mean
  median, minimum   time of a call. A round times the operation and then the yardsticks, so that all see the
                    same machine. Calls too short for the clock are timed many at a time; the backend is
                    fenced before and after, so on a device a lone short call would measure the launch.
  GB/s              10^9 bytes a second: (bytes of the input + bytes of the output) / median. Each must move
                    once, whatever the implementation does. With a transform those of its operands, too, and
                    not what a causal mask drops at the ends of rows of the input and of operands as large.
  copy GB/s         the same rate for a copy of the input into the output in the same rounds: on a host a
                    parallel copy by the backend's threads, with ordinary stores and with streaming stores,
                    whichever is faster; on CUDA cudaMemcpyAsync. Where the scalars differ in size, as many
                    bytes are copied as the smaller holds. logsumexp writes next to nothing: its yardstick is a
                    sum that only reads the input. With a transform as many bytes are moved as have to be,
                    in memory of the copy's (or the sum's) own where the input and the output are too small.
  of copy           GB/s over copy GB/s
  error             largest over the checked elements. softmax: |y - r| / r against r in double (normal r
                    alone); log_softmax: |y - r| / max(1, |x - max|, log N); logsumexp:
                    |y - r| / max(1, |max|, |r|).
  of allowed        largest error as a part of what the library promises; above 1 is out of tolerance. Promised,
                    with eps = 2^-24 (2^-53 where all is double): softmax r (1e-6 + |x - max| eps) (1e-14 for
                    double); the others 4 eps times the scale above; half and bfloat16 outputs one unit in
                    the last place more. Below the smallest normal number a result may be 0, except in half.
                    Also, no element of the output may be left unwritten. The reference transforms logits in
                    the accumulator's type; a quotient by a temperature may be wrong by 2.5 eps, GELU of x by
                    8 eps |x|, and what that does to the result is allowed too. What is dropped must be 0.
  speed-up          GB/s over that of the slowest backend on the same work

Exit status
  0  everything ran and is within tolerance
  1  a result is out of tolerance, or a case could not run; which, is said on stderr
  2  wrong flags
)";

std::vector<std::string> split(const std::string& text, const char* flag) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t comma = text.find(',', begin);
    parts.push_back(text.substr(begin, comma - begin));
    if (parts.back().empty()) throw UsageError{std::string(flag) + ": empty element in '" + text + "'"};
    if (comma == std::string::npos) return parts;
    begin = comma + 1;
  }
}

std::int64_t to_count(const std::string& text, const char* flag, bool suffix = false) {
  errno = 0;
  char* end = nullptr;
  const long long value = std::strtoll(text.c_str(), &end, 10);
  std::int64_t unit = 1;
  if (suffix && end != text.c_str() && *end != '\0' && end[1] == '\0') {
    switch (*end) {
      case 'K':
      case 'k':
        unit = std::int64_t(1) << 10;
        break;
      case 'M':
      case 'm':
        unit = std::int64_t(1) << 20;
        break;
      case 'G':
      case 'g':
        unit = std::int64_t(1) << 30;
        break;
      default:
        unit = 0;
    }
    ++end;
  }
  if (end == text.c_str() || *end != '\0' || unit == 0 || errno != 0 || value <= 0 ||
      value > std::numeric_limits<std::int64_t>::max() / unit) {
    throw UsageError{std::string(flag) + ": '" + text + "' is not a positive number"};
  }
  return value * unit;
}

double to_real(const std::string& text, const char* flag) {
  errno = 0;
  char* end = nullptr;
  const double value = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || *end != '\0' || errno != 0 || !(value > 0) || !std::isfinite(value)) {
    throw UsageError{std::string(flag) + ": '" + text + "' is not a positive number"};
  }
  return value;
}

ShapeRequest to_shape(const std::string& text) {
  std::vector<std::string> extents;
  std::size_t begin = 0;
  while (true) {
    const std::size_t x = text.find('x', begin);
    extents.push_back(text.substr(begin, x - begin));
    if (x == std::string::npos) break;
    begin = x + 1;
  }
  ShapeRequest shape;
  if (extents.size() > 3 || (extents[0] == "fit" && extents.size() != 2)) {
    throw UsageError{"--shape: '" + text +
                     "' is not ROWSxCOLUMNS, COLUMNS, fitxCOLUMNS or ROWSxINNERxCOLUMNS"};
  }
  shape.columns = to_count(extents.back(), "--shape");
  if (extents.size() == 1) {
    shape.kind = ShapeRequest::Rows::total;
  } else if (extents[0] == "fit") {
    shape.kind = ShapeRequest::Rows::fit;
  } else {
    shape.rows = to_count(extents[0], "--shape");
    if (extents.size() == 3) shape.inner = to_count(extents[1], "--shape");
  }
  return shape;
}

std::vector<ShapeRequest> to_shapes(const std::string& text) {
  std::vector<ShapeRequest> shapes;
  for (const std::string& part : split(text, "--shape")) shapes.push_back(to_shape(part));
  return shapes;
}

std::vector<std::string> to_layouts(const std::string& text) {
  const std::string one[] = {"right", "left", "strided"};
  std::vector<std::string> mixtures, layouts;
  for (const std::string& x : one) {
    for (const std::string& w : one) {
      for (const std::string& y : one) mixtures.push_back(x + ":" + w + ":" + y);
    }
  }
  for (const std::string& part : split(text, "--layout")) {
    if (part == "mixtures") {
      layouts.insert(layouts.end(), mixtures.begin(), mixtures.end());
    } else if (std::find(mixtures.begin(), mixtures.end(), part) != mixtures.end() ||
               std::find(std::begin(one), std::end(one), part) != std::end(one)) {
      layouts.push_back(part);
    } else {
      throw UsageError{"--layout: '" + part +
                       "' is not right, left, strided, three of them as X:W:Y, or mixtures"};
    }
  }
  return layouts;
}

}  // namespace

std::vector<ShapeRequest> default_shapes() {
  return to_shapes("fitx393216,10,64,65,256,1024,4096,4097,16384,50257,65536,131072,1048576");
}

bool parse_options(int argc, char** argv, Options& options) {
  enum Flag : int {
    operation = 256,
    transform,
    shape,
    scalar,
    backend,
    implementation,
    axis,
    layout,
    total,
    range,
    repetitions,
    time_budget,
    check,
    graph,
    json,
    markdown,
    quiet,
    list,
    help
  };
  static const option long_options[] = {{"operation", required_argument, nullptr, operation},
                                        {"transform", required_argument, nullptr, transform},
                                        {"shape", required_argument, nullptr, shape},
                                        {"scalar", required_argument, nullptr, scalar},
                                        {"backend", required_argument, nullptr, backend},
                                        {"implementation", required_argument, nullptr, implementation},
                                        {"axis", required_argument, nullptr, axis},
                                        {"layout", required_argument, nullptr, layout},
                                        {"total", required_argument, nullptr, total},
                                        {"range", required_argument, nullptr, range},
                                        {"repetitions", required_argument, nullptr, repetitions},
                                        {"time-budget", required_argument, nullptr, time_budget},
                                        {"check", required_argument, nullptr, check},
                                        {"graph", no_argument, nullptr, graph},
                                        {"json", required_argument, nullptr, json},
                                        {"markdown", optional_argument, nullptr, markdown},
                                        {"quiet", no_argument, nullptr, quiet},
                                        {"list", no_argument, nullptr, list},
                                        {"help", no_argument, nullptr, help},
                                        {nullptr, 0, nullptr, 0}};
  opterr = 0;
  while (true) {
    const int current = optind;
    const int flag = getopt_long(argc, argv, "", long_options, nullptr);
    if (flag == -1) break;
    const std::string value = optarg != nullptr ? optarg : "";
    switch (flag) {
      case operation:
        options.operations = split(value, "--operation");
        break;
      case transform:
        options.transforms = split(value, "--transform");
        break;
      case shape:
        options.shapes = to_shapes(value);
        break;
      case scalar:
        options.scalars = split(value, "--scalar");
        break;
      case backend:
        options.backends = split(value, "--backend");
        break;
      case implementation:
        options.implementations = split(value, "--implementation");
        break;
      case axis:
        if (value != "0" && value != "1") throw UsageError{"--axis: '" + value + "' is neither 0 nor 1"};
        options.axis = value == "1" ? 1 : 0;
        break;
      case layout:
        options.layouts = to_layouts(value);
        break;
      case total:
        options.total_bytes = to_count(value, "--total", true);
        break;
      case range:
        options.range = to_real(value, "--range");
        break;
      case repetitions:
        options.repetitions =
            static_cast<int>(std::min<std::int64_t>(to_count(value, "--repetitions"), 1 << 30));
        break;
      case time_budget:
        options.time_budget = to_real(value, "--time-budget");
        break;
      case check:
        options.check_elements = to_count(value, "--check");
        break;
      case graph:
        options.graph = true;
        break;
      case json:
        options.json_file = value;
        break;
      case markdown:
        options.markdown = true;
        // getopt takes an optional value only after '='; there are no other arguments it could be.
        if (optarg != nullptr) {
          options.markdown_file = value;
        } else if (optind < argc && argv[optind][0] != '-') {
          options.markdown_file = argv[optind++];
        }
        break;
      case quiet:
        options.quiet = true;
        break;
      case list:
        options.list = true;
        break;
      case help:
        std::cout << usage_line << help_text;
        return false;
      default: {
        const std::string culprit = argv[optind > current ? optind - 1 : current];
        throw UsageError{"'" + culprit + "' is no flag of this program, lacks its value or has one too many"};
      }
    }
  }
  if (optind < argc) throw UsageError{std::string("unexpected argument '") + argv[optind] + "'"};
  if (options.json_file == "-" && options.markdown && options.markdown_file.empty()) {
    throw UsageError{"--json - and --markdown without a file would both write to the standard output"};
  }
  return true;
}

}  // namespace compare
