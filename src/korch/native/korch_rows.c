/* Rows that replace those of another tensor: buffers are that tensor, the rows, their positions, and the result, which may be
 * the tensor itself. `korch.provider.state` prints the sizes. */
#include "korch_runtime.h"

typedef struct {
    int64_t outer, count, rows, row_bytes; /* the tensor has `outer` times `count` rows, of which `rows` are replaced */
    int64_t is_checked; /* whether it is an error that a position is out of range; else it is taken modulo `count` */
} rows_call;

int korch_rows_run(const rows_call *call, void *state, void *const *buffers) {
    const char *const from = buffers[1];
    const int64_t *const positions = buffers[2];
    char *const to = buffers[3];
    const size_t bytes = (size_t)call->row_bytes;
    (void)state;
    for (int64_t r = 0; call->is_checked && r < call->rows; ++r)
        if (positions[r] < -call->count || positions[r] >= call->count) return 1;
    if (to != buffers[0]) memcpy(to, buffers[0], (size_t)(call->outer * call->count) * bytes);
    for (int64_t r = 0; r < call->rows; ++r) {
        const int64_t place = (positions[r] % call->count + call->count) % call->count;
        for (int64_t i = 0; i < call->outer; ++i)
            memcpy(to + (size_t)(i * call->count + place) * bytes, from + (size_t)(i * call->rows + r) * bytes, bytes);
    }
    return 0;
}
