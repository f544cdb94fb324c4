// C[M][N] = A[M][K] W[N][K]^T: bf16 in, f32 sums, the same bits in a row of C whatever M is.
//
// K goes in blocks of 32, four of them a slice. Slice i belongs to segment i mod 8; a segment's sum walks its slices upward,
// two multiplications of 16 a block, and the eight segments' sums meet in a binary tree. Within a block a lane holds 8
// neighbours of K, one 16-byte load, so that the order inside is a fixed permutation: the same in all kernels.
#include "common.cuh"

constexpr int SEGMENTS = 8, K_BLOCK = 32, SLICE = 4, ROUND = SEGMENTS * SLICE;
constexpr int STORE_BF16 = 0, STORE_F32 = 1, STORE_GATED = 3; // 2: added to what is there; from 3 on the activation's number is added

__device__ __forceinline__ void put(void* c, size_t index, float value, int mode) {
    if (mode == STORE_BF16) {
        static_cast<bf16*>(c)[index] = __float2bfloat16(value);
    } else if (mode == STORE_F32) {
        static_cast<float*>(c)[index] = value;
    } else {
        static_cast<float*>(c)[index] += value;
    }
}

__device__ __forceinline__ int rows_of(const int* m_ptr, int m_cap) {
    return m_ptr ? min(*m_ptr, m_cap) : m_cap;
}

// Both multiplications of a block of 32, of 16 rows of the first matrix and 8 of the second.
__device__ __forceinline__ void multiply_block(float (&c)[4], const uint4& upper, const uint4& lower, const uint4& other) {
    multiply(c, upper.x, lower.x, upper.y, lower.y, other.x, other.y);
    multiply(c, upper.z, lower.z, upper.w, lower.w, other.z, other.w);
}

__device__ __forceinline__ uint4 read_shared(uint32_t address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}

// --- M up to 16: the weights stream through a ring in shared memory. Their rows are the first matrix, so that 16 of them meet
// 8 rows of A at once; a warp has one segment.

constexpr int SMALL_THREADS = 32 * (SEGMENTS + 1), SMALL_N = 16;

struct Product {
    const bf16 *W, *A;
    void* C;
    // Gated: columns of the result; W has rows of as many gates, then of as many factors.
    int N, K, m_cap;
    const int* m_ptr;
    int mode;

    __device__ __forceinline__ bool gated() const { return mode >= STORE_GATED; }
    // Columns of the result that a tile makes.
    __device__ __forceinline__ int columns() const { return gated() ? SMALL_N / 2 : SMALL_N; }
    __device__ __forceinline__ int tiles() const { return (N + columns() - 1) / columns(); }
    // Row of the weights that is row `i` of a tile; past the end there is none.
    __device__ __forceinline__ int row(int tile, int i) const {
        const int column = tile * columns() + i % columns();
        return column < N ? column + i / columns() * N : -1;
    }
};

template <int GROUPS>
struct Sums {
    float of[SEGMENTS][SMALL_N][8 * GROUPS + 1];
};

// The tree over the segments' sums.
template <int GROUPS>
__device__ __forceinline__ float meet(const Sums<GROUPS>& sums, int column, int row) {
    float level[SEGMENTS];
#pragma unroll
    for (int s = 0; s < SEGMENTS; s++) level[s] = sums.of[s][column][row];
#pragma unroll
    for (int width = 1; width < SEGMENTS; width *= 2) {
#pragma unroll
        for (int s = 0; s < SEGMENTS; s += 2 * width) level[s] += level[s + width];
    }
    return level[0];
}

__device__ __forceinline__ float rounded(float x) {
    return __bfloat162float(__float2bfloat16(x));
}

// Sums of the segments to C. Gates and factors are rounded before they meet, as they are where a kernel of its own does that.
template <int GROUPS>
__device__ __forceinline__ void store_tile(const Sums<GROUPS>& sums, const Product& p, int tile, int m) {
    const int columns = p.columns();
    for (int i = threadIdx.x; i < m * columns; i += 32 * SEGMENTS) {
        const int column = i % columns, row = i / columns, n = tile * columns + column;
        if (n >= p.N) continue;
        float x = meet<GROUPS>(sums, column, row);
        if (p.gated()) x = activate(rounded(x), p.mode - STORE_GATED) * rounded(meet<GROUPS>(sums, column + columns, row));
        put(p.C, (size_t)row * p.N + n, x, p.gated() ? STORE_BF16 : p.mode);
    }
}

template <int GROUPS>
__device__ __forceinline__ void keep_sums(Sums<GROUPS>& sums, const float (&c)[GROUPS][4]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < GROUPS; i++) {
#pragma unroll
        for (int k = 0; k < 4; k++) sums.of[warp][g + k / 2 * 8][i * 8 + t * 2 + k % 2] = c[i][k];
    }
}

// Rows of A for one slice; zeros past M and past K.
template <int GROUPS>
__device__ __forceinline__ void load_inputs(uint4 (&x)[GROUPS][SLICE], const bf16* A, int K, int m, int first_block) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int c = 0; c < SLICE; c++) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) {
            const int row = i * 8 + g, k = (first_block + c) * K_BLOCK + t * 8;
            x[i][c] = load_plain(A + (size_t)row * K + k, row < m && k < K);
        }
    }
}

#if __CUDA_ARCH__ >= 900

// Bytes of a row and stage; the pitch keeps eight rows in different banks.
constexpr int RING = 3, ROUND_BYTES = ROUND * K_BLOCK * 2, PITCH = ROUND_BYTES + 64, STAGE_BYTES = SMALL_N * PITCH;

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t phase) {
    asm volatile("{.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier, uint64_t policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier), "l"(policy)
                 : "memory");
}

// Fetches the weights of this block. The ring is first filled stage by stage: all at once they would not come sooner, but what the
// kernels in front still read would wait behind them.
__device__ __forceinline__ void fetch(const Product& p, uint32_t ring, uint32_t full, uint32_t empty) {
    const int lane = threadIdx.x % 32, blocks = p.K / K_BLOCK, rounds = (blocks + ROUND - 1) / ROUND, tiles = p.tiles();
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    int index = 0;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int row = lane < SMALL_N ? p.row(tile, lane) : -1, rows = __popc(__ballot_sync(ALL_LANES, row >= 0));
        const char* from = reinterpret_cast<const char*>(p.W + (size_t)max(row, 0) * p.K);
        for (int round = 0; round < rounds; round++, index++) {
            const int bytes = min(ROUND_BYTES, (blocks - round * ROUND) * K_BLOCK * 2), stage = index % RING;
            if (index > 0 && index < RING) barrier_wait(full + 8 * (index - 1), 0);
            barrier_wait(empty + 8 * stage, (index / RING & 1) ^ 1);
            if (lane == 0) barrier_expect(full + 8 * stage, rows * bytes);
            __syncwarp();
            if (row >= 0) copy_bulk(ring + stage * STAGE_BYTES + lane * PITCH, from + round * ROUND_BYTES, bytes, full + 8 * stage, policy);
        }
    }
}

// One warp sends for weights, the others use them; the first stages are under way before the kernel in front has ended.
template <int GROUPS>
__device__ __forceinline__ void small(const Product& p) {
    extern __shared__ __align__(128) char memory[];
    __shared__ __align__(8) uint64_t barriers[2][RING];
    __shared__ Sums<GROUPS> sums;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int blocks = p.K / K_BLOCK, rounds = (blocks + ROUND - 1) / ROUND, tiles = p.tiles();
    const uint32_t ring = shared_address(memory), full = shared_address(barriers[0]), empty = shared_address(barriers[1]);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < RING; stage++) {
            barrier_init(full + 8 * stage, 1);
            barrier_init(empty + 8 * stage, SEGMENTS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    release_successor();
    if (warp == SEGMENTS) return fetch(p, ring, full, empty);
    int stage = 0;
    uint32_t phase = 0;
    wait_for_predecessor();
    const int m = rows_of(p.m_ptr, p.m_cap);
    // One group's inputs are loaded a round before they are used: while weights stream, even what is in L2 takes long to come. For two
    // there are no registers.
    uint4 next[1][SLICE];
    if constexpr (GROUPS == 1) load_inputs(next, p.A, p.K, m, warp * SLICE);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float c[GROUPS][4] = {};
        for (int round = 0; round < rounds; round++) {
            const int first_block = round * ROUND + warp * SLICE;
            uint4 x[GROUPS][SLICE], upper[SLICE], lower[SLICE];
            if constexpr (GROUPS == 1) {
#pragma unroll
                for (int b = 0; b < SLICE; b++) x[0][b] = next[0][b];
                load_inputs(next, p.A, p.K, m, round + 1 < rounds ? first_block + ROUND : warp * SLICE);
            } else {
                load_inputs(x, p.A, p.K, m, first_block);
            }
            barrier_wait(full + 8 * stage, phase);
            const uint32_t at = ring + stage * STAGE_BYTES + g * PITCH + warp * (SLICE * K_BLOCK * 2) + t * 16;
#pragma unroll
            for (int b = 0; b < SLICE; b++) {
                upper[b] = read_shared(at + b * (K_BLOCK * 2));
                lower[b] = read_shared(at + 8 * PITCH + b * (K_BLOCK * 2));
            }
#pragma unroll
            for (int b = 0; b < SLICE; b++) {
                if (first_block + b >= blocks) break;
#pragma unroll
                for (int i = 0; i < GROUPS; i++) multiply_block(c[i], upper[b], lower[b], x[i][b]);
            }
            // Not before the loads have arrived: the barrier does not wait for them.
            __syncwarp();
            if (lane == 0) barrier_arrive(empty + 8 * stage);
            if (++stage == RING) {
                stage = 0;
                phase ^= 1;
            }
        }
        keep_sums<GROUPS>(sums, c);
        asm volatile("bar.sync 1, %0;" ::"n"(32 * SEGMENTS) : "memory");
        store_tile<GROUPS>(sums, p, tile, m);
        asm volatile("bar.sync 1, %0;" ::"n"(32 * SEGMENTS) : "memory");
    }
}

#else

// Before Hopper the weights come straight to registers.
template <int GROUPS>
__device__ __forceinline__ void small(const Product& p) {
    __shared__ Sums<GROUPS> sums;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int blocks = p.K / K_BLOCK, tiles = p.tiles(), m = rows_of(p.m_ptr, p.m_cap);
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        float c[GROUPS][4] = {};
        const int above = p.row(tile, g), below = p.row(tile, g + 8);
        const bf16 *from_above = p.W + (size_t)max(above, 0) * p.K + t * 8, *from_below = p.W + (size_t)max(below, 0) * p.K + t * 8;
        for (int first = warp * SLICE; warp < SEGMENTS && first < blocks; first += ROUND) {
            uint4 x[GROUPS][SLICE], upper[SLICE], lower[SLICE];
#pragma unroll
            for (int b = 0; b < SLICE; b++) {
                const bool real = first + b < blocks;
                upper[b] = load_stream(from_above + (first + b) * K_BLOCK, real && above >= 0);
                lower[b] = load_stream(from_below + (first + b) * K_BLOCK, real && below >= 0);
            }
            load_inputs(x, p.A, p.K, m, first);
#pragma unroll
            for (int b = 0; b < SLICE; b++) {
                if (first + b >= blocks) break;
#pragma unroll
                for (int i = 0; i < GROUPS; i++) multiply_block(c[i], upper[b], lower[b], x[i][b]);
            }
        }
        if (warp < SEGMENTS) keep_sums<GROUPS>(sums, c);
        __syncthreads();
        if (warp < SEGMENTS) store_tile<GROUPS>(sums, p, tile, m);
        __syncthreads();
    }
}

#endif

#define SMALL(ROWS)                                                                                                                        \
    KERNEL __launch_bounds__(SMALL_THREADS, 2) gemm_small_##ROWS(const bf16* W, const bf16* A, void* C, int N, int K, int m_cap,           \
                                                                 const int* m_ptr, int mode) {                                             \
        small<ROWS / 8>({W, A, C, N, K, m_cap, m_ptr, mode});                                                                              \
    }

SMALL(8)
SMALL(16)

// --- Any M: tiles of 64 x 128 through shared memory.

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int TILE_M = 64, TILE_N = 128, STAGES = 3, ROW_BYTES = K_BLOCK * 2;
constexpr int M_WARPS = 2, M_TILES = TILE_M / M_WARPS / 16, N_TILES = TILE_N / (WARPS / M_WARPS) / 8;

struct TileSums {
    float c[M_TILES][N_TILES][4];
};

__device__ __forceinline__ void add_sums(TileSums& to, const TileSums& other) {
#pragma unroll
    for (int i = 0; i < M_TILES; i++) {
#pragma unroll
        for (int j = 0; j < N_TILES; j++) {
#pragma unroll
            for (int k = 0; k < 4; k++) to.c[i][j][k] = other.c[i][j][k] + to.c[i][j][k];
        }
    }
}

// Blocks of K, segment after segment.
struct Walk {
    int blocks, segment = 0, place = 0;

    __device__ __forceinline__ int block() const { return place / SLICE * ROUND + segment * SLICE + place % SLICE; }
    __device__ __forceinline__ bool ends() const { return block() >= blocks; }

    // To the next block of this segment, or the first of the next that has any.
    __device__ __forceinline__ void step() {
        place++;
        while (segment < SEGMENTS && ends()) {
            segment++;
            place = 0;
        }
    }
};

KERNEL __launch_bounds__(THREADS) gemm_tile(const bf16* W, const bf16* A, void* C, int N, int K, int m_cap, const int* m_ptr, int mode) {
    __shared__ __align__(128) char stages[STAGES][(TILE_M + TILE_N) * ROW_BYTES];
    wait_for_predecessor();
    const int m = rows_of(m_ptr, m_cap), first_row = blockIdx.y * TILE_M, first_column = blockIdx.x * TILE_N;
    if (first_row >= m) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, blocks = K / K_BLOCK;
    const uint32_t shared = shared_address(stages);
    const int load_row = threadIdx.x / 4, load_part = threadIdx.x % 4;
    Walk fetched = {blocks};
    int fetch_stage = 0;
    auto fetch = [&] {
        if (fetched.segment < SEGMENTS) {
            const uint32_t stage = shared + fetch_stage * ((TILE_M + TILE_N) * ROW_BYTES) + load_part * 16;
            const size_t k = (size_t)fetched.block() * K_BLOCK + load_part * 8;
            const int row = first_row + load_row;
            copy_async(stage + load_row * ROW_BYTES, A + (row < m ? row : 0) * (size_t)K + k, row < m);
#pragma unroll
            for (int half = 0; half < TILE_N / 64; half++) {
                const int column = first_column + half * 64 + load_row;
                const uint32_t to = stage + (TILE_M + half * 64 + load_row) * ROW_BYTES;
                copy_async(to, W + (column < N ? column : 0) * (size_t)K + k, column < N);
            }
            fetched.step();
            fetch_stage = (fetch_stage + 1) % STAGES;
        }
        copy_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; i++) fetch();
    const int warp_row = warp / (WARPS / M_WARPS) * (M_TILES * 16), warp_column = warp % (WARPS / M_WARPS) * (N_TILES * 8);
    TileSums sums, pairs, quads, halves;
    int stage = 0;
    for (int segment = 0; segment < SEGMENTS; segment++) {
        sums = {};
        for (Walk walk = {blocks, segment}; !walk.ends(); walk.place++) {
            copy_wait<STAGES - 2>();
            __syncthreads();
            fetch();
            const uint32_t a = shared + stage * ((TILE_M + TILE_N) * ROW_BYTES) + t * 16, w = a + TILE_M * ROW_BYTES;
            stage = (stage + 1) % STAGES;
            uint4 columns[N_TILES];
#pragma unroll
            for (int j = 0; j < N_TILES; j++) columns[j] = read_shared(w + (warp_column + j * 8 + g) * ROW_BYTES);
#pragma unroll
            for (int i = 0; i < M_TILES; i++) {
                const uint4 upper = read_shared(a + (warp_row + i * 16 + g) * ROW_BYTES);
                const uint4 lower = read_shared(a + (warp_row + i * 16 + g + 8) * ROW_BYTES);
#pragma unroll
                for (int j = 0; j < N_TILES; j++) multiply_block(sums.c[i][j], upper, lower, columns[j]);
            }
        }
        // The tree as a binary counter: an even segment waits for the next, an odd one meets it and goes up.
        if (segment % 2 == 0) {
            pairs = sums;
        } else {
            add_sums(sums, pairs);
            if (segment % 4 == 1) {
                quads = sums;
            } else {
                add_sums(sums, quads);
                if (segment % 8 == 3) {
                    halves = sums;
                } else {
                    add_sums(sums, halves);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < M_TILES; i++) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int row = first_row + warp_row + i * 16 + g + k / 2 * 8;
            if (row >= m) continue;
#pragma unroll
            for (int j = 0; j < N_TILES; j++) {
                const int column = first_column + warp_column + j * 8 + t * 2 + k % 2;
                if (column < N) put(C, (size_t)row * N + column, sums.c[i][j][k], mode);
            }
        }
    }
}
