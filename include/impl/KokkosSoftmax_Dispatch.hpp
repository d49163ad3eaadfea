// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// Walks an ordered list of implementations: the first one that supports the types and gives no reason to
/// refuse the call runs. Knows no backend and no operation.

#ifndef KOKKOSSOFTMAX_DISPATCH_HPP
#define KOKKOSSOFTMAX_DISPATCH_HPP

#include <cstdlib>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace KokkosSoftmax {
namespace impl {

/// One rule that forces an implementation; empty operation or backend: any.
struct ForceRule {
  std::string operation;
  std::string backend;
  std::string implementation;
};

/// Reads `[operation][@Backend]=implementation,...`; a word without `=` is an implementation.
inline std::vector<ForceRule> parse_force_rules(std::string_view text) {
  std::vector<ForceRule> rules;
  while (!text.empty()) {
    const auto comma = text.find(',');
    const std::string_view word = text.substr(0, comma);
    text = comma == std::string_view::npos ? std::string_view{} : text.substr(comma + 1);
    if (word.empty()) continue;
    const auto equals = word.find('=');
    ForceRule rule;
    if (equals == std::string_view::npos) {
      rule.implementation = word;
    } else {
      const std::string_view scope = word.substr(0, equals);
      rule.implementation = word.substr(equals + 1);
      const auto at = scope.find('@');
      rule.operation = scope.substr(0, at);
      if (at != std::string_view::npos) rule.backend = scope.substr(at + 1);
    }
    rules.push_back(std::move(rule));
  }
  return rules;
}

inline std::vector<std::vector<ForceRule>>& scoped_force_rules() {
  thread_local std::vector<std::vector<ForceRule>> rules;
  return rules;
}

inline const std::vector<ForceRule>& environment_force_rules() {
  static const std::vector<ForceRule> rules = [] {
    const char* text = std::getenv("KOKKOSSOFTMAX_FORCE_IMPL");
    return parse_force_rules(text ? text : "");
  }();
  return rules;
}

/// The implementation that is forced for an operation on a backend: the innermost scope counts, then the
/// environment, and within each the last rule that fits. A step of an operation ("linear_softmax/softmax")
/// has candidates of its own, so only a rule that names the step forces one.
inline const std::string* forced_implementation(std::string_view operation, std::string_view backend) {
  const auto find = [&](const std::vector<ForceRule>& rules) -> const std::string* {
    const bool is_step = operation.find('/') != std::string_view::npos;
    for (auto rule = rules.rbegin(); rule != rules.rend(); ++rule) {
      if ((rule->operation == operation || (rule->operation.empty() && !is_step)) &&
          (rule->backend.empty() || rule->backend == backend)) {
        return &rule->implementation;
      }
    }
    return nullptr;
  };
  const auto& scopes = scoped_force_rules();
  for (auto scope = scopes.rbegin(); scope != scopes.rend(); ++scope) {
    if (const std::string* found = find(*scope)) return found;
  }
  return find(environment_force_rules());
}

inline const char*& last_implementation_slot() {
  thread_local const char* name = "";
  return name;
}

/// What a call that none takes says of each.
struct Candidate {
  const char* name;
  std::string_view reason;  ///< why not; empty: it can
};

/// Apart from the lists, so that it is compiled once and not for each transform.
[[noreturn]] inline void throw_no_candidate(std::string_view operation, const char* backend,
                                            const std::string* forced,
                                            std::initializer_list<Candidate> candidates) {
  std::string text = "KokkosSoftmax::" + std::string(operation) + " on " + backend + ": ";
  if (forced) {
    bool known = false;
    for (const Candidate& candidate : candidates) known = known || *forced == candidate.name;
    text += "the forced implementation '" + *forced + "' " + (known ? "refuses" : "does not exist");
  } else {
    text += "no implementation can run";
  }
  text += "; candidates:";
  for (const Candidate& candidate : candidates) {
    text += std::string("\n  ") + candidate.name + ": " +
            std::string(candidate.reason.empty() ? "can run" : candidate.reason);
  }
  throw std::invalid_argument(text);
}

/// An ordered list of implementations. Each has
///   static constexpr const char* name;
///   template <class Exec, class Problem> static constexpr bool supports;     what the types decide
///   template <class Exec, class Problem>
///   static std::string_view refuse(const Exec&, const Problem&);             why not this call; empty: it
///   can
/// and what the visitors call. It may have
///   static std::string_view advise_against(const Exec&, const Problem&);     why it can but, unless forced,
///   leaves the call to a later one;
///   static constexpr Operation only_for;                                     its operation, if it has but
///   one.
template <class... Implementations>
struct CandidateList {
  /// Those that a backend has, for any of some problems without particularities. `is_meant(implementation)`
  /// may leave some out.
  template <class Exec, class... Problems, class IsMeant>
  static std::vector<std::string> names(const IsMeant& is_meant) {
    std::vector<std::string> all;
    ((supports_any<Implementations, Exec, Problems...> && is_meant(Implementations{})
          ? all.push_back(Implementations::name)
          : void()),
     ...);
    return all;
  }
  template <class Exec, class... Problems>
  static std::vector<std::string> names() {
    return names<Exec, Problems...>([](const auto&) { return true; });
  }

  /// Those that support the types.
  template <class Exec, class Problem, class Visitor>
  static void for_each(Visitor&& visit) {
    (visit_supported<Implementations, Exec, Problem>(visit), ...);
  }

  /// Whether one of them takes the call where none is forced.
  template <class Exec, class Problem>
  static bool take(const Exec& exec, const Problem& problem) {
    return (takes<Implementations>(false, exec, problem) || ...);
  }

  /// Calls `visit(Implementation{})` on the implementation that is to do the work.
  template <class Exec, class Problem, class Visitor>
  static void choose(std::string_view operation, const Exec& exec, const Problem& problem, Visitor&& visit) {
    const std::string* forced = forced_implementation(operation, Exec::name());
    bool done = false;
    (try_one<Implementations>(forced, exec, problem, visit, done), ...);
    if (!done) explain<Exec, Problem>(operation, forced, exec, problem);
  }

 private:
  template <class Implementation, class Exec, class... Problems>
  static constexpr bool supports_any = (Implementation::template supports<Exec, Problems> || ...);

  template <class Implementation, class Exec, class Problem, class Visitor>
  static void visit_supported(Visitor& visit) {
    if constexpr (Implementation::template supports<Exec, Problem>) visit(Implementation{});
  }

  static constexpr std::string_view unsupported_types = "does not support these types on this backend";

  template <class Implementation, class Exec, class Problem>
  static bool takes(bool is_forced, const Exec& exec, const Problem& problem) {
    if constexpr (Implementation::template supports<Exec, Problem>) {
      return Implementation::refuse(exec, problem).empty() &&
             (is_forced || advice<Implementation>(exec, problem).empty());
    } else {
      return false;
    }
  }

  template <class Implementation, class Exec, class Problem, class Visitor>
  static void try_one(const std::string* forced, const Exec& exec, const Problem& problem, Visitor& visit,
                      bool& done) {
    if constexpr (Implementation::template supports<Exec, Problem>) {
      if (done || (forced && *forced != Implementation::name)) return;
      if (!takes<Implementation>(forced != nullptr, exec, problem)) return;
      done = true;
      last_implementation_slot() = Implementation::name;
      visit(Implementation{});
    }
  }

  template <class Implementation, class Exec, class Problem>
  static std::string_view advice(const Exec& exec, const Problem& problem) {
    if constexpr (requires { Implementation::advise_against(exec, problem); }) {
      return Implementation::advise_against(exec, problem);
    } else {
      return {};
    }
  }

  /// Empty: it can run.
  template <class Implementation, class Exec, class Problem>
  static std::string_view reason(const Exec& exec, const Problem& problem) {
    if constexpr (Implementation::template supports<Exec, Problem>) {
      const std::string_view why = Implementation::refuse(exec, problem);
      return why.empty() ? advice<Implementation>(exec, problem) : why;
    } else {
      return unsupported_types;
    }
  }

  template <class Exec, class Problem>
  [[noreturn]] static void explain(std::string_view operation, const std::string* forced, const Exec& exec,
                                   const Problem& problem) {
    throw_no_candidate(operation, Exec::name(), forced,
                       {Candidate{Implementations::name, reason<Implementations>(exec, problem)}...});
  }
};

}  // namespace impl

/// The name of the implementation that last ran on the calling host thread; empty before the first.
inline const char* last_implementation() {
  return impl::last_implementation_slot();
}

/// Forces implementations on the calling host thread while it lives, as KOKKOSSOFTMAX_FORCE_IMPL does for the
/// process: a comma-separated list of `[operation][@Backend]=implementation`, or of `implementation` alone,
/// for instance "softmax@OpenMP=team_rows". Scopes nest; the innermost that fits counts. A call for which the
/// name is unknown or the implementation refuses throws std::invalid_argument with every candidate and its
/// reason.
class ScopedImplementation {
 public:
  [[nodiscard]] explicit ScopedImplementation(std::string_view rules) {
    impl::scoped_force_rules().push_back(impl::parse_force_rules(rules));
  }
  ~ScopedImplementation() { impl::scoped_force_rules().pop_back(); }
  ScopedImplementation(const ScopedImplementation&) = delete;
  ScopedImplementation& operator=(const ScopedImplementation&) = delete;
};

}  // namespace KokkosSoftmax

#endif
