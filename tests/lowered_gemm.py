"""A TileLang program with shared memory, a software pipeline and atomics, for tests of lowering. Its annotations are
values, so nothing here is a string."""
# mypy: ignore-errors

import tilelang.language as T


def program(rows=64, columns=64, depth=32):
    @T.prim_func
    def gemm(A: T.Tensor((256, 256), "bfloat16"), B: T.Tensor((256, 256), "bfloat16"),
             C: T.Tensor((256, 256), "float32")):
        with T.Kernel(256 // columns, 256 // rows, threads=128) as (bx, by):
            a = T.alloc_shared((rows, depth), "bfloat16")
            b = T.alloc_shared((depth, columns), "bfloat16")
            acc = T.alloc_fragment((rows, columns), "float32")
            T.clear(acc)
            for k in T.Pipelined(256 // depth, num_stages=2):
                T.copy(A[by * rows, k * depth], a)
                T.copy(B[k * depth, bx * columns], b)
                T.gemm(a, b, acc)
            for i, j in T.Parallel(rows, columns):
                T.atomic_add(C[by * rows + i, bx * columns + j], acc[i, j])

    return gemm
