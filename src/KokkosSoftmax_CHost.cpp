// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

// The C interface on the host.

#include "KokkosSoftmax_CBackend.hpp"

namespace KokkosSoftmax::c {
namespace {

/// The default instance of the host: what a call starts on it has ended when it returns, or is waited for.
class HostBackend : public Backend {
 public:
  void rows(const Place&, const RowsCall& call) override {
    rows_of_scalars(exec(), call);
    wait();
  }
  void head(const Place&, const HeadCall& call) override {
    head_of_scalars(exec(), call);
    wait();
  }
  std::shared_ptr<void> pack(const Place&, const Array& w) override { return pack_of_scalar(exec(), w); }
  void synchronize(const Place&) override { wait(); }

 private:
  using Exec = Kokkos::DefaultHostExecutionSpace;
  static Exec exec() { return Exec(); }
  static void wait() { exec().fence("KokkosSoftmax: calls from C on the host are synchronous"); }
};

}  // namespace

Backend& host_backend() {
  static auto* backend = new HostBackend;
  return *backend;
}

}  // namespace KokkosSoftmax::c
