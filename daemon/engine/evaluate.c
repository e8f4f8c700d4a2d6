/* SPDX-License-Identifier: Apache-2.0 */
/* Teacher-forced logits into an .npy file. */

#include "daemon/engine/evaluate.h"
#include "quant/base/file.h"

#include <string.h>
#include <sys/stat.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the file is written as it lies in memory, little-endian"
#endif

struct Evaluation {
    int fd;
    uint32_t n_vocab;
    uint64_t n_rows, n_written;
    float *logits;
};

static int write_all(int fd, const void *data, size_t n, ErrorDetail *reterr)
{
    int r = file_write(fd, data, n);

    return r ? error_detail_set(reterr, r, "the logits cannot be written: %s", strerror(-r)) : 0;
}

/* Magic, version, length, a Python dictionary padded with blanks so that the data begins at a multiple of 64. */
static int write_header(const Evaluation *e, ErrorDetail *reterr)
{
    char header[128];
    size_t n;

    memset(header, ' ', sizeof(header));
    memcpy(header, "\x93NUMPY\x01\x00", 8);
    header[8] = (char)(sizeof(header) - 10);
    header[9] = 0;
    n = (size_t)snprintf(header + 10, sizeof(header) - 10, "{'descr': '<f4', 'fortran_order': False, 'shape': (%llu, %u), }",
                         (unsigned long long)e->n_rows, e->n_vocab);
    header[10 + n] = ' ';
    header[sizeof(header) - 1] = '\n';
    return write_all(e->fd, header, sizeof(header), reterr);
}

int evaluation_new(int fd, uint64_t n_rows, uint32_t n_vocab, Evaluation **ret, ErrorDetail *reterr)
{
    _cleanup_(evaluation_freep) Evaluation *e = NULL;
    struct stat st;
    int r;

    if (fstat(fd, &st) < 0)
        return error_detail_set(reterr, -errno, "the output cannot be used: %m");
    if (!S_ISREG(st.st_mode))
        return error_detail_set(reterr, -EINVAL, "logits are written to a regular file or a memfd only");
    e = calloc(1, sizeof(*e));
    if (!e)
        return error_origin(-ENOMEM);
    e->fd = fd;
    e->n_rows = n_rows;
    e->n_vocab = n_vocab;
    e->logits = calloc((size_t)EVALUATE_ROWS * n_vocab, sizeof(*e->logits));
    if (!e->logits)
        return error_origin(-ENOMEM);
    r = write_header(e, reterr);
    if (r < 0)
        return error_trace(r);
    *ret = TAKE_PTR(e);
    return 0;
}

Evaluation *evaluation_free(Evaluation *evaluation)
{
    if (!evaluation)
        return NULL;
    free(evaluation->logits);
    free(evaluation);
    return NULL;
}

float *evaluation_logits(Evaluation *evaluation)
{
    return evaluation->logits;
}

int evaluation_write(Evaluation *evaluation, uint64_t first, uint32_t n_rows, ErrorDetail *reterr)
{
    uint64_t n_again;

    if (n_rows > EVALUATE_ROWS || first > evaluation->n_written || n_rows > evaluation->n_rows - first)
        return error_origin(-EINVAL);
    n_again = MIN(evaluation->n_written - first, (uint64_t)n_rows);
    evaluation->n_written += n_rows - n_again;
    return write_all(evaluation->fd, evaluation->logits + n_again * evaluation->n_vocab, (n_rows - n_again) * evaluation->n_vocab * sizeof(float),
                     reterr);
}
