// Products of 13 to 64 rows on Hopper. Rows of W are the first matrix, 128 a tile. Of the blocks of a cluster FEATURES have other tiles, so
// that each row of A is fetched once for all of them, and SPLITS other parts of K, whose sums meet in shared memory.
#pragma once

#include "barrier.cuh"
#include "gemm_small.cuh"
#include "wgmma.cuh"

constexpr int CLUSTER_ROWS = 64, CLUSTER_N = 128, CLUSTER_K = 64;
// Two warp groups multiply; of two warps more a thread each fetches, one weights and one inputs; the last two make factors, a thread a row.
constexpr int MULTIPLYING = 256, CLUSTER_THREADS = MULTIPLYING + 64 + CLUSTER_ROWS, CLUSTER_WARPS = MULTIPLYING / 32;
constexpr int W_BYTES = CLUSTER_N * CLUSTER_K * 2, X_BYTES = CLUSTER_ROWS * CLUSTER_K * 2, STAGE = W_BYTES + X_BYTES;
// Eights of rows of A; what a block holds of one's sums.
constexpr int EIGHTS = CLUSTER_ROWS / 8, EIGHT_BYTES = MULTIPLYING * 16;

// Rows of A that are a norm's but for a factor, which their sums of squares give: of each row `parts` sums. None: rows as they are.
struct Factors {
    const float* squares;
    int parts;
    float eps;
};

// What STORE_ADD leaves for the product behind it: rows times the norm's weight, and sums of squares of each tile. None without a weight.
struct Behind {
    const bf16* weight;
    bf16* rows;
    float* squares;
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void sync_group() {
    asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory");
}

// What becomes of sums is known to the compiler, and loops over K are not unrolled: a block runs most of its code once, and waits for all of it.
template <int FEATURES, int SPLITS, int MODE>
struct Cluster {
    static constexpr bool IS_GATED = MODE == STORE_GATED, IS_PAIRED = IS_GATED || MODE == STORE_HEADS, ADDS = MODE == STORE_ADD, LEAVES_NORM = ADDS && SPLITS > 1;
    static constexpr int SIZE = FEATURES * SPLITS;
    // Eights whose sums a block ends with, of the last one they may be fewer; and the memory in which they meet.
    static constexpr int OWN = (EIGHTS + SPLITS - 1) / SPLITS, MET_BYTES = SPLITS > 1 ? SPLITS * OWN * EIGHT_BYTES : 0;
    static constexpr int STAGES = SPLITS > 2 ? 7 : 8, SHARED_BYTES = STAGES * STAGE + MET_BYTES;

    struct Shared {
        uint64_t full[STAGES], empty[STAGES], met, scaled;
        float factors[CLUSTER_ROWS], squares[OWN * 8][CLUSTER_WARPS];
    };

    // What a lane needs of an eight beside its sums: what they are added to; or of heads cosine and sine for both rows, and where row g goes.
    struct Beside {
        float of[4];
        int place;
    };

    const TensorMap &weights, &inputs;
    const Product& p;
    const Factors& scale;
    const Behind& behind;
    Shared& shared;
    const uint32_t ring;
    // Of the cluster's blocks; of clusters; steps of K.
    const int feature, split, cluster, clusters, begin, end;
    const int m;

    __device__ __forceinline__ int columns() const { return IS_GATED ? CLUSTER_N / 2 : CLUSTER_N; }
    __device__ __forceinline__ int tiles() const { return (p.N + columns() - 1) / columns(); }

    // By one thread, which makes the barriers.
    __device__ __forceinline__ void fetch_weights() {
        prefetch_map(weights);
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(shared.full[stage], 1);
            barrier_init(shared.empty[stage], 2 * FEATURES);
        }
        barrier_init(shared.met, 1);
        barrier_init(shared.scaled, CLUSTER_ROWS);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        cluster_arrive();
        int stage = 0, phase = 1;
        for (int group = cluster; group * FEATURES < tiles(); group += clusters) {
            const int tile = group * FEATURES + feature;
            // Pairs are eight of the first beside eight of the second, as kernels/maps.rs lays them out.
            int y = 0, u = 0, v = 0;
            if (!IS_PAIRED) {
                y = tile * CLUSTER_N;
            } else if (IS_GATED) {
                u = tile * (CLUSTER_N / 16);
            } else {
                v = tile * (CLUSTER_N / 2) / p.heads.half, u = tile * (CLUSTER_N / 2) % p.heads.half / 8;
            }
#pragma unroll 1
            for (int step = begin; step < end; step++) {
                barrier_wait(shared.empty[stage], phase);
                barrier_expect(shared.full[stage], STAGE);
                copy_box(ring + stage * STAGE, weights, shared.full[stage], step * CLUSTER_K, y, 0, u, v);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
        cluster_wait();
    }

    // By another: a part of the rows, for all blocks with the same part of K.
    __device__ __forceinline__ void fetch_inputs() {
        prefetch_map(inputs);
        cluster_arrive();
        cluster_wait();
        release_successor();
        wait_for_predecessor();
        constexpr int ROWS = CLUSTER_ROWS / FEATURES;
        const uint16_t mask = ((1 << FEATURES) - 1) << split * FEATURES;
        const uint32_t to = ring + W_BYTES + feature * (X_BYTES / FEATURES);
        int stage = 0, phase = 1;
        for (int group = cluster; group * FEATURES < tiles(); group += clusters) {
#pragma unroll 1
            for (int step = begin; step < end; step++) {
                barrier_wait(shared.empty[stage], phase);
                copy_box_to_all(to + stage * STAGE, inputs, shared.full[stage], step * CLUSTER_K, feature * ROWS, mask);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
        }
    }

    // By warps of their own: sums wait for them only at their end.
    __device__ __forceinline__ void make_factors() {
        cluster_arrive();
        cluster_wait();
        wait_for_predecessor();
        const int row = threadIdx.x - (MULTIPLYING + 64);
        float factor = 1.f;
        if (scale.squares && row < m) {
            float total = 0.f;
#pragma unroll 8
            for (int part = 0; part < scale.parts; part++) total += scale.squares[(size_t)row * scale.parts + part];
            factor = rsqrtf(total / p.K + scale.eps);
        }
        shared.factors[row] = factor;
        barrier_arrive(shared.scaled);
    }

    // What a lane has of an eight: rows 2t and 2t + 1 of A, columns g and g + 8 of the warp's sixteen, which begin here.
    __device__ __forceinline__ int first_column(int tile) const { return tile * CLUSTER_N + threadIdx.x / 32 * 16; }

    __device__ __forceinline__ void load_before(Beside& beside, int tile, int eight) const {
        const int lane = threadIdx.x % 32, n = first_column(tile);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = eight * 8 + lane % 4 * 2 + i % 2, column = n + lane / 4 + i / 2 * 8;
            beside.of[i] = row < m && n < p.N ? static_cast<const float*>(p.C)[(size_t)row * p.N + column] : 0.f;
        }
    }

    // Eights of pairs of a warp: which head, and where in it.
    __device__ __forceinline__ int first_pair(int tile) const { return tile * (CLUSTER_N / 2) + threadIdx.x / 32 * 8; }

    // Of this step, and written before it began.
    __device__ __forceinline__ void load_turn(Beside& beside, int tile, int eight) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, pair = first_pair(tile);
        const Heads& h = p.heads;
        if (pair / h.half < h.q_heads + h.kv_heads) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int row = eight * 8 + t * 2 + i;
                const float2 angle = row < m ? h.rope[(size_t)h.positions[row] * h.half + pair % h.half + g] : make_float2(1.f, 0.f);
                beside.of[2 * i] = angle.x, beside.of[2 * i + 1] = angle.y;
            }
        }
        beside.place = eight * 8 + g < m ? h.places[eight * 8 + g] : -1;
    }

    __device__ __forceinline__ void store_heads(const float (&x)[4], const Beside& beside, int tile, int eight) const {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const Heads& h = p.heads;
        const int pair = first_pair(tile), head = pair / h.half, in_head = pair % h.half;
        if (head >= h.q_heads + 2 * h.kv_heads) return;
        const bool is_q = head < h.q_heads, is_v = head >= h.q_heads + h.kv_heads;
        const int column = head * 2 * h.half + in_head;
        float low[2] = {x[0], x[1]}, high[2] = {x[2], x[3]};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if (h.bias) low[i] += __bfloat162float(h.bias[column + g]), high[i] += __bfloat162float(h.bias[column + h.half + g]);
            if (!is_v) turn(low[i], high[i], make_float2(beside.of[2 * i], beside.of[2 * i + 1]));
        }
        const uint32_t lows = transpose(pack(low[0], low[1])), highs = transpose(pack(high[0], high[1]));
        const int row = eight * 8 + g;
        if (row >= m) return;
        if (is_q) {
            bf16* to = static_cast<bf16*>(p.C) + (size_t)row * p.N + column + t * 2;
            *reinterpret_cast<uint32_t*>(to) = lows, *reinterpret_cast<uint32_t*>(to + h.half) = highs;
            return;
        }
        if (beside.place < 0) return;
        const size_t at = kv_index(beside.place, head - h.q_heads - (is_v ? h.kv_heads : 0), h.kv_heads, 2 * h.half) + in_head + t * 2;
        void* cache = is_v ? h.v_cache : h.k_cache;
        store_kv_pair(cache, at, lows, h.kv_dtype), store_kv_pair(cache, at + h.half, highs, h.kv_dtype);
    }

    __device__ __forceinline__ void store_gated(const float (&x)[4], int tile, int eight) const {
        const int lane = threadIdx.x % 32, activation = p.mode - STORE_GATED;
        const int row = eight * 8 + lane / 4, column = tile * (CLUSTER_N / 2) + threadIdx.x / 32 * 8 + lane % 4 * 2;
        const uint32_t y = transpose(pack(activate(x[0], activation) * x[2], activate(x[1], activation) * x[3]));
        if (row < m && column < p.N) *reinterpret_cast<uint32_t*>(static_cast<bf16*>(p.C) + (size_t)row * p.N + column) = y;
    }

    // Rows times the weight of the norm behind, and what this warp knows of their squares.
    __device__ __forceinline__ void store_behind(const float (&x)[4], float2 weight, int tile, int eight, int own) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, n = first_column(tile), row = eight * 8 + g;
        if (n >= p.N) {
            if (g == 0) shared.squares[own * 8 + t * 2][threadIdx.x / 32] = 0.f, shared.squares[own * 8 + t * 2 + 1][threadIdx.x / 32] = 0.f;
            return;
        }
        const uint32_t lows = transpose(pack(x[0] * weight.x, x[1] * weight.x)), highs = transpose(pack(x[2] * weight.y, x[3] * weight.y));
        if (row < m) {
            bf16* to = behind.rows + (size_t)row * p.N + n + t * 2;
            *reinterpret_cast<uint32_t*>(to) = lows, *reinterpret_cast<uint32_t*>(to + 8) = highs;
        }
        float even = x[0] * x[0] + x[2] * x[2], odd = x[1] * x[1] + x[3] * x[3];
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
            even += __shfl_xor_sync(ALL_LANES, even, offset), odd += __shfl_xor_sync(ALL_LANES, odd, offset);
        }
        if (g == 0) shared.squares[own * 8 + t * 2][threadIdx.x / 32] = even, shared.squares[own * 8 + t * 2 + 1][threadIdx.x / 32] = odd;
    }

    // A lane's sums of an eight, the block's `own`-th.
    __device__ __forceinline__ void store(float (&x)[4], const Beside& beside, float2 next_weight, int tile, int eight, int own) {
        const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const float2 factor = *reinterpret_cast<const float2*>(shared.factors + eight * 8 + t * 2);
        x[0] *= factor.x, x[1] *= factor.y, x[2] *= factor.x, x[3] *= factor.y;
        if constexpr (MODE == STORE_HEADS) {
            store_heads(x, beside, tile, eight);
        } else if constexpr (IS_GATED) {
            store_gated(x, tile, eight);
        } else {
            const int n = first_column(tile);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = eight * 8 + t * 2 + i % 2;
                if (ADDS) x[i] += beside.of[i];
                if (row < m && n < p.N) put(p.C, (size_t)row * p.N + n + g + i / 2 * 8, x[i], MODE == STORE_BF16 ? STORE_BF16 : STORE_F32);
            }
            if (LEAVES_NORM && behind.weight) store_behind(x, next_weight, tile, eight, own);
        }
    }

    // Blocks with other parts of K give one another the sums of their eights.
    __device__ __forceinline__ void meet(const float (&c)[EIGHTS * 4]) {
        const uint32_t barrier = shared_address(&shared.met), met = ring + STAGES * STAGE + threadIdx.x * 16;
        if (threadIdx.x == 0) barrier_expect(shared.met, SPLITS * min(OWN, EIGHTS - split * OWN) * EIGHT_BYTES);
#pragma unroll
        for (int other = 0; other < SPLITS; other++) {
            const int rank = other * FEATURES + feature;
            const uint32_t to = address_in(met + split * OWN * EIGHT_BYTES, rank), their = address_in(barrier, rank);
#pragma unroll
            for (int own = 0; own < OWN; own++) {
                const int i = (other * OWN + own) * 4;
                if (i < EIGHTS * 4) store_at(to + own * EIGHT_BYTES, c[i], c[i + 1], c[i + 2], c[i + 3], their);
            }
        }
        barrier_wait(shared.met, 0);
    }

    // The only tile of a block that has a part of K, from what met.
    __device__ __forceinline__ void store_met(const Beside (&beside)[OWN], float2 next_weight, int tile) {
        const uint32_t met = ring + STAGES * STAGE + threadIdx.x * 16;
#pragma unroll
        for (int own = 0; own < OWN; own++) {
            if (split * OWN + own >= EIGHTS) break;
            float x[4] = {};
#pragma unroll
            for (int part = 0; part < SPLITS; part++) {
                const uint4 y = read_shared(met + (part * OWN + own) * EIGHT_BYTES);
                x[0] += __uint_as_float(y.x), x[1] += __uint_as_float(y.y), x[2] += __uint_as_float(y.z), x[3] += __uint_as_float(y.w);
            }
            store(x, beside[own], next_weight, tile, split * OWN + own, own);
        }
        if (!LEAVES_NORM || !behind.weight) return;
        sync_group();
        const int row = split * OWN * 8 + threadIdx.x;
        if (threadIdx.x < OWN * 8 && row < m && tile < tiles()) {
            float total = 0.f;
#pragma unroll
            for (int warp = 0; warp < CLUSTER_WARPS; warp++) total += shared.squares[threadIdx.x][warp];
            behind.squares[(size_t)row * tiles() + tile] = total;
        }
    }

    __device__ __forceinline__ void multiply() {
        cluster_arrive();
        cluster_wait();
        // What stores need is on its way while sums are made; of weights and of the step before the kernel in front has ended.
        const int half = threadIdx.x / 128, own_tile = cluster * FEATURES + feature, n = first_column(own_tile) + threadIdx.x % 32 / 4;
        Beside beside[OWN] = {};
        float2 next_weight = {};
        if (LEAVES_NORM && behind.weight && n < p.N) next_weight = make_float2(__bfloat162float(behind.weight[n]), __bfloat162float(behind.weight[n + 8]));
        if (SPLITS > 1 && MODE == STORE_HEADS) {
#pragma unroll
            for (int own = 0; own < OWN; own++) load_turn(beside[own], own_tile, split * OWN + own);
        }
        wait_for_predecessor();
        if (SPLITS > 1 && ADDS) {
#pragma unroll
            for (int own = 0; own < OWN; own++) load_before(beside[own], own_tile, split * OWN + own);
        }
        int stage = 0, phase = 0, left = 0;
        for (int group = cluster; group * FEATURES < tiles(); group += clusters) left += end - begin;
        const uint32_t empty = address_in(shared_address(shared.empty), split * FEATURES + threadIdx.x % FEATURES);
        auto release = [&](int stage) {
            // A block may have ended once nobody waits for its stages to be empty.
            if (left > STAGES && threadIdx.x % 128 < FEATURES) barrier_arrive_at(empty + stage * 8);
            left--;
        };
        for (int group = cluster; group * FEATURES < tiles(); group += clusters) {
            const int tile = group * FEATURES + feature;
            float c[EIGHTS * 4];
#pragma unroll 1
            for (int step = begin; step < end; step++) {
                barrier_wait(shared.full[stage], phase);
                const uint32_t w = ring + stage * STAGE + half * (W_BYTES / 2), x = ring + stage * STAGE + W_BYTES;
                multiplications_begin();
#pragma unroll
                for (int k = 0; k < CLUSTER_K / 16; k++) multiply_shared(c, matrix_at(w + k * 32, 0), matrix_at(x + k * 32, 0), step > begin || k > 0);
                multiplications_commit();
                multiplications_wait<1>();
                if (step > begin) release(stage == 0 ? STAGES - 1 : stage - 1);
                if (++stage == STAGES) stage = 0, phase ^= 1;
            }
            multiplications_wait<0>();
            // The sums are in registers only now, whatever the compiler would move.
#pragma unroll
            for (int i = 0; i < EIGHTS * 4; i++) asm volatile("" : "+f"(c[i]));
            release(stage == 0 ? STAGES - 1 : stage - 1);
            if constexpr (SPLITS > 1) {
                meet(c);
                barrier_wait(shared.scaled, 0);
                store_met(beside, next_weight, tile);
            } else {
                barrier_wait(shared.scaled, 0);
#pragma unroll
                for (int eight = 0; eight < EIGHTS; eight++) {
                    float x[4] = {c[eight * 4], c[eight * 4 + 1], c[eight * 4 + 2], c[eight * 4 + 3]};
                    if (ADDS) load_before(beside[0], tile, eight);
                    if (MODE == STORE_HEADS) load_turn(beside[0], tile, eight);
                    store(x, beside[0], next_weight, tile, eight, 0);
                }
            }
        }
    }
};

template <int FEATURES, int SPLITS, int MODE>
__device__ __forceinline__ void by_clusters(const TensorMap& weights, const TensorMap& inputs, const Product& p, const Factors& scale,
                                            const Behind& behind, int m_cap, const int* m_ptr) {
    using Of = Cluster<FEATURES, SPLITS, MODE>;
    extern __shared__ __align__(1024) char memory[];
    __shared__ typename Of::Shared shared;
    const int rank = cluster_rank(), split = rank / FEATURES, steps = (p.K + CLUSTER_K - 1) / CLUSTER_K;
    Of work{weights,
            inputs,
            p,
            scale,
            behind,
            shared,
            shared_address(memory),
            rank % FEATURES,
            split,
            (int)blockIdx.x / Of::SIZE,
            (int)gridDim.x / Of::SIZE,
            steps * split / SPLITS,
            steps * (split + 1) / SPLITS,
            rows_of(m_ptr, m_cap)};
    if (threadIdx.x < MULTIPLYING) return work.multiply();
    if (threadIdx.x >= MULTIPLYING + 64) return work.make_factors();
    if (threadIdx.x == MULTIPLYING) return work.fetch_weights();
    if (threadIdx.x == MULTIPLYING + 32) return work.fetch_inputs();
    cluster_arrive();
    cluster_wait();
}

// kernels/cluster.rs says the same.
static_assert(Cluster<4, 1, 0>::SHARED_BYTES == 196608 && Cluster<2, 2, 0>::SHARED_BYTES == 229376 && Cluster<2, 3, 0>::SHARED_BYTES == 208896);

#else

template <int FEATURES, int SPLITS, int MODE>
__device__ __forceinline__ void by_clusters(const TensorMap&, const TensorMap&, const Product&, const Factors&, const Behind&, int, const int*) {}

#endif
