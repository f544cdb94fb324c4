// The few tokens that a filter can keep, sorted; the first block of a team has them.
#pragma once

#include "logits.cuh"

constexpr int CANDIDATES_MAX = 4096;

// Tokens that a filter can keep, the likeliest first.
struct Candidates {
    u64 entries[CANDIDATES_MAX];
    int n;
};

// Sorts downward (Batcher's bitonic network over the next power of two).
__device__ __forceinline__ void sort(Candidates& candidates) {
    int size = 1;
    while (size < candidates.n) size *= 2;
    for (int i = candidates.n + threadIdx.x; i < size; i += THREADS) candidates.entries[i] = 0;
    __syncthreads();
    for (int width = 2; width <= size; width *= 2) {
        for (int step = width / 2; step > 0; step /= 2) {
            for (int pair = threadIdx.x; pair < size / 2; pair += THREADS) {
                const int low = pair / step * step * 2 + pair % step, high = low + step;
                const u64 a = candidates.entries[low], b = candidates.entries[high];
                if ((low & width) == 0 ? a < b : a > b) {
                    candidates.entries[low] = b;
                    candidates.entries[high] = a;
                }
            }
            __syncthreads();
        }
    }
}

// Collects tokens at or above a value and sorts them; false where they are too many. Between two of these the team has summed something
// up, so that nobody is behind.
__device__ __noinline__ bool collect(const Logits& logits, float lowest, Candidates& candidates) {
    if (threadIdx.x == 0) candidates.n = 0;
    team_sync();
    Candidates& first = *in_part(&candidates, 0);
    u64 n = 0;
    each(logits, [&](float x, int id) {
        if (x < lowest || x == -INFINITY) return;
        const int place = atomicAdd(&first.n, 1);
        if (place < CANDIDATES_MAX) first.entries[place] = entry_of(x, id);
        n++;
    });
    if (team_sum(n) > CANDIDATES_MAX) return false;
    if (part() == 0) sort(candidates);
    return true;
}

// A value that at least `count` tokens reach: of the blocks' the largest, which is the count-th of its threads' own maxima. Uses the
// candidates' memory.
__device__ __noinline__ float reached_by(const Logits& logits, int count, Candidates& candidates) {
    float largest = -INFINITY;
    each(logits, [&](float x, int) { largest = fmaxf(largest, x); });
    __syncthreads();
    candidates.entries[threadIdx.x] = entry_of(largest, threadIdx.x);
    if (threadIdx.x == 0) candidates.n = THREADS;
    __syncthreads();
    sort(candidates);
    return value_of(team_max(candidates.entries[count - 1]));
}

// Exponents of 2 at which the weight above is taken, for a first guess at where a share ends.
constexpr int STEPS = 8;
__device__ constexpr float STEP_EXPONENTS[STEPS] = {-1.f, -2.f, -4.f, -6.f, -8.f, -11.f, -15.f, -20.f};

// The weight of all tokens, and a value above which lies at least `share` of it.
__device__ __noinline__ u64 share_above(const Logits& logits, const Weigh& weigh, float share, float& lowest) {
    // By steps, and at the end of all.
    u64 above[STEPS + 1] = {};
    each<2>(logits, [&](float x, int) {
        const float exponent = (x - weigh.largest) * weigh.factor;
        const u64 weight = weigh(x);
        above[STEPS] += weight;
        if (exponent < STEP_EXPONENTS[STEPS - 1]) return;
#pragma unroll
        for (int step = 0; step < STEPS; step++) above[step] += exponent >= STEP_EXPONENTS[step] ? weight : 0;
    });
    team_sums(above);
    const u64 total = above[STEPS];
    lowest = -INFINITY;
#pragma unroll
    for (int step = STEPS - 1; step >= 0; step--) {
        // A little lower, so that rounding keeps none out.
        if ((double)above[step] >= (double)share * (double)total) lowest = weigh.largest + (STEP_EXPONENTS[step] - 1e-3f) / weigh.factor;
    }
    return total;
}

// Draws from sorted candidates, in the block that has them: top-k, top-p of what it leaves, min-p. `total` is the weight that top-p refers to where
// top-k is off.
__device__ __forceinline__ int draw_from(const Candidates& candidates, const SlotParams& params, const Weigh& weigh, u64 total, double random) {
    constexpr int EACH = CANDIDATES_MAX / THREADS;
    __shared__ u64 sums[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = threadIdx.x * EACH;
    const int n = params.top_k > 0 ? min(candidates.n, params.top_k) : candidates.n;
    u64 running[EACH], before = 0;
    int light = n;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int place = first + i;
        const float x = place < n ? value_of(candidates.entries[place]) : 0.f;
        before += place < n ? weigh(x) : 0;
        running[i] = before;
        if (place < n && weigh.weight(x) < params.min_p) light = min(light, place);
    }
    u64 through = before;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const u64 lower = __shfl_up_sync(ALL_LANES, through, offset);
        if (lane >= offset) through += lower;
    }
    if (lane == 31) sums[warp] = through;
    __syncthreads();
    u64 all = 0, base = through - before;
    for (int other = 0; other < WARPS; other++) {
        base += other < warp ? sums[other] : 0;
        all += sums[other];
    }
    const u64 of = params.top_k > 0 ? all : total;
    const u64 wanted = params.top_p < 1.f ? (u64)((double)params.top_p * (double)of) : ~0ull;
    int last = n - 1;
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) {
        if (first + i < n && base + running[i] >= wanted) last = min(last, first + i);
    }
    last = max(min(block_min(last), block_min(light) - 1), 0);
    u64 kept = 0;
#pragma unroll
    for (int i = 0; i < EACH; i++) kept = first + i == last ? base + running[i] : kept;
    kept = block_sum(kept);
    const u64 target = min((u64)(random * (double)kept), kept - 1);
    int chosen = last;
#pragma unroll
    for (int i = EACH - 1; i >= 0; i--) {
        if (first + i <= last && base + running[i] > target) chosen = min(chosen, first + i);
    }
    return id_of(candidates.entries[block_min(chosen)]);
}
