// Attention of rows with many queries on Hopper. A query row is a (token, head of the group) of one KV head, an item is 128 of them.
// A block takes items until none is left: one warp claims them, two have queries, keys and values brought by the copy engine, and two
// warp groups multiply 64 query rows each. The design is FlashAttention-3's (arXiv 2407.08608), over paged KV. Other cards: attention.cu.
//
// attn_shared is the same of keys that decoding rows share: 128 query rows are of as many sequences as it takes, nothing is masked, and
// sums are left for decode.cu, where they meet those of the rows' own keys (Hydragen, arXiv 2402.05099).
#include "prefill.cuh"
#include "wgmma.cuh"

constexpr int THREADS = 384;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)


// One of the warp groups that multiply. Scores of a tile are worked out and softened while weights of the tile before meet their
// values, also where the one begins an item and the other ends one.
template <int D, bool IS_SHARED>
struct Consumer {
    const Params& p;
    Shared<D>& shared;
    const int group;
    int lane;
    // Of this lane's two query rows: their place among the group's, token and head of the item's.
    int rows[2], tokens[2], heads[2];

    Work work;
    // The tile whose weights are at hand, and where its values and the next tile's keys stand.
    int turn, tile;
    bool is_first;
    Place values, keys;

    uint32_t queries[D / 4], weights[KEYS / 4];
    float s[KEYS / 2], o[D / 2], base[2], sum[2], keep[2];

    __device__ __forceinline__ Consumer(const Params& p, Shared<D>& shared, int group) : p(p), shared(shared), group(group) {
        lane = threadIdx.x % 32;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            rows[half] = group * 64 + threadIdx.x / 32 % 4 * 16 + lane / 4 + half * 8;
            tokens[half] = rows[half] / p.group_size, heads[half] = rows[half] % p.group_size;
        }
    }

    __device__ __forceinline__ void run() {
        work = next_work(shared, 0);
        if (work.rows == 0) return;
        turn = 0, tile = last_tile(work), is_first = true, keys = {0, 0}, values = {0, 0};
        take_queries();
        barrier_wait(shared.keys_full[0], 0);
        scores();
        multiplications_wait<0>();
        done_with_keys();
        if (!IS_SHARED) mask(work, tile);
        begin_item();
        clear_sums();
        soften();
        round_weights();
#pragma unroll 1
        while (step<false>()) {
            const int plain_end = IS_SHARED ? work.low / KEYS : p.window > 0 ? max(0, work.high - p.window + KEYS - 1) / KEYS : 0;
#pragma unroll 1
            while (tile > plain_end && (IS_SHARED || (!is_first && tile * KEYS <= work.place + 1))) step<true>();
        }
        barrier_wait(shared.values_full[values.stage], values.phase);
        add_values();
        multiplications_wait<0>();
        in_place(o);
        write(work, sum[0], sum[1], base);
    }

    // Values of this tile and scores of the next. `PLAIN`: that one is of the same item, and every query sees all of its keys.
    template <bool PLAIN>
    __device__ __forceinline__ bool step() {
        const bool is_last = !PLAIN && tile == work.low / KEYS;
        Work next = work;
        if (!PLAIN && !IS_SHARED && is_first) clear_unwritten();
        tile--;
        if (is_last) {
            next = next_work(shared, ++turn);
            if (next.rows == 0) return false;
            tile = last_tile(next);
            take_queries();
        }
        barrier_wait(shared.keys_full[keys.stage], keys.phase);
        scores();
        barrier_wait(shared.values_full[values.stage], values.phase);
        add_values();
        multiplications_wait<1>();
        done_with_keys();
        if (!PLAIN && !IS_SHARED && needs_mask(next, tile)) mask(next, tile);
        const float sums[2] = {sum[0], sum[1]}, bases[2] = {base[0], base[1]};
        if (is_last) begin_item();
        soften();
        const bool is_moved = __any_sync(ALL_LANES, keep[0] != 1.f || keep[1] != 1.f);
        // The assembler moves the wait ahead of all this arithmetic, but not ahead of a store.
        asm volatile("{.reg .pred never; setp.lt.f32 never, %0, 0f00000000; @never st.shared.f32 [%1], %0;}" ::"f"(sum[0] + sum[1]), "r"(0) : "memory");
        multiplications_wait<0>();
        in_place(o);
        release(shared.values_empty[values.stage]);
        values.advance();
        if (is_last) {
            write(work, sums[0], sums[1], bases);
            clear_sums();
        } else if (is_moved) {
#pragma unroll
            for (int i = 0; i < D / 2; i++) o[i] *= keep[i / 2 % 2];
        }
        round_weights();
        if (!PLAIN) work = next, is_first = is_last;
        return true;
    }

    __device__ __forceinline__ static int last_tile(const Work& work) { return (work.high - 1) / KEYS; }

    // What matrix instructions have left there is read after this only.
    template <int N>
    __device__ __forceinline__ static void in_place(float (&x)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
    }

    __device__ __forceinline__ void release(uint64_t& barrier) const {
        if (lane == 0) barrier_arrive(barrier);
    }

    __device__ __forceinline__ void done_with_keys() {
        in_place(s);
        release(shared.keys_empty[keys.stage]);
        keys.advance();
    }

    __device__ __forceinline__ void begin_item() {
        base[0] = base[1] = -INFINITY;
        sum[0] = sum[1] = 0.f;
    }

    __device__ __forceinline__ void clear_sums() {
#pragma unroll
        for (int i = 0; i < D / 2; i++) o[i] = 0.f;
    }

    // To registers: multiplied from there, they leave shared memory to the keys.
    __device__ __forceinline__ void take_queries() {
        barrier_wait(shared.queries_full, turn % 2);
        const int r = rows[0] - lane / 4 + lane % 16;
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            const int unit = step * 2 + lane / 16;
            uint32_t x[4];
            load_matrices(shared_address(shared.queries) + (unit / 8 * ROWS + r) * ROW_BYTES + (unit % 8 ^ (r & 7)) * 16, x);
#pragma unroll
            for (int i = 0; i < 4; i++) queries[step * 4 + i] = x[i];
        }
        __syncwarp();
        release(shared.queries_empty);
    }

    __device__ __forceinline__ void scores() {
        const uint64_t at = matrix_at(shared_address(shared.keys[keys.stage]), 16);
        multiplications_begin();
#pragma unroll
        for (int step = 0; step < D / 16; step++) {
            multiply_transposed(s, queries[step * 4], queries[step * 4 + 1], queries[step * 4 + 2], queries[step * 4 + 3],
                                at + (step / 4 * (KEYS * ROW_BYTES) + step % 4 * 32) / 16, step > 0);
        }
        multiplications_commit();
    }

    __device__ __forceinline__ void add_values() {
        const uint64_t at = matrix_at(shared_address(shared.values[values.stage]), KEYS * ROW_BYTES);
        multiplications_begin();
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            multiply_registers(o, weights[step * 4], weights[step * 4 + 1], weights[step * 4 + 2], weights[step * 4 + 3],
                               at + step * (16 * ROW_BYTES) / 16);
        }
        multiplications_commit();
    }

    // Values behind the last key, in its block: they may never have been written, and not even a weight of zero bears a NaN.
    __device__ __forceinline__ void clear_unwritten() {
        const int rest = -work.high & (BLOCK_TOKENS - 1), first = (work.high - 1) % KEYS + 1;
        if (rest == 0) return;
        barrier_wait(shared.values_full[values.stage], values.phase);
        for (int i = threadIdx.x % 128; i < rest * (D / 8); i += 128) {
            const int key = first + i / (D / 8), unit = i % (D / 8);
            bf16* to = shared.values[values.stage] + (unit / 8 * KEYS + key) * PANEL + unit % 8 * 8;
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    }

    __device__ __forceinline__ bool needs_mask(const Work& of, int tile) const {
        return tile * KEYS + KEYS > of.place + 1 || (p.window > 0 && tile * KEYS + p.window < of.high);
    }

    __device__ __forceinline__ void mask(const Work& of, int tile) {
        if (p.window > 0) {
            mask<true>(of, tile);
        } else {
            mask<false>(of, tile);
        }
    }

    template <bool HAS_WINDOW>
    __device__ __forceinline__ void mask(const Work& of, int tile) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int last = of.place + tokens[half] - tile * KEYS - lane % 4 * 2, before = last - p.window;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float& x = s[j * 4 + half * 2 + c];
                    x = j * 8 + c <= last && (!HAS_WINDOW || j * 8 + c > before) ? x : -INFINITY;
                }
            }
        }
    }

    // Scores to weights, as powers of two above a base. The base follows the largest score only where weights would grow beyond 2^8;
    // what was summed up before is then to be multiplied with `keep`.
    __device__ __forceinline__ void soften() {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = s[half * 2];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) largest = fmaxf(largest, fmaxf(s[j * 4 + half * 2], s[j * 4 + half * 2 + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2)) * p.factor;
            const float to = largest > base[half] + 8.f ? largest : base[half], from = to == -INFINITY ? 0.f : to;
            keep[half] = exp2_fast(base[half] - from);
            base[half] = to;
            float total = 0.f;
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float& x = s[j * 4 + half * 2 + c];
                    x = exp2_fast(fmaf(x, p.factor, -from));
                    total += x;
                }
            }
            sum[half] = sum[half] * keep[half] + total;
        }
    }

    __device__ __forceinline__ void round_weights() {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) weights[i] = pack(s[2 * i], s[2 * i + 1]);
    }

    __device__ __forceinline__ void write(const Work& of, float sum0, float sum1, const float (&bases)[2]) const {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = half ? sum1 : sum0;
            total += __shfl_xor_sync(ALL_LANES, total, 1);
            total += __shfl_xor_sync(ALL_LANES, total, 2);
            IS_SHARED ? write_part(of, half, total, bases[half]) : write_row(of, half, total);
        }
    }

    // For decode.cu, as its own blocks leave it.
    __device__ __forceinline__ void write_part(const Work& of, int half, float total, float base) const {
        const int quarter = lane % 4;
        const size_t place = ((size_t)(of.place + tokens[half] * of.stride) * p.kv_heads + of.kv_head) * PARTIAL_ROWS + heads[half];
        float* to = p.partial_o + place * D + quarter * 2;
        if (rows[half] < of.rows) {
            if (quarter == 0) p.partial_ml[place] = make_float2(base, total);
#pragma unroll
            for (int j = 0; j < D / 8; j++) *reinterpret_cast<float2*>(to + j * 8) = make_float2(o[j * 4 + half * 2], o[j * 4 + half * 2 + 1]);
        }
        __syncwarp();
    }

    // Four lanes have a row, each pairs of columns: they exchange them for eight columns each.
    __device__ __forceinline__ void write_row(const Work& of, int half, float total) const {
        const int quarter = lane % 4;
        const float inverse = total > 0.f ? 1.f / total : 0.f;
        const size_t token = of.start + tokens[half], head = of.kv_head * p.group_size + heads[half];
        bf16* to = p.out + (token * p.q_heads + head) * D + quarter * 8;
#pragma unroll
        for (int j = 0; j < D / 8; j += 4) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) x[i] = pack(o[(j + i) * 4 + half * 2] * inverse, o[(j + i) * 4 + half * 2 + 1] * inverse);
            exchange(x[0], x[1], quarter & 1, 1), exchange(x[2], x[3], quarter & 1, 1);
            exchange(x[0], x[2], quarter & 2, 2), exchange(x[1], x[3], quarter & 2, 2);
            if (rows[half] < of.rows) *reinterpret_cast<uint4*>(to + j * 8) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }

    // The lower lane's second against the upper lane's first.
    __device__ __forceinline__ static void exchange(uint32_t& first, uint32_t& second, bool is_upper, int distance) {
        const uint32_t other = __shfl_xor_sync(ALL_LANES, is_upper ? first : second, distance);
        (is_upper ? first : second) = other;
    }
};

template <int D, bool IS_SHARED>
__device__ __forceinline__ void attend(const Params& p, const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map) {
    extern __shared__ __align__(1024) char memory[];
    Shared<D>& shared = *reinterpret_cast<Shared<D>*>(memory);
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        prefetch_map(q_map), prefetch_map(k_map), prefetch_map(v_map);
        shared.init();
    }
    __syncthreads();
    wait_for_predecessor();
    if (group == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (warp == 0) fetch<D, true>(p, shared, k_map, q_map);
        if (warp == 1) fetch<D, false>(p, shared, v_map, q_map);
        if (warp == 2 && threadIdx.x % 32 == 0) plan<D, IS_SHARED>(p, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        Consumer<D, IS_SHARED>(p, shared, group - 1).run();
    }
}

#define RUN(D, IS_SHARED, ITEMS, SHARED_ITEMS, OUT, PARTIAL_O, PARTIAL_ML, WINDOW)                                                     \
    const Params p = {counts, tables, rows, ITEMS, SHARED_ITEMS, OUT, PARTIAL_O, PARTIAL_ML, group, q_heads, kv_heads,                 \
                      q_heads / kv_heads, WINDOW, scale * LOG2_E};                                                                     \
    attend<D, IS_SHARED>(p, q_map, k_map, v_map);

#else
#define RUN(...)
#endif

#define HEAD_DIM(D)                                                                                                                       \
    KERNEL __launch_bounds__(THREADS, 1) attn_prefill_##D(const int* counts, int group, const RowMeta* rows, const int* tables,           \
                                                          const AttnItem* items, bf16* out, int q_heads, int kv_heads, float scale,       \
                                                          int window, const __grid_constant__ TensorMap q_map,                            \
                                                          const __grid_constant__ TensorMap k_map,                                        \
                                                          const __grid_constant__ TensorMap v_map) {                                      \
        RUN(D, false, items, nullptr, out, nullptr, nullptr, window)                                                                      \
    }                                                                                                                                     \
    KERNEL __launch_bounds__(THREADS, 1) attn_shared_##D(const int* counts, int group, const RowMeta* rows, const int* tables,            \
                                                         const SharedItem* items, float* partial_o, float2* partial_ml, int q_heads,      \
                                                         int kv_heads, float scale, const __grid_constant__ TensorMap q_map,              \
                                                         const __grid_constant__ TensorMap k_map,                                         \
                                                         const __grid_constant__ TensorMap v_map) {                                       \
        release_successor();                                                                                                              \
        RUN(D, true, nullptr, items, nullptr, partial_o, partial_ml, 0)                                                                   \
    }

HEAD_DIM(64)
HEAD_DIM(128)
