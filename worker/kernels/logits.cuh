// A row of logits as one block sees it: reading, walking, summing up.
#pragma once

#include <cfloat>
#include <climits>

#include "common.cuh"

constexpr int THREADS = 512, WARPS = THREADS / 32;
constexpr float ONE = 1099511627776.f /* 2^40 */;
constexpr unsigned IN_PROMPT = 0x80000000u;

typedef unsigned long long u64;

// Logits of a row: NaN and what is masked count as minus infinity, plus infinity as the largest finite number; penalties applied.
struct Logits {
    const float* values;
    // Times that tokens were put out, and whether they are in the prompt; null without penalties.
    const unsigned* seen;
    float repetition, frequency, presence;
    int vocab;
    // A bit per token, set where it may be drawn; null without a mask.
    const unsigned* mask;

    __device__ __forceinline__ float at(int id) const {
        if (mask && !(mask[id >> 5] >> (id & 31) & 1)) return -INFINITY;
        const float x = clean(values[id]);
        return seen ? penalised(x, seen[id]) : x;
    }

    __device__ __forceinline__ static float clean(float x) { return x != x ? -INFINITY : fminf(x, FLT_MAX); }

    __device__ __forceinline__ float penalised(float x, unsigned times) const {
        if (times == 0) return x;
        const unsigned count = times & ~IN_PROMPT;
        x = x > 0.f ? x / repetition : x * repetition;
        x -= frequency * count;
        return count > 0 ? x - presence : x;
    }
};

constexpr int VECTORS = 4;

// Calls f(value, id) for all tokens of this thread. Several loads are under way at a time.
template <typename F>
__device__ __forceinline__ void each(const Logits& logits, F f) {
    if (logits.vocab % 4 != 0) {
        // Rows do not begin at multiples of 16 bytes.
        for (int id = threadIdx.x; id < logits.vocab; id += THREADS) f(logits.at(id), id);
        return;
    }
    const float4* values = reinterpret_cast<const float4*>(logits.values);
    const uint4* seen = reinterpret_cast<const uint4*>(logits.seen);
    const int n = logits.vocab / 4;
    for (int base = threadIdx.x; base < n; base += VECTORS * THREADS) {
        float4 x[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (base + k * THREADS < n) x[k] = values[base + k * THREADS];
        }
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int place = base + k * THREADS;
            if (place >= n) break;
            float four[4] = {logits.clean(x[k].x), logits.clean(x[k].y), logits.clean(x[k].z), logits.clean(x[k].w)};
            if (seen) {
                const uint4 times = seen[place];
                four[0] = logits.penalised(four[0], times.x);
                four[1] = logits.penalised(four[1], times.y);
                four[2] = logits.penalised(four[2], times.z);
                four[3] = logits.penalised(four[3], times.w);
            }
            if (logits.mask) {
                const unsigned bits = logits.mask[place >> 3] >> (place & 7) * 4;
#pragma unroll
                for (int c = 0; c < 4; c++) four[c] = bits >> c & 1 ? four[c] : -INFINITY;
            }
#pragma unroll
            for (int c = 0; c < 4; c++) f(four[c], place * 4 + c);
        }
    }
}

// Grows with the number.
__device__ __forceinline__ unsigned key_of(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

__device__ __forceinline__ double warp_sum(double x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
    return x;
}

template <typename T>
__device__ __forceinline__ T block_sum(T x) {
    __shared__ T sums[WARPS];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    T total = 0;
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

__device__ __forceinline__ u64 block_max(u64 x) {
    __shared__ u64 largest[WARPS];
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) {
        const u64 other = __shfl_xor_sync(ALL_LANES, x, offset);
        x = other > x ? other : x;
    }
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = x;
    __syncthreads();
    for (int warp = 0; warp < WARPS; warp++) x = largest[warp] > x ? largest[warp] : x;
    __syncthreads();
    return x;
}

// Value and id as one number: larger for the likelier, and for the lower id of equals.
__device__ __forceinline__ u64 entry_of(float x, int id) {
    return (u64)key_of(x) << 32 | (unsigned)~id;
}

__device__ __forceinline__ int id_of(u64 entry) {
    return (int)~(unsigned)entry;
}

__device__ __forceinline__ float value_of(u64 entry) {
    const unsigned key = (unsigned)(entry >> 32);
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The likeliest token, the lowest of equals.
__device__ __forceinline__ int argmax(const Logits& logits) {
    float largest = -INFINITY;
    int id_of_largest = INT_MAX;
    // A thread's ids grow, so that the first of equals stays.
    each(logits, [&](float x, int id) {
        if (x > largest || id_of_largest == INT_MAX) {
            largest = x;
            id_of_largest = id;
        }
    });
    return id_of(block_max(id_of_largest == INT_MAX ? 0 : entry_of(largest, id_of_largest)));
}

// e^((x - largest) / temperature) in units of 2^-40.
struct Weigh {
    float largest, factor;

    __device__ __forceinline__ float weight(float x) const { return exp2f((x - largest) * factor); }
    __device__ __forceinline__ u64 operator()(float x) const { return __float2ull_rn(weight(x) * ONE); }
};
