# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# cmake -P check_ptxas.cmake -- <command of the compiler>: runs it, and fails where ptxas says that registers are spilled
# or that tensor core products are serialised (C75xx). Neither is an error to ptxas; in a kernel that lives from its
# registers each is one.

set(command "")
set(found FALSE)
foreach(i RANGE ${CMAKE_ARGC})
  if(found AND NOT i EQUAL CMAKE_ARGC)
    list(APPEND command "${CMAKE_ARGV${i}}")
  elseif("${CMAKE_ARGV${i}}" STREQUAL "--")
    set(found TRUE)
  endif()
endforeach()

execute_process(
  COMMAND ${command}
  RESULT_VARIABLE result
  OUTPUT_VARIABLE output
  ERROR_VARIABLE errors
)
set(text "${output}${errors}")
string(STRIP "${text}" shown)
if(shown)
  message("${shown}")
endif()
if(NOT result EQUAL 0)
  message(FATAL_ERROR "the compiler failed: ${result}")
endif()
if(text MATCHES "\\(?C75[0-9][0-9]\\)?|[Rr]egisters are spilled")
  message(FATAL_ERROR "ptxas serialises tensor core products or spills registers, see above")
endif()
