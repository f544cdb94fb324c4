// Products of any number of rows: tiles of 64 x 128 through shared memory.
#include "gemm.cuh"

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
