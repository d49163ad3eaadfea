// SPDX-FileCopyrightText: The KokkosSoftmax authors
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

/// \file
/// The whole library: `#include <KokkosSoftmax.hpp>`.

#ifndef KOKKOSSOFTMAX_HPP
#define KOKKOSSOFTMAX_HPP

#include <KokkosSoftmax_ColumnStatistics.hpp>
#include <KokkosSoftmax_Softmax.hpp>
#include <KokkosSoftmax_config.hpp>
#if defined(KOKKOSSOFTMAX_ENABLE_LINEAR)
#include <KokkosSoftmax_Linear.hpp>
#endif

#endif
