// Attention of rows with many queries on Hopper: two warp groups with 64 query rows each, tiles of 128 keys, scores and
// values through wgmma. A query row is a (token, head of the group) of one KV head. Kernels of other cards: attention.cu.
#include "wgmma.cuh"

constexpr int THREADS = 256, ROWS = 128, KEYS = 128, STAGES = 2, PANEL = 64, PANEL_ROW_BYTES = PANEL * 2;
constexpr float LOG2_E = 1.4426950408889634f;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <int D>
struct Prefill {
    static constexpr int UNITS = D / 8, Q_BYTES = ROWS * D * 2, HALF_BYTES = KEYS * D * 2, STAGE_BYTES = 2 * HALF_BYTES;

    const int* table;
    const bf16 *qkv, *k, *v;
    bf16* out;
    uint32_t shared;
    int qkv_stride, q_heads, kv_heads, kv_head, group_size, start, position, rows, low, high, window;
    float factor;

    // Address of 16 bytes of a matrix kept as panels of 64 columns.
    __device__ __forceinline__ static uint32_t place(uint32_t base, int n_rows, int r, int unit) {
        return base + unit / 8 * (n_rows * PANEL_ROW_BYTES) + r * PANEL_ROW_BYTES + (unit % 8 ^ (r & 7)) * 16;
    }

    __device__ __forceinline__ void load_queries() const {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * UNITS; i += THREADS) {
            const int r = i / UNITS, unit = i % UNITS, used = r < rows ? r : 0;
            const size_t token = start + used / group_size, head = kv_head * group_size + used % group_size;
            copy_async(place(shared, ROWS, r, unit), qkv + token * qkv_stride + head * D + unit * 8, r < rows);
        }
    }

    // One of keys and values. What no query sees is zero: it may never have been written.
    __device__ __forceinline__ void load(const bf16* cache, int tile, uint32_t to) const {
#pragma unroll 4
        for (int i = threadIdx.x; i < KEYS * UNITS; i += THREADS) {
            const int key = i / UNITS, unit = i % UNITS, at = tile * KEYS + key;
            const bool real = at >= low && at < high;
            const size_t block = real ? table[at / BLOCK_TOKENS] : 0;
            copy_async(place(to, KEYS, key, unit), cache + ((block * kv_heads + kv_head) * BLOCK_TOKENS + at % BLOCK_TOKENS) * D + unit * 8, real);
        }
    }

    __device__ __forceinline__ uint32_t keys_of(int stage) const { return shared + Q_BYTES + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint32_t values_of(int stage) const { return keys_of(stage) + HALF_BYTES; }

    __device__ __forceinline__ void scores(int stage, float (&s)[KEYS / 2]) const {
        const uint32_t queries = shared + threadIdx.x / 128 * (64 * PANEL_ROW_BYTES), keys = keys_of(stage);
        multiplications_begin();
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            const uint32_t panel = step / 4, column = step % 4 * 32;
            multiply_shared(s, matrix_at(queries + panel * (ROWS * PANEL_ROW_BYTES) + column, 16),
                            matrix_at(keys + panel * (KEYS * PANEL_ROW_BYTES) + column, 16), step > 0);
        }
        multiplications_commit();
    }

    __device__ __forceinline__ void mask(int tile, float (&s)[KEYS / 2]) const {
        const int lane = threadIdx.x % 32, first_key = tile * KEYS + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = threadIdx.x / 32 * 16 + lane / 4 + half * 8;
            const int last = r < rows ? position + r / group_size : -1, first = window > 0 ? last - window + 1 : 0;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int at = first_key + j * 8 + c;
                    float& x = s[j * 4 + half * 2 + c];
                    x = at <= last && at >= first ? x : -INFINITY;
                }
            }
        }
    }

    // Scores to weights against a running maximum; `keep` is what earlier sums are multiplied with.
    __device__ __forceinline__ void soften(float (&s)[KEYS / 2], float (&max)[2], float (&sum)[2], float (&keep)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = max[half];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) largest = fmaxf(largest, fmaxf(s[j * 4 + half * 2], s[j * 4 + half * 2 + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
            const float base = largest == -INFINITY ? 0.f : largest * factor;
            keep[half] = exp2_fast(max[half] * factor - base);
            max[half] = largest;
            float total = 0.f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float& x = s[j * 4 + half * 2 + c];
                    x = exp2_fast(fmaf(x, factor, -base));
                    total += x;
                }
            }
            sum[half] = sum[half] * keep[half] + total;
        }
    }

    __device__ __forceinline__ static void rescale(float (&o)[D / 2], const float (&keep)[2]) {
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] *= keep[i / 2 % 2];
    }

    __device__ __forceinline__ void add_values(int stage, const uint32_t (&p)[KEYS / 4], float (&o)[D / 2]) const {
        multiplications_begin();
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            multiply_registers(o, p[step * 4], p[step * 4 + 1], p[step * 4 + 2], p[step * 4 + 3],
                               matrix_at(values_of(stage) + step * 2048, KEYS * PANEL_ROW_BYTES));
        }
        multiplications_commit();
    }

    __device__ __forceinline__ void run() const {
        const int first_tile = low / KEYS, end_tile = (high + KEYS - 1) / KEYS;
        load_queries();
        load(k, first_tile, keys_of(0));
        copy_commit();
        load(v, first_tile, values_of(0));
        copy_commit();
        float o[D / 2] = {}, max[2] = {-INFINITY, -INFINITY}, sum[2] = {};
        for (int tile = first_tile; tile < end_tile; tile++) {
            const int stage = (tile - first_tile) % STAGES;
            copy_wait<1>();
            arrived();
            float s[KEYS / 2];
            scores(stage, s);
            if (tile + 1 < end_tile) load(k, tile + 1, keys_of(stage ^ 1));
            copy_commit();
            multiplications_wait<0>();
            if (tile * KEYS + KEYS > position + 1 || (window > 0 && tile * KEYS <= position + rows / group_size - window)) mask(tile, s);
            float keep[2];
            soften(s, max, sum, keep);
            rescale(o, keep);
            uint32_t p[KEYS / 4];
#pragma unroll
            for (int i = 0; i < KEYS / 4; i++) p[i] = pack(s[2 * i], s[2 * i + 1]);
            copy_wait<1>();
            arrived();
            add_values(stage, p, o);
            if (tile + 1 < end_tile) load(v, tile + 1, values_of(stage ^ 1));
            copy_commit();
            multiplications_wait<0>();
        }
        copy_wait<0>();
        write(o, sum);
        __syncthreads();
    }

    // All threads' copies are in shared memory and seen by the matrix instructions.
    __device__ __forceinline__ static void arrived() {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncthreads();
    }

    __device__ __forceinline__ void write(const float (&o)[D / 2], float (&sum)[2]) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 1);
            sum[half] += __shfl_xor_sync(ALL_LANES, sum[half], 2);
            const int r = threadIdx.x / 32 * 16 + lane / 4 + half * 8;
            if (r >= rows) continue;
            const float inverse = sum[half] > 0.f ? 1.f / sum[half] : 0.f;
            const size_t token = start + r / group_size, head = kv_head * group_size + r % group_size;
            bf16* to = out + (token * q_heads + head) * D + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < D / 8; j++) {
                *reinterpret_cast<uint32_t*>(to + j * 8) = pack(o[j * 4 + half * 2] * inverse, o[j * 4 + half * 2 + 1] * inverse);
            }
        }
    }
};

#endif

template <int D>
__device__ __forceinline__ void prefill(const int* counts, int group, const RowMeta* rows, const int* tables, const AttnItem* items, const bf16* qkv,
                                        int qkv_stride, const bf16* k, const bf16* v, bf16* out, int q_heads, int kv_heads, float scale, int window) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    extern __shared__ __align__(1024) char memory[];
    const int n = counts[N_WHOLE + group], group_size = q_heads / kv_heads;
    for (int i = blockIdx.x; i < n; i += gridDim.x) {
        const AttnItem item = items[i];
        const RowMeta* row = rows + item.row;
        const int tokens = min(row->len - item.q_start, ROWS / group_size), position = row->context + item.q_start;
        const Prefill<D> tile = {tables + row->table_offset[group] - row->table_first[group], qkv, k, v, out, shared_address(memory), qkv_stride, q_heads,
                                 kv_heads, (int)blockIdx.y, group_size, row->start + item.q_start, position, tokens * group_size,
                                 window > 0 ? max(0, position - window + 1) : 0, position + tokens, window, scale * LOG2_E};
        tile.run();
    }
#endif
}

#define HEAD_DIM(D)                                                                                                                          \
    KERNEL __launch_bounds__(THREADS, 1) attn_prefill_##D(const int* counts, int group, const RowMeta* rows, const int* tables,              \
                                                          const AttnItem* items, const bf16* qkv, int qkv_stride, const bf16* k,             \
                                                          const bf16* v, bf16* out, int q_heads, int kv_heads, float scale, int window) {    \
        wait_for_predecessor();                                                                                                              \
        prefill<D>(counts, group, rows, tables, items, qkv, qkv_stride, k, v, out, q_heads, kv_heads, scale, window);                        \
    }

HEAD_DIM(64)
HEAD_DIM(128)
