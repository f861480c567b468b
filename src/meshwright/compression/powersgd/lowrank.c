/* The passes of PowerSGD over one matrix e of so many rows and columns; p is [rank][rows], q is [rank][columns], so that
   rows are read in order. Tiles of rows (or ranks) by vectors are summed in registers, so that a number that was loaded is
   used several times before the next one is needed. */
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define TILE 4
#define WIDE (TILE * LANES) /* columns of a tile */
#define TALL 8              /* rows of a tile where its vectors are ranks */
#define CHUNK 256           /* columns whose q, turned, stays in the first cache */
#define ROWS 32             /* that stay in the first cache while all ranks pass over them */

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vector load(const float *at) { return *(const vector *)at; }

/* Rows [i, i + many) of e become sums with their residual (0: none), for columns [j, j + chunk). Whether all are finite. */
static inline int add_residual(float *e, const float *residual, int64_t many, int64_t columns, int64_t chunk) {
    float bad[LANES] = {0}, any = 0;
    for (int64_t r = 0; r < many; r++) {
        float *row = e + r * columns;
        if (residual)
            for (int64_t j = 0; j < chunk; j++) row[j] += residual[r * columns + j];
        for (int64_t j = 0; j < chunk / LANES * LANES; j += LANES)
            for (int l = 0; l < LANES; l++) bad[l] += row[j + l] * 0.0f;
        for (int64_t j = chunk / LANES * LANES; j < chunk; j++) bad[0] += row[j] * 0.0f;
    }
    for (int l = 0; l < LANES; l++) any += bad[l];
    return any == 0.0f;
}

/* p += e q' for LANES ranks of a chunk of columns, whose q lies as [chunk][LANES]: one number of e times all ranks. */
static inline void add_ranks(const float *e, const float *turned, float *p, int64_t many, int64_t ranks, int64_t rows,
                             int64_t columns, int64_t chunk) {
    vector sums[TALL];
    const float *row[TALL]; /* the last one again where there are fewer */
    for (int r = 0; r < TALL; r++) sums[r] = (vector){0}, row[r] = e + (r < many ? r : many - 1) * columns;
    for (int64_t j = 0; j < chunk; j++) {
        const vector with = load(turned + j * LANES);
#pragma GCC unroll 8
        for (int r = 0; r < TALL; r++) sums[r] += row[r][j] * with;
    }
    float out[TALL][LANES]; /* ranks outside: their lines of p may all fall on one place of the first cache */
    memcpy(out, sums, sizeof out);
    for (int64_t l = 0; l < ranks; l++)
        for (int64_t r = 0; r < many; r++) p[l * rows + r] += out[r][l];
}

/* e becomes the sum of a gradient and its residual (0: none), p = e q'. Returns whether all numbers are finite. */
int first(float *e, const float *residual, const float *q, float *p, int64_t rows, int64_t columns, int64_t rank) {
    float turned[CHUNK * LANES];
    int finite = 1;
    memset(p, 0, sizeof(float) * rank * rows);
    for (int64_t from = 0; from < columns; from += CHUNK) {
        const int64_t chunk = columns - from < CHUNK ? columns - from : CHUNK;
        for (int64_t k = 0; k < rank; k += LANES) {
            const int64_t ranks = rank - k < LANES ? rank - k : LANES;
            for (int64_t j = 0; j < chunk; j++)
                for (int64_t l = 0; l < LANES; l++) turned[j * LANES + l] = l < ranks ? q[(k + l) * columns + from + j] : 0;
            for (int64_t i = 0; i < rows; i += TALL) {
                const int64_t many = rows - i < TALL ? rows - i : TALL, place = i * columns + from;
                if (!k) finite &= add_residual(e + place, residual ? residual + place : 0, many, columns, chunk);
                add_ranks(e + place, turned, p + k * rows + i, many, ranks, rows, columns, chunk);
            }
        }
    }
    return finite;
}

/* q += p e for rows [from, to) and ranks [k, k + ranks), of WIDE columns from j. */
static inline void add_tile(const float *e, const float *p, float *q, int64_t rows, int64_t columns, int64_t from, int64_t to,
                            int64_t j, int64_t k, int64_t ranks) {
    vector sums[TILE][TILE];
    for (int64_t t = 0; t < TILE; t++)
        for (int v = 0; v < TILE; v++)
            sums[t][v] = t < ranks ? load(q + (k + t) * columns + j + v * LANES) : (vector){0};
    const float *by[TILE];
    for (int64_t t = 0; t < TILE; t++) by[t] = p + (k + (t < ranks ? t : ranks - 1)) * rows;
    for (int64_t i = from; i < to; i++) {
        const float *row = e + i * columns + j;
        const vector a = load(row), b = load(row + LANES), c = load(row + 2 * LANES), d = load(row + 3 * LANES);
#pragma GCC unroll 4
        for (int t = 0; t < TILE; t++) {
            const float x = by[t][i];
            sums[t][0] += x * a, sums[t][1] += x * b, sums[t][2] += x * c, sums[t][3] += x * d;
        }
    }
    for (int64_t t = 0; t < ranks; t++)
        for (int v = 0; v < TILE; v++) *(vector *)(q + (k + t) * columns + j + v * LANES) = sums[t][v];
}

/* q = p e. */
void second(const float *e, const float *p, float *q, int64_t rows, int64_t columns, int64_t rank) {
    const int64_t whole = columns / WIDE * WIDE;
    memset(q, 0, sizeof(float) * rank * columns);
    for (int64_t from = 0; from < rows; from += ROWS) {
        const int64_t to = from + ROWS < rows ? from + ROWS : rows;
        for (int64_t j = 0; j < whole; j += WIDE)
            for (int64_t k = 0; k < rank; k += TILE)
                add_tile(e, p, q, rows, columns, from, to, j, k, rank - k < TILE ? rank - k : TILE);
        for (int64_t i = from; i < to; i++)
            for (int64_t k = 0; k < rank; k++)
                for (int64_t j = whole; j < columns; j++) q[k * columns + j] += p[k * rows + i] * e[i * columns + j];
    }
}

/* e becomes mean, the residual (0: none) what e was more. */
static inline void replace(float *e, float *residual, const float *mean, int64_t many) {
    if (residual)
        for (int64_t j = 0; j < many; j++) residual[j] = e[j] - mean[j];
    memcpy(e, mean, sizeof(float) * many);
}

/* e becomes p' q, the residual (0: none) what e was more. */
void finish(float *e, float *residual, const float *p, const float *q, int64_t rows, int64_t columns, int64_t rank) {
    const int64_t whole = columns / WIDE * WIDE;
    for (int64_t i = 0; i < rows; i += TILE) {
        const int64_t many = rows - i < TILE ? rows - i : TILE;
        int64_t at[TILE]; /* rows, the last one again where there are fewer */
        for (int t = 0; t < TILE; t++) at[t] = i + (t < many ? t : many - 1);
        for (int64_t j = 0; j < whole; j += WIDE) {
            vector sums[TILE][TILE];
            memset(sums, 0, sizeof sums);
            for (int64_t k = 0; k < rank; k++) {
                const float *with = q + k * columns + j, *by = p + k * rows;
                const vector a = load(with), b = load(with + LANES), c = load(with + 2 * LANES), d = load(with + 3 * LANES);
#pragma GCC unroll 4
                for (int t = 0; t < TILE; t++) {
                    const float x = by[at[t]];
                    sums[t][0] += x * a, sums[t][1] += x * b, sums[t][2] += x * c, sums[t][3] += x * d;
                }
            }
            for (int64_t t = 0; t < many; t++) {
                const int64_t place = (i + t) * columns + j;
                replace(e + place, residual ? residual + place : 0, (const float *)sums[t], WIDE);
            }
        }
        for (int64_t t = 0; t < many; t++)
            for (int64_t j = whole; j < columns; j++) {
                const int64_t place = (i + t) * columns + j;
                float mean = 0;
                for (int64_t k = 0; k < rank; k++) mean += p[k * rows + i + t] * q[k * columns + j];
                replace(e + place, residual ? residual + place : 0, &mean, 1);
            }
    }
}
