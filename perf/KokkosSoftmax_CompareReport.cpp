// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <map>
#include <ostream>
#include <sstream>
#include <tuple>

#include "KokkosSoftmax_Compare.hpp"

namespace compare {

const Yardstick* Result::yardstick() const {
  const Yardstick* best = nullptr;
  for (const Yardstick& candidate : yardsticks) {
    if (candidate.time.median <= 0) continue;
    if (best == nullptr || candidate.bytes / candidate.time.median > best->bytes / best->time.median) {
      best = &candidate;
    }
  }
  return best;
}

double Result::fraction() const {
  const Yardstick* best = yardstick();
  return best == nullptr ? 0 : bandwidth() / (best->bytes / best->time.median);
}

void set_speedups(std::vector<Result>& results) {
  std::map<std::tuple<int, std::string, std::string, std::string, std::string>, double> slowest;
  const auto key = [](const Result& r) {
    return std::tuple(r.what.group, r.what.operation, r.what.scalar_in, r.what.scalar_out,
                      r.what.implementation);
  };
  for (const Result& result : results) {
    if (!result.ran()) continue;
    const auto [at, fresh] = slowest.emplace(key(result), result.bandwidth());
    if (!fresh) at->second = std::min(at->second, result.bandwidth());
  }
  for (Result& result : results) {
    if (result.ran()) result.speedup = result.bandwidth() / slowest[key(result)];
  }
}

namespace {

std::string format(const char* pattern, double value) {
  char text[64];
  std::snprintf(text, sizeof text, pattern, value);
  return text;
}

// Three significant digits, with as many decimals as that takes.
std::string digits(double value) {
  if (value <= 0 || !std::isfinite(value)) return format("%.3g", value);
  return format(value < 9.995 ? "%.2f" : value < 99.95 ? "%.1f" : "%.0f", value);
}

std::string rate(double bytes_per_second) {
  const double gb = bytes_per_second * 1e-9;
  return format(gb < 100 ? "%.1f" : "%.0f", gb);
}

std::string scalars(const Case& what) {
  return what.scalar_in == what.scalar_out ? what.scalar_in : what.scalar_in + " to " + what.scalar_out;
}

std::string shape(const Case& what) {
  std::string text = std::to_string(what.rows) + " x ";
  if (what.inner > 0) text += std::to_string(what.inner) + " x ";
  text += std::to_string(what.columns);
  if (what.axis == 0) text += " axis 0";
  if (what.layout != "right") text += " " + what.layout;
  return text;
}

const std::vector<std::string> headings{"operation", "shape",      "scalar",   "backend",   "implementation",
                                        "median",    "minimum",    "GB/s",     "copy GB/s", "of copy",
                                        "error",     "of allowed", "speed-up", "checked"};
constexpr std::size_t text_columns = 5;  // aligned left

std::vector<std::string> cells(const Result& r) {
  std::vector<std::string> row{r.what.call(), shape(r.what), scalars(r.what), r.what.backend,
                               r.ran() ? r.implementation : r.what.implementation};
  if (!r.ran()) {
    row.resize(headings.size(), "-");
    row.back() = r.refused ? "refused" : "FAILED";
    return row;
  }
  const Yardstick* best = r.yardstick();
  row.push_back(duration(r.time.median));
  row.push_back(duration(r.time.minimum));
  row.push_back(rate(r.bandwidth()));
  row.push_back(best != nullptr ? rate(best->bytes / best->time.median) : "-");
  row.push_back(best != nullptr ? format("%.3f", r.fraction()) : "-");
  row.push_back(format("%.1e", r.accuracy.error));
  row.push_back(format("%.2f", r.accuracy.allowed));
  row.push_back(digits(r.speedup));
  row.push_back(r.correct() ? "ok" : "WRONG");
  return row;
}

void print_heading(std::ostream& out, const RunInfo& info, const char* bullet) {
  out << bullet << "KokkosSoftmax " << info.library << ", Kokkos " << info.kokkos << ", " << info.date
      << "\n";
  for (const Backend& backend : info.backends) {
    out << bullet << backend.name << ": " << backend.device;
    if (backend.on_host)
      out << ", " << backend.concurrency << (backend.concurrency == 1 ? " thread" : " threads");
    out << "\n";
  }
  for (const std::string& note : info.notes) out << bullet << note << "\n";
}

// JSON knows no infinity and no NaN.
std::string number(double value) {
  return std::isfinite(value) ? format("%.9g", value) : "null";
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

void print_timing(std::ostream& out, const Timing& time) {
  out << "\"median_s\": " << number(time.median) << ", \"minimum_s\": " << number(time.minimum)
      << ", \"rounds\": " << time.rounds << ", \"calls_a_round\": " << time.calls;
}

}  // namespace

std::string duration(double seconds) {
  if (seconds < 1e-3) return digits(seconds * 1e6) + " us";
  if (seconds < 1) return digits(seconds * 1e3) + " ms";
  return digits(seconds) + " s";
}

void print_table(std::ostream& out, const RunInfo& info, const std::vector<Result>& results) {
  print_heading(out, info, "");
  std::vector<std::vector<std::string>> rows{headings};
  for (const Result& result : results) rows.push_back(cells(result));
  std::vector<std::size_t> widths(headings.size(), 0);
  for (const auto& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) widths[c] = std::max(widths[c], row[c].size());
  }
  out << "\n";
  for (std::size_t r = 0; r < rows.size(); ++r) {
    std::string line;
    for (std::size_t c = 0; c < headings.size(); ++c) {
      const std::string pad(widths[c] - rows[r][c].size(), ' ');
      if (c > 0) line += "  ";
      line += c < text_columns ? rows[r][c] + pad : pad + rows[r][c];
    }
    out << line << "\n";
    if (r == 0) {
      std::string rule;
      for (std::size_t c = 0; c < headings.size(); ++c) {
        rule += std::string(c > 0 ? 2 : 0, ' ') + std::string(widths[c], '-');
      }
      out << rule << "\n";
    }
  }
}

void print_markdown(std::ostream& out, const RunInfo& info, const std::vector<Result>& results) {
  print_heading(out, info, "- ");
  out << "\n|";
  for (const std::string& heading : headings) out << " " << heading << " |";
  out << "\n|";
  for (std::size_t c = 0; c < headings.size(); ++c) out << (c < text_columns ? "---|" : "---:|");
  out << "\n";
  for (const Result& result : results) {
    out << "|";
    for (const std::string& cell : cells(result)) out << " " << cell << " |";
    out << "\n";
  }
}

void print_json(std::ostream& out, const RunInfo& info, const Options& options,
                const std::vector<Result>& results) {
  out << "{\n  \"library\": " << quoted(info.library) << ",\n  \"kokkos\": " << quoted(info.kokkos)
      << ",\n  \"date\": " << quoted(info.date) << ",\n  \"processor\": " << quoted(info.processor)
      << ",\n  \"graph\": " << (options.graph ? "true" : "false")
      << ",\n  \"range\": " << number(options.range) << ",\n  \"backends\": [";
  for (std::size_t b = 0; b < info.backends.size(); ++b) {
    const Backend& backend = info.backends[b];
    out << (b > 0 ? "," : "") << "\n    {\"name\": " << quoted(backend.name)
        << ", \"device\": " << quoted(backend.device) << ", \"concurrency\": " << backend.concurrency << "}";
  }
  out << "\n  ],\n  \"notes\": [";
  for (std::size_t n = 0; n < info.notes.size(); ++n) out << (n > 0 ? ", " : "") << quoted(info.notes[n]);
  out << "],\n  \"results\": [";
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    out << (i > 0 ? "," : "") << "\n    {\"operation\": " << quoted(r.what.operation)
        << ", \"transform\": " << quoted(r.what.transform) << ", \"backend\": " << quoted(r.what.backend)
        << ", \"scalar_in\": " << quoted(r.what.scalar_in)
        << ", \"scalar_out\": " << quoted(r.what.scalar_out) << ",\n     \"rows\": " << r.what.rows
        << ", \"inner\": " << r.what.inner << ", \"columns\": " << r.what.columns
        << ", \"axis\": " << r.what.axis << ", \"layout\": " << quoted(r.what.layout)
        << ", \"forced\": " << quoted(r.what.implementation) << ", \"group\": " << r.what.group;
    if (!r.ran()) {
      out << ",\n     \"status\": " << quoted(r.refused ? "refused" : "failed")
          << ", \"reason\": " << quoted(r.failure) << "}";
      continue;
    }
    out << ",\n     \"status\": " << quoted(r.correct() ? "ok" : "out of tolerance")
        << ", \"implementation\": " << quoted(r.implementation) << ",\n     ";
    print_timing(out, r.time);
    out << ", \"bytes\": " << number(r.bytes) << ", \"gb_per_s\": " << number(r.bandwidth() * 1e-9)
        << ", \"fraction_of_copy\": " << number(r.fraction()) << ", \"speedup\": " << number(r.speedup)
        << ",\n     \"error\": " << number(r.accuracy.error)
        << ", \"error_of_allowed\": " << number(r.accuracy.allowed)
        << ", \"elements_checked\": " << r.accuracy.checked
        << ", \"elements_unwritten\": " << r.accuracy.unwritten << ",\n     \"yardsticks\": [";
    for (std::size_t y = 0; y < r.yardsticks.size(); ++y) {
      const Yardstick& yardstick = r.yardsticks[y];
      out << (y > 0 ? ", " : "") << "{\"name\": " << quoted(yardstick.name) << ", ";
      print_timing(out, yardstick.time);
      out << ", \"bytes\": " << number(yardstick.bytes)
          << ", \"gb_per_s\": " << number(yardstick.bytes / yardstick.time.median * 1e-9) << "}";
    }
    out << "]}";
  }
  out << "\n  ]\n}\n";
}

std::int64_t host_available_bytes() {
  std::int64_t available = 0;
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    std::istringstream words(line);
    std::string name;
    std::int64_t kib = 0;
    if (words >> name >> kib && name == "MemAvailable:") available = kib * 1024;
  }
#if defined(_SC_AVPHYS_PAGES)
  if (available == 0) {
    available = static_cast<std::int64_t>(sysconf(_SC_AVPHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  }
#endif
  if (available == 0) available = std::int64_t(4) << 30;
  // In a container the control group's limit counts, not the machine's memory.
  const auto read = [](const char* file) {
    std::int64_t value = -1;
    std::ifstream(file) >> value;  // "max" leaves it 0: no limit
    return value;
  };
  const std::int64_t limit = read("/sys/fs/cgroup/memory.max");
  const std::int64_t used = read("/sys/fs/cgroup/memory.current");
  if (limit > 0 && used >= 0) available = std::min(available, std::max<std::int64_t>(limit - used, 0));
  return available;
}

std::string host_processor() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const std::size_t colon = line.find(':');
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) {
      return line.substr(std::min(colon + 2, line.size()));
    }
  }
  return "host";
}

}  // namespace compare
