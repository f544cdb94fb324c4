// C[M][N] = A[M][K] W[N][K]^T: bf16 in, f32 sums, the same bits in a row of C whatever M is.
//
// K goes in blocks of 32, four of them a slice. Slice i belongs to segment i mod 8; a segment's sum walks its slices upward,
// two multiplications of 16 a block, and the eight segments' sums meet in a binary tree. Within a block a lane holds 8
// neighbours of K, one 16-byte load, so that the order inside is a fixed permutation: the same in all kernels.
#pragma once

#include "common.cuh"

constexpr int SEGMENTS = 8, K_BLOCK = 32, SLICE = 4, ROUND = SEGMENTS * SLICE;
// STORE_GATED comes with the activation's number added to it.
constexpr int STORE_BF16 = 0, STORE_F32 = 1, STORE_ADD = 2, STORE_GATED = 3, STORE_HEADS = 5;

__device__ __forceinline__ void put(void* c, size_t index, float value, int mode) {
    if (mode == STORE_BF16) {
        static_cast<bf16*>(c)[index] = __float2bfloat16(value);
    } else if (mode == STORE_F32) {
        static_cast<float*>(c)[index] = value;
    } else {
        static_cast<float*>(c)[index] += value;
    }
}

__device__ __forceinline__ int rows_of(const int* m_ptr, int m_cap) {
    return m_ptr ? min(*m_ptr, m_cap) : m_cap;
}

// Both multiplications of a block of 32, of 16 rows of the first matrix and 8 of the second.
__device__ __forceinline__ void multiply_block(float (&c)[4], const uint4& upper, const uint4& lower, const uint4& other) {
    multiply(c, upper.x, lower.x, upper.y, lower.y, other.x, other.y);
    multiply(c, upper.z, lower.z, upper.w, lower.w, other.z, other.w);
}

__device__ __forceinline__ uint4 read_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
