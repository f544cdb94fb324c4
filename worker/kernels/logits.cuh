// A row of logits as one block sees it, or a cluster of blocks that share it: reading, walking, summing up.
#pragma once

#include <cfloat>
#include <climits>

#include "team.cuh"

constexpr float ONE = 1099511627776.f /* 2^40 */;
constexpr unsigned IN_PROMPT = 0x80000000u;

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

// Calls f(value, id) for all tokens of this thread, upward. VECTORS loads are under way at a time; f is in the code four times as often.
template <int VECTORS = 4, typename F>
__device__ __forceinline__ void each(const Logits& logits, F f) {
    const int thread = part() * THREADS + threadIdx.x, threads = parts() * THREADS;
    // Rows of other lengths do not begin at multiples of 16 bytes.
    if (logits.seen || logits.mask || logits.vocab % 4 != 0) {
#pragma unroll 4
        for (int id = thread; id < logits.vocab; id += threads) f(logits.at(id), id);
        return;
    }
    const float4* values = reinterpret_cast<const float4*>(logits.values);
    const int n = logits.vocab / 4;
    for (int base = thread; base < n; base += VECTORS * threads) {
        float4 x[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            if (base + k * threads < n) x[k] = values[base + k * threads];
        }
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            const int place = base + k * threads;
            if (place >= n) break;
            const float four[4] = {x[k].x, x[k].y, x[k].z, x[k].w};
#pragma unroll
            for (int c = 0; c < 4; c++) f(logits.clean(four[c]), place * 4 + c);
        }
    }
}

// Grows with the number.
__device__ __forceinline__ unsigned key_of(float x) {
    const unsigned bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
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
__device__ __noinline__ int argmax(const Logits& logits) {
    float largest = -INFINITY;
    int id_of_largest = INT_MAX;
    // A thread's ids grow, so that the first of equals stays.
    each(logits, [&](float x, int id) {
        if (x > largest || id_of_largest == INT_MAX) {
            largest = x;
            id_of_largest = id;
        }
    });
    return id_of(team_max(id_of_largest == INT_MAX ? 0 : entry_of(largest, id_of_largest)));
}

// The same where nothing is masked or edited and rows begin at multiples of 16 bytes: what most steps run, and all that they need to fetch.
__device__ __forceinline__ int plain_argmax(const float* values, int vocab) {
    constexpr int VECTORS = 4;
    const float4* fours = reinterpret_cast<const float4*>(values);
    const int n = vocab / 4, thread = part() * THREADS + threadIdx.x, threads = parts() * THREADS;
    float largest = -INFINITY;
    int id = INT_MAX;
#pragma unroll 1
    for (int base = thread; base < n; base += VECTORS * threads) {
        float4 x[VECTORS];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) x[k] = fours[min(base + k * threads, n - 1)];
#pragma unroll
        for (int k = 0; k < VECTORS; k++) {
            // The last four again change nothing.
            const int first = min(base + k * threads, n - 1) * 4;
            const float four[4] = {x[k].x, x[k].y, x[k].z, x[k].w};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                // Not what is no number.
                const float y = fminf(four[c], FLT_MAX);
                if (four[c] == four[c] && y > largest) largest = y, id = first + c;
            }
        }
    }
    const u64 best = team_max(id == INT_MAX ? 0 : entry_of(largest, id));
    return best == 0 ? 0 : id_of(best);
}

// e^((x - largest) / temperature) in units of 2^-40.
struct Weigh {
    float largest, factor;

    __device__ __forceinline__ float weight(float x) const { return exp2f((x - largest) * factor); }
    __device__ __forceinline__ u64 operator()(float x) const { return __float2ull_rn(weight(x) * ONE); }
};
