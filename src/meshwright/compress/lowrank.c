/* The passes of PowerSGD over one matrix e of so many rows and columns; p is [rank][rows], q is [rank][columns], so that
   rows are read once, in order, and what goes with each stays in the first caches. */
#include <stdint.h>

#define LANES 16

/* e becomes the sum of a gradient and its residual (0: none), p = e q'. Returns whether all numbers are finite. */
int first(float *e, const float *residual, const float *q, float *p, int64_t rows, int64_t columns, int64_t rank) {
    const int64_t whole = columns / LANES * LANES;
    float bad[LANES] = {0};
    for (int64_t i = 0; i < rows; i++) {
        float *row = e + i * columns;
        if (residual)
            for (int64_t j = 0; j < columns; j++) row[j] += residual[i * columns + j];
        for (int64_t j = 0; j < whole; j += LANES)
            for (int l = 0; l < LANES; l++) bad[l] += row[j + l] * 0.0f;
        for (int64_t j = whole; j < columns; j++) bad[0] += row[j] * 0.0f;
        for (int64_t k = 0; k < rank; k++) {
            const float *with = q + k * columns;
            float sums[LANES] = {0}, sum = 0;
            for (int64_t j = 0; j < whole; j += LANES)
                for (int l = 0; l < LANES; l++) sums[l] += row[j + l] * with[j + l];
            for (int64_t j = whole; j < columns; j++) sum += row[j] * with[j];
            for (int l = 0; l < LANES; l++) sum += sums[l];
            p[k * rows + i] = sum;
        }
    }
    float any = 0;
    for (int l = 0; l < LANES; l++) any += bad[l];
    return any == 0.0f;
}

/* q = p e, of four rows at a time: sums are read and written a quarter as often, in the same order. */
void second(const float *restrict e, const float *restrict p, float *restrict q, int64_t rows, int64_t columns, int64_t rank) {
    const int64_t whole = rows / 4 * 4;
    for (int64_t j = 0; j < rank * columns; j++) q[j] = 0;
    for (int64_t i = 0; i < whole; i += 4) {
        const float *a = e + i * columns, *b = a + columns, *c = b + columns, *d = c + columns;
        for (int64_t k = 0; k < rank; k++) {
            const float *by = p + k * rows + i;
            const float w = by[0], x = by[1], y = by[2], z = by[3];
            float *sums = q + k * columns;
            for (int64_t j = 0; j < columns; j++) sums[j] = (((sums[j] + w * a[j]) + x * b[j]) + y * c[j]) + z * d[j];
        }
    }
    for (int64_t i = whole; i < rows; i++)
        for (int64_t k = 0; k < rank; k++) {
            const float by = p[k * rows + i];
            for (int64_t j = 0; j < columns; j++) q[k * columns + j] += by * e[i * columns + j];
        }
}

/* e becomes p' q, the residual (0: none) what e was more. */
void finish(float *restrict e, float *restrict residual, const float *restrict p, const float *restrict q, int64_t rows,
            int64_t columns, int64_t rank) {
    enum { MOST = 256 };
    float mean[MOST];
    for (int64_t i = 0; i < rows; i++)
        for (int64_t from = 0; from < columns; from += MOST) {
            const int64_t many = columns - from < MOST ? columns - from : MOST;
            float *row = e + i * columns + from;
            for (int64_t j = 0; j < many; j++) mean[j] = 0;
            int64_t k = 0;
            for (; k + 4 <= rank; k += 4) {
                const float *a = q + k * columns + from, *b = a + columns, *c = b + columns, *d = c + columns;
                const float *by = p + k * rows + i;
                const float w = by[0], x = by[rows], y = by[2 * rows], z = by[3 * rows];
                for (int64_t j = 0; j < many; j++) mean[j] = (((mean[j] + w * a[j]) + x * b[j]) + y * c[j]) + z * d[j];
            }
            for (; k < rank; k++) {
                const float by = p[k * rows + i], *with = q + k * columns + from;
                for (int64_t j = 0; j < many; j++) mean[j] += by * with[j];
            }
            if (residual)
                for (int64_t j = 0; j < many; j++) residual[i * columns + from + j] = row[j] - mean[j];
            for (int64_t j = 0; j < many; j++) row[j] = mean[j];
        }
}
