! SPDX-FileCopyrightText: The KokkosSoftmax authors
! SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
!
! The Fortran module: every rank, kind and dimension against the C++ library to the bit, sections, masks, heads, errors.

program test_fortran
  use, intrinsic :: iso_c_binding
  use, intrinsic :: iso_fortran_env, only: real32, real64
  use, intrinsic :: ieee_arithmetic, only: ieee_is_finite
  use kokkossoftmax
  implicit none

  interface
    subroutine cpp_result(log, bytes, x, y, extents, x_strides, y_strides, dim, scale) bind(c)
      import
      integer(c_int), value :: log, bytes, dim
      type(c_ptr), value :: x, y, scale
      integer(c_int64_t), intent(in) :: extents(4), x_strides(4), y_strides(4)
    end subroutine cpp_result
  end interface

  integer :: failures = 0

  call initialize()
  call check_ranks_real32()
  call check_ranks_real64()
  call check_sections()
  call check_mask()
  call check_logsumexp()
  call check_heads()
  call check_errors()
  call check(len(last_implementation()) > 0, 'last_implementation')
  call finalize()
  call check_after_finalize()
  if (failures > 0) error stop 1
  print '(a)', 'done'

contains

  subroutine check(condition, what)
    logical, intent(in) :: condition
    character(len=*), intent(in) :: what
    if (condition) return
    print '(2a)', 'failed: ', what
    failures = failures + 1
  end subroutine check

  ! Strides of an array without gaps.
  pure function strides_of(extents) result(strides)
    integer(c_int64_t), intent(in) :: extents(4)
    integer(c_int64_t) :: strides(4)
    integer :: d
    strides(1) = 1
    do d = 2, 4
      strides(d) = strides(d - 1) * extents(d - 1)
    end do
  end function strides_of

  subroutine check_ranks_real32()
    real(real32), target :: x(9, 5, 4, 3), expected(9, 5, 4, 3)
    real(real32) :: y(9, 5, 4, 3)
    real(real64), target :: scale
    integer(c_int64_t) :: e(4)
    integer :: dim
    call random_number(x)
    x = 8 * x - 4
    scale = 0.375_real64
    e = shape(x)
    do dim = 1, 4
      call cpp_result(0, 4, c_loc(x), c_loc(expected), e, strides_of(e), strides_of(e), dim, c_null_ptr)
      call softmax(x, y, dim)
      call check(all(y == expected), 'rank 4 of real32')
      call cpp_result(1, 4, c_loc(x), c_loc(expected), e, strides_of(e), strides_of(e), dim, c_loc(scale))
      call log_softmax(x, y, dim=dim, scale=scale)
      call check(all(y == expected), 'log_softmax, rank 4 of real32, scaled')
      y = x
      call log_softmax_in_place(y, dim=dim, scale=scale)
      call check(all(y == expected), 'log_softmax_in_place')
    end do
    e = [9, 5, 4, 1]
    call cpp_result(0, 4, c_loc(x), c_loc(expected), e, strides_of(e), strides_of(e), 2, c_null_ptr)
    call softmax(x(:, :, :, 1), y(:, :, :, 1), dim=2)
    call check(all(y(:, :, :, 1) == expected(:, :, :, 1)), 'rank 3 of real32')
    e = [9, 5, 1, 1]
    call cpp_result(0, 4, c_loc(x), c_loc(expected), e, strides_of(e), strides_of(e), 1, c_null_ptr)
    call softmax(x(:, :, 1, 1), y(:, :, 1, 1))
    call check(all(y(:, :, 1, 1) == expected(:, :, 1, 1)), 'rank 2 of real32, dimension 1 if none is said')
    e = [9, 1, 1, 1]
    call cpp_result(0, 4, c_loc(x), c_loc(expected), e, strides_of(e), strides_of(e), 1, c_null_ptr)
    call softmax(x(:, 1, 1, 1), y(:, 1, 1, 1))
    call check(all(y(:, 1, 1, 1) == expected(:, 1, 1, 1)), 'rank 1 of real32')
    call reserve_softmax(x, y, dim=3)
  end subroutine check_ranks_real32

  subroutine check_ranks_real64()
    real(real64), target :: x(9, 5, 4, 3), expected(9, 5, 4, 3)
    real(real64) :: y(9, 5, 4, 3)
    integer(c_int64_t) :: e(4)
    integer :: dim
    call random_number(x)
    x = 8 * x - 4
    e = shape(x)
    do dim = 1, 4
      call cpp_result(0, 8, c_loc(x), c_loc(expected), e, strides_of(e), strides_of(e), dim, c_null_ptr)
      call softmax(x, y, dim)
      call check(all(y == expected), 'rank 4 of real64')
    end do
    e = [9, 5, 4, 1]
    call cpp_result(0, 8, c_loc(x), c_loc(expected), e, strides_of(e), strides_of(e), 3, c_null_ptr)
    call softmax(x(:, :, :, 1), y(:, :, :, 1), 3)
    call check(all(y(:, :, :, 1) == expected(:, :, :, 1)), 'rank 3 of real64')
    e = [9, 5, 1, 1]
    call cpp_result(0, 8, c_loc(x), c_loc(expected), e, strides_of(e), strides_of(e), 2, c_null_ptr)
    call softmax(x(:, :, 1, 1), y(:, :, 1, 1), 2)
    call check(all(y(:, :, 1, 1) == expected(:, :, 1, 1)), 'rank 2 of real64')
    e = [9, 1, 1, 1]
    call cpp_result(0, 8, c_loc(x), c_loc(expected), e, strides_of(e), strides_of(e), 1, c_null_ptr)
    call softmax(x(:, 1, 1, 1), y(:, 1, 1, 1))
    call check(all(y(:, 1, 1, 1) == expected(:, 1, 1, 1)), 'rank 1 of real64')
  end subroutine check_ranks_real64

  ! Sections are taken as they lie, and what is between their elements stays.
  subroutine check_sections()
    real(real32), target :: x(20, 7, 6), y(30, 9, 4), expected(30, 9, 4)
    integer(c_int64_t) :: e(4)
    integer :: dim
    call random_number(x)
    e = [9, 7, 2, 1]
    do dim = 1, 3
      y = -7
      expected = -7
      ! x(2:18:2, :, 1:6:4) and y(1:27:3, 3:9, 2:3)
      call cpp_result(0, 4, c_loc(x(2, 1, 1)), c_loc(expected(1, 3, 2)), e, &
                      [2_c_int64_t, 20_c_int64_t, 560_c_int64_t, 0_c_int64_t], &
                      [3_c_int64_t, 30_c_int64_t, 270_c_int64_t, 0_c_int64_t], dim, c_null_ptr)
      call softmax(x(2:18:2, :, 1:6:4), y(1:27:3, 3:9, 2:3), dim)
      call check(all(y == expected), 'sections')
      call check(count(y == -7) == size(y) - 9 * 7 * 2, 'elements between those of a section')
    end do
    ! Backwards: x(18:2:-2, 7:1:-1, 1:6:4) and y(1:27:3, 9:3:-1, 3:2:-1)
    do dim = 1, 3
      y = -7
      expected = -7
      call cpp_result(0, 4, c_loc(x(18, 7, 1)), c_loc(expected(1, 9, 3)), e, &
                      [-2_c_int64_t, -20_c_int64_t, 560_c_int64_t, 0_c_int64_t], &
                      [3_c_int64_t, -30_c_int64_t, -270_c_int64_t, 0_c_int64_t], dim, c_null_ptr)
      call softmax(x(18:2:-2, 7:1:-1, 1:6:4), y(1:27:3, 9:3:-1, 3:2:-1), dim)
      call check(all(y == expected), 'sections that lie backwards')
      call check(count(y == -7) == size(y) - 9 * 7 * 2, 'elements between those of a section that lies backwards')
    end do
    call softmax(x(1:0, :, 1:4), y(1:0, 1:7, :))
    call softmax(x(5:5, 3:3, 2), y(7:7, 3:3, 1))
    call check(y(7, 3, 1) == 1, 'one element')
  end subroutine check_sections

  subroutine check_mask()
    real(real64) :: x(6, 4), y(6, 4), sum_of_kept
    logical(c_bool) :: keep(6, 4), keep_row(6, 1)
    integer :: i, j
    call random_number(x)
    keep = x > 0.4_real64
    keep(:, 2) = .false.
    call softmax(x, y, mask=keep)
    do j = 1, 4
      sum_of_kept = sum(exp(x(:, j)), mask=logical(keep(:, j)))
      do i = 1, 6
        if (keep(i, j)) then
          call check(abs(y(i, j) - exp(x(i, j)) / sum_of_kept) < 1e-14_real64, 'masked softmax')
        else
          call check(y(i, j) == 0, 'masked to 0')
        end if
      end do
    end do
    keep_row(:, 1) = keep(:, 1)
    call softmax(x, y, mask=keep_row)
    call check(all(y == 0 .or. spread(logical(keep(:, 1)), 2, 4)), 'a mask that is broadcast')
  end subroutine check_mask

  subroutine check_logsumexp()
    real(real32) :: x(5, 6, 3), lse_1(6, 3), lse_2(5, 3), one
    real(real64) :: a(50, 2, 2, 2), b(50, 2, 2)
    call random_number(x)
    call random_number(a)
    call logsumexp(x, lse_1)
    call check(all(abs(lse_1 - log(sum(exp(x), dim=1))) < 1e-6), 'logsumexp along 1')
    call logsumexp(x, lse_2, dim=2, scale=2.0_real64)
    call check(all(abs(lse_2 - log(sum(exp(2 * x), dim=2))) < 2e-6), 'logsumexp along 2')
    call logsumexp(x(:, 1, 1), one)
    call check(one == lse_1(1, 1), 'logsumexp of a vector')
    call logsumexp(a, b, dim=4)
    call check(all(abs(b - log(sum(exp(a), dim=4))) < 1e-14_real64), 'logsumexp of rank 4')
  end subroutine check_logsumexp

  subroutine check_heads()
    real(real32) :: x(8, 5), w(8, 12), b(12), y(12, 5), logits(12, 5), w_rows(12, 8)
    real(real64) :: x64(8, 5), w64(8, 12), y64(12, 5), logits64(12, 5)
    integer :: stat, j
    call random_number(x)
    call random_number(w)
    call random_number(b)
    logits = matmul(transpose(w), x) + spread(b, 2, 5)
    call linear_softmax(x, w, y, bias=b, stat=stat)
    if (stat == ks_unsupported) return ! built without the heads
    call check(stat == 0, 'stat of linear_softmax')
    do j = 1, 5
      call check(all(abs(y(:, j) - exp(logits(:, j)) / sum(exp(logits(:, j)))) < 1e-6), 'linear_softmax')
    end do
    logits = max(logits - 5, 0.0)
    call linear_log_softmax(x, w, y, bias=b - 5, activation='relu', scale=0.5_real64)
    do j = 1, 5
      call check(all(abs(y(:, j) - (0.5 * logits(:, j) - log(sum(exp(0.5 * logits(:, j)))))) < 4e-6), 'linear_log_softmax')
    end do
    call linear_softmax(x, w, y, bias=b, activation='gelu', tf32=.true.)
    call linear_softmax(x, w, y, activation='identity', stat=stat)
    call check(stat == ks_invalid_argument, 'unknown activation')
    w_rows = transpose(w)
    call linear_softmax(x, w_rows, y, stat=stat)
    call check(stat == ks_invalid_argument, 'w of the wrong shape')
    x64 = x
    w64 = w
    logits64 = matmul(transpose(w64), x64)
    call linear_softmax(x64, w64, y64)
    do j = 1, 5
      call check(all(abs(y64(:, j) - exp(logits64(:, j)) / sum(exp(logits64(:, j)))) < 1e-14_real64), 'in real64')
    end do
  end subroutine check_heads

  subroutine check_errors()
    real(real32) :: x(4, 3), y(4, 3), narrow(3, 3)
    character(len=200) :: errmsg
    integer :: stat
    x = 1
    y = 2
    errmsg = 'unchanged'
    call softmax(x, y, stat=stat, errmsg=errmsg)
    call check(stat == 0 .and. errmsg == 'unchanged', 'no error')
    y = 2
    call softmax(x, y, dim=3, stat=stat, errmsg=errmsg)
    call check(stat == ks_invalid_argument .and. index(errmsg, 'dim') > 0, 'dim out of range')
    call softmax(x, y, dim=0, stat=stat)
    call check(stat == ks_invalid_argument, 'dim of 0')
    call softmax(x, narrow, stat=stat, errmsg=errmsg)
    call check(stat == ks_invalid_argument .and. index(errmsg, 'does not fit') > 0, 'shapes that do not fit')
    call softmax(c_null_ptr, c_null_ptr, shape=[4, 3], kind=real32, stat=stat, errmsg=errmsg)
    call check(stat /= 0, 'null pointers')
    call softmax(c_null_ptr, c_null_ptr, shape=[4, 3], kind=3, stat=stat, errmsg=errmsg)
    call check(stat /= 0, 'an unknown kind')
    call check(all(y == 2), 'nothing was written')
  end subroutine check_errors

  subroutine check_after_finalize()
    real(real32) :: x(4), y(4)
    integer :: stat
    x = 1
    call softmax(x, y, stat=stat)
    call check(stat == ks_finalized, 'after finalize')
  end subroutine check_after_finalize

end program test_fortran
