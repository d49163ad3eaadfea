# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# Runs the comparison with the threads bound to cores, as Kokkos advises, unless the user said otherwise; the OpenMP
# runtime reads this before the program starts.
if(NOT DEFINED ENV{OMP_PROC_BIND})
  set(ENV{OMP_PROC_BIND} spread)
  if(NOT DEFINED ENV{OMP_PLACES})
    set(ENV{OMP_PLACES} threads)
  endif()
endif()
execute_process(COMMAND "${PROGRAM}" RESULT_VARIABLE result)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "The comparison failed (${result})")
endif()
