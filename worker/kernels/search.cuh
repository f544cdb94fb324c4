// Thresholds of filters and the token at a place of a running sum, without sorting: bit by bit, part by part.
#pragma once

#include "logits.cuh"

// A search fixes this many bits of a key in one pass over the row.
constexpr int BITS = 3, CHOICES = (1 << BITS) - 1;
constexpr u64 UNKNOWN = ~0ull;

// Tokens that may be drawn: those above a key, and of those at it the ones up to an id.
struct Kept {
    unsigned key = 0;
    int last_id = INT_MAX;

    __device__ __forceinline__ bool has(unsigned other, int id) const { return other > key || (other == key && id <= last_id); }
};

// Sum of `measure(key, id)` over all tokens.
template <typename Measure>
__device__ __forceinline__ u64 sum(const Logits& logits, Measure measure) {
    u64 total = 0;
    each(logits, [&](float x, int id) { total += measure(x, id); });
    return team_sum(total);
}

// The largest key such that tokens at or above it measure at least `wanted`.
template <typename Measure>
__device__ __forceinline__ unsigned search(const Logits& logits, u64 wanted, Measure measure) {
    unsigned key = 0;
    for (int shift = 32 - BITS; shift > -BITS; shift -= BITS) {
        const int bit = max(shift, 0);
        u64 above[CHOICES] = {};
        each<1>(logits, [&](float x, int id) {
            const unsigned own = key_of(x);
            if (own < key) return;
            const u64 amount = measure(x, id);
#pragma unroll
            for (int choice = 0; choice < CHOICES; choice++) above[choice] += own >= (key | (unsigned)(choice + 1) << bit) ? amount : 0;
        });
        team_sums(above);
        unsigned digit = 0;
#pragma unroll
        for (int choice = 0; choice < CHOICES; choice++) {
            // In the last pass the low bits that are left are fewer: larger digits would touch bits that are fixed.
            if (shift < 0 && choice + 1 >= 1 << (BITS + shift)) break;
            if (above[choice] >= wanted) digit = choice + 1;
        }
        key |= digit << bit;
    }
    return key;
}

// The first id of a range, upward, at which the running sum of `measure` exceeds a target, which is below the range's sum; `target_of(sum)` where
// it is not known before. The warps of the block share out the range, then the part that holds the id, until one warp can walk it.
template <typename Target, typename Measure>
__device__ __forceinline__ int find_within(const Logits& logits, int first, int end, u64 target, Target target_of, Measure measure) {
    __shared__ u64 sums[WARPS];
    __shared__ int found;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 before = 0;
    if (threadIdx.x == 0) found = 0;
    do {
        const int part = (end - first + THREADS - 1) / THREADS * 32, from = first + warp * part, to = min(from + part, end);
        u64 sum = 0;
#pragma unroll 4
        for (int id = from + lane; id < to; id += 32) sum += measure(logits.at(id), id);
        sum = warp_sum(sum);
        if (lane == 0) sums[warp] = sum;
        __syncthreads();
        if (target == UNKNOWN) {
            u64 total = 0;
            for (int other = 0; other < WARPS; other++) total += sums[other];
            target = target_of(total);
        }
        int holder = 0;
        while (holder < WARPS - 1 && before + sums[holder] <= target) before += sums[holder++];
        first += holder * part;
        end = min(first + part, end);
        __syncthreads();
    } while (end - first > THREADS);
    if (warp == 0) {
        for (int base = first; base < end; base += 32) {
            const int id = base + lane;
            u64 running = id < end ? measure(logits.at(id), id) : 0;
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const u64 lower = __shfl_up_sync(ALL_LANES, running, offset);
                if (lane >= offset) running += lower;
            }
            const unsigned over = __ballot_sync(ALL_LANES, before + running > target);
            if (over) {
                if (lane == 0) found = base + __ffs(over) - 1;
                break;
            }
            before += __shfl_sync(ALL_LANES, running, 31);
        }
    }
    __syncthreads();
    const int id = found;
    __syncthreads();
    return id;
}

// The same of all tokens, `target_of(sum)` being below their sum. Each block of a team has a range, of which one holds the id.
template <typename Target, typename Measure>
__device__ __forceinline__ int find(const Logits& logits, Target target_of, Measure measure) {
    int first = 0, end = logits.vocab;
    u64 target = UNKNOWN;
    bool holds = true;
    if (parts() > 1) {
        const int range = (end + parts() - 1) / parts();
        first = part() * range, end = min(first + range, end);
        u64 own = 0;
#pragma unroll 4
        for (int id = first + threadIdx.x; id < end; id += THREADS) own += measure(logits.at(id), id);
        u64 sums[PARTS_MAX];
#pragma unroll
        for (int other = 0; other < PARTS_MAX; other++) sums[other] = other == part() ? own : 0;
        team_sums(sums);
        u64 total = 0, before = 0;
        own = 0;
#pragma unroll
        for (int other = 0; other < PARTS_MAX; other++) {
            total += sums[other];
            before += other < part() ? sums[other] : 0;
            own += other == part() ? sums[other] : 0;
        }
        target = target_of(total) - before;
        holds = target < own;
    }
    const int id = holds ? find_within(logits, first, end, target, target_of, measure) : 0;
    return parts() > 1 ? (int)team_max(id) : id;
}

// Keeps the `count` likeliest of all tokens.
__device__ __noinline__ Kept keep_top(const Logits& logits, int count) {
    Kept kept;
    if (count >= logits.vocab) return kept;
    kept.key = search(logits, count, [](float, int) { return 1ull; });
    const unsigned key = kept.key;
    const u64 above = sum(logits, [&](float x, int) { return key_of(x) > key ? 1ull : 0ull; });
    kept.last_id = find(logits, [&](u64) { return count - above - 1; }, [&](float x, int) { return key_of(x) == key ? 1ull : 0ull; });
    return kept;
}

// Of what is kept, the shortest run of the likeliest that weighs at least `share` of it.
__device__ __noinline__ Kept keep_share(const Logits& logits, const Kept& kept, const Weigh& weigh, float share) {
    auto measure = [&](float x, int id) { return kept.has(key_of(x), id) ? weigh(x) : 0ull; };
    const u64 total = sum(logits, measure);
    const u64 wanted = max((u64)((double)share * (double)total), 1ull);
    Kept fewer;
    fewer.key = search(logits, wanted, measure);
    const unsigned key = fewer.key;
    const u64 above = sum(logits, [&](float x, int id) { return key_of(x) > key ? measure(x, id) : 0ull; });
    const u64 weight = max(weigh(value_of((u64)key << 32)), 1ull);
    const u64 ties = max((wanted - above + weight - 1) / weight, 1ull);
    fewer.last_id = find(logits, [&](u64) { return ties - 1; }, [&](float x, int id) { return key_of(x) == key && kept.has(key, id) ? 1ull : 0ull; });
    return fewer;
}
