// Attention over the paged KV cache. A block has query rows of one KV head: (token, head of the group), 16 a warp, so that
// the rows of the tensor cores are filled whatever the group.
//
// Keys are walked upward in tiles of 32 by absolute position, with a running maximum; every 256 keys, a chunk, the result is
// closed and merged to what lies before it. attn_whole does so for a tile of rows in one block; attn_split has a block per
// chunk and attn_merge the merging. A row's bits are the same either way and whatever rows are beside it.
#include "common.cuh"

constexpr int KEYS = 32, CHUNK = 256, TILES_PER_CHUNK = CHUNK / KEYS, SPLIT_ROWS = 16;
constexpr int KV_BF16 = 0, KV_E4M3 = 1, KV_E5M2 = 2;

struct Attention {
    const int* counts;
    int group;
    const RowMeta* rows;
    const int* tables;
    const AttnItem* items;
    const bf16* qkv;
    int qkv_stride;
    const void *k, *v;
    bf16* out;
    float* partial_o;
    float2* partial_ml;
    int q_heads, kv_heads;
    float scale;
    int window;
};

// Maximum (of scores times log2 e), sum of weights and weighted values of some keys, for one query row.
struct Weight {
    float max, sum;
};

// Factors for what was there and for what comes on top; `total` becomes that of both. Nothing may come on top.
__device__ __forceinline__ float2 merge(Weight& total, const Weight& more) {
    if (more.max == -INFINITY) return make_float2(1.f, 0.f);
    const float max = fmaxf(total.max, more.max);
    const float2 factors = make_float2(exp2f(total.max - max), exp2f(more.max - max));
    total = Weight{max, __fmaf_rn(factors.x, total.sum, __fmul_rn(factors.y, more.sum))};
    return factors;
}

__device__ __forceinline__ float merged(float2 factors, float before, float more) {
    return __fmaf_rn(factors.x, before, __fmul_rn(factors.y, more));
}

__device__ __forceinline__ float inverse(float sum) {
    return sum > 0.f ? __frcp_rn(sum) : 0.f;
}

__device__ __forceinline__ uint32_t widen(uint16_t pair, int dtype) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(pair, dtype == KV_E4M3 ? __NV_E4M3 : __NV_E5M2);
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    return pack(values.x, values.y);
}

// What a block computes of one item.
template <int D, int DTYPE, int WARPS, int STAGES>
struct Tile {
    static constexpr int ROWS = 16 * WARPS, THREADS = 32 * WARPS, UNITS = D / 8, ROW_BYTES = D * 2, STAGE_BYTES = 2 * KEYS * ROW_BYTES;
    static constexpr int Q_BYTES = ROWS * ROW_BYTES, SHARED_BYTES = Q_BYTES + STAGES * STAGE_BYTES;

    // Unrolled as far as registers go: sums of 256 values a row take half of them.
    static constexpr int SCORE_STEPS = D > 128 ? 2 : D / 16, LOAD_STEPS = D > 128 ? 2 : 4;

    const Attention& a;
    const uint32_t shared;
    // The row's blocks, by logical index.
    const int* table;
    const int kv_head, group_size, start, context, q_start, tokens, lane, warp;
    int low, high;
    float o[D / 8][4];
    Weight weights[2];

    __device__ __forceinline__ Tile(const Attention& a, const AttnItem& item, uint32_t shared)
        : a(a), shared(shared), table(a.tables + a.rows[item.row].table_offset[a.group] - a.rows[item.row].table_first[a.group]),
          kv_head(blockIdx.y), group_size(a.q_heads / a.kv_heads), start(a.rows[item.row].start), context(a.rows[item.row].context),
          q_start(item.q_start), tokens(min(a.rows[item.row].len - item.q_start, ROWS / (a.q_heads / a.kv_heads))),
          lane(threadIdx.x % 32), warp(threadIdx.x / 32) {
        const int first = context + q_start;
        low = a.window > 0 ? max(0, first - a.window + 1) : 0;
        high = first + tokens;
    }

    // Address of 16 bytes of a row; rows are rotated so that eight of them lie in different banks.
    __device__ __forceinline__ uint32_t place(uint32_t base, int r, int unit) const {
        return base + r * ROW_BYTES + (unit ^ (r & 7)) * 16;
    }

    __device__ __forceinline__ int token_of(int r) const { return q_start + r / group_size; }
    __device__ __forceinline__ int head_of(int r) const { return kv_head * group_size + r % group_size; }
    __device__ __forceinline__ bool is_row(int r) const { return r < tokens * group_size; }

    __device__ __forceinline__ void load_queries() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
            const int r = i / UNITS, unit = i % UNITS;
            const bool real = is_row(r);
            const size_t token = start + (real ? token_of(r) : 0);
            copy_async(place(shared, r, unit), a.qkv + token * a.qkv_stride + (real ? head_of(r) : 0) * D + unit * 8, real);
        }
    }

    // Keys and values of one tile. What no query of this item sees is zero: it may never have been written.
    __device__ __forceinline__ void load_keys(int tile, int stage) const {
        const uint32_t keys = shared + Q_BYTES + stage * STAGE_BYTES, values = keys + KEYS * ROW_BYTES;
#pragma unroll LOAD_STEPS
        for (int i = threadIdx.x; i < KEYS * UNITS; i += THREADS) {
            const int key = i / UNITS, unit = i % UNITS, position = tile * KEYS + key;
            const bool real = position >= low && position < high;
            const size_t block = real ? table[position / BLOCK_TOKENS] : 0;
            const size_t index = ((block * a.kv_heads + kv_head) * BLOCK_TOKENS + position % BLOCK_TOKENS) * D + unit * 8;
            if (DTYPE == KV_BF16) {
                copy_async(place(keys, key, unit), static_cast<const bf16*>(a.k) + index, real);
                copy_async(place(values, key, unit), static_cast<const bf16*>(a.v) + index, real);
            } else {
                store_wide(place(keys, key, unit), static_cast<const uint8_t*>(a.k) + index, real);
                store_wide(place(values, key, unit), static_cast<const uint8_t*>(a.v) + index, real);
            }
        }
    }

    __device__ __forceinline__ static void store_wide(uint32_t to, const uint8_t* from, bool real) {
        uint2 bytes = make_uint2(0, 0);
        if (real) bytes = *reinterpret_cast<const uint2*>(from);
        const uint32_t w[4] = {widen(bytes.x & 0xffff, DTYPE), widen(bytes.x >> 16, DTYPE), widen(bytes.y & 0xffff, DTYPE), widen(bytes.y >> 16, DTYPE)};
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]) : "memory");
    }

    __device__ __forceinline__ void begin_chunk() {
        weights[0] = weights[1] = Weight{-INFINITY, 0.f};
#pragma unroll
        for (int j = 0; j < D / 8; j++) o[j][0] = o[j][1] = o[j][2] = o[j][3] = 0.f;
    }

    __device__ __forceinline__ void scores(int stage, float (&s)[KEYS / 8][4]) const {
        const uint32_t keys = shared + Q_BYTES + stage * STAGE_BYTES;
#pragma unroll
        for (int j = 0; j < KEYS / 8; j++) s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0.f;
        const int matrix = lane / 8;
#pragma unroll SCORE_STEPS
        for (int step = 0; step < D / 16; step++) {
            uint32_t q[4];
            load_matrices(place(shared, warp * 16 + lane % 16, step * 2 + lane / 16), q);
#pragma unroll
            for (int pair = 0; pair < KEYS / 16; pair++) {
                uint32_t k[4];
                load_matrices(place(keys, pair * 16 + matrix / 2 * 8 + lane % 8, step * 2 + matrix % 2), k);
                multiply(s[2 * pair], q[0], q[1], q[2], q[3], k[0], k[1]);
                multiply(s[2 * pair + 1], q[0], q[1], q[2], q[3], k[2], k[3]);
            }
        }
    }

    // Scores outside a row's sight become minus infinity, the others base-2 exponents.
    __device__ __forceinline__ void mask(int tile, float (&s)[KEYS / 8][4]) const {
        const float factor = a.scale * LOG2_E;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = warp * 16 + lane / 4 + half * 8;
            const int last = is_row(r) ? context + token_of(r) : -1;
            const int first = a.window > 0 ? last - a.window + 1 : 0;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int position = tile * KEYS + j * 8 + lane % 4 * 2 + c;
                    float& x = s[j][half * 2 + c];
                    x = position <= last && position >= first ? x * factor : -INFINITY;
                }
            }
        }
    }

    // Scores to weights, with what was summed before brought to the new maximum.
    __device__ __forceinline__ void soften(float (&s)[KEYS / 8][4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = -INFINITY;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) largest = fmaxf(largest, fmaxf(s[j][half * 2], s[j][half * 2 + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
            Weight& weight = weights[half];
            const float max = fmaxf(weight.max, largest), base = max == -INFINITY ? 0.f : max;
            const float keep = exp2f(weight.max - base);
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float& x = s[j][half * 2 + c];
                    x = exp2f(x - base);
                    sum = __fadd_rn(sum, x);
                }
            }
            weight = Weight{max, __fmaf_rn(weight.sum, keep, sum)};
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                o[j][half * 2] = __fmul_rn(o[j][half * 2], keep);
                o[j][half * 2 + 1] = __fmul_rn(o[j][half * 2 + 1], keep);
            }
        }
    }

    __device__ __forceinline__ void add_values(int stage, const float (&p)[KEYS / 8][4]) {
        const uint32_t values = shared + Q_BYTES + stage * STAGE_BYTES + KEYS * ROW_BYTES;
        const int matrix = lane / 8;
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            const float(&left)[4] = p[2 * step], (&right)[4] = p[2 * step + 1];
            const uint32_t w[4] = {pack(left[0], left[1]), pack(left[2], left[3]), pack(right[0], right[1]), pack(right[2], right[3])};
#pragma unroll
            for (int pair = 0; pair < D / 16; pair++) {
                uint32_t v[4];
                load_matrices_transposed(place(values, step * 16 + matrix % 2 * 8 + lane % 8, pair * 2 + matrix / 2), v);
                multiply(o[2 * pair], w[0], w[1], w[2], w[3], v[0], v[1]);
                multiply(o[2 * pair + 1], w[0], w[1], w[2], w[3], v[2], v[3]);
            }
        }
    }

    // Each lane has summed its own keys so far.
    __device__ __forceinline__ void end_chunk() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float& sum = weights[half].sum;
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
            sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
        }
    }

    // Walks the keys of chunks [first, end) and calls `close` behind each chunk.
    template <typename Close>
    __device__ __forceinline__ void walk(int first, int end, Close close) {
        const int begin_tile = max(first * TILES_PER_CHUNK, low / KEYS), end_tile = min(end * TILES_PER_CHUNK, (high + KEYS - 1) / KEYS);
        load_queries();
#pragma unroll
        for (int ahead = 0; ahead < STAGES - 1; ahead++) {
            if (begin_tile + ahead < end_tile) load_keys(begin_tile + ahead, ahead);
            copy_commit();
        }
        begin_chunk();
        for (int tile = begin_tile; tile < end_tile; tile++) {
            const int ahead = tile + STAGES - 1;
            if (ahead < end_tile) load_keys(ahead, (ahead - begin_tile) % STAGES);
            copy_commit();
            copy_wait<STAGES - 1>();
            __syncthreads();
            const int stage = (tile - begin_tile) % STAGES;
            float s[KEYS / 8][4];
            scores(stage, s);
            mask(tile, s);
            soften(s);
            add_values(stage, s);
            if ((tile + 1) % TILES_PER_CHUNK == 0 || tile + 1 == end_tile) {
                end_chunk();
                close();
                begin_chunk();
            }
            __syncthreads();
        }
    }

    // Calls `put(half, r, d, first of two values)` for each pair of values of this lane's rows.
    template <typename Put>
    __device__ __forceinline__ void each_pair(Put put) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = warp * 16 + lane / 4 + half * 8;
            if (!is_row(r)) continue;
#pragma unroll
            for (int j = 0; j < D / 8; j++) put(half, r, j * 8 + lane % 4 * 2, o[j][half * 2], o[j][half * 2 + 1]);
        }
    }

    __device__ __forceinline__ void write(int r, int d, float x, float y, float factor) const {
        const size_t token = start + token_of(r);
        bf16* to = a.out + (token * a.q_heads + head_of(r)) * D + d;
        *reinterpret_cast<uint32_t*>(to) = pack(x * factor, y * factor);
    }
};

template <int D, int DTYPE>
__device__ __forceinline__ void split(const Attention& a) {
    extern __shared__ __align__(128) char memory[];
    const int n = a.counts[N_SPLIT + a.group];
    for (int i = blockIdx.x; i < n; i += gridDim.x) {
        const AttnItem item = a.items[i];
        Tile<D, DTYPE, 1, 2> tile(a, item, shared_address(memory));
        tile.walk(item.chunk, item.chunk + 1, [&] {
            if (item.partial < 0) {
                const float factors[2] = {inverse(tile.weights[0].sum), inverse(tile.weights[1].sum)};
                tile.each_pair([&](int half, int r, int d, float x, float y) { tile.write(r, d, x, y, factors[half]); });
                return;
            }
            const size_t first = ((size_t)item.partial * a.kv_heads + tile.kv_head) * SPLIT_ROWS;
            tile.each_pair([&](int half, int r, int d, float x, float y) {
                *reinterpret_cast<float2*>(a.partial_o + (first + r) * D + d) = make_float2(x, y);
                if (d < 8 && tile.lane % 4 == 0) a.partial_ml[first + r] = make_float2(tile.weights[half].max, tile.weights[half].sum);
            });
        });
    }
}

template <int D, int DTYPE, int WARPS, int STAGES>
__device__ __forceinline__ void whole(const Attention& a) {
    extern __shared__ __align__(128) char memory[];
    typedef Tile<D, DTYPE, WARPS, STAGES> Part;
    float* totals = reinterpret_cast<float*>(memory + Part::SHARED_BYTES);
    const int n = a.counts[N_WHOLE + a.group];
    for (int i = blockIdx.x; i < n; i += gridDim.x) {
        const AttnItem item = a.items[i];
        Part tile(a, item, shared_address(memory));
        Weight total[2] = {{-INFINITY, 0.f}, {-INFINITY, 0.f}};
        tile.walk(item.chunk, item.partial, [&] {
            const bool is_first[2] = {total[0].max == -INFINITY, total[1].max == -INFINITY};
            const float2 factors[2] = {merge(total[0], tile.weights[0]), merge(total[1], tile.weights[1])};
            tile.each_pair([&](int half, int r, int d, float x, float y) {
                float2* to = reinterpret_cast<float2*>(totals + r * D + d);
                const float2 before = is_first[half] ? make_float2(0.f, 0.f) : *to;
                *to = make_float2(merged(factors[half], before.x, x), merged(factors[half], before.y, y));
            });
        });
        const float factors[2] = {inverse(total[0].sum), inverse(total[1].sum)};
        tile.each_pair([&](int half, int r, int d, float, float) {
            const float2 sum = *reinterpret_cast<const float2*>(totals + r * D + d);
            tile.write(r, d, sum.x, sum.y, factors[half]);
        });
        __syncthreads();
    }
}

// Closes rows whose chunks lie in different blocks. Grid: items x KV heads.
template <int D>
__device__ __forceinline__ void merge_partials(const int* counts, int group, const RowMeta* rows, const MergeItem* items, const float* partial_o,
                                               const float2* partial_ml, bf16* out, int q_heads, int kv_heads) {
    const int n = counts[N_MERGE + group], group_size = q_heads / kv_heads, kv_head = blockIdx.y;
    for (int i = blockIdx.x; i < n; i += gridDim.x) {
        const MergeItem item = items[i];
        const RowMeta row = rows[item.row];
        const int used = min(row.len - item.q_start, SPLIT_ROWS / group_size) * group_size;
        for (int index = threadIdx.x; index < used * (D / 2); index += blockDim.x) {
            const int r = index / (D / 2), d = index % (D / 2) * 2;
            Weight total = {-INFINITY, 0.f};
            float2 sum = make_float2(0.f, 0.f);
            for (int p = 0; p < item.n_partials; p++) {
                const size_t place = ((size_t)(item.partial_first + p) * kv_heads + kv_head) * SPLIT_ROWS + r;
                const float2 weight = partial_ml[place], x = *reinterpret_cast<const float2*>(partial_o + place * D + d);
                const float2 factors = merge(total, Weight{weight.x, weight.y});
                sum = make_float2(merged(factors, sum.x, x.x), merged(factors, sum.y, x.y));
            }
            const float factor = inverse(total.sum);
            const size_t token = row.start + item.q_start + r / group_size;
            bf16* to = out + (token * q_heads + kv_head * group_size + r % group_size) * D + d;
            *reinterpret_cast<uint32_t*>(to) = pack(sum.x * factor, sum.y * factor);
        }
    }
}

#define ARGUMENTS                                                                                                                            \
    const int *counts, int group, const RowMeta *rows, const int *tables, const AttnItem *items, const bf16 *qkv, int qkv_stride,            \
        const void *k, const void *v, bf16 *out, float *partial_o, float2 *partial_ml, int q_heads, int kv_heads, float scale, int window
#define ATTENTION {counts, group, rows, tables, items, qkv, qkv_stride, k, v, out, partial_o, partial_ml, q_heads, kv_heads, scale, window}

#define KERNELS(D, NAME, DTYPE, WARPS, STAGES)                                            \
    KERNEL __launch_bounds__(32) attn_split_##D##_##NAME(ARGUMENTS) {                     \
        wait_for_predecessor();                                                           \
        const Attention a = ATTENTION;                                                    \
        split<D, DTYPE>(a);                                                               \
    }                                                                                     \
    KERNEL __launch_bounds__(32 * WARPS) attn_whole_##D##_##NAME(ARGUMENTS) {             \
        wait_for_predecessor();                                                           \
        const Attention a = ATTENTION;                                                    \
        whole<D, DTYPE, WARPS, STAGES>(a);                                                \
    }

#define HEAD_DIM(D, WARPS, STAGES)                                                                                                        \
    KERNELS(D, bf16, KV_BF16, WARPS, STAGES)                                                                                              \
    KERNELS(D, e4m3, KV_E4M3, WARPS, STAGES)                                                                                              \
    KERNELS(D, e5m2, KV_E5M2, WARPS, STAGES)                                                                                              \
    KERNEL __launch_bounds__(128) attn_merge_##D(const int* counts, int group, const RowMeta* rows, const MergeItem* items,               \
                                                 const float* partial_o, const float2* partial_ml, bf16* out, int q_heads, int kv_heads) { \
        wait_for_predecessor();                                                                                                           \
        merge_partials<D>(counts, group, rows, items, partial_o, partial_ml, out, q_heads, kv_heads);                                     \
    }

HEAD_DIM(64, 4, 2)
HEAD_DIM(128, 4, 2)
HEAD_DIM(256, 2, 1)
