/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench-read: the rate in GB/s at which two threads read memory, each 128 MiB of its own; the best of nine rounds.  The limits that the
 * benches compare with follow from this figure of the machine at hand, not from a constant.
 */

#include "quant/base/cleanup.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define N_THREADS 2u
#define N_WORDS   (UINT64_C(16) << 20)
#define N_ROUNDS  9u

typedef struct Reader {
    pthread_t thread;
    const uint64_t *words;
    uint64_t sum;
} Reader;

static double now_sec(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void *read_all(void *userdata)
{
    Reader *reader = userdata;
    uint64_t sums[8] = {0};

    for (uint64_t i = 0; i < N_WORDS; i += 8)
        for (unsigned lane = 0; lane < 8; lane++)
            sums[lane] += reader->words[i + lane];
    for (unsigned lane = 0; lane < 8; lane++)
        reader->sum += sums[lane];
    return NULL;
}

int main(void)
{
    Reader readers[N_THREADS] = {{0}};
    uint64_t *words = malloc(N_THREADS * N_WORDS * sizeof(*words)), sum = 0;
    double best = 0;

    if (!words)
        return EXIT_FAILURE;
    memset(words, 1, N_THREADS * N_WORDS * sizeof(*words));
    for (unsigned round = 0; round < N_ROUNDS; round++) {
        double begin = now_sec();

        for (unsigned t = 0; t < N_THREADS; t++) {
            readers[t].words = words + t * N_WORDS;
            if (pthread_create(&readers[t].thread, NULL, read_all, &readers[t]))
                return EXIT_FAILURE;
        }
        for (unsigned t = 0; t < N_THREADS; t++) {
            (void)pthread_join(readers[t].thread, NULL);
            sum += readers[t].sum;
        }
        double rate = (double)(N_THREADS * N_WORDS * sizeof(*words)) / (now_sec() - begin) * 1e-9;
        best = rate > best ? rate : best;
    }
    free(words);
    (void)printf("%.1f\n", sum ? best : 0.0);
    return EXIT_SUCCESS;
}
