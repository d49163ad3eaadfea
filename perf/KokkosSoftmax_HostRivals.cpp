// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The library beside what else computes a softmax on a host: oneDNN when this was built with it, PyTorch
/// when a Python with it is given, and a parallel copy of the same bytes. They take turns on each shape, so
/// that all meet the same machine; of several turns the best counts.
///
///   kokkossoftmax_host_rivals [--python PYTHON] [--alone] [--seconds S] [--turns T] [--bytes B] [CASE]...
///
/// CASE is SCALAR:EXTENTS[:AXIS[:OPERATION]] with EXTENTS AxB or AxBxC, or N alone for as many rows of N as
/// --bytes of input hold; without cases: those of the goals. PYTHONPATH is passed on. Every fraction is of
/// times of the same run: "/ copy" of a parallel copy with streaming stores, "/ roof" of the smaller of that
/// and of the speed in cache (the best of 4096 columns in 128 KB a thread), "/ rival" of the better rival.

#include <KokkosSoftmax.hpp>

#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#if defined(KOKKOSSOFTMAX_HAVE_ONEDNN)
#include <oneapi/dnnl/dnnl.hpp>
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

namespace ks = KokkosSoftmax;
using Exec = Kokkos::DefaultHostExecutionSpace;

struct Case {
  std::string scalar = "float", operation = "softmax";
  std::vector<std::int64_t> extents;
  int axis = -1;
  std::size_t scalar_bytes() const { return scalar == "double" ? 8 : scalar == "float" ? 4 : 2; }
  std::int64_t elements() const {
    std::int64_t product = 1;
    for (const std::int64_t extent : extents) product *= extent;
    return product;
  }
  std::string shape() const {
    std::string text;
    for (const std::int64_t extent : extents) text += (text.empty() ? "" : "x") + std::to_string(extent);
    return text;
  }
  bool along_last() const { return axis + 1 == static_cast<int>(extents.size()); }
};

struct Options {
  std::string python;
  double seconds = 0.15;
  int turns = 3;
  bool rivals = true;
  double bytes = 268435456;
  std::vector<Case> cases;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double best_time(double seconds, const std::function<void()>& call) {
  double best = std::numeric_limits<double>::infinity();
  const double end = now() + seconds;
  for (int calls = 0; calls < 3 || now() < end; ++calls) {
    const double begin = now();
    call();
    best = std::min(best, now() - begin);
  }
  return best;
}

/// PyTorch in a process of its own.
class PyTorch {
 public:
  explicit PyTorch(const std::string& python, int threads) {
    if (python.empty()) return;
    int to[2], from[2];
    if (pipe(to) != 0 || pipe(from) != 0) return;
    child_ = fork();
    if (child_ == 0) {
      dup2(to[0], 0);
      dup2(from[1], 1);
      close(to[1]);
      close(from[0]);
      execlp(python.c_str(), python.c_str(), KOKKOSSOFTMAX_HOST_RIVALS_SCRIPT,
             std::to_string(threads).c_str(), static_cast<char*>(nullptr));
      std::_Exit(1);
    }
    close(to[0]);
    close(from[1]);
    requests_ = fdopen(to[1], "w");
    answers_ = fdopen(from[0], "r");
    version_ = answer();
    if (version_.empty() || version_.rfind("none", 0) == 0) {
      std::fprintf(stderr, "no PyTorch: %s\n", version_.c_str());
      version_.clear();
    }
  }
  ~PyTorch() {
    if (requests_) std::fclose(requests_);
    if (answers_) std::fclose(answers_);
    if (child_ > 0) waitpid(child_, nullptr, 0);
  }
  PyTorch(const PyTorch&) = delete;
  PyTorch& operator=(const PyTorch&) = delete;

  const std::string& version() const { return version_; }
  double time(const Case& c, double seconds) { return ask(c, c.operation, seconds); }
  void forget(const Case& c) { ask(c, "forget", 0); }

 private:
  double ask(const Case& c, const std::string& operation, double seconds) {
    if (version_.empty()) return std::numeric_limits<double>::infinity();
    std::fprintf(requests_, "%s %s %s %d %g\n", operation.c_str(), c.scalar.c_str(), c.shape().c_str(),
                 c.axis, seconds);
    std::fflush(requests_);
    return std::atof(answer().c_str());
  }
  std::string answer() {
    char line[256] = "";
    if (!std::fgets(line, sizeof line, answers_)) return {};
    std::string text = line;
    while (!text.empty() && text.back() == '\n') text.pop_back();
    return text;
  }

  pid_t child_ = -1;
  FILE *requests_ = nullptr, *answers_ = nullptr;
  std::string version_;
};

/// A copy with streaming stores where the processor has them.
template <class T>
struct Copy {
  const T* x;
  T* y;
  std::int64_t count;
  int parts;
  void operator()(int part) const {
    std::int64_t i = count / parts * part;
    const std::int64_t end = part + 1 == parts ? count : count / parts * (part + 1);
#if defined(__AVX2__)
    constexpr std::int64_t n = 32 / sizeof(T);
    while (i < end && reinterpret_cast<std::uintptr_t>(y + i) % 32 != 0) y[i] = x[i], ++i;
    for (; i + 2 * n <= end; i += 2 * n) {
      const auto a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i));
      const auto b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i + n));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(y + i), a);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(y + i + n), b);
    }
    _mm_sfence();
#endif
    for (; i < end; ++i) y[i] = x[i];
  }
};

template <class T>
struct Fill {
  T* x;
  void operator()(std::int64_t i) const {
    x[i] =
        T(static_cast<float>((static_cast<std::uint64_t>(i) * 0x9E3779B97F4A7C15u) >> 40) * 0x6p-24f - 3.0f);
  }
};

struct Times {
  double copy, ours, onednn, pytorch;
};

#if defined(KOKKOSSOFTMAX_HAVE_ONEDNN)
template <class T>
std::function<void()> onednn_call(const Case& c, const T* x, T* y) {
  using namespace dnnl;
  if (std::is_same_v<T, double>) return {};
  const auto type = std::is_same_v<T, float>        ? memory::data_type::f32
                    : std::is_same_v<T, ks::half_t> ? memory::data_type::f16
                                                    : memory::data_type::bf16;
  try {
    const engine cpu(engine::kind::cpu, 0);
    stream queue(cpu);
    const memory::desc layout(memory::dims(c.extents.begin(), c.extents.end()), type,
                              c.extents.size() == 2 ? memory::format_tag::ab : memory::format_tag::abc);
    const auto algorithm = c.operation == "softmax" ? algorithm::softmax_accurate : algorithm::softmax_log;
    const softmax_forward softmax(softmax_forward::primitive_desc(cpu, prop_kind::forward_inference,
                                                                  algorithm, layout, layout, c.axis));
    memory from(layout, cpu, const_cast<T*>(x)), to(layout, cpu, y);
    return [=]() mutable {
      softmax.execute(queue, {{DNNL_ARG_SRC, from}, {DNNL_ARG_DST, to}});
      queue.wait();
    };
  } catch (const dnnl::error&) {
    return {};
  }
}
#endif

template <class T>
Times measure(const Case& c, const Options& options, PyTorch& pytorch) {
  const Exec exec{};
  const std::int64_t count = c.elements();
  using Flat = Kokkos::View<T*, Exec::memory_space>;
  const Flat x(Kokkos::view_alloc("x", Kokkos::WithoutInitializing), count);
  const Flat y(Kokkos::view_alloc("y", Kokkos::WithoutInitializing), count);
  using Matrix =
      Kokkos::View<T**, Kokkos::LayoutRight, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  using Tensor =
      Kokkos::View<T***, Kokkos::LayoutRight, Exec::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  using Range = Kokkos::RangePolicy<Exec, Kokkos::IndexType<std::int64_t>>;
  Kokkos::parallel_for("fill", Range(exec, 0, count), Fill<T>{x.data()});
  Kokkos::parallel_for("fill", Range(exec, 0, count), Fill<T>{y.data()});
  exec.fence();
  const int threads = exec.concurrency();
  const auto copy = [&] {
    Kokkos::parallel_for("copy", Kokkos::RangePolicy<Exec>(exec, 0, threads),
                         Copy<T>{x.data(), y.data(), count, threads});
  };
  const auto call = [&](const auto& from, const auto& to) {
    if (c.operation == "softmax") {
      ks::softmax(exec, from, to, ks::axis(c.axis));
    } else {
      ks::log_softmax(exec, from, to, ks::axis(c.axis));
    }
  };
  const auto ours = [&] {
    const auto& e = c.extents;
    if (e.size() == 2) {
      call(Matrix(x.data(), e[0], e[1]), Matrix(y.data(), e[0], e[1]));
    } else {
      call(Tensor(x.data(), e[0], e[1], e[2]), Tensor(y.data(), e[0], e[1], e[2]));
    }
  };
  std::function<void()> onednn;
#if defined(KOKKOSSOFTMAX_HAVE_ONEDNN)
  if (options.rivals) onednn = onednn_call(c, x.data(), y.data());
#endif
  constexpr double none = std::numeric_limits<double>::infinity();
  Times best{none, none, none, none};
  for (int turn = 0; turn < options.turns; ++turn) {
    best.copy = std::min(best.copy, best_time(options.seconds / 2, copy));
    best.ours = std::min(best.ours, best_time(options.seconds / 2, ours));
    if (onednn) best.onednn = std::min(best.onednn, best_time(options.seconds, onednn));
    best.pytorch = std::min(best.pytorch, pytorch.time(c, options.seconds));
    best.ours = std::min(best.ours, best_time(options.seconds / 2, ours));
  }
  pytorch.forget(c);
  return best;
}

Times measure_scalar(const Case& c, const Options& options, PyTorch& pytorch) {
  return c.scalar == "float"    ? measure<float>(c, options, pytorch)
         : c.scalar == "double" ? measure<double>(c, options, pytorch)
         : c.scalar == "half"   ? measure<ks::half_t>(c, options, pytorch)
                                : measure<ks::bhalf_t>(c, options, pytorch);
}

std::string onednn_version() {
#if defined(KOKKOSSOFTMAX_HAVE_ONEDNN)
  const dnnl_version_t* v = dnnl_version();
  return std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
#else
  return "not there";
#endif
}

bool parse_case(const std::string& text, Case& c, double bytes) {
  char scalar[16] = "", shape[64] = "", operation[16] = "softmax";
  if (std::sscanf(text.c_str(), "%15[a-z0-9]:%63[0-9x]:%d:%15[a-z_]", scalar, shape, &c.axis, operation) < 2)
    return false;
  c.scalar = scalar;
  c.operation = operation;
  for (const char* at = shape; *at;) {
    char* end;
    c.extents.push_back(std::strtoll(at, &end, 10));
    if (end == at || c.extents.back() < 1) return false;
    at = *end == 'x' ? end + 1 : end;
  }
  if (c.extents.size() == 1) {
    const double rows = bytes / static_cast<double>(c.scalar_bytes()) / static_cast<double>(c.extents[0]);
    c.extents.insert(c.extents.begin(), std::max<std::int64_t>(1, static_cast<std::int64_t>(rows)));
  }
  const int rank = static_cast<int>(c.extents.size());
  if (c.axis < 0) c.axis += rank;
  return (rank == 2 || rank == 3) && c.axis >= 0 && c.axis < rank &&
         (c.operation == "softmax" || c.operation == "log_softmax") &&
         (c.scalar == "float" || c.scalar == "double" || c.scalar == "half" || c.scalar == "bfloat16");
}

bool parse(int argc, char** argv, Options& options) {
  std::vector<std::string> cases;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool has_value = i + 1 < argc;
    if (word == "--python" && has_value) {
      options.python = argv[++i];
    } else if (word == "--seconds" && has_value) {
      options.seconds = std::atof(argv[++i]);
    } else if (word == "--turns" && has_value) {
      options.turns = std::atoi(argv[++i]);
    } else if (word == "--bytes" && has_value) {
      options.bytes = std::atof(argv[++i]);
    } else if (word == "--alone") {
      options.rivals = false;
    } else if (word.rfind("--", 0) == 0) {
      return false;
    } else {
      cases.push_back(word);
    }
  }
  if (cases.empty()) {
    for (const std::string scalar : {"float", "half", "bfloat16", "double"}) {
      for (const char* shape : {"64x1024", "32x4096", "8x32768", "1x128256", "1024x1024", "1024x1024:0", "64",
                                "128", "256", "1024", "4096", "16384", "65536", "393216", "1048576",
                                "4194304", "65536x1024:0", "64x1024x1024:1"}) {
        cases.push_back(scalar + ":" + shape);
      }
      for (const char* shape : {"64x1024", "8x32768"})
        cases.push_back(scalar + ":" + shape + ":1:log_softmax");
      for (const char* columns : {"64", "1024", "4096", "65536", "1048576"})
        cases.push_back(scalar + ":" + columns + ":-1:log_softmax");
    }
  }
  for (const auto& text : cases) {
    Case c;
    if (!parse_case(text, c, options.bytes)) {
      std::fprintf(stderr, "not a case: %s\n", text.c_str());
      return false;
    }
    options.cases.push_back(c);
  }
  return options.turns > 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr, "usage: see the head of perf/KokkosSoftmax_HostRivals.cpp\n");
    return 2;
  }
  // Before Kokkos has threads: a process is started.
  const char* threads = std::getenv("OMP_NUM_THREADS");
  PyTorch pytorch(options.python,
                  threads ? std::atoi(threads) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)));
  const Kokkos::ScopeGuard kokkos(argc, argv);
  std::printf("%s, %d threads; oneDNN %s; PyTorch %s; GB/s of input and output (microseconds)\n",
              Exec::name(), Exec().concurrency(), onednn_version().c_str(),
              pytorch.version().empty() ? "not there" : pytorch.version().c_str());
  const char* line = "| %-34s | %-6s | %-16s | %-16s | %-16s | %-6s | %-6s | %-7s |\n";
  std::printf(line, "case", "copy", "KokkosSoftmax", "oneDNN", "PyTorch", "/ copy", "/ roof", "/ rival");
  std::printf("|---|---|---|---|---|---|---|---|\n");
  std::map<std::string, double> speed_in_cache;
  for (const Case& c : options.cases) {
    // The speed in cache that a roof is made of, once for each scalar and operation.
    double& in_cache = speed_in_cache[c.scalar + c.operation];
    if (in_cache == 0) {
      Case small = c;
      small.extents = {static_cast<std::int64_t>(8 * static_cast<std::size_t>(Exec().concurrency())), 4096};
      small.axis = 1;
      Options alone = options;
      alone.rivals = false;
      PyTorch nobody("", 1);
      in_cache = 2 * static_cast<double>(small.elements()) * static_cast<double>(c.scalar_bytes()) /
                 measure_scalar(small, alone, nobody).ours;
    }
    const Times t = measure_scalar(c, options, pytorch);
    const double bytes = 2 * static_cast<double>(c.elements()) * static_cast<double>(c.scalar_bytes());
    const auto entry = [&](double seconds) {
      char text[32] = "-";
      if (seconds < 1e9)
        std::snprintf(text, sizeof text, "%.1f (%.1f)", bytes / seconds * 1e-9, seconds * 1e6);
      return std::string(text);
    };
    const auto ratio = [](double value) {
      char text[32] = "-";
      if (value < 1e9) std::snprintf(text, sizeof text, "%.2f", value);
      return std::string(text);
    };
    char copy[16];
    std::snprintf(copy, sizeof copy, "%.1f", bytes / t.copy * 1e-9);
    const std::string name = c.scalar + " " + c.shape() +
                             (c.along_last() ? "" : " axis " + std::to_string(c.axis)) +
                             (c.operation == "softmax" ? "" : " log");
    std::printf(line, name.c_str(), copy, entry(t.ours).c_str(), entry(t.onednn).c_str(),
                entry(t.pytorch).c_str(), ratio(t.copy / t.ours).c_str(),
                ratio(bytes / t.ours / std::min(in_cache, bytes / t.copy)).c_str(),
                ratio(std::min(t.onednn, t.pytorch) / t.ours).c_str());
    std::fflush(stdout);
  }
  return 0;
}
