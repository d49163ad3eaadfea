// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// kokkossoftmax_compare: every operation on every backend of the build, checked, timed and put side by side.
// Try --help.

#include <KokkosSoftmax_config.hpp>
#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "KokkosSoftmax_Compare.hpp"

namespace compare {

std::vector<Operation> all_operations() {
  std::vector<Operation> operations = softmax_operations();
#if defined(KOKKOSSOFTMAX_ENABLE_LINEAR)
  for (Operation& operation : linear_operations()) operations.push_back(std::move(operation));
#endif
  return operations;
}

namespace {

constexpr std::int64_t fit_rows = 4096;
constexpr double host_share = 0.25, device_share = 0.8;

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string gibibytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GiB", bytes / (1 << 30));
  return text;
}

bool contains(const std::vector<std::string>& list, const std::string& name) {
  return std::find(list.begin(), list.end(), name) != list.end();
}

std::vector<std::string> operation_names(const std::vector<Operation>& operations) {
  std::vector<std::string> names;
  for (const Operation& operation : operations) names.push_back(operation.name);
  return names;
}

std::string pair_name(const Kernel& kernel) {
  return kernel.scalar_in == kernel.scalar_out ? kernel.scalar_in
                                               : kernel.scalar_in + ":" + kernel.scalar_out;
}

std::vector<std::string> scalar_names(const std::vector<Operation>& operations) {
  std::vector<std::string> names;
  for (const Operation& operation : operations) {
    for (const Kernel& kernel : operation.kernels) {
      if (!contains(names, pair_name(kernel))) names.push_back(pair_name(kernel));
    }
  }
  return names;
}

// `chosen` with "all" replaced; each name must be one of `known`.
std::vector<std::string> resolve(const char* flag, const std::vector<std::string>& chosen,
                                 const std::vector<std::string>& known) {
  if (contains(chosen, "all")) return known;
  for (const std::string& name : chosen) {
    if (!contains(known, name)) {
      throw UsageError{std::string(flag) + ": '" + name + "' is not one of " + joined(known) + ", all"};
    }
  }
  return chosen;
}

std::vector<std::string> transform_names(const std::vector<Operation>& operations) {
  std::vector<std::string> names;
  for (const Operation& operation : operations) {
    for (const Kernel& kernel : operation.kernels) {
      if (!contains(names, kernel.transform)) names.push_back(kernel.transform);
    }
  }
  return names;
}

bool takes_transform(const Operation& operation, const std::string& transform) {
  return std::any_of(operation.kernels.begin(), operation.kernels.end(),
                     [&](const Kernel& kernel) { return kernel.transform == transform; });
}

std::vector<std::string> known_implementations(const std::vector<Operation>& operations,
                                               const std::vector<Backend>& backends) {
  std::vector<std::string> known;
  for (const Operation& operation : operations) {
    for (const Backend& backend : backends) {
      for (const std::string& name : operation.implementations(backend.name)) {
        if (!contains(known, name)) known.push_back(name);
      }
    }
  }
  return known;
}

void print_list(const std::vector<Operation>& operations, const std::vector<Backend>& backends) {
  std::cout << "operations\n";
  for (const Operation& operation : operations) {
    std::cout << "  " << operation.name << ": " << operation.description << "\n";
  }
  std::cout << "transforms\n  " << joined(transform_names(operations)) << "\n";
  std::cout << "scalars (input, or input:output)\n";
  for (const std::string& name : scalar_names(operations)) std::cout << "  " << name << "\n";
  std::cout << "backends\n";
  for (const Backend& backend : backends) std::cout << "  " << backend.name << ": " << backend.device << "\n";
  std::cout << "implementations, in the order in which the library tries them\n";
  for (const Operation& operation : operations) {
    for (const Backend& backend : backends) {
      std::cout << "  " << operation.name << "@" << backend.name << ": "
                << joined(operation.implementations(backend.name)) << "\n";
    }
  }
}

// The rows of a shape that leaves them open, for one backend and pair of scalars.
std::int64_t open_rows(const ShapeRequest& shape, const Kernel& kernel, const Backend& backend,
                       const Options& options, std::vector<std::string>& notes) {
  const double row_in = static_cast<double>(shape.columns) * static_cast<double>(kernel.size_in);
  double row = row_in + static_cast<double>(shape.columns) * static_cast<double>(kernel.size_out);
  const Transform transform(kernel.transform);
  if (!transform.steps.empty()) {
    if (!transform.one_row) {
      row +=
          static_cast<double>(shape.columns) * static_cast<double>(transform.operand_bytes(kernel.size_in));
    }
    row *= 2;  // its yardstick may have as much of its own
  }
  if (shape.kind == ShapeRequest::Rows::total) {
    double total = static_cast<double>(options.total_bytes);
    if (options.total_bytes == 0) total = backend.on_host ? 0x1p28 : 0x1p30;
    return std::max<std::int64_t>(1, static_cast<std::int64_t>(total / row_in));
  }
  const double available = static_cast<double>(backend.free_bytes());
  const double share = backend.on_host ? host_share : device_share;
  const auto rows = std::clamp<std::int64_t>(static_cast<std::int64_t>(available * share / row), 1, fit_rows);
  if (rows < fit_rows) {
    notes.push_back(std::to_string(fit_rows) + " x " + std::to_string(shape.columns) + " " +
                    kernel.scalar_in + " would take " + gibibytes(row * static_cast<double>(fit_rows)) +
                    "; " + backend.name + " runs " + std::to_string(rows) + " rows, which fit in " +
                    (backend.on_host ? "a quarter" : "0.8") + " of the " + gibibytes(available) +
                    " available");
  }
  return rows;
}

int compare_all(const Options& options) {
  const std::vector<Operation> operations = all_operations();
  std::vector<Backend> backends = all_backends();
  if (options.list) {
    print_list(operations, backends);
    return 0;
  }

  // Everything that can be wrong with the flags is found before anything runs.
  const std::vector<std::string> chosen_operations =
      resolve("--operation", options.operations, operation_names(operations));
  const std::vector<std::string> chosen_scalars =
      resolve("--scalar", options.scalars, scalar_names(operations));
  const std::vector<std::string> known_transforms = transform_names(operations);
  if (known_transforms.size() == 1 && options.transforms != known_transforms) {
    throw UsageError{
        "--transform: this program has none; kokkossoftmax_compare_transforms, a target of the build, has "
        "them"};
  }
  const std::vector<std::string> chosen_transforms =
      resolve("--transform", options.transforms, known_transforms);
  std::vector<std::string> backend_names;
  for (const Backend& backend : backends) backend_names.push_back(backend.name);
  const std::vector<std::string> chosen_backends =
      options.backends.empty() ? backend_names : resolve("--backend", options.backends, backend_names);
  std::erase_if(backends, [&](const Backend& backend) { return !contains(chosen_backends, backend.name); });
  const bool every_implementation = contains(options.implementations, "all");
  const std::vector<std::string> known = known_implementations(operations, backends);
  const bool library_chooses = options.implementations == std::vector<std::string>{""};
  const std::vector<std::string> chosen_implementations =
      library_chooses ? options.implementations : resolve("--implementation", options.implementations, known);
  const std::vector<ShapeRequest> shapes = options.shapes.empty() ? default_shapes() : options.shapes;
  // Of all operations, those run that take the shape; one that was named has to.
  const auto fits = [](const ShapeRequest& shape, const Operation& operation) {
    return (shape.inner > 0) == (operation.extents == 3);
  };
  for (const ShapeRequest& shape : shapes) {
    for (const Operation& operation : operations) {
      if (!contains(chosen_operations, operation.name)) continue;
      if (!fits(shape, operation) && !contains(options.operations, "all")) {
        throw UsageError{"--shape: " + operation.name + " takes " + std::to_string(operation.extents) +
                         " extents"};
      }
    }
  }

  const auto has_layout = [](const std::string& layout, const Operation& operation) {
    return operation.extents == 3 || layout == "right" || layout == "left";
  };
  for (const std::string& layout : options.layouts) {
    for (const Operation& operation : operations) {
      if (contains(options.operations, operation.name) && !has_layout(layout, operation)) {
        throw UsageError{"--layout: " + operation.name + " takes right and left"};
      }
    }
  }

  // Of all transforms, those run that the operation takes along the axis.
  const auto has_queries = [&](const std::string& transform) {
    return options.axis == 1 || !Transform(transform).has("causal");
  };
  for (const std::string& transform : chosen_transforms) {
    if (contains(options.transforms, "all")) break;
    if (!has_queries(transform)) {
      throw UsageError{"--transform: " + transform + " takes the rows of the view for queries: --axis 1"};
    }
    for (const Operation& operation : operations) {
      if (contains(options.operations, operation.name) && !takes_transform(operation, transform)) {
        throw UsageError{"--transform: " + operation.name + " does not take " + transform};
      }
    }
  }

  struct Variant {
    std::string layout, scalars, transform;
  };
  std::vector<Variant> variants;
  for (const std::string& layout : options.layouts) {
    for (const std::string& scalars : chosen_scalars) {
      for (const std::string& transform : chosen_transforms) {
        if (has_queries(transform)) variants.push_back({layout, scalars, transform});
      }
    }
  }

  RunInfo info;
  info.library = std::to_string(KOKKOSSOFTMAX_VERSION_MAJOR) + "." +
                 std::to_string(KOKKOSSOFTMAX_VERSION_MINOR) + "." +
                 std::to_string(KOKKOSSOFTMAX_VERSION_PATCH);
  info.kokkos = std::to_string(KOKKOS_VERSION / 10000) + "." + std::to_string(KOKKOS_VERSION / 100 % 100) +
                "." + std::to_string(KOKKOS_VERSION % 100);
  info.processor = host_processor();
  info.backends = backends;
  const std::time_t now = std::time(nullptr);
  char date[32];
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M UTC", std::gmtime(&now));
  info.date = date;

  std::vector<Result> results;
  bool failed = false;
  int group = 0;
  for (const ShapeRequest& shape : shapes) {
    for (const Operation& operation : operations) {
      if (!contains(chosen_operations, operation.name) || !fits(shape, operation)) continue;
      for (const Variant& variant : variants) {
        if (!has_layout(variant.layout, operation) || !takes_transform(operation, variant.transform))
          continue;
        ++group;
        for (const Backend& backend : backends) {
          const auto kernel =
              std::find_if(operation.kernels.begin(), operation.kernels.end(), [&](const Kernel& k) {
                return k.backend == backend.name && pair_name(k) == variant.scalars &&
                       k.transform == variant.transform;
              });
          if (kernel == operation.kernels.end()) continue;
          const std::vector<std::string> of_backend = operation.implementations(backend.name);
          for (const std::string& implementation :
               every_implementation ? of_backend : chosen_implementations) {
            if (!implementation.empty() && !contains(of_backend, implementation)) continue;
            Case what;
            what.operation = operation.name;
            what.transform = variant.transform;
            what.backend = backend.name;
            what.scalar_in = kernel->scalar_in;
            what.scalar_out = kernel->scalar_out;
            what.rows = shape.kind == ShapeRequest::Rows::given
                            ? shape.rows
                            : open_rows(shape, *kernel, backend, options, info.notes);
            what.inner = shape.inner;
            what.columns = shape.columns;
            if (options.axis == 0 && shape.kind != ShapeRequest::Rows::given)
              std::swap(what.rows, what.columns);
            what.axis = options.axis;
            what.layout = variant.layout;
            what.implementation = implementation;
            what.group = group;
            const std::string label = what.call() + " " + std::to_string(what.rows) + " x " +
                                      std::to_string(what.columns) + " " + variant.scalars +
                                      (what.layout == "right" ? "" : " " + what.layout) + " on " +
                                      what.backend + (implementation.empty() ? "" : " by " + implementation);
            if (!options.quiet) std::cerr << label << " ..." << std::flush;
            Result result = kernel->run(what, options);
            if (!options.quiet) {
              if (result.ran()) {
                std::fprintf(stderr, " %s, %.1f GB/s, %.2f of copy (%s)\n",
                             duration(result.time.median).c_str(), result.bandwidth() * 1e-9,
                             result.fraction(), result.implementation.c_str());
              } else {
                std::cerr << (result.refused ? " refused\n" : " failed\n");
              }
            }
            if (result.refused) {
              info.notes.push_back(label + ": refused");
            } else if (!result.ran()) {
              failed = true;
              std::cerr << "kokkossoftmax_compare: " << label << " failed: " << result.failure << "\n";
            } else if (!result.correct()) {
              failed = true;
              std::cerr << "kokkossoftmax_compare: " << label << " is out of tolerance: error "
                        << result.accuracy.error << ", " << result.accuracy.allowed << " of what is allowed, "
                        << result.accuracy.unwritten << " elements left unwritten or NaN\n";
            }
            results.push_back(std::move(result));
          }
        }
      }
    }
  }
  if (results.empty()) throw UsageError{"nothing to run: no backend has this operation for these scalars"};

  // The same remark for several operations is said once.
  std::vector<std::string> notes;
  for (const std::string& note : info.notes) {
    if (!contains(notes, note)) notes.push_back(note);
  }
  info.notes = notes;
  set_speedups(results);

  const auto write = [&](const std::string& file, const auto& print) {
    std::ofstream out(file);
    print(out);
    out.flush();
    if (out) return;
    failed = true;
    std::cerr << "kokkossoftmax_compare: could not write " << file << ": " << std::strerror(errno) << "\n";
  };
  const auto json = [&](std::ostream& out) { print_json(out, info, options, results); };
  const auto markdown = [&](std::ostream& out) { print_markdown(out, info, results); };
  if (options.json_file == "-") {
    json(std::cout);
  } else if (options.markdown && options.markdown_file.empty()) {
    markdown(std::cout);
  } else {
    print_table(std::cout, info, results);
  }
  if (!options.json_file.empty() && options.json_file != "-") write(options.json_file, json);
  if (!options.markdown_file.empty()) write(options.markdown_file, markdown);
  return failed ? 1 : 0;
}

}  // namespace
}  // namespace compare

int main(int argc, char** argv) {
  // Kokkos answers --help with its own text and takes flags that are misspelt, so it sees only what is meant
  // for it.
  std::vector<char*> ours, theirs{argv[0]};
  for (int i = 0; i < argc; ++i) {
    (i > 0 && std::strncmp(argv[i], "--kokkos-", 9) == 0 ? theirs : ours).push_back(argv[i]);
  }
  int our_count = static_cast<int>(ours.size()), their_count = static_cast<int>(theirs.size());
  ours.push_back(nullptr);
  theirs.push_back(nullptr);
  try {
    compare::Options options;
    if (!compare::parse_options(our_count, ours.data(), options)) return 0;
    const Kokkos::ScopeGuard kokkos(their_count, theirs.data());
    if (their_count > 1) throw compare::UsageError{std::string("Kokkos does not know ") + theirs[1]};
    return compare::compare_all(options);
  } catch (const compare::UsageError& error) {
    std::cerr << "kokkossoftmax_compare: " << error.what << "\n" << compare::usage_line;
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "kokkossoftmax_compare: " << error.what() << "\n";
    return 1;
  }
}
