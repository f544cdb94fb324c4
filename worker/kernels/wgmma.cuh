// Hopper's matrix instructions of a warp group: 64 rows in registers by a matrix in shared memory with rows of 128 bytes in the 128-byte swizzle.
#pragma once

#include "common.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Start, distance of panels of 64 columns (where N is contiguous), distance of groups of eight rows; all in units of 16 bytes.
__device__ __forceinline__ uint64_t matrix_at(uint32_t address, uint32_t panel_bytes) {
    constexpr uint64_t GROUP_BYTES = 1024, SWIZZLE_128 = 1;
    return (uint64_t)(address >> 4 & 0x3fff) | (uint64_t)(panel_bytes >> 4) << 16 | GROUP_BYTES >> 4 << 32 | SWIZZLE_128 << 62;
}

__device__ __forceinline__ void multiplications_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void multiplications_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING>
__device__ __forceinline__ void multiplications_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Sums of a warp group's lanes by sixteens, as text and as operands.
#define SUMS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define SUMS_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SUMS_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define SUMS_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define SUMS_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SUMS_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define SUM_4(I) "+f"(d[I]), "+f"(d[I + 1]), "+f"(d[I + 2]), "+f"(d[I + 3])
#define SUM_16(I) SUM_4(I), SUM_4(I + 4), SUM_4(I + 8), SUM_4(I + 12)
#define SUMS_32 SUMS_0 ", " SUMS_1
#define SUMS_64 SUMS_32 ", " SUMS_2 ", " SUMS_3
#define SUMS_112 SUMS_64 ", " SUMS_4 ", " SUMS_5 ", " SUMS_6

// d[64][64] (+)= a[64][16] b[64][16]^T, both in shared memory, K contiguous.
__device__ __forceinline__ void multiply_shared(float (&d)[32], uint64_t a, uint64_t b, int add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SUMS_32 "}, %32, %33, add, 1, 1, 0, 0;}"
                 : SUM_16(0), SUM_16(16)
                 : "l"(a), "l"(b), "r"(add));
}

// d[64][224] (+)= a[64][16] b[224][16]^T, both in shared memory, K contiguous.
__device__ __forceinline__ void multiply_shared(float (&d)[112], uint64_t a, uint64_t b, int add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %114, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n224k16.f32.bf16.bf16 {" SUMS_112 "}, %112, %113, add, 1, 1, 0, 0;}"
                 : SUM_16(0), SUM_16(16), SUM_16(32), SUM_16(48), SUM_16(64), SUM_16(80), SUM_16(96)
                 : "l"(a), "l"(b), "r"(add));
}

// d[64][128] (+)= a[64][16] b[128][16]^T, a in registers, b in shared memory, K contiguous.
__device__ __forceinline__ void multiply_transposed(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int add) {
    asm volatile("{.reg .pred add; setp.ne.b32 add, %69, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SUMS_64 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 0;}"
                 : SUM_16(0), SUM_16(16), SUM_16(32), SUM_16(48)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add));
}

// d[64][128] += a[64][16] b[16][128], a in registers, b in shared memory, N contiguous.
__device__ __forceinline__ void multiply_registers(float (&d)[64], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" SUMS_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;"
                 : SUM_16(0), SUM_16(16), SUM_16(32), SUM_16(48)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

// d[64][64] += a[64][16] b[16][64], a in registers, b in shared memory, N contiguous.
__device__ __forceinline__ void multiply_registers(float (&d)[32], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" SUMS_32 "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;"
                 : SUM_16(0), SUM_16(16)
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}

#endif
