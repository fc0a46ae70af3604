/* Times MPI as `drumline bench` times drumline: the same sizes, turns and figures.
 *
 *     mpiexec -n 2 ./mpi_loop rewritten 100 all_reduce:8 all_gather:1048576
 *
 * Prints a line of JSON for each collective and size (bytes of the longest buffer of a rank).
 *
 * `rewritten`: every rank writes its input anew, all ranks meet in a barrier, and each times its call.
 * The slowest rank counts. Every result is verified.
 * `untouched`: 20 batches of calls in a row, as in IMB.
 *
 * All calls are out of place, MPI's plain form, except broadcast. Times are in microseconds.
 */

#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { WARM_UP = 5, SAMPLES_MAX = 10000, BATCHES = 20, BATCH_MAX = 100000, SALTS = 3 };

static int rank, ranks;
static float *input, *output;

struct operation {
    const char *name;
    /* Length of input and output, where the longest buffer has `count` elements: see OPERATIONS. */
    int blocks_in, blocks_out;
};

/* 0: `count` elements. 1: `count` divided by the number of ranks. */
static const struct operation OPERATIONS[] = {
    {"all_reduce", 0, 0},     {"all_gather", 1, 0}, {"reduce_scatter", 0, 1},
    {"all_to_all", 0, 0},     {"broadcast", 0, 0},
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

/* Small whole numbers, whose sums are exact. */
static float value(int of, size_t index, int salt) {
    return (float)((index * 7 + (size_t)of * 3 + (size_t)salt * 5 + index / 11) % 4);
}

static void rewrite(float *data, size_t len, int salt) {
    /* Write one period, then copy it: as fast as memory. */
    size_t period = len < 1100 ? len : 1100;
    for (size_t i = 0; i < period; i++) data[i] = value(rank, i, salt);
    for (size_t done = period; done < len;) {
        size_t part = done < len - done ? done : len - done;
        memcpy(data + done, data, part * sizeof(float));
        done += part;
    }
}

static float expected(int op, size_t block, size_t index, int salt) {
    float sum = 0;
    switch (op) {
    case 1: return value((int)(index / block), index % block % 1100, salt);
    case 3: return value((int)(index / block), ((size_t)rank * block + index % block) % 1100, salt);
    case 4: return value(0, index % 1100, salt);
    case 2: index += (size_t)rank * block; break;
    }
    for (int from = 0; from < ranks; from++) sum += value(from, index % 1100, salt);
    return sum;
}

static void call(int op, int count) {
    int block = count / ranks;
    switch (op) {
    case 0: MPI_Allreduce(input, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case 1: MPI_Allgather(input, block, MPI_FLOAT, output, block, MPI_FLOAT, MPI_COMM_WORLD); break;
    case 2: MPI_Reduce_scatter_block(input, output, block, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); break;
    case 3: MPI_Alltoall(input, block, MPI_FLOAT, output, block, MPI_FLOAT, MPI_COMM_WORLD); break;
    case 4: MPI_Bcast(output, count, MPI_FLOAT, 0, MPI_COMM_WORLD); break;
    }
}

static long verify(int op, size_t count, size_t len, int salt) {
    long wrong = 0;
    for (size_t i = 0; i < len; i++) {
        wrong += output[i] != expected(op, count / (size_t)ranks, i, salt);
    }
    return wrong;
}

static double largest(double mine) {
    double all;
    MPI_Allreduce(&mine, &all, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return all;
}

static int by_size(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double cpu_seconds(const struct rusage *usage) {
    return usage->ru_utime.tv_sec + usage->ru_stime.tv_sec +
           (usage->ru_utime.tv_usec + usage->ru_stime.tv_usec) * 1e-6;
}

static void measure(int op, size_t bytes, double turn_us, int untouched) {
    size_t count = bytes / sizeof(float), block = count / (size_t)ranks;
    size_t len_in = OPERATIONS[op].blocks_in ? block : count;
    size_t len_out = OPERATIONS[op].blocks_out ? block : count;
    float *rewritten = op == 4 ? output : input;
    size_t rewritten_len = op == 4 ? count : len_in;
    if (op != 0 && op != 4) count = block * (size_t)ranks;

    long wrong = 0;
    double cycle = 1e12, fastest = 1e12;
    for (int salt = 0; salt < WARM_UP; salt++) {
        double start = now();
        rewrite(rewritten, rewritten_len, salt % SALTS);
        MPI_Barrier(MPI_COMM_WORLD);
        double called = now();
        call(op, (int)count);
        double time = now() - called;
        /* Only a part of a long result is verified here: the check is slower than the call. */
        wrong += verify(op, count, len_out < 200000 ? len_out : 200000, salt % SALTS);
        if (time < fastest) fastest = time;
        if (now() - start < cycle) cycle = now() - start;
    }
    cycle = largest(cycle), fastest = largest(fastest);

    int samples = (int)(turn_us / cycle), batch = 1;
    if (untouched) {
        double fits = turn_us / fastest;
        fits = fits < 3 ? 3 : fits;
        samples = fits < BATCHES ? (int)fits : BATCHES;
        batch = fits / samples > BATCH_MAX ? BATCH_MAX : (int)(fits / samples);
    }
    samples = samples < 3 ? 3 : samples > SAMPLES_MAX ? SAMPLES_MAX : samples;
    double *times = malloc((size_t)samples * sizeof(double));
    for (int sample = 0; sample < samples; sample++) {
        if (!untouched) rewrite(rewritten, rewritten_len, sample % SALTS);
        MPI_Barrier(MPI_COMM_WORLD);
        double start = now();
        for (int i = 0; i < batch; i++) call(op, (int)count);
        times[sample] = (now() - start) / batch;
        if (!untouched) {
            wrong += verify(op, count, len_out < 200000 ? len_out : 200000, sample % SALTS);
        }
    }
    MPI_Allreduce(MPI_IN_PLACE, times, samples, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    double mean = 0;
    for (int sample = 0; sample < samples; sample++) mean += times[sample] / samples;
    qsort(times, (size_t)samples, sizeof(double), by_size);

    int billed = (int)(20000 / mean);
    billed = billed < 2 ? 2 : billed > BATCH_MAX ? BATCH_MAX : billed;
    struct rusage before, after;
    MPI_Barrier(MPI_COMM_WORLD);
    getrusage(RUSAGE_SELF, &before);
    for (int i = 0; i < billed; i++) call(op, (int)count);
    getrusage(RUSAGE_SELF, &after);
    double used[2] = {cpu_seconds(&after) - cpu_seconds(&before),
                      (double)(after.ru_nvcsw + after.ru_nivcsw - before.ru_nvcsw - before.ru_nivcsw)};
    MPI_Allreduce(MPI_IN_PLACE, used, 2, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) {
        printf("{\"operation\": \"%s\", \"size\": %zu, \"mean_us\": %.4f, \"median_us\": %.4f, "
               "\"p99_us\": %.4f, \"min_us\": %.4f, \"samples\": %d, \"wrong\": %ld, "
               "\"cpu_s_per_gb\": %.6f, \"switches\": %.3f}\n",
               OPERATIONS[op].name, bytes, mean, times[samples / 2],
               times[(int)(0.99 * (samples - 1))], times[0], samples, wrong,
               used[0] / billed * 1e9 / (double)bytes, used[1] / billed);
        fflush(stdout);
    }
    free(times);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 4) {
        if (rank == 0) fprintf(stderr, "usage: mpi_loop rewritten|untouched MS OPERATION:BYTES...\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    int untouched = strcmp(argv[1], "untouched") == 0;
    double turn_us = atof(argv[2]) * 1e3;
    size_t longest = 0;
    for (int i = 3; i < argc; i++) {
        char *colon = strchr(argv[i], ':');
        size_t bytes = colon ? strtoull(colon + 1, NULL, 10) : 0;
        longest = bytes > longest ? bytes : longest;
    }
    input = aligned_alloc(64, longest + 64 - longest % 64);
    output = aligned_alloc(64, longest + 64 - longest % 64);
    memset(input, 0, longest), memset(output, 0, longest);
    for (int i = 3; i < argc; i++) {
        char *colon = strchr(argv[i], ':');
        for (int op = 0; colon && op < (int)(sizeof OPERATIONS / sizeof *OPERATIONS); op++) {
            const char *name = OPERATIONS[op].name;
            if (strlen(name) == (size_t)(colon - argv[i]) && !strncmp(name, argv[i], strlen(name))) {
                measure(op, strtoull(colon + 1, NULL, 10), turn_us, untouched);
            }
        }
    }
    MPI_Finalize();
    return 0;
}
