# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# For our targets and, in the installed package, for those of its users.

# kokkossoftmax_compile_for_sm_90a(<target>...): where nvcc_wrapper compiles these targets, and Kokkos tells it sm_90, it
# does so for sm_90a. That has wgmma, which float heads want, and setmaxnreg, which the longest rows of floats want, each
# of whoever compiles their kernels. Elsewhere nothing changes: sources whose language is CUDA have it from
# KokkosSoftmax::KokkosSoftmax. Call it where the targets are made.
function(kokkossoftmax_compile_for_sm_90a)
  set(with_sm_90a "${CMAKE_CURRENT_FUNCTION_LIST_DIR}/nvcc_sm_90a.sh")
  get_property(of_all GLOBAL PROPERTY RULE_LAUNCH_COMPILE)
  foreach(target IN LISTS ARGN)
    # A launcher of Kokkos' makes nvcc_wrapper the compiler, of all or of some targets, else it is the C++ compiler itself.
    get_target_property(launcher ${target} RULE_LAUNCH_COMPILE)
    if(NOT launcher)
      set(launcher "${of_all}")
    endif()
    if("${launcher} ${CMAKE_CXX_COMPILER}" MATCHES "nvcc_wrapper")
      set_target_properties(${target} PROPERTIES RULE_LAUNCH_COMPILE "${with_sm_90a} ${launcher}")
    endif()
  endforeach()
endfunction()
