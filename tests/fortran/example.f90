! SPDX-FileCopyrightText: The KokkosSoftmax authors
! SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
!
! Classes of some points: a linear layer with bias and GELU, its softmax, and the cross-entropy of the true classes.

program example
  use, intrinsic :: iso_fortran_env, only: real32
  use kokkossoftmax
  implicit none
  integer, parameter :: features = 64, classes = 10, points = 1000
  real(real32), allocatable :: x(:, :), w(:, :), b(:), probability(:, :), log_probability(:, :)
  integer, allocatable :: class(:)
  integer :: p

  allocate (x(features, points), w(features, classes), b(classes))
  allocate (probability(classes, points), log_probability(classes, points), class(points))
  call random_number(x)
  call random_number(w)
  b = 0.1
  call linear_softmax(x, w, probability, bias=b, activation='gelu')
  print '(a, f8.5)', 'sum of the probabilities of the first point: ', sum(probability(:, 1))

  class = maxloc(probability, dim=1)
  call log_softmax(probability, log_probability)      ! along dimension 1, the classes of each point
  print '(a, f8.5)', 'mean cross-entropy: ', -sum([(log_probability(class(p), p), p=1, points)]) / points
  call softmax_in_place(x(1:features:2, :), dim=2)    ! every other feature, over the points; nothing is copied
  print '(a, f8.5)', 'sum of the first feature: ', sum(x(1, :))
  call finalize()
end program example
