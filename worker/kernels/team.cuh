// The threads that share a row: a block, or on Hopper the blocks of a cluster. Sums are of all of them, the same in every thread.
#pragma once

#include "common.cuh"

typedef unsigned long long u64;

// Most blocks of a cluster that any card runs.
constexpr int THREADS = 512, WARPS = THREADS / 32, PARTS_MAX = 8;

// Blocks that share a row; a card before Hopper, or a launch without clusters, has one.
__device__ __forceinline__ int parts() {
    unsigned n = 1;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
#endif
    return n;
}

// Which of them this block is.
__device__ __forceinline__ int part() {
    unsigned i = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(i));
#endif
    return i;
}

// Waits for all threads of the team; what they wrote before is seen behind it.
__device__ __forceinline__ void team_sync() {
#if __CUDA_ARCH__ >= 900
    if (parts() > 1) {
        asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
        return;
    }
#endif
    __syncthreads();
}

// The same place of shared memory in another block of the team.
template <typename T>
__device__ __forceinline__ T* in_part(T* place, int other) {
#if __CUDA_ARCH__ >= 900
    T* there;
    asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(place), "r"(other));
    return there;
#else
    return place;
#endif
}

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

__device__ __forceinline__ u64 block_sum(u64 x) {
    __shared__ u64 sums[WARPS];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    u64 total = 0;
    for (int warp = 0; warp < WARPS; warp++) total += sums[warp];
    __syncthreads();
    return total;
}

__device__ __forceinline__ int block_min(int x) {
    __shared__ int least[WARPS];
    x = __reduce_min_sync(ALL_LANES, x);
    if (threadIdx.x % 32 == 0) least[threadIdx.x / 32] = x;
    __syncthreads();
    for (int warp = 0; warp < WARPS; warp++) x = min(x, least[warp]);
    __syncthreads();
    return x;
}

// Sums of N numbers.
template <int N>
__device__ __forceinline__ void team_sums(u64 (&x)[N]) {
    __shared__ u64 of_warps[WARPS][N], of_parts[PARTS_MAX][N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        const u64 sum = warp_sum(x[i]);
        if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32][i] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = 0;
        for (int warp = 0; warp < WARPS; warp++) x[i] += of_warps[warp][i];
    }
    if (parts() > 1) {
        if (threadIdx.x < parts()) {
#pragma unroll
            for (int i = 0; i < N; i++) *in_part(&of_parts[part()][i], threadIdx.x) = x[i];
        }
        team_sync();
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = 0;
            for (int other = 0; other < parts(); other++) x[i] += of_parts[other][i];
        }
    }
    team_sync();
}

__device__ __forceinline__ u64 team_sum(u64 x) {
    u64 sums[1] = {x};
    team_sums(sums);
    return sums[0];
}

__device__ __forceinline__ u64 team_max(u64 x) {
    __shared__ u64 of_warps[WARPS], of_parts[PARTS_MAX];
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        const u64 other = __shfl_xor_sync(ALL_LANES, x, offset);
        x = other > x ? other : x;
    }
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll 1
    for (int warp = 0; warp < WARPS; warp++) x = of_warps[warp] > x ? of_warps[warp] : x;
    if (parts() > 1) {
        if (threadIdx.x < parts()) *in_part(&of_parts[part()], threadIdx.x) = x;
        team_sync();
#pragma unroll 1
        for (int other = 0; other < parts(); other++) x = of_parts[other] > x ? of_parts[other] : x;
    }
    team_sync();
    return x;
}
