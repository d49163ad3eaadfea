! SPDX-FileCopyrightText: The KokkosSoftmax authors
! SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception

program main
  use kokkossoftmax
  implicit none
  real :: x(3, 2), y(3, 2)
  x = 1
  call softmax(x, y)
  if (any(abs(y - 1.0 / 3) > 1e-6)) error stop 'wrong values'
  call finalize()
end program main
