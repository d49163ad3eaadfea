# SPDX-FileCopyrightText: The KokkosSoftmax authors
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

# Passes when target RIGHT of BUILD_DIR builds and target WRONG does not, with output that matches MESSAGE.

execute_process(
  COMMAND "${CMAKE_COMMAND}" --build "${BUILD_DIR}" --target ${RIGHT}
  RESULT_VARIABLE result
  OUTPUT_VARIABLE output
  ERROR_VARIABLE output
)
if(NOT result EQUAL 0)
  message(FATAL_ERROR "The right code does not compile:\n${output}")
endif()

execute_process(
  COMMAND "${CMAKE_COMMAND}" --build "${BUILD_DIR}" --target ${WRONG}
  RESULT_VARIABLE result
  OUTPUT_VARIABLE output
  ERROR_VARIABLE output
)
if(result EQUAL 0)
  message(FATAL_ERROR "The wrong code compiles")
endif()
if(NOT output MATCHES "${MESSAGE}")
  message(FATAL_ERROR "The wrong code is refused, but not with '${MESSAGE}':\n${output}")
endif()
