// Attention of rows with few queries, where reading the KV cache is all that counts: decode steps.
//
// A block takes a run of one row's keys for one KV head. Its warps take turns at blocks of 16 keys, each with loads of its
// own under way; their results meet in shared memory, and those of several runs in the block that ends last. Keys that rows
// share may have been taken before by attn_shared (prefill.cu): their results meet the row's own. Which runs a row is cut into
// depends on the batch, so that sums are not the same bits in another batch: attention.cu's are.
#include "common.cuh"

constexpr int WARPS = 4, THREADS = 32 * WARPS, ROWS = PARTIAL_ROWS, KEYS = BLOCK_TOKENS;
// Parts of a row whose loads are under way at once where they meet.
constexpr int MEET = 8;

struct Decode {
    const int* counts;
    int group;
    const int* tables;
    const DecodeItem* items;
    const bf16* qkv;
    int qkv_stride;
    const bf16 *k, *v;
    bf16* out;
    float* partial_o;
    float2* partial_ml;
    int* tickets;
    int q_heads, kv_heads;
    float scale;
    int window;
};

struct Weight {
    float max, sum;
};

// Factors for two sums of weights that meet; `total` becomes that of both.
__device__ __forceinline__ float2 meet(Weight& total, const Weight& more) {
    const float max = fmaxf(total.max, more.max), base = max == -INFINITY ? 0.f : max;
    const float2 factors = make_float2(exp2f(total.max - base), exp2f(more.max - base));
    total = Weight{max, total.sum * factors.x + more.sum * factors.y};
    return factors;
}

__device__ __forceinline__ void add(float2& sum, Weight& total, float2 more, const Weight& weight) {
    const float2 factors = meet(total, weight);
    sum = make_float2(sum.x * factors.x + more.x * factors.y, sum.y * factors.x + more.y * factors.y);
}

template <int D, int STAGES>
struct Run {
    static constexpr int UNITS = D / 8, ROW_BYTES = D * 2, HALF_BYTES = KEYS * ROW_BYTES, STAGE_BYTES = 2 * HALF_BYTES;
    static constexpr int Q_BYTES = ROWS * ROW_BYTES, RING_BYTES = WARPS * STAGES * STAGE_BYTES, SHARED_BYTES = Q_BYTES + RING_BYTES;
    static_assert(RING_BYTES >= WARPS * ROWS * D * 4, "the warps' results take the ring's place");

    const Decode& a;
    const DecodeItem& item;
    const uint32_t shared, ring;
    const int* table;
    const int kv_head, group_size, start, context, rows, lane, warp;
    float o[D / 8][4];
    Weight weights[2];

    __device__ __forceinline__ Run(const Decode& a, const DecodeItem& item, uint32_t shared)
        : a(a), item(item), shared(shared), ring(shared + Q_BYTES + threadIdx.x / 32 * (STAGES * STAGE_BYTES)),
          table(a.tables + item.table), kv_head(blockIdx.y), group_size(a.q_heads / a.kv_heads), start(item.start), context(item.context),
          rows(min(item.len, ROWS / (a.q_heads / a.kv_heads)) * (a.q_heads / a.kv_heads)), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}

    __device__ __forceinline__ uint32_t place(uint32_t base, int r, int unit) const {
        return base + r * ROW_BYTES + (unit ^ (r & 7)) * 16;
    }

    __device__ __forceinline__ void load_queries() const {
        constexpr int LOADS = ROWS * UNITS / THREADS;
        uint4 x[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const int i = k * THREADS + threadIdx.x, r = i / UNITS, used = r < rows ? r : 0;
            const size_t token = start + used / group_size, head = kv_head * group_size + used % group_size;
            x[k] = load_plain(a.qkv + token * a.qkv_stride + head * D + i % UNITS * 8, r < rows);
        }
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            const int i = k * THREADS + threadIdx.x;
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(place(shared, i / UNITS, i % UNITS)), "r"(x[k].x), "r"(x[k].y), "r"(x[k].z), "r"(x[k].w)
                         : "memory");
        }
    }

    // Keys from the run's end on are zero: they may never have been written.
    __device__ __forceinline__ void load_keys(int block, int stage) const {
        const uint32_t keys = ring + stage * STAGE_BYTES, values = keys + HALF_BYTES;
        const size_t base = ((size_t)table[block] * a.kv_heads + kv_head) * KEYS * D;
        const int real_keys = item.key_end - block * KEYS;
#pragma unroll
        for (int i = 0; i < KEYS * UNITS / 32; i++) {
            const int index = i * 32 + lane, key = index / UNITS, unit = index % UNITS;
            copy_async(place(keys, key, unit), a.k + base + key * D + unit * 8, key < real_keys);
            copy_async(place(values, key, unit), a.v + base + key * D + unit * 8, key < real_keys);
        }
    }

    __device__ __forceinline__ void take(int block, int stage, const uint32_t (&q)[D / 16][4]) {
        const uint32_t keys = ring + stage * STAGE_BYTES, values = keys + HALF_BYTES;
        const int matrix = lane / 8;
        float s[2][4] = {};
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            uint32_t k[4];
            load_matrices(place(keys, matrix / 2 * 8 + lane % 8, step * 2 + matrix % 2), k);
            multiply(s[0], q[step][0], q[step][1], q[step][2], q[step][3], k[0], k[1]);
            multiply(s[1], q[step][0], q[step][1], q[step][2], q[step][3], k[2], k[3]);
        }
        soften(block, s);
        const uint32_t p[4] = {pack(s[0][0], s[0][1]), pack(s[0][2], s[0][3]), pack(s[1][0], s[1][1]), pack(s[1][2], s[1][3])};
#pragma unroll
        for (int pair = 0; pair < D / 16; pair++) {
            uint32_t v[4];
            load_matrices_transposed(place(values, matrix % 2 * 8 + lane % 8, pair * 2 + matrix / 2), v);
            multiply(o[2 * pair], p[0], p[1], p[2], p[3], v[0], v[1]);
            multiply(o[2 * pair + 1], p[0], p[1], p[2], p[3], v[2], v[3]);
        }
    }

    // Scores to weights; what was summed before is brought to the new maximum.
    __device__ __forceinline__ void soften(int block, float (&s)[2][4]) {
        const float factor = a.scale * LOG2_E;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = lane / 4 + half * 8, last = r < rows ? context + r / group_size : -1, first = a.window > 0 ? last - a.window + 1 : 0;
            float largest = -INFINITY;
#pragma unroll
            for (int j = 0; j < 2; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int position = block * KEYS + j * 8 + lane % 4 * 2 + c;
                    float& x = s[j][half * 2 + c];
                    x = position <= last && position >= first ? x * factor : -INFINITY;
                    largest = fmaxf(largest, x);
                }
            }
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
            const float max = fmaxf(weights[half].max, largest), base = max == -INFINITY ? 0.f : max;
            const float keep = exp2f(weights[half].max - base);
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < 2; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) sum += s[j][half * 2 + c] = exp2f(s[j][half * 2 + c] - base);
            }
            weights[half] = Weight{max, weights[half].sum * keep + sum};
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                o[j][half * 2] *= keep;
                o[j][half * 2 + 1] *= keep;
            }
        }
    }

    // Keys behind which the row's tokens stand were written by earlier steps: they need not wait for the kernel in front.
    __device__ __forceinline__ void walk(bool waits) {
        const int first = item.key_begin / KEYS + warp, end = (item.key_end + KEYS - 1) / KEYS, end_old = min(end, context / KEYS);
        int ahead = 0;
#pragma unroll
        for (; ahead < STAGES - 1 && first + ahead * WARPS < end_old; ahead++) {
            load_keys(first + ahead * WARPS, ahead);
            copy_commit();
        }
        if (waits) wait_for_predecessor();
        load_queries();
#pragma unroll
        for (; ahead < STAGES - 1; ahead++) {
            if (first + ahead * WARPS < end) load_keys(first + ahead * WARPS, ahead);
            copy_commit();
        }
        weights[0] = weights[1] = Weight{-INFINITY, 0.f};
#pragma unroll
        for (int j = 0; j < D / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
        __syncthreads();
        uint32_t q[D / 16][4];
#pragma unroll
        for (int step = 0; step < D / 16; step++) load_matrices(place(shared, lane % 16, step * 2 + lane / 16), q[step]);
        int stage = 0;
        for (int block = first; block < end; block += WARPS) {
            const int ahead = block + (STAGES - 1) * WARPS;
            if (ahead < end) load_keys(ahead, (stage + STAGES - 1) % STAGES);
            copy_commit();
            copy_wait<STAGES - 1>();
            __syncwarp();
            take(block, stage, q);
            __syncwarp();
            stage = (stage + 1) % STAGES;
        }
        copy_wait<0>();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float& sum = weights[half].sum;
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        }
        __syncthreads();
    }

    // The warps' results to shared memory, then those of row r and value d (and the next) together.
    __device__ __forceinline__ void gather(float* results, Weight (*of_warps)[ROWS]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = lane / 4 + half * 8;
            if (r >= rows) continue;
            if (lane % 4 == 0) of_warps[warp][r] = weights[half];
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                *reinterpret_cast<float2*>(results + (warp * ROWS + r) * D + j * 8 + lane % 4 * 2) = make_float2(o[j][half * 2], o[j][half * 2 + 1]);
            }
        }
        __syncthreads();
    }

    __device__ __forceinline__ void write(int r, int d, float2 sum, float weight) const {
        const float factor = weight > 0.f ? 1.f / weight : 0.f;
        const size_t token = start + r / group_size;
        bf16* to = a.out + (token * a.q_heads + kv_head * group_size + r % group_size) * D + d;
        *reinterpret_cast<uint32_t*>(to) = pack(sum.x * factor, sum.y * factor);
    }

    // What keys that rows share gave meets what this block has, of row r and value d (and the next).
    __device__ __forceinline__ void meet_shared(int r, int d, float2& sum, Weight& total) const {
        const int parts = item.n_partials - 1;
        for (int first = 0; first < parts; first += MEET) {
            float2 weight[MEET], more[MEET];
#pragma unroll
            for (int p = 0; p < MEET; p++) {
                if (first + p >= parts) continue;
                const size_t from = ((size_t)(item.partial_first + first + p) * a.kv_heads + kv_head) * ROWS + r;
                weight[p] = __ldcg(a.partial_ml + from);
                more[p] = __ldcg(reinterpret_cast<const float2*>(a.partial_o + from * D + d));
            }
#pragma unroll
            for (int p = 0; p < MEET; p++) {
                if (first + p < parts) add(sum, total, more[p], Weight{weight[p].x, weight[p].y});
            }
        }
    }

    // The row's parts, of this block and of others, to the output.
    __device__ __forceinline__ void merge() const {
        for (int index = threadIdx.x; index < rows * (D / 4); index += THREADS) {
            const int r = index / (D / 4), d = index % (D / 4) * 4;
            Weight total = {-INFINITY, 0.f};
            float2 low = make_float2(0.f, 0.f), high = low;
            for (int first = 0; first < item.n_partials; first += MEET) {
                float2 weight[MEET];
                float4 more[MEET];
#pragma unroll
                for (int p = 0; p < MEET; p++) {
                    const bool real = first + p < item.n_partials;
                    const size_t from = ((size_t)(item.partial_first + (real ? first + p : 0)) * a.kv_heads + kv_head) * ROWS + r;
                    weight[p] = __ldcg(a.partial_ml + from);
                    more[p] = __ldcg(reinterpret_cast<const float4*>(a.partial_o + from * D + d));
                    if (!real) weight[p] = make_float2(-INFINITY, 0.f);
                }
#pragma unroll
                for (int p = 0; p < MEET; p++) {
                    const float2 factors = meet(total, Weight{weight[p].x, weight[p].y});
                    low = make_float2(low.x * factors.x + more[p].x * factors.y, low.y * factors.x + more[p].y * factors.y);
                    high = make_float2(high.x * factors.x + more[p].z * factors.y, high.y * factors.x + more[p].w * factors.y);
                }
            }
            write(r, d, low, total.sum);
            write(r, d + 2, high, total.sum);
        }
    }
};

// True in all threads of the block that is the last of `n` to arrive; the ticket is then as before.
__device__ __forceinline__ bool is_last(int* ticket, int n) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(ticket, 1) == n - 1;
        if (last) *ticket = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// `SHARES`: there may be rows some of whose keys attn_shared has taken.
template <int D, int STAGES, bool SHARES>
__device__ __forceinline__ void decode(const Decode& a) {
    extern __shared__ __align__(128) char memory[];
    __shared__ Weight of_warps[WARPS][ROWS];
    typedef Run<D, STAGES> Part;
    float* results = reinterpret_cast<float*>(memory + Part::Q_BYTES);
    // There is room for as many items as there are blocks: the first is on its way with their number.
    DecodeItem item = a.items[blockIdx.x];
    const int n = a.counts[N_DECODE + a.group];
    if (blockIdx.x >= n) wait_for_predecessor();
    for (int i = blockIdx.x; i < n; i += gridDim.x) {
        if (i != blockIdx.x) item = a.items[i];
        Part run(a, item, shared_address(memory));
        run.walk(i == blockIdx.x);
        run.gather(results, of_warps);
        const size_t place = ((size_t)item.partial * a.kv_heads + run.kv_head) * ROWS;
        for (int index = threadIdx.x; index < run.rows * (D / 2); index += THREADS) {
            const int r = index / (D / 2), d = index % (D / 2) * 2;
            Weight total = of_warps[0][r];
            float2 sum = *reinterpret_cast<const float2*>(results + r * D + d);
#pragma unroll
            for (int warp = 1; warp < WARPS; warp++) add(sum, total, *reinterpret_cast<const float2*>(results + (warp * ROWS + r) * D + d), of_warps[warp][r]);
            if (item.partial < 0) {
                if (SHARES) run.meet_shared(r, d, sum, total);
                run.write(r, d, sum, total.sum);
                continue;
            }
            *reinterpret_cast<float2*>(a.partial_o + (place + r) * D + d) = sum;
            if (d == 0) a.partial_ml[place + r] = make_float2(total.max, total.sum);
        }
        if (item.partial >= 0 && is_last(a.tickets + (size_t)item.row * a.kv_heads + run.kv_head, item.n_runs)) run.merge();
        __syncthreads();
    }
}

#define DECODE(NAME, D, STAGES, SHARES)                                                                                                \
    KERNEL __launch_bounds__(THREADS) NAME(const int* counts, int group, const int* tables, const DecodeItem* items, const bf16* qkv,  \
                                           int qkv_stride, const bf16* k, const bf16* v, bf16* out, float* partial_o,                  \
                                           float2* partial_ml, int* tickets, int q_heads, int kv_heads, float scale, int window) {     \
        release_successor();                                                                                                           \
        const Decode a = {counts, group, tables, items, qkv, qkv_stride, k, v, out, partial_o, partial_ml, tickets, q_heads, kv_heads, \
                          scale, window};                                                                                              \
        decode<D, STAGES, SHARES>(a);                                                                                                  \
    }

DECODE(attn_decode_64, 64, 4, false)
DECODE(attn_decode_128, 128, 3, false)
DECODE(attn_decode_256, 256, 2, false)
// There is an attn_shared for these.
DECODE(attn_decode_sharing_64, 64, 4, true)
DECODE(attn_decode_sharing_128, 128, 3, true)
